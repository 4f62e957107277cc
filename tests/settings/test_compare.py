"""``lowtide compare`` and ``lowtide bench`` as a user meets them: tables, JSON, exit codes."""

import json
import sys
from functools import partial

import pytest

from lowtide.cli import main
from lowtide.graph.costs import Costs
from lowtide.measurement.timing import compare_times

SCRIPT = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

    def forward(self, x):
        return x + self.mlp(self.input_layernorm(x))


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def setup():
    print("the script says hello")
    torch.manual_seed(0)
    return Stack(4), torch.randn(512, 32)


class RunsOnce(Block):
    def forward(self, x):
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("this layer must not run in backward")
        return super().forward(x)


def runs_once():
    return nn.Sequential(RunsOnce(), RunsOnce()), torch.randn(512, 32)


def flat():
    return nn.TransformerEncoderLayer(16, 2, 32, 0.0), torch.randn(8, 4, 16)
"""
BLOCK = "recompute_granularity: full\nrecompute_method: block\nrecompute_num_layers: 2\nlr: 0.1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    # Bytes and bits do not depend on what an op takes.
    for place in ("settings.settings_plan", "measurement.op_times"):
        monkeypatch.setattr(f"lowtide.{place}.measure", lambda graph, **_: Costs((1.0,) * len(graph.ops)))
    once = partial(compare_times, rounds=1, warmup=0)
    monkeypatch.setattr("lowtide.side_by_side.compare_times", lambda calls, *, rounds, **options: once(calls))
    return tmp_path


def compare(folder, text, *options, name="settings.yaml"):
    (folder / name).write_text(text)
    return main(["compare", "train.py:setup", "--settings", name, *options])


def test_compare_measures_settings_as_they_run_as_a_plan_and_exact_plans_beside_them(folder, capsys):
    code = compare(folder, BLOCK, "--json")

    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert code == 0 and body["status"] == "ok" and captured.out.count("\n") == 1
    assert body["framework"] == "megatron" and "first 2 of 4 layers" in body["settings"]
    rows = {row["name"]: row for row in body["rows"]}
    real, same_peak, same_time = (rows[name] for name in (body["measured_as"], "exact, same peak", "exact, same time"))
    assert list(rows) == ["plain", "settings, by torch.utils.checkpoint", "settings, as a plan", "exact, same peak",
                          "exact, same time"]  # fmt: skip
    assert all(row["bitwise_equal"] for row in rows.values())
    assert abs(body["mapped_peak_difference"]) < 0.01
    assert same_peak["peak_bytes"] <= real["peak_bytes"] < rows["plain"]["peak_bytes"]
    assert same_peak["predicted_overhead"] < rows["settings, as a plan"]["predicted_overhead"]
    assert same_time["predicted_overhead"] <= rows["settings, as a plan"]["predicted_overhead"]
    assert same_time["peak_bytes"] <= same_peak["peak_bytes"]
    assert "the script says hello" in captured.err


def test_compare_prints_a_table_that_fits_and_says_what_does_nothing(folder, capsys):
    text = json.dumps({"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"], "seed": 1})
    code = compare(folder, text, "--framework", "megatron", name="settings.json")

    out = capsys.readouterr().out
    assert code == 1
    assert "- moe: does nothing: no layer of Stack has such a part" in out
    assert "what is about other things is left aside: seed" in out
    assert "At the same peak the exact plan takes" in out and "settings, by torch.utils.checkpoint" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "framework"), [((), "transformers"), (("--framework", "trl"), "trl")], ids=["file", "option"]
)
def test_the_file_says_whose_settings_it_has_unless_the_option_does(folder, capsys, options, framework):
    code = compare(folder, "framework: transformers\ngradient_checkpointing: true\n", "--json", *options)

    assert (json.loads(capsys.readouterr().out)["framework"], code) == (framework, 0)


def test_settings_that_change_nothing_are_a_finding_and_a_plan_is_shown_all_the_same(folder, capsys):
    code = compare(folder, '{"activation_checkpointing": {"cpu_checkpointing": true}}', name="ds.json")

    out = capsys.readouterr().out
    assert code == 1
    assert "The settings change nothing" in out and "exact, 50 % of the activations" in out
    assert "activation_checkpointing: does nothing: it wraps no module" in out


def test_contradictions_are_a_finding_and_come_with_the_way_out(folder, capsys):
    code = compare(folder, "recompute_granularity: full\n", "--json")

    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert code == 1 and body["status"] == "finding"
    assert "without recompute_method" in body["message"] and "without recompute_method" in captured.err


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("gradient_checkpointing: true\n", (), "may be settings of transformers or trl"),
        (BLOCK, ("--framework", "megatrn"), "Did you mean 'megatron'"),
        (f"framework: megatrn\n{BLOCK}", (), "Did you mean 'megatron'"),
        ("[1, 2", (), "cannot be parsed"),
        ("just words\n", (), "holds no settings"),
        ("lr: 0.1\n", (), "no framework has all of no settings"),
    ],
)
def test_bad_usage(folder, capsys, text, options, message):
    assert compare(folder, text, *options) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_and_yaml_without_pyyaml_are_bad_usage(folder, capsys, monkeypatch):
    assert main(["compare", "train.py:setup", "--settings", "none.yaml"]) == 2
    assert "cannot read settings from none.yaml" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert compare(folder, BLOCK) == 2
    assert "pip install pyyaml" in capsys.readouterr().err


def test_toml_is_read(folder, capsys):
    assert (
        compare(folder, '[activation_checkpoint]\nmode = "none"\n[training]\nsteps = 3\n', "--json", name="t.toml") == 0
    )
    assert json.loads(capsys.readouterr().out)["framework"] == "torchtitan"


def test_bench_measures_every_method_and_draws_them(folder, capsys):
    code = main(["bench", "train.py:setup", "--plot", "b.svg", "--json"])

    body = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in body["rows"]}
    assert code == 0 and body["status"] == "ok"
    assert {"plain", "every 2nd layer", "sqrt", "full", "selective", "torch selective", "exact, 50 %"} <= set(rows)
    assert all(row["bitwise_equal"] for row in rows.values())
    assert rows["exact, 50 %"]["fraction"] <= 0.5
    for row in rows.values():
        if row["predicted_peak_bytes"] is not None:
            assert abs(row["peak_bytes"] / row["predicted_peak_bytes"] - 1) < 0.01
    assert ">full</text>" in (folder / "b.svg").read_text() or (folder / "b.svg").stat().st_size > 10_000


def test_bench_tells_what_it_leaves_out(capsys):
    assert main(["bench", "train.py:flat"]) == 0

    out = capsys.readouterr().out
    assert "full: left out: method='full' needs repeated layers and this model has none." in out
    assert "torch selective: left out: the model has no repeated blocks" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.slow
def test_checkpoints_that_fail_are_a_finding_and_plans_run_all_the_same(folder, capsys):
    (folder / "s.json").write_text('{"modules": ["0", "1"]}')
    assert main(["compare", "train.py:runs_once", "--settings", "s.json", "--framework", "torch", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)

    assert {"key": "settings", "kind": "fails", "text": body["why_not_measured"]} in body["findings"]
    assert "must not run in backward" in body["why_not_measured"]
    rows = {row["name"]: row["bitwise_equal"] for row in body["rows"]}
    assert rows["settings, as a plan"] and rows["exact, same peak"] and body["measured_as"] is None
    assert main(["bench", "train.py:runs_once"]) == 0
    assert "torch selective: left out: RuntimeError: this layer must not run in backward" in capsys.readouterr().out


def test_bench_refuses_a_plot_that_cannot_be_written_before_it_measures(capsys):
    assert main(["bench", "train.py:setup", "--plot", "no/such/folder.png"]) == 2
    assert "there is no folder no/such" in capsys.readouterr().err
