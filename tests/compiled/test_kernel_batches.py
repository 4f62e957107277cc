"""Kernels in C++ that share a file: each is the one that PyTorch compiles alone."""

import pytest
import torch
from support.compiled_layers import decoder, equal, reference, step_of
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

import lowtide
from lowtide.compiled import kernel_batches
from lowtide.compiled.kernel_batches import Batch, CppSource, batches_of
from lowtide.compiled.kernels_later import KernelsLater

KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(1L))
        out_ptr0[x0] = {how};
}
"""
TYPES = ("const float*", "float*", "const int64_t")
WAYS = ("std::exp(in_ptr0[x0])", "in_ptr0[x0] / 3.0f", "std::tanh(in_ptr0[x0])")


def source(how, types=TYPES):
    return CppSource(types, KERNEL.replace("{how}", how))


@pytest.fixture
def loaded(monkeypatch):
    """Texts of files that a compiler was asked for."""
    texts = []
    load = CppPythonBindingsCodeCache.load_async.__func__

    def load_async(cls, text, *args, **options):
        texts.append(text)
        return load(cls, text, *args, **options)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", classmethod(load_async))
    return texts


@pytest.mark.slow
def test_kernels_of_one_file_are_those_that_are_compiled_alone(loaded):
    sources, x = [source(how) for how in WAYS], torch.linspace(-3, 3, 37)
    placed = batches_of(sources)
    assert len(loaded) == len({id(batch) for batch, _ in placed}) < len(sources)
    for (batch, place), one in zip(placed, sources, strict=True):
        together, alone = torch.zeros_like(x), torch.zeros_like(x)
        batch.kernel(place)(x, together, len(x))
        AsyncCompile().cpp_pybinding(list(one.argument_types), one.text).result()(x, alone, len(x))
        assert torch.equal(together, alone) and together.count_nonzero() > 30
        with pytest.raises(RuntimeError, match="requires 3 args"):
            batch.kernel(place)(x)


def test_as_many_files_as_half_of_the_compilers(monkeypatch):
    monkeypatch.setattr(Batch, "__init__", lambda batch, sources: setattr(batch, "sources", sources))
    sources = [source(f"{i}.0f") for i in range(8)]
    for threads, files in ((1, 1), (2, 1), (4, 2), (6, 3)):
        monkeypatch.setattr(kernel_batches, "get_compile_threads", lambda threads=threads: threads)
        placed = batches_of(sources)
        assert len({id(batch) for batch, _ in placed}) == files
        assert [batch.sources[place] for batch, place in placed] == sources
    monkeypatch.setattr(kernel_batches, "get_compile_threads", lambda: 16)
    assert batches_of(sources) == [None] * 8, "alone each has a compiler"


@pytest.mark.parametrize("more", ['extern "C" void other() {}', "#define WIDTH 8"])
def test_what_its_neighbours_would_see_is_compiled_alone(more, loaded):
    """Two entries of one name, or a name that others may use."""
    odd = CppSource(TYPES, f"{source('1.0f').text}\n{more}\n")
    assert not odd.can_share
    assert batches_of([odd, odd]) == [None, None] and not loaded


def begun(later, sources):
    """``later`` after Inductor's module with these kernels was loaded, and the module's names."""
    scope = {}
    with later.held():
        compiler = AsyncCompile()
        for i, one in enumerate(sources):
            scope[f"cpp_{i}"] = compiler.cpp_pybinding(list(one.argument_types), one.text)
        compiler.wait(scope)
    later.begin()
    return scope


@pytest.mark.slow
def test_a_file_that_the_compiler_refuses_leaves_each_kernel_to_itself(monkeypatch):
    def refuse(batch, number):
        raise CppCompileError([], "")

    later, x, y = KernelsLater(KernelsLater()), torch.ones(4), torch.zeros(4)
    scope = begun(later, [source(how) for how in WAYS])
    (batch,) = {scope[name].batch[0] for name in scope}
    monkeypatch.setattr(batch, "_load", lambda: refuse(batch, 0))
    later.compile()
    scope["cpp_1"](x, y, 4)
    assert torch.equal(y, x / 3)


@pytest.mark.slow
def test_what_the_plain_code_has_too_is_compiled_once_and_as_pytorch_does(loaded):
    sources = [source(how) for how in WAYS]
    plain = KernelsLater()
    of_plain = begun(plain, sources[:1])
    assert len(loaded) == 1 and "namespace lowtide" not in loaded[0]
    later = KernelsLater(plain)
    scope = begun(later, sources)
    assert len(loaded) == 2 and loaded[1].count("namespace lowtide") == 2
    later.compile()
    plain.compile()
    assert scope["cpp_0"] is of_plain["cpp_0"] and callable(scope["cpp_2"])


@pytest.mark.slow
def test_a_planned_layer_asks_for_few_files_and_has_the_bits_of_pytorchs(loaded):
    model = decoder(width=48)
    compiled = lowtide.compile(model, budget="60%")
    step_of(compiled, model)
    num_plain = len(loaded)
    plan = compiled.plan
    (planner,) = compiled._planners.values()
    made = [v for shape in planner._distinct for v in shape.variants.values() if v.run is not None]
    assert set(plan.layers.values()) - {"plain", "run again"} and num_plain > 4
    assert 0 < len(loaded) - num_plain <= 2 * (len(made) - 2), "a file for a forward, and one for its backward"
    assert equal(step_of(compiled, model), reference(width=48))
