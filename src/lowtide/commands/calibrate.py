"""``lowtide calibrate``: measure this machine, so that ``lowtide.estimate(graph, device="here")`` knows it."""

import argparse
from typing import Any

from lowtide.commands.verbs import add_verb
from lowtide.errors import LowtideError


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    description = 'Measure this machine\'s CPU, one thread, for device "here"\nof lowtide.estimate and lowtide plan.'
    add_verb(verbs, "calibrate", run, 'measure this machine (under a minute): device "here"', description)


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb."""
    from lowtide.estimation.calibration import calibrate
    from lowtide.estimation.device_table import calibration_path
    from lowtide.reports.progress import counting

    with counting("measuring") as progress:
        try:
            device = calibrate(progress=progress)
        except OSError as error:
            raise LowtideError(
                f"the measurement cannot be kept: {error}. Set LOWTIDE_CACHE_DIR to a folder."
            ) from error
    flops = {dtype: round(rate / 1e9, 1) for dtype, rate in device.matrix_flops.items()}
    lines = [f"{device.title}, {device.note}"]
    lines += [f"  {dtype} products up to {rate} billion operations per second" for dtype, rate in flops.items()]
    lines += [f'Kept in {calibration_path()} as device "here".']
    body = {
        "status": "ok",
        "device": device.title,
        "matrix_gflops": flops,
        "op_us": device.op_us,
        "error_fraction": device.error_fraction,
        "path": str(calibration_path()),
    }
    return 0, "\n".join(lines), body
