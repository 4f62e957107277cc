"""Values for compiled graphs: before Inductor's code runs, its own FX graph runs eagerly on a second stand-in device
(the value layer makes the numbers there, the allocator of the first device sees nothing), and what it gives is written
over what the code returned. Bits are those of eager ops of the post-AOT graph, however Inductor fuses.

    STANDIN_DEVICES=2; import inductor_values; inductor_values.install()
"""

import weakref

import torch
from torch import fx

SECOND = torch.device("cuda", 1)
ran = 0


def _moved(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return SECOND
    if isinstance(value, (tuple, list)):
        return type(value)(map(_moved, value))
    return value


def _over_there(t):
    if not isinstance(t, torch.Tensor) or t.device.type != "cuda":
        return t
    with torch.no_grad():
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=SECOND)
        return made.copy_(t.detach())


def _eager(gm):
    """A copy of the graph whose factories make tensors on the second device."""
    graph = fx.Graph()
    returned = graph.graph_copy(gm.graph, val_map := {}, return_output_node=True)
    value, old = returned
    graph.output(value)
    for node in graph.nodes:
        if node.op == "call_function":
            node.kwargs = {k: _moved(v) for k, v in node.kwargs.items()}
            node.args = tuple(map(_moved, node.args))
    written = [
        i
        for i, n in enumerate(x for x in gm.graph.nodes if x.op == "placeholder")
        if any(u.op == "call_function" and str(u.target).startswith("aten.copy_") and u.args[0] is n for u in n.users)
    ]
    return fx.GraphModule(gm, graph), written


def _with_values(code, gm):
    """Inductor's code is called as ever, and has its outputs and what it writes written over."""
    (eager, written), run = _eager(gm), code.current_callable

    def both(inputs):
        global ran
        ran += 1
        there = [_over_there(t) for t in inputs]
        keep = {i: inputs[i] for i in written}
        given = [weakref.ref(t) for t in inputs if isinstance(t, torch.Tensor)]
        with torch.no_grad(), torch.cuda.device(SECOND):
            values = eager(*there)
        made = run(inputs)
        given = {
            t.untyped_storage().data_ptr() for ref in given if (t := ref()) is not None
        }  # the rest went, and its memory may be used again
        with torch.no_grad():
            for i, t in keep.items():
                with torch.autograd._unsafe_preserve_version_counter(t):
                    t.detach().copy_(there[i])
            for mine, value in zip(made, values, strict=True):
                if (
                    not isinstance(mine, torch.Tensor)
                    or mine.device.type != "cuda"
                    or mine.untyped_storage().data_ptr() in given
                ):
                    continue
                with torch.autograd._unsafe_preserve_version_counter(mine):
                    mine.detach().copy_(value)
        return made

    code.current_callable = both
    return code


def install():
    import torch._inductor.compile_fx as c
    import torch._functorch.config as f

    torch._inductor.config.fx_graph_cache = False
    f.enable_autograd_cache = False
    import copy

    inner = c.compile_fx_inner

    def with_values(gm, example_inputs, **options):
        before = copy.deepcopy(gm)  # lowering changes the graph
        return _with_values(inner(gm, example_inputs, **options), before)

    c.compile_fx_inner, whole = with_values, c.compile_fx
    c.compile_fx = lambda *args, **options: whole(*args, **{"inner_compile": with_values, **options})
    from torch._inductor.runtime import (
        benchmarking,
    )  # kernels take no time: all configurations are as good as the first

    for kind in {type(benchmarking.benchmarker), *type(benchmarking.benchmarker).__mro__[:-1]}:
        for name in ("benchmark", "benchmark_gpu", "benchmark_cpu", "benchmark_gpu_with_cuda_graph"):
            if name in vars(kind):
                setattr(kind, name, lambda self, *args, **kwargs: 1.0)
