"""Which attention kernel a CUDA device runs: lowtide's choice beside PyTorch's, over all combinations."""

import json

import attention_choices
import pytest
import torch
from attention_choices import Case, cases

from lowtide.hollow import cuda_attention
from lowtide.hollow.cuda_attention import attention_kernel

KNOWN = json.loads(attention_choices.RESULTS.read_text())
NAMES = {"0": "math", "1": "flash", "2": "efficient"}  # ``SDPBackend``
H100, RELEASE = (9, 0), (2, 14)


def numbers(text):
    return tuple(map(int, text.split(".")[:2]))


def chosen(case: Case, capability=H100, release=RELEASE):
    (q, k, v, mask), named = case.arguments("meta")
    return attention_kernel(q, k, v, mask, capability, release=release, **named)


@pytest.mark.parametrize("place", KNOWN)
def test_the_choice_is_pytorchs_in_all_combinations(place):
    torch_part, _, capability = place.removeprefix("torch ").partition(", compute capability ")

    wrong = [
        (case, NAMES[digit], found)
        for case, digit in zip(cases(), KNOWN[place], strict=True)
        if (found := chosen(case, numbers(capability), numbers(torch_part))) != NAMES[digit]
    ]

    assert not wrong, f"{len(wrong)} of {len(KNOWN[place])}, such as {wrong[:3]}"


def test_the_table_has_the_releases_and_devices_that_differ():
    releases, capabilities = ({key.split(", ")[i] for key in KNOWN} for i in (0, 1))

    assert {r.rpartition(".")[0] for r in releases} >= {"torch 2.13", "torch 2.14", "torch 2.15"}
    assert len(capabilities) >= 3
    assert all(len(digits) == len(list(cases())) for digits in KNOWN.values())
    assert len(set(KNOWN.values())) >= 4  # each release and each kind of device has choices of its own


@pytest.mark.parametrize(
    ("guard", "broken"),
    [
        ("_LITTLE_SHARED_MEMORY", ()),
        ("_FLASH_WIDTH", 1024),
        ("_efficient_alignment", lambda dtype, capability: 1),
        ("_trains", lambda *tensors: False),
    ],
)
def test_each_rule_is_seen_by_the_table(monkeypatch, guard, broken):
    monkeypatch.setattr(cuda_attention, guard, broken)
    digits = KNOWN["torch 2.14.1, compute capability 8.9"]

    assert any(chosen(c, (8, 9)) != NAMES[d] for c, d in zip(cases(), digits, strict=True))


def test_older_devices_have_fewer_kernels():
    case = Case(torch.float16, (64, 64), "as queries", "none", False, 0.0, True, True)

    assert chosen(case, (7, 5)) == "efficient"
    assert chosen(case._replace(dtype=torch.bfloat16), (7, 5)) == "math"
    assert chosen(case._replace(dtype=torch.float32, widths=(33, 33)), (7, 5)) == "efficient"
    assert chosen(case._replace(widths=(36, 36)), (7, 5)) == "math"


def test_heads_that_differ_without_being_grouped_are_math():
    q, k = (torch.empty(2, heads, 8, 64, device="meta") for heads in (4, 1))

    assert attention_kernel(q, k, k, None, H100, release=(2, 13)) == "math"
    assert attention_kernel(q, k, k, None, H100, release=RELEASE) == "efficient"  # one head is for all
    assert attention_kernel(q, k, k, None, H100, enable_gqa=True, release=RELEASE) == "efficient"
    assert attention_kernel(q[0], k[0], k[0], None, H100) == "math"
