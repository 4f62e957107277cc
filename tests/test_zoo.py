"""A slice of the zoo (``make zoo`` runs all of it): architectures that differ in kind, every variant, every plan."""

import pytest
import zoo
import zoo_models
import zoo_page

import lowtide

SLICE = [
    ("causal language", "llama"),
    ("causal language", "gemma3_text"),
    ("causal language", "mixtral"),
    ("causal language", "mamba"),
    ("sequence to sequence", "t5"),
    ("image classification", "resnet"),
    ("image classification", "mobilevit"),
    ("speech to text", "whisper"),
]


@pytest.mark.parametrize(("task", "kind"), SLICE, ids=[kind for _, kind in SLICE])
def test_an_architecture_trains_bitwise_as_plainly(task, kind):
    told = {line["variant"]: line for line in zoo.examine(task, kind, searched=False)}

    assert list(told) == list(zoo.VARIANTS)
    assert {line["status"] for line in told.values()} == {"equal"}, told
    assert told["float32"]["dropped_ops"] > 0


@pytest.mark.parametrize(
    ("task", "kind"), [("causal language", "llama"), ("image classification", "vit")], ids=["llama", "vit"]
)
def test_an_architecture_trains_bitwise_at_the_tightest_budget_and_at_half(task, kind):
    (line,) = zoo.examine(task, kind, variants=["dropout"])

    assert line["status"] == "equal" and not line["mismatched_ops"], line
    assert line["plans"]["least"] < line["plans"]["half"] <= 0.5
    assert all(predicted == measured for predicted, measured in line["peaks"].values()), line["peaks"]


def test_the_tightest_budget_of_the_zoo_is_the_least_that_solve_names():
    specimen = zoo_models.build("causal language", "llama")
    model, step = zoo.prepare(specimen, "bfloat16 autocast")
    graph = lowtide.trace(model, specimen.batch, step=step)
    costs = zoo.plausible_costs(graph)

    plans, told = zoo.plans_searched(graph, costs)

    with pytest.raises(lowtide.BudgetInfeasibleError) as error:
        lowtide.solve(graph, costs, plans["least"].predicted_peak_bytes - 1, node_limit=5, gap=0.1)
    assert error.value.least_bytes == plans["least"].predicted_peak_bytes
    assert plans["half"].predicted_fraction <= 0.5 and not told


def test_the_zoo_says_what_stands_in_the_way_of_half():
    (line,) = zoo.examine("causal language", "musicgen", variants=["float32"])

    assert line["status"] == "equal" and "half" not in line["plans"], line
    assert 0 < line["floor"] <= line["plans"]["least"] and line["plans"]["least"] > 0.5
    assert line["in_the_way"].endswith(("forward)", "backward)"))


def test_every_architecture_is_tried_once():
    found = list(zoo_models.specimens())

    assert len(found) == len(set(found)) > 250
    assert {task for task, _ in found} == set(zoo_models.TASKS)


def test_a_difference_and_a_failure_are_told_on_the_page():
    shared = {"task": "causal language", "torch": "2.13.0", "transformers": "5.23.0", "date": "2026-11-20"}
    seen = {**shared, "task": "image and text"}
    lines = [
        {**shared, "type": "good", "variant": "float32", "status": "equal", "plans": {"half": 0.5, "least": 0.25}},
        {**shared, "type": "good", "variant": "LoRA", "status": "not built", "reason": "no such layer"},
        {**seen, "type": "sighted", "variant": "float32", "status": "equal", "inputs": ["pixel_values"]},
        {**seen, "type": "blind", "variant": "float32", "status": "equal", "inputs": ["input_ids"]},
        {**shared, "type": "bad", "variant": "float32", "status": "differs", "differing": {"least": ["loss"]}},
        {**shared, "type": "ugly", "variant": "LoRA", "status": "failed", "reason": "a | b"},
        {**shared, "type": "ugly", "variant": "float32", "status": "equal"},
        {**shared, "type": "odd", "variant": "float32", "status": "not built", "reason": "?"},
        {**shared, "type": "far", "variant": "float32", "status": "not built", "reason": "ImportError: timm"},
    ]

    text = "\n".join(zoo_page.page(lines))

    assert "5 model types in 5 classes, 6 variants tried, **4 bitwise equal under every plan**;" in text
    assert "exact at 50 % 1, exact at the least 1; half of those leave at most 25%" in text
    assert "**Image and text** (2): `blind`*, `sighted`" in text
    assert "**Causal language** (1): `good`" in text
    assert "| `bad` | causal language | float32 | differs (least: loss) |" in text
    assert "| `ugly` | causal language | LoRA | failed: a / b |" in text
    assert "Not tried (2)" in text and "batch is known: `odd` (" in text
    assert "Needs a package that is not installed: `far`" in text
    assert "- LoRA: `good`" in text
