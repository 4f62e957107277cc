"""A slice of the zoo (``make zoo`` runs all of it): architectures that differ in kind, every variant, every plan."""

import pytest
from zoo import architectures, page
from zoo.examine import VARIANTS, examine, plans_searched, plausible_costs, prepare

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


SLOW = {"mobilevit", "whisper", "mamba", "t5", "mixtral", "gemma3_text"}  # of many small ops


@pytest.mark.parametrize(
    ("task", "kind"),
    [pytest.param(*case, marks=pytest.mark.slow) if case[1] in SLOW else case for case in SLICE],
    ids=[kind for _, kind in SLICE],
)
def test_an_architecture_trains_bitwise_as_plainly(task, kind):
    told = {line["variant"]: line for line in examine(task, kind, searched=False, published=True)}

    assert list(told) == list(VARIANTS)
    assert {line["status"] for line in told.values()} == {"equal"}, told
    assert told["float32"]["dropped_ops"] > 0


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        pytest.param("causal language", "llama", id="llama"),
        pytest.param("image classification", "vit", id="vit", marks=pytest.mark.thorough),
    ],
)
def test_an_architecture_trains_bitwise_at_the_tightest_budget_and_at_half(task, kind):
    (line,) = examine(task, kind, variants=["dropout"])

    assert line["status"] == "equal" and not line["mismatched_ops"], line
    assert line["plans"]["least"] < line["plans"]["half"] <= 0.5
    assert all(predicted == measured for predicted, measured in line["peaks"].values()), line["peaks"]


@pytest.mark.thorough
def test_the_tightest_budget_of_the_zoo_is_near_the_least_that_solve_names():
    architecture = architectures.build("causal language", "llama")
    model, step = prepare(architecture, "bfloat16 autocast")
    graph = lowtide.trace(model, architecture.batch, step=step)
    costs = plausible_costs(graph)

    plans, told = plans_searched(graph, costs)

    with pytest.raises(lowtide.BudgetInfeasibleError) as error:
        lowtide.solve(graph, costs, 1, node_limit=5, gap=0.1)
    least = plans["least"]
    assert (
        0
        <= least.predicted_peak_bytes - error.value.least_bytes
        <= 0.02 * (least.plain_peak_bytes - least.resident_bytes)
    )
    assert plans["half"].predicted_fraction <= 0.5 and not told


def test_the_zoo_says_what_stands_in_the_way_of_half():
    (line,) = examine("causal language", "musicgen", variants=["float32"])

    assert line["status"] == "equal" and "half" not in line["plans"], line
    assert 0 < line["floor"] <= line["plans"]["least"] and line["plans"]["least"] > 0.5
    assert line["in_the_way"].endswith(("forward)", "backward)"))


def test_every_architecture_is_tried_once():
    found = list(architectures.names())

    assert len(found) == len(set(found)) > 250
    assert {task for task, _ in found} == set(architectures.TASKS)


def test_a_difference_and_a_failure_are_told_on_the_page():
    shared = {"task": "causal language", "torch": "2.13.0", "transformers": "5.23.0", "date": "2026-11-20"}
    seen = {**shared, "task": "image and text"}
    good = {**shared, "type": "good", "class": "GoodLM", "status": "equal"}
    at_half = {"all replayed": 1.0, "least": 0.2401, "half": 0.5}
    lines = [
        {**good, "variant": "float32", "plans": at_half, "peaks": {"least": [1000, 1000], "half": [2000, 2000]}},
        {
            **good,
            "variant": "dropout",
            "plans": {"least": 0.501},
            "floor": 0.4,
            "in_the_way": "a.b (aten.mm.default, forward)",
        },
        {
            **good,
            "variant": "bfloat16 autocast",
            "plans": {"least": 0.75},
            "floor": 0.7,
            "in_the_way": "(aten.mm.out, forward)",
        },
        {**good, "variant": "LoRA", "status": "not built", "reason": "no such layer"},
        {**seen, "type": "sighted", "variant": "float32", "status": "equal", "inputs": ["pixel_values"]},
        {
            **seen,
            "type": "blind",
            "variant": "float32",
            "status": "equal",
            "inputs": ["input_ids"],
            "peaks": {"half": [1000, 998]},
        },
        {**shared, "type": "bad", "variant": "float32", "status": "differs", "differing": {"least": ["loss"]}},
        {**shared, "type": "ugly", "variant": "LoRA", "status": "failed", "reason": "a | b"},
        {**shared, "type": "ugly", "variant": "float32", "status": "equal"},
        {**shared, "type": "odd", "variant": "float32", "status": "not built", "reason": "?"},
        {**shared, "type": "far", "variant": "float32", "status": "not built", "reason": "ImportError: timm"},
    ]

    text = "\n".join(page.page(lines))

    assert "5 model types in 5 classes, 8 variants tried, **6 bitwise equal under every plan**;" in text
    assert "Plans carried out: all replayed 1, exact at 50 % 1, exact at the least 3." in text
    assert (
        "In 2 variants the tightest known budget is above 50 %" in text
        and "for 1 of them it is proven that none exists." in text
    )
    assert "The ops that run at their least peak: `mm` forward 2." in text
    assert "of 3 plans: 2 equal the predicted peak to the byte, 2 are within 0.1 %, 3 within 1 %." in text
    assert "The worst is `blind` (float32, exact at 50 %), off by -0.20%." in text
    assert "### Image and text (2)" in text and "| `blind`* |" in text and "| `sighted` |" in text
    assert "### Causal language (1)" in text
    assert "| model type | class | float32 | dropout | bfloat16 autocast | LoRA |" in text
    assert "| `good` | GoodLM | 25 % | 51 % | 75 % † | - |" in text
    assert "| `bad` | causal language | float32 | differs (least: loss) |" in text
    assert "| `ugly` | causal language | LoRA | failed: a / b |" in text
    assert "Not tried (2)" in text and "batch is known: `odd` (" in text
    assert "Needs a package that is not installed: `far`" in text
    assert "- LoRA: `good`" in text
