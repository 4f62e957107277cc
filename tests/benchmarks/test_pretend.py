"""The page of public scripts: every case has a result or a reason, and inputs are what scripts look for."""

import json
import re
from pathlib import Path

import pretend_inputs as make
import pretend_scripts
import pretend_table
import pytest
from pretend_cases import CASES, SOURCES

LINES = json.loads((Path(pretend_scripts.__file__).parent / "results" / "pretend_scripts.json").read_text())


def test_every_case_is_known_once_and_is_typed_or_has_a_reason():
    names = [case.name for case in CASES]

    assert len(set(names)) == len(names) and all(bool(case.command) != bool(case.why_not) for case in CASES)
    assert {line["name"] for line in LINES} <= {case.name for case in CASES if case.command}
    assert all(SOURCES[case.source].commit or SOURCES[case.source].package for case in CASES if case.command)


def test_a_case_that_did_not_train_says_why():
    remarks = {case.name: case.remark for case in CASES}

    assert all(remarks[x["name"]] for x in LINES if x["verdict"] in ("failed", "trained nothing", "did not end"))


def test_results_name_no_folder_of_the_machine_that_they_were_made_on():
    text = json.dumps([{key: value for key, value in line.items() if key != "notes"} for line in LINES])

    assert re.findall(r"(?<![\w:/.~>-])/\w+/\w+", text) == []
    assert re.findall(r"(?<![\w:/.~>-])/\w+/\w+", f'"{Path(__file__).absolute()}"') != []


def test_a_result_without_a_case_stops_the_table_and_a_case_without_a_result_stands_apart():
    with pytest.raises(SystemExit, match="no case is called gone"):
        pretend_table.runs([*LINES, LINES[0] | {"name": "gone"}])

    assert f" {LINES[0]['name']} | has not been run yet" in pretend_table.not_run(LINES[1:])


def test_variables_before_a_command_are_not_its_words():
    case = next(case for case in CASES if case.command.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 "))

    assert pretend_scripts.typed(case)[0] == "torchrun"


def test_words_are_the_same_for_the_same_seed(tmp_path):
    make.dataset("glue", make.pair, card="mrpc", validation=2)(tmp_path)

    assert make.words(5, 1) == make.words(5, 1) != make.words(5, 2)
    assert sorted(file.name for file in (tmp_path / "glue").iterdir()) == [
        "README.md", "test.jsonl", "train.jsonl", "validation.jsonl",
    ]  # fmt: skip
