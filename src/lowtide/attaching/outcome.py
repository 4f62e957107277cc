"""What came of it, in files for whoever asked for them."""

import contextlib
import json
from pathlib import Path
from typing import Any

from lowtide.attaching.variables import Wanted


def write(wanted: Wanted, fit: Any, attached_to: str, why_not: str) -> str:
    """Write what is wanted of ``fit``, which is None where nothing was attached. What is to be said, or ""."""
    status = None if fit is None else fit.status().to_dict()
    if wanted.outcome:
        with contextlib.suppress(OSError):  # whoever started the command misses it, and says so
            body = {"attached_to": attached_to or None, "why_not": why_not, "status": status}
            Path(wanted.outcome).write_text(json.dumps(body), encoding="utf-8")
    if not wanted.report or fit is None:
        return ""
    if not fit.plans:
        return f"there is no {wanted.report}: no plan was made"
    from lowtide.reports.html import html_report

    try:
        page = html_report(fit.plan, fit.graph, costs=fit.costs)
        Path(wanted.report).write_text(page, encoding="utf-8")
    except OSError as error:
        return f"cannot write {wanted.report}: {error.strerror}"
    return ""
