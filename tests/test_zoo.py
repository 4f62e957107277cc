"""A slice of the zoo (``make zoo`` runs all of it): architectures that differ in kind, every variant, every plan."""

import pytest
import zoo
import zoo_models

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
    told = {line["variant"]: line for line in zoo.examine(task, kind, exact=())}

    assert list(told) == list(zoo.VARIANTS)
    assert {line["status"] for line in told.values()} == {"equal"}, told
    assert told["float32"]["dropped_ops"] > 0


@pytest.mark.parametrize(
    ("task", "kind"), [("causal language", "llama"), ("image classification", "resnet")], ids=["llama", "resnet"]
)
def test_an_architecture_trains_bitwise_at_the_tightest_budget_and_at_half(task, kind):
    (line,) = zoo.examine(task, kind, variants=["bfloat16 autocast"], exact=["bfloat16 autocast"])

    assert line["status"] == "equal" and "least" in line["plans"], line
    assert line["least_bytes"] < line["plain_peak_bytes"]


def test_every_architecture_is_tried_once():
    found = list(zoo_models.specimens())

    assert len(found) == len(set(found)) > 250
    assert {task for task, _ in found} == set(zoo_models.TASKS)


def test_a_difference_and_a_failure_are_told_on_the_page():
    shared = {"task": "causal language", "torch": "2.13.0", "transformers": "5.23.0", "date": "2026-11-20"}
    lines = [
        {**shared, "type": "good", "variant": "float32", "status": "equal"},
        {**shared, "type": "bad", "variant": "float32", "status": "differs", "differing": {"least": ["loss"]}},
        {**shared, "type": "ugly", "variant": "LoRA", "status": "failed", "reason": "a | b"},
        {**shared, "type": "ugly", "variant": "float32", "status": "equal"},
        {**shared, "type": "odd", "variant": "float32", "status": "not built", "reason": "?"},
    ]

    text = "\n".join(zoo.page(lines))

    assert "3 model types in 3 classes, 4 variants tried, 2 bitwise equal under every plan;" in text
    assert "**Causal language** (1): `good`" in text
    assert "| `bad` | causal language | float32 | differs (least: loss) |" in text
    assert "| `ugly` | causal language | LoRA | failed: a / b |" in text
    assert "Not tried (1)" in text and "`odd`" in text
