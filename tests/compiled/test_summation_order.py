"""Sums in another order are found in generated code, whatever rounding hides of them."""

from types import SimpleNamespace

import pytest
import torch
from support.compiled_loops import GPT, WORDS
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

import lowtide
from lowtide.compiled import captured_layer
from lowtide.compiled.kernels_later import KernelsLater
from lowtide.compiled.summation_order import add_up_alike, summation_orders

LANES = "{sum} = {sum} + at::vec::vec_reduce_all<float, {num}>([](auto& x, auto& y) {{ return x + y; }}, {sum}_vec);"
ROWS = """
    {{
        for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>({rows}L); x0+=static_cast<int64_t>(1L))
        {{
            {{
                float {sum} = {begin};
                at::vec::VectorizedN<float,{num}> {sum}_vec = at::vec::VectorizedN<float,{num}>(0);
                for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(40L); x1+=static_cast<int64_t>({by}L))
                {{
                    {sum}_vec = {sum}_vec + tmp1;
                }}
                {last}
                out_ptr0[static_cast<int64_t>(x0)] = static_cast<float>({sum});
            }}
            for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(64L); x1+=static_cast<int64_t>(32L))
            {{
            }}
        }}
    }}
"""
COLUMNS = """
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(64L); x0+=static_cast<int64_t>({step}L))
    {{
        {{
            float tmp_acc0 = 0;
            for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(240L); x1+=static_cast<int64_t>(1L))
            {{
                tmp_acc0_vec = tmp_acc0_vec + tmp1;
            }}
            tmp_acc0_vec.store(out_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(32));
        }}
    }}
"""
TRITON = """
@triton_heuristics.{kind}(
    size_hints={{'x': {x}, 'r0_': 64}},
    reduction_hint=ReductionHint.INNER,
    filename=__file__,
)
@triton.jit
def triton_red_fused(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    tmp3 = triton_helpers.max2(tmp1, 1)[:, None]
    tmp4 = tl.sum(tmp3, 1)[:, None].to(tl.float32)
"""


def source(*kernels, calls=1):
    """Code that defines these and calls each so often."""
    lines = [f"kernel_{at} = async_compile.any('', r'''{text}''')" for at, text in enumerate(kernels)]
    for at, text in enumerate(kernels):
        lines += [f"    kernel_{at}{'.run' if 'triton' in text else ''}(buf0)"] * calls
    return "\n".join(lines)


def triton(*, kind="reduction", x=64):
    return TRITON.format(kind=kind, x=x)


def rows(num=1, *, rows=960, name="tmp_acc0", begin="0"):
    last = LANES.format(sum=name, num=num)
    return ROWS.format(rows=rows, sum=name, begin=begin, num=num, by=16 * num, last=last)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ([rows(1)], [rows(2)], False),
        ([rows(1)], [rows(1, name="tmp_acc3", rows=24)], True),
        ([rows(1)], [rows(1), rows(2, begin="-std::numeric_limits<float>::infinity()")], True),
        ([COLUMNS.format(step=16)], [COLUMNS.format(step=32)], True),
        ([rows(1)], [COLUMNS.format(step=16)], False),
        ([triton()], [triton()], True),
        ([triton()], [triton(kind="persistent_reduction")], False),
        ([triton()], [triton(x=128)], False),
    ],
    ids=["lanes", "names and rows", "greatest", "columns", "direction", "Triton", "Triton's kind", "Triton's sizes"],
)
def test_orders_are_told_apart_by_what_decides_over_digits(one, other, alike):
    assert summation_orders(source(*one))
    assert (summation_orders(source(*one)) == summation_orders(source(*other))) == alike


@pytest.mark.parametrize("kernel", [rows(1), triton()], ids=["C++", "Triton"])
def test_a_kernel_counts_as_often_as_it_is_called(kernel):
    once, twice = summation_orders(source(kernel)), summation_orders(source(kernel, calls=2))
    assert once.total() == 1 and twice == once + once == summation_orders(source(kernel, f"{kernel}\n"))


def test_a_backward_makes_sums_of_the_forward_again_and_no_others():
    plain = source(rows(1)), source(rows(2))
    assert add_up_alike(plain, (source(rows(1)), source(rows(1), rows(2))))
    assert add_up_alike(plain, ("", source(rows(1), rows(2))))  # for the backward alone
    assert not add_up_alike(plain, (source(rows(1)), source(rows(1))))
    assert not add_up_alike(plain, (source(rows(1)), source(rows(2), rows(2))))
    assert not add_up_alike(plain, (source(rows(1)), source(rows(2), rows(4))))


def test_block_sizes_of_triton_count_once_they_are_known():
    plain, other = triton(), f"{triton()}\n# fused with something else"
    code, others = ("", source(plain)), ("", source(other))
    assert add_up_alike(code, others)
    assert add_up_alike(code, others, {plain: "8"}, {other: "8"})
    assert not add_up_alike(code, others, {plain: "8"}, {other: "32"})
    assert not add_up_alike(code, others, {plain: "8"}, {})  # nobody knows them


class Autotuner:
    """As PyTorch's for a kernel: it times ``launchers`` when it first runs, and one is left."""

    def __init__(self, *x_blocks):
        self.launchers = [SimpleNamespace(config=SimpleNamespace(kwargs={"XBLOCK": x}, num_warps=2)) for x in x_blocks]

    def take(self, at):
        self.launchers = [self.launchers[at]]


def test_a_kernel_takes_the_block_sizes_of_the_plain_codes_kernel_that_is_most_like_it(monkeypatch):
    """PyTorch would time them, and take others as it comes."""
    monkeypatch.setattr(AsyncCompile, "triton", lambda compiler, name, text: Autotuner(1, 8, 32))
    first, second, larger = triton() + "    tmp5 = sin(tmp4)\n", triton() + "    tmp5 = exp(tmp4)\n", triton(x=128)

    def compiled(later, *texts):
        with later.held():
            scope = {f"kernel_{i}": AsyncCompile().triton("kernel", text) for i, text in enumerate(texts)}
            AsyncCompile().wait(scope)
        later.compile()
        return [*scope.values()]

    plain = KernelsLater()
    for kernel, at in zip(compiled(plain, first, second), (1, 2)):
        kernel.take(at)  # it has run
    later = KernelsLater(plain)
    more = second.replace("tmp5", "tmp7") + "    tmp8 = tmp7 + 1\n"
    taken, others = compiled(later, more, larger)

    assert later.blocks() == {more: plain.blocks()[second]} != {more: plain.blocks()[first]}
    assert len(taken.launchers) == 1 and len(others.launchers) == 3  # none adds up so many values


def test_sums_are_found_in_the_code_that_inductor_writes_today():
    """Were its text another one day, no order would be another."""

    def centred(x):
        return x.softmax(-1) - x.mean(0)

    x = torch.randn(64, 96, requires_grad=True)
    _, sources = run_and_get_code(lambda: torch.compile(centred, dynamic=False)(x).sum().backward())
    found = sum(map(summation_orders, sources), start=summation_orders(""))
    assert sum("vec_reduce_all" in order and "96L" in order for order in found) and "[('64L', '')] one by one" in found


@pytest.mark.parametrize("autocast", [True, False], ids=["bfloat16", "float32"])
def test_what_adds_up_in_another_order_is_left_out_in_low_precision_before_it_is_compiled(autocast, monkeypatch):
    monkeypatch.setattr(captured_layer, "add_up_alike", lambda plain, other, *blocks: plain == other)
    torch.manual_seed(0)
    model = GPT()
    compiled = lowtide.compile(model, budget="70%")
    ids = torch.randint(0, WORDS, (4, 32))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, ids)[1]
        loss.backward()
        compiled.wait()
    others = set(compiled.plan.layers.values()) - {"plain", "run again"}
    assert autocast == any(captured_layer.OTHER_ORDER in reason for reason in compiled.plan.refused)
    assert bool(others) != autocast
