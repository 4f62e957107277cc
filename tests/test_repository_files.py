"""What the hosting service reads: workflows and issue forms are well formed, and what they name is there."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(p for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml")
READ = sorted({*WORKFLOWS, *FORMS, *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / ".ci" / "run"})
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
INPUTS = {"textarea", "input", "dropdown", "checkboxes"}


def loaded(path: Path) -> dict:
    body = yaml.safe_load(path.read_text())
    assert isinstance(body, dict)
    return body


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def make_commands(text: str) -> list[str]:
    """What ``make`` is asked for in code: between backticks, in indented blocks, and in commands of workflows."""
    command = r"(?:`|^ {4,}|\brun: |&& |^(?=make --))make (?:--[a-z-]+ )*([a-z][a-z-]*)"
    return re.findall(command, text, re.MULTILINE)


@pytest.mark.parametrize("path", READ, ids=name)
def test_every_make_command_is_a_target(path):
    assert set(make_commands(path.read_text())) <= TARGETS


def test_make_commands_are_found():
    text = "`make a` or make b\n    make c && make d\n  - run: make e\nmake --no-print-directory f\nmake all fit\n"
    assert make_commands(text) == list("acdef")
    assert {"check", "test"} <= set(make_commands((ROOT / ".ci" / "run").read_text()))
    assert {"gpu"} <= set(make_commands(FORMS[1].read_text()))


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_a_workflow_has_what_the_service_asks_for(path):
    body = loaded(path)
    assert {"name", "jobs", "permissions"} <= body.keys()
    assert True in body or "on" in body  # YAML 1.1 reads the key ``on`` as a truth value
    for job in body["jobs"].values():
        assert {"runs-on", "steps", "timeout-minutes"} <= job.keys()
        for step in job["steps"]:
            assert len({"run", "uses"} & step.keys()) == 1
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))


def test_the_workflow_runs_what_a_change_must_pass_on_each_python_that_is_named():
    jobs = loaded(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]

    assert jobs["test"]["strategy"]["matrix"]["python"] == named
    assert {"run": "bash .ci/run"} in jobs["test"]["steps"]
    assert {"run": "make docs"} in jobs["docs"]["steps"]


@pytest.mark.parametrize("path", FORMS, ids=name)
def test_an_issue_form_has_what_the_service_asks_for(path):
    body = loaded(path)
    assert {"name", "description", "body"} <= body.keys()
    ids = [part["id"] for part in body["body"] if part["type"] in INPUTS]
    assert len(ids) == len(set(ids)) > 0
    for part in body["body"]:
        assert part["type"] in INPUTS | {"markdown"}
        assert part["attributes"]["value" if part["type"] == "markdown" else "label"]
        if part["type"] == "dropdown":
            assert all(isinstance(option, str) for option in part["attributes"]["options"])
    assert any(part.get("validations", {}).get("required") for part in body["body"])


def test_two_forms_are_there_and_the_one_for_gpus_names_the_file_that_make_gpu_writes():
    assert [path.stem for path in FORMS] == ["bug", "gpu_result"]
    assert loaded(FORMS[0].with_name("config.yml")) == {"blank_issues_enabled": True}
    written = re.search(
        r'^RESULTS = HERE / "results" / "(.*)"$', (ROOT / "benchmarks/gpu.py").read_text(), re.MULTILINE
    )
    assert written and f"benchmarks/results/{written[1]}" in FORMS[1].read_text()
