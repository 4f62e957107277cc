"""Graphs and costs of format version 1, brought to version 2.

Version 1 wrote parameters that the step writes into ``provenance``, the times of compiled code into ``signatures``, and
named the time per dispatched op ``mode_us``. What is damaged is left as it is, for the reader of version 2 to refuse.
"""

from __future__ import annotations

from typing import Any


def upgraded_graph(body: Any) -> Any:
    """``body`` in version 2; unchanged if it is not of version 1."""
    if not isinstance(body, dict) or body.get("version") != 1:
        return body
    provenance, signatures = body.get("provenance"), body.get("signatures")
    body = {**body, "version": 2, "written_parameters": [], "recorded_ms": []}
    if isinstance(provenance, dict) and isinstance(provenance.get("writes_parameters", ""), str):
        body["written_parameters"] = provenance.get("writes_parameters", "").split()
        body["provenance"] = {key: value for key, value in provenance.items() if key != "writes_parameters"}
    if isinstance(signatures, list) and all(isinstance(s, dict) for s in signatures):
        body["recorded_ms"] = [[i, s["ms"]] for i, s in enumerate(signatures) if "ms" in s]
        body["signatures"] = [{key: value for key, value in s.items() if key != "ms"} for s in signatures]
    return body


def upgraded_costs(body: Any) -> Any:
    """``body`` in version 2; unchanged if it is not of version 1."""
    if not isinstance(body, dict) or body.get("version") != 1:
        return body
    renamed = {"dispatch_us" if key == "mode_us" else key: value for key, value in body.items()}
    return {"links": {}, **renamed, "version": 2}
