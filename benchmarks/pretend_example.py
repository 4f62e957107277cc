"""The run that the pages and the README show: ``examples/pretend/llama_1b.py`` on an H100 and an L4 that are not there.

    python benchmarks/pretend_example.py

Written to ``results/pretend_example.json``; ``make figures`` draws it. Run by the Python of ``.venv-cuda``; 20 seconds.
"""

import json
import sys
from pathlib import Path

from provenance import provenance

import lowtide

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pretend_example.json"


def main() -> int:
    command = ["python", "examples/pretend/llama_1b.py"]
    found = {}
    for device in ("h100", "l4"):
        report = lowtide.pretend(command, device, output=sys.stderr)
        shown = {name: value for name, value in report.to_json().items() if name not in ("last_words", "seconds")}
        found[device] = {**shown, "text": str(report)}
    RESULTS.write_text(json.dumps({"devices": found, **provenance()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
