"""The command line: exit codes, whole messages, and stdout that holds the result and nothing else."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.toy_graphs import chain

import lowtide
from lowtide.cli import _parser, main
from lowtide.graph import json_format
from lowtide.graph.costs import Costs, Link

SCRIPT = '''
import torch
from torch import nn
import neighbour


def setup():
    """A chain of layers whose inner tensors can be dropped."""
    print("the script says hello")
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(256, 64)


def with_step():
    model, batch = setup()
    return model, (batch,), lambda model, batch: model(*batch).sum()


def three():
    return 3


def four():
    return 1, 2, 3, 4


def no_model():
    return "model", 1


def no_step():
    return *setup(), "step"


def rejected():
    return setup()[0], torch.randn(256, 63)


def frozen():
    model, batch = setup()
    return model.requires_grad_(False), batch


def raises():
    raise OSError("no such data")


def leaves():
    raise SystemExit(3)


constant = 3
'''
BYTES = 'Write bytes as an int, "6GiB" (2^30), "6GB" (10^9), "40%" of the plain step\'s activation memory, or "auto".'
RETURN = "Return (model, batch) or (model, batch, step), where step(model, batch) is the scalar loss."


@pytest.fixture(autouse=True)
def scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('done')\n")
    (tmp_path / "not_a_plan.json").write_text("{}")
    json_format.save(chain(2, size=8), tmp_path / "graph.json")
    return tmp_path


def only_json(capsys) -> dict:
    """stdout as one JSON object; anything beside it is an error."""
    text = capsys.readouterr().out
    body = json.loads(text)
    assert isinstance(body, dict) and text.count("\n") == 1
    return body


def test_fit_reports_and_saves_a_plan_that_fits_and_is_proven(capsys, scripts):
    code = main(["fit", "train.py:setup", "--budget", "60%", "--verify", "--save", "plan.json"])

    out, err = capsys.readouterr()
    plan = lowtide.Plan.load("plan.json")
    assert code == 0
    assert "loss, gradients and buffers bitwise equal" in out
    assert plan.counts["recompute"] > 0 and plan.predicted_fraction <= 0.6
    assert "lowtide:" not in err


def test_fit_moves_to_a_scratch_directory_and_its_plan_can_be_drawn_without_one(capsys, scripts, tmp_path, monkeypatch):
    # Ops are dear and the link is not, so something moves anywhere.
    def costs(graph, *, tiers=(), scratch_dir=None, memory_bytes=None):
        return Costs((1.0,) * len(graph.ops), links=dict.fromkeys(tiers, Link(1e12, 1e12)))

    monkeypatch.setattr("lowtide.training.rehearsal.measure", costs)
    code = main(["fit", "train.py:setup", "--budget", "60%", "--scratch-dir", str(tmp_path), "--disk-budget", "1GiB",
                 "--save", "moved.json", "--save-graph", "moved.graph.json", "--json"])  # fmt: skip
    counts = json.loads(capsys.readouterr().out)["counts"]

    assert code == 0 and counts["disk_offload"] > 0
    assert main(["report", "moved.json", "--graph", "moved.graph.json", "--plot", "moved.svg"]) == 0
    assert (scripts / "moved.svg").stat().st_size > 0
    assert main(["fit", "train.py:setup", "--scratch-dir", "/not/there"]) == 1
    assert "scratch_dir='/not/there' cannot hold a scratch file" in capsys.readouterr().err


def test_fit_as_json_is_one_object_whatever_the_script_prints(capsys):
    code = main(["fit", "train.py:with_step", "--budget", "60%", "--verify", "--json"])

    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert code == 0 and captured.out.count("\n") == 1
    assert "the script says hello" in captured.err
    assert body["status"] == "ok" and body["findings"] == [] and body["proof"]["bitwise_equal"]
    assert body["measured"]["peak_bytes"] <= body["budget_bytes"]
    assert body["region"] == "step"


def test_json_also_in_a_process_of_its_own(scripts):
    command = [sys.executable, "-m", "lowtide.cli", "fit", "train.py:setup", "--budget", "100%", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=scripts)
    assert json.loads(done.stdout)["status"] == "ok"


def test_an_impossible_budget_exits_with_one_and_names_the_least_bytes_which_then_succeed(capsys):
    assert main(["fit", "train.py:setup", "--budget", "1KiB", "--json"]) == 1
    body = only_json(capsys)
    assert (body["status"], body["budget_bytes"]) == ("infeasible", 1024)

    assert main(["fit", "train.py:setup", "--budget", str(body["least_bytes"]), "--json"]) == 0
    assert only_json(capsys)["predicted_peak_bytes"] <= body["least_bytes"]


def test_a_step_that_differs_is_a_finding(capsys, monkeypatch):
    from lowtide import side_by_side

    monkeypatch.setattr(side_by_side, "_same", lambda a, b: False)
    code = main(["fit", "train.py:setup", "--budget", "60%", "--verify", "--json"])

    body = only_json(capsys)
    assert code == 1 and body["status"] == "finding"
    assert body["findings"][0].startswith("the planned step differs from the plain one in loss, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "train"], "'train' does not name a function.\nWrite SCRIPT.py:FUNCTION, e.g. train.py:setup"),
        (
            ["fit", "nowhere.py:setup"],
            "there is no file nowhere.py.\nWrite SCRIPT.py:FUNCTION with the path of a Python script.",
        ),
        (
            ["fit", "train.py:nothing"],
            "train.py has no function 'nothing'.\nDefine nothing() so that it returns (model, batch).",
        ),
        (
            ["fit", "train.py:constant"],
            "train.py has no function 'constant'.\nDefine constant() so that it returns (model, batch).",
        ),
        (
            ["fit", "broken.py:setup"],
            "broken.py cannot be run: ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
        ),
        (
            ["fit", "train.py:raises"],
            "train.py:raises raised OSError: no such data\nIt must return (model, batch).",
        ),
        (["fit", "train.py:three"], f"train.py:three returned type int.\n{RETURN}"),
        (["fit", "train.py:four"], f"train.py:four returned a tuple of 4.\n{RETURN}"),
        (["fit", "train.py:no_model"], f"train.py:no_model returned type str as model, not an nn.Module.\n{RETURN}"),
        (["fit", "train.py:no_step"], f"train.py:no_step returned type str as step, which cannot be called.\n{RETURN}"),
        (["fit", "nowhere.py:f", "--budget", "12 parsecs"], "budget='12 parsecs': 'parsecs' is not a unit of memory. "
         + BYTES),
        (["fit", "nowhere.py:f", "--budget", "-1"], f"budget=-1 bytes is not positive. {BYTES}"),
        (["fit", "nowhere.py:f", "--budget", "0%"], f"budget='0%' is not positive. {BYTES}"),
        (
            ["fit", "nowhere.py:f", "--save", "no/such/folder/plan.json"],
            "cannot write no/such/folder/plan.json: there is no folder no/such/folder.\nMake it first.",
        ),
        (
            ["fit", "train.py:setup", "--budget", "60%", "--method", "magic"],
            "method='magic' is not known. Use one of exact, none, full, every_n, sqrt_n, selective, "
            "revolve, rotor, knapsack.",
        ),
        (
            ["report", "nowhere.json"],
            "cannot read a plan from nowhere.json: No such file or directory.\n"
            "Write one with: lowtide fit ... --save PLAN.json",
        ),
        (
            ["report", "not_a_plan.json"],
            "not a plan: field 'version' is None, not 2. Make the plan again with this lowtide.",
        ),
        (
            ["report", "graph.json"],
            "not a plan: this is a traced step (a graph). Plan it with lowtide.solve().",
        ),
        (
            ["fit", "train.py:leaves"],
            "train.py:leaves called sys.exit(3).\nIt must return (model, batch) and leave the process running.",
        ),
        (
            ["fit", "leaving.py:setup"],
            "leaving.py called sys.exit('done') while it was loaded.\n"
            'Put what runs the script under: if __name__ == "__main__":',
        ),
        (
            ["fit", "nowhere.py:f", "--budget", "150%"],
            "budget='150%' is more activation memory than the plain step's. Pass 100% or less; \"100%\" changes "
            "nothing.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_usage_exits_with_two_and_says_what_would_do(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith(f"lowtide: {message}\n")
    assert captured.out.replace("the script says hello\n", "") == ""

    assert main([*arguments, "--json"]) == 2
    assert only_json(capsys) == {"status": "bad_usage", "error": message, "message": message}


@pytest.mark.parametrize("function", ["rejected", "frozen"])
def test_a_step_that_cannot_be_planned_is_bad_usage(function, capsys):
    assert main(["fit", f"train.py:{function}", "--budget", "60%", "--json"]) == 2
    assert only_json(capsys)["status"] == "bad_usage"


@pytest.mark.parametrize("arguments", [[], ["fit"], ["dance"], ["fit", "a.py:f", "--no-such-flag"]], ids=str)
def test_what_argparse_refuses_exits_with_two(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""


def options() -> dict[str, list[argparse.Action]]:
    """By verb, its options but for ``--help``."""
    (verbs,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        verb: [a for a in p._actions if a.option_strings and a.dest != "help"] for verb, p in verbs.choices.items()
    }
    assert len(found) > 8 and all(found.values())
    return found


def test_every_option_of_a_verb_says_what_it_does_and_is_used_by_a_test():
    texts = [path.read_text() for path in Path(__file__).parent.rglob("*.py")]
    used = {option for text in texts for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}

    assert [f"{verb} {a.option_strings}" for verb, mine in options().items() for a in mine if not a.help] == []
    assert [
        f"{verb} {o}" for verb, mine in options().items() for a in mine for o in a.option_strings if o not in used
    ] == []


def test_help_exits_with_zero(capsys):
    assert main(["--help"]) == 0
    assert "demo" in capsys.readouterr().out


def test_the_help_of_fit_says_what_a_budget_includes_and_shows_an_example(capsys):
    assert main(["fit", "--help"]) == 0

    shown = capsys.readouterr().out
    assert "weights, gradients and optimizer state included" in shown
    assert "lowtide fit train.py:setup --budget 6GiB" in shown


def test_without_a_verb_the_help_shows_an_example_and_it_is_bad_usage(capsys):
    assert main([]) == 2

    captured = capsys.readouterr()
    assert captured.out == "" and "lowtide fit train.py:setup --budget 6GiB --verify" in captured.err


def test_the_package_is_the_command_where_that_is_not_on_the_path():
    command = [sys.executable, "-m", "lowtide", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.split()[-1] == lowtide.__version__


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


def test_a_closed_pipe_ends_quietly():
    command = [sys.executable, "-m", "lowtide.cli", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()

    assert (process.returncode, errors) == (0, "")


def test_report_reads_what_fit_wrote_and_draws_it(capsys, scripts):
    pytest.importorskip("matplotlib")
    saved = ["--save", "plan.json", "--save-graph", "graph.json", "--html", "fit.html"]
    assert main(["fit", "train.py:setup", "--budget", "60%", *saved]) == 0
    fitted = capsys.readouterr().out

    assert main(["report", "plan.json", "--graph", "graph.json", "--html", "r.html", "--plot", "r.png"]) == 0

    shown = capsys.readouterr().out
    assert shown.splitlines()[0] in fitted
    assert "Memory over one step" in (scripts / "r.html").read_text()
    assert "Memory over one step" in (scripts / "fit.html").read_text()
    assert (scripts / "r.png").read_bytes().startswith(b"\x89PNG")

    assert main(["report", "plan.json", "--json"]) == 0
    assert only_json(capsys)["plan_status"] == lowtide.Plan.load("plan.json").status


def test_a_plot_without_the_step_says_where_to_get_it(capsys):
    main(["fit", "train.py:setup", "--budget", "60%", "--save", "plan.json"])
    capsys.readouterr()

    assert main(["report", "plan.json", "--plot", "r.png"]) == 2
    assert capsys.readouterr().err == (
        "lowtide: --plot needs the traced step, which a plan does not hold.\n"
        "Add --graph GRAPH.json, written by: lowtide fit ... --save-graph GRAPH.json\n"
    )


def test_a_graph_of_another_step_is_refused(capsys):
    main(["fit", "train.py:setup", "--budget", "60%", "--save", "plan.json"])
    main(["fit", "train.py:with_step", "--budget", "60%", "--save-graph", "graph.json"])
    capsys.readouterr()

    assert main(["report", "plan.json", "--graph", "graph.json", "--html", "r.html", "--json"]) == 2
    assert only_json(capsys)["status"] == "bad_usage"


def test_the_trade_off_is_drawn_with_the_published_methods_beside_it(capsys):
    saved = ["--save", "plan.json", "--save-graph", "graph.json", "--save-costs", "costs.json"]
    main(["fit", "train.py:setup", "--budget", "60%", *saved])
    capsys.readouterr()
    files = ["--graph", "graph.json", "--costs", "costs.json", "--frontier"]

    assert main(["report", "plan.json", *files, "front.svg", "--json"]) == 0

    body = json.loads(capsys.readouterr().out)
    peaks = [point["peak_bytes"] for point in body["frontier"]]
    times = [point["step_ms"] for point in body["frontier"]]
    assert len(peaks) > 2 and peaks == sorted(peaks) and times == sorted(times, reverse=True)
    assert "full" in body["classics"]
    assert "<svg" in Path("front.svg").read_text()
    assert main(["report", "plan.json", *files, "front.png"]) == 0
    assert Path("front.png").read_bytes().startswith(b"\x89PNG")


def test_a_trade_off_without_step_or_times_says_where_to_get_them(capsys):
    main(["fit", "train.py:setup", "--budget", "60%", "--save", "plan.json", "--save-graph", "graph.json"])
    capsys.readouterr()

    assert main(["report", "plan.json", "--graph", "graph.json", "--frontier", "f.png"]) == 2
    assert "--save-costs" in capsys.readouterr().err


def test_times_of_another_step_are_refused(capsys):
    saved = ["--save", "plan.json", "--save-graph", "graph.json"]
    main(["fit", "train.py:setup", "--budget", "60%", *saved])
    main(["fit", "train.py:with_step", "--budget", "60%", "--save-costs", "costs.json"])
    capsys.readouterr()

    files = ["--graph", "graph.json", "--costs", "costs.json", "--frontier", "f.png"]
    assert main(["report", "plan.json", *files]) == 2
    assert "Write both in one run" in capsys.readouterr().err


def test_report_groups_by_what_is_asked_and_compares_two_plans(capsys, scripts):
    for budget in ("60%", "90%"):
        main(["fit", "train.py:setup", "--budget", budget, "--save", f"plan{budget[:2]}.json"])
    capsys.readouterr()

    assert main(["report", "plan60.json", "--by", "layer", "tensor"]) == 0
    text = capsys.readouterr().out
    assert "by layer" in text and "by tensor" in text and "by module" not in text

    assert main(["report", "--compare", "plan60.json", "plan90.json", "--html", "both.html", "--json"]) == 0
    body = only_json(capsys)
    assert body["b"]["predicted_peak_bytes"] > body["a"]["predicted_peak_bytes"]
    assert "plan90.json" in (scripts / "both.html").read_text()


@pytest.mark.parametrize("arguments", [[], ["plan.json", "--compare", "a.json", "b.json"]])
def test_report_says_which_plans_it_takes(capsys, arguments):
    assert main(["report", *arguments]) == 2
    assert "lowtide report --compare A.json B.json" in capsys.readouterr().err


def test_the_page_shows_the_trade_off_when_asked(capsys, scripts):
    saved = ["--save", "plan.json", "--save-graph", "graph.json", "--save-costs", "costs.json"]
    main(["fit", "train.py:setup", "--budget", "60%", *saved])
    files = ["--graph", "graph.json", "--costs", "costs.json"]

    assert main(["report", "plan.json", *files, "--html", "r.html", "--frontier"]) == 0

    assert "The whole trade-off" in (scripts / "r.html").read_text()
