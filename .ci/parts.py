"""The parts of ``make test-all``, in the order of their worth after ``make test``.

    python .ci/parts.py                          every part
    python .ci/parts.py --quick --within 25      make test, then the parts that fit in 25 minutes; the others are named

A part that fails ends the run, and the exit status is its own. The last line is a summary in pytest's form: the sums
over all that ran.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from typing import NamedTuple

ROOT = __file__.rpartition("/.ci/")[0] or "."
PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "2")
# What is known to run with another default device (tests/support/not_on_the_accelerator.py).
SWITCHED = (
    "step", "recording", "tracing", "shapes", "tape", "graph", "reports", "simulation", "api", "planning", "training",
    "measurement", "inference", "estimation", "models", "settings", "test_long_sequences.py", "foresight", "solvers",
    "doctor", "docs", "distributed", "integrations", "benchmarks", "device", "test_cli.py", "hollow",
)  # fmt: skip
# What is known to run so on CUDA's stand-in.
SWITCHED_TO_CUDA = (
    "step", "recording", "tracing", "shapes", "tape", "api", "planning", "training", "measurement", "device",
    "inference", "models", "graph", "reports", "simulation", "settings", "test_long_sequences.py", "doctor",
    "estimation", "foresight", "test_cli.py", "integrations", "distributed/test_sharded_guards.py", "hollow",
)  # fmt: skip
WITH_PLANS = ("tests/solvers", "tests/foresight", "tests/graph", "tests/simulation", "tests/reports", "tests/docs")
WITH_PROCESSES = ("tests/distributed", "tests/integrations", "tests/benchmarks")


class Part(NamedTuple):
    """``minutes``: on two quiet cores, rounded up."""

    label: str
    minutes: float
    command: tuple[str, ...]


def rest_of(*folders: str) -> tuple[str, ...]:
    return tuple(f"--ignore={folder}" for folder in folders)


CUDA = ("sh", "tools/test_cuda.sh", sys.executable)
QUICK = Part("the quick tests", 11.0, ("make", "--no-print-directory", "test"))
PARTS = (
    Part("thorough tests on the accelerator", 1.5, (*PYTEST, "-m", "accelerator and thorough")),
    Part("the tests of CUDA, without a GPU", 7.0, ("make", "--no-print-directory", "test-cuda")),
    Part("the quick tests on another PyTorch", 2.5, ("make", "--no-print-directory", "test-other-torch")),
    Part("thorough tests of plans", 2.0, (*PYTEST, "-m", "thorough", *WITH_PLANS)),
    Part("thorough tests in processes", 5.0, (*PYTEST, "-m", "thorough", *WITH_PROCESSES)),
    Part("other thorough tests", 6.0, (*PYTEST, "-m", "thorough", *rest_of(*WITH_PLANS, *WITH_PROCESSES))),
    Part("slow tests on the accelerator", 2.5, (*PYTEST, "-m", "accelerator and slow")),
    Part("slow tests of plans", 2.0, (*PYTEST, "-m", "slow and not thorough", *WITH_PLANS)),
    Part("slow tests in processes", 10.0, (*PYTEST, "-m", "slow and not thorough", *WITH_PROCESSES)),
    Part("other slow tests", 12.0, (*PYTEST, "-m", "slow and not thorough", *rest_of(*WITH_PLANS, *WITH_PROCESSES))),
    Part("the quick tests with all examples and full effort on the accelerator", 2.5,
         (*PYTEST, "-m", "accelerator and not slow and not thorough")),
    Part("the quick tests with all examples and full effort", 11.0,
         (*PYTEST, "--dist", "worksteal", "-m", "not slow and not thorough")),
    Part("slow tests of CUDA", 5.0, (*CUDA, "-m", "slow", "cuda_standin/tests", "tests/cuda")),
    Part("the quick tests with CUDA as default device", 7.0,
         (*CUDA, "--quick", "--device", "cuda", *(f"tests/{name}" for name in SWITCHED_TO_CUDA))),
    Part("the tests with the accelerator as default device", 23.0,
         (*PYTEST, "--device", "standin", "-m", "not slow", *(f"tests/{name}" for name in SWITCHED))),
)  # fmt: skip
COUNT = re.compile(r"(\d+) (passed|failed|skipped|deselected|xfailed|xpassed|warning|error)s?\b")
SUMMARY = re.compile(r"^=*\s*\d+ (passed|failed|skipped|deselected|xfailed|xpassed|warning|error)s?\b.* in [\d.]+s\b")


def run(part: Part, counts: Counter[str]) -> int:
    """The part's exit status; what pytest counted is added to ``counts``."""
    print(f"== {part.label}: {' '.join(part.command)}", flush=True)
    process = subprocess.Popen(part.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if SUMMARY.match(line):
            for number, what in COUNT.findall(line):
                counts[what] += int(number)
    return process.wait()


def summary(counts: Counter[str], seconds: float) -> str:
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error")
    plural = {"warning": "warnings", "error": "errors"}
    told = [
        f"{counts[w]} {plural.get(w, w) if counts[w] != 1 else w}" for w in order if counts[w] and w != "deselected"
    ]
    return f"{', '.join(told) or 'no tests ran'} in {seconds:.2f}s"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="begin with make test")
    parser.add_argument("--within", type=float, metavar="MINUTES", help="start only what ends within them")
    parser.add_argument("--used", type=float, default=0.0, metavar="SECONDS", help="already gone of them")
    parser.add_argument("--only", default="", metavar="WORD", help="those that have it in their name")
    given = parser.parse_args(arguments)
    start_s, status, left_out = time.monotonic() - given.used, 0, []
    counts: Counter[str] = Counter()
    taken_min = foreseen_min = 0.0
    for part in (*([QUICK] if given.quick else []), *(p for p in PARTS if given.only in p.label)):
        begun_s = time.monotonic()
        # A machine that was slower so far stays so.
        slower = max(1.0, taken_min / foreseen_min) if foreseen_min else 1.0
        ends_min = (begun_s - start_s) / 60 + part.minutes * slower
        if status or (part is not QUICK and given.within is not None and ends_min > given.within):
            left_out.append(part)
            continue
        status = run(part, counts)
        minutes = (time.monotonic() - begun_s) / 60
        taken_min, foreseen_min = taken_min + minutes, foreseen_min + part.minutes
        print(f"== {part.label}: {minutes:.1f} minutes", flush=True)
    for part in left_out:
        print(f"left out: {part.label} (some {part.minutes:g} minutes)")
    print(summary(counts, time.monotonic() - start_s))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
