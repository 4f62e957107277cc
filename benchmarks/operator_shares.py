"""What share of the data sheet's rates operators reached on a GPU, by class, beside what the table of devices says.

    cd benchmarks
    python operator_shares.py profile.json

``profile.json`` has of each case of ``scripts/gpu_training.py`` the operators of one step as PyTorch's profiler groups
them by shapes: ``{case: {"ops": [[name, shapes, calls, device us, host us], ...]}}``. ``foreseen_gpu.py`` has recorded
the same steps without a GPU. Where operators of several layouts have the same shapes, time is divided as foreseen.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreseen_gpu import path_of
from provenance import HERE, commit

from lowtide.estimation.device_table import Device, device_named
from lowtide.estimation.op_classes import COMPUTE
from lowtide.estimation.op_work import Work, work_of
from lowtide.pretending.links import links_of
from lowtide.pretending.op_times import OpTimes
from lowtide.pretending.step_record import StepRecord, step_record

RESULTS = HERE / "results" / "operator_shares.json"
# What stands for it on the GPU: cuDNN's operators, and what profiles call in-place ones.
ON_THE_GPU = {
    "_scaled_dot_product_flash_attention": "_cudnn_attention_forward",
    "_scaled_dot_product_flash_attention_backward": "_cudnn_attention_backward",
    "_slow_conv2d_forward": "cudnn_convolution", "native_batch_norm": "cudnn_batch_norm",
    "native_batch_norm_backward": "cudnn_batch_norm_backward", "relu_": "clamp_min_", "zero_": "fill_",
}  # fmt: skip
COLUMNS = ("measured_ms", "at_peak_ms", "before_ms", "foreseen_ms")
_FEWEST_US = 20.0  # of a call: below, launches are what is measured
Shapes = tuple[tuple[int, ...], ...]


def class_name(work: Work) -> str:
    if work.is_odd:
        return "matmul, odd rows"
    name = work.kind + (", backward" if work.variant == "backward" and work.kind != "elementwise" else "")
    name += f", {work.variant}" if work.variant in ("foreach", "fused") else ""
    bits = "" if work.kind not in COMPUTE else ", 32 bits" if work.dtype == "float32" else ", 16 bits"
    return name + bits + (f", {work.access}" if work.access else "")


def measured(ops: list[list[Any]]) -> dict[tuple[str, Shapes], float]:
    """Microseconds by operator and shapes of the tensors it was given."""
    found: dict[tuple[str, Shapes], float] = defaultdict(float)
    for key, text, _, device_us, _ in ops:
        if key.startswith("aten::"):
            shapes = [s for s in ast.literal_eval(text) if s and all(isinstance(size, int) for size in s)]
            found[key.removeprefix("aten::"), tuple(tuple(shape) for shape in shapes)] += device_us
    return found


def shapes_of(signature: dict[str, Any]) -> Shapes:
    given = [*signature["args"], *signature.get("kwargs", {}).values()]
    return tuple(tuple(x["t"]) for x in given if isinstance(x, dict) and x.get("t"))


def taken(name: str, shapes: Shapes, on_gpu: dict[tuple[str, Shapes], float]) -> float | None:
    for other in (name, ON_THE_GPU.get(name, name)):
        if (other, shapes) in on_gpu:
            return on_gpu[other, shapes]
    alike = [us for (n, s), us in on_gpu.items() if n == ON_THE_GPU.get(name, "") and s[:2] == shapes[:2]]
    return alike[0] if len(alike) == 1 else None


def of_case(
    record: StepRecord, ops: list[list[Any]], device: Device
) -> Iterator[tuple[str, float, float, float, float]]:
    """Each operator's class and microseconds: measured, at the data sheet's rates, foreseen without and with shares."""
    kinds = {work_of(told).kind for told in record.signatures if "op" in told and "name" not in told}
    tables = (
        replace(device, shares=dict.fromkeys(kinds, ((1.0, 1.0),)), elements_per_s={}),
        replace(device, shares={}, elements_per_s={}),
        device,
    )
    times = [OpTimes(record, table, links_of(table)) for table in tables]
    groups = defaultdict(list)
    for entry in record.entries:
        if entry.kind == "op" and entry.a >= 0:
            told = record.signatures[entry.a]
            groups[told["op"].split(".")[1], shapes_of(told)].append((entry, told))
    on_gpu = measured(ops)
    for (name, shapes), members in groups.items():
        us = taken(name, shapes, on_gpu)
        if us is None or us < _FEWEST_US * len(members):
            continue
        found = [[t.op_time(entry) for t in times] for entry, _ in members]
        total = sum(now.us(1.0) for _, _, now in found)
        for (peak, before, now), (_, told) in zip(found, members):
            at_peak = max(peak.compute_us, peak.memory_us)
            yield class_name(work_of(told)), us * now.us(1.0) / total, at_peak, before.us(1.0), now.us(1.0)


def held_out(by_case: dict[str, dict[str, list[float]]]) -> Iterator[dict[str, Any]]:
    """Of each case, with every class as much faster or slower than the old table as it was in the other cases."""
    for case, sums in by_case.items():
        others = [other for name, other in by_case.items() if name != case]
        told_us = 0.0
        for name, (_, _, before_us, _) in sums.items():
            took, before = (sum(other[name][i] for other in others if name in other) for i in (0, 2))
            told_us += before_us * (took / before if before else 1.0)
        measured_ms, before_ms = (sum(of[i] for of in sums.values()) / 1e3 for i in (0, 2))
        line = {"benchmark": "operator_shares", "held_out": case, "measured_ms": measured_ms, "before_ms": before_ms,
                "told_ms": told_us / 1e3}  # fmt: skip
        print(f"{case:25} {measured_ms:8.1f} ms, before {before_ms:8.1f}, by the other cases {told_us / 1e3:8.1f}")
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--device", default="h200")
    args = parser.parse_args()
    by_case: dict[str, dict[str, list[float]]] = {}
    for case, profiled in json.loads(args.profile.read_text()).items():
        body = json.loads(path_of(case).read_text())
        record = step_record(body["record"], body["facts"])
        sums = by_case[case] = defaultdict(lambda: [0.0] * 4)
        for name, *us in of_case(record, profiled["ops"], device_named(args.device)):
            sums[name] = [a + b for a, b in zip(sums[name], us)]
    lines = []
    for name in {name for sums in by_case.values() for name in sums}:
        of = [sums[name] for sums in by_case.values() if name in sums]
        told = {key: sum(us) / 1e3 for key, us in zip(COLUMNS, zip(*of))}
        lines.append({"benchmark": "operator_shares", "class": name, "cases": len(of), **told})
    lines.sort(key=lambda line: -line["measured_ms"])
    for line in lines:
        share = line["at_peak_ms"] / line["measured_ms"]
        print(f"{line['class']:32} {line['measured_ms']:8.1f} ms, share {share:5.2f}, foreseen "
              f" {line['before_ms']:8.1f} -> {line['foreseen_ms']:8.1f}")  # fmt: skip
    lines += held_out(by_case)
    lines = [{**line, "device": args.device, "commit": commit()} for line in lines]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
