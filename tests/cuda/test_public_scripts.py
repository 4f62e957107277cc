"""Four small ones of the public scripts on docs/pretend.md, run again: they take what the page says.

These come with the packages of the test environment; the others need the clones that ``benchmarks/pretend_scripts.py``
names.
"""

import json

import pretend_scripts
import pytest
from pretend_cases import CASES

pytest.importorskip("cuda_standin", reason="cuda_standin is not here: make test-cuda")
pytest.importorskip("trl")

LINES = {line["name"]: line for line in json.loads(pretend_scripts.RESULTS.read_text())}


@pytest.mark.parametrize("name", ["sft", "sft, QLoRA", "sft, FSDP2", "dpo"])
def test_a_public_script_takes_what_the_page_says(name, tmp_path):
    shown, case = LINES[name], next(case for case in CASES if case.name == name)

    found = pretend_scripts.run_case(case, tmp_path, tmp_path)

    assert (found["verdict"], found["ranks"], found["exit_code"]) == (shown["verdict"], shown["ranks"], 0)
    off = 0.001 if found["versions"] == shown["versions"] else 0.05  # the page is of other versions then
    for peak in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert found[peak] == pytest.approx(shown[peak], rel=off)
