"""Values for compiled graphs: Inductor's kernels are compiled and launched, and do nothing.

Before Inductor's code runs, its FX graph runs eagerly on a second device, where the value layer makes the numbers and
the allocator of the first device sees nothing. What it gives is written over what the code returned. Bits are those of
eager operators of the graph behind AOT autograd, however Inductor fuses; draws of a recomputed generator differ.

    STANDIN_DEVICES=2
    from cuda_standin import compiled_values; compiled_values.install()
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cuda_standin.settings import StandinError

SECOND = torch.device("cuda", 1)
graphs_run = 0


def install() -> None:
    """From now on graphs that ``torch.compile`` makes give values; kernels are not timed, all count as equally fast.

    Raises:
        StandinError: there is no second device.
    """
    if torch.cuda.device_count() < 2:
        raise StandinError("values of compiled graphs are made on a second device: set STANDIN_DEVICES=2.")
    import torch._functorch.config as autograd_config
    import torch._inductor.compile_fx as compiler

    torch._inductor.config.fx_graph_cache = False  # a graph that is found again has no FX graph beside it
    autograd_config.enable_autograd_cache = False
    one_graph, whole = compiler.compile_fx_inner, compiler.compile_fx

    def with_values(graph_module: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        before = copy.deepcopy(graph_module)  # lowering changes it
        return _with_values(one_graph(graph_module, example_inputs, **options), before)

    compiler.compile_fx_inner = with_values
    compiler.compile_fx = lambda *args, **options: whole(*args, **{"inner_compile": with_values, **options})
    measure_nothing()


def measure_nothing() -> None:
    """Every kernel takes 1 ms: nothing takes time here, and Inductor measures until it has seen 25 ms."""
    from torch._inductor.runtime import benchmarking

    for kind in type(benchmarking.benchmarker).__mro__[:-1]:
        for name in ("benchmark", "benchmark_gpu", "benchmark_cpu", "benchmark_gpu_with_cuda_graph"):
            if name in vars(kind):
                setattr(kind, name, lambda self, *args, **kwargs: 1.0)


def _with_values(code: Any, graph_module: fx.GraphModule) -> Any:
    """Inductor's code, which is called as ever and then has its outputs and what it writes written over."""
    eager, written, run = _on_second(graph_module), _written(graph_module), code.current_callable

    def both(inputs: list[Any]) -> Any:
        global graphs_run
        graphs_run += 1
        there = [_moved(value) for value in inputs]
        keep = {i: inputs[i] for i in written}
        given = [weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)]
        torch.cuda.set_rng_state(torch.cuda.get_rng_state(), SECOND)  # what Inductor's code is about to draw from
        with torch.no_grad(), torch.cuda.device(SECOND):
            values = eager(*there)
        made = run(inputs)  # empties the list: inputs that nobody holds go, and their memory may be used again
        alive = {t.untyped_storage().data_ptr() for ref in given if (t := ref()) is not None}
        for i, tensor in keep.items():
            _write(tensor, there[i])
        for mine, value in zip(made, values, strict=True):
            if isinstance(mine, torch.Tensor) and mine.is_cuda and mine.untyped_storage().data_ptr() not in alive:
                _write(mine, value)
        return made

    code.current_callable = both
    return code


@torch.no_grad()
def _write(into: torch.Tensor, value: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(into):
        _once(into.detach()).copy_(_once(value))


@torch.no_grad()
def _moved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=SECOND)
    _once(made).copy_(_once(value.detach()))
    return made


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repeats of an expanded tensor, which cannot be written."""
    return tensor[tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())]


def _on_second(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """The graph with its factories on the second device."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = tuple(map(_elsewhere, node.args))
            node.kwargs = {name: _elsewhere(value) for name, value in node.kwargs.items()}
    return fx.GraphModule(graph_module, graph)


def _elsewhere(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return SECOND
    return type(value)(map(_elsewhere, value)) if isinstance(value, tuple | list) else value


def _written(graph_module: fx.GraphModule) -> list[int]:
    """Positions of the inputs that the graph writes: those that a ``copy_`` names first."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return [
        i
        for i, node in enumerate(placeholders)
        if any(
            u.op == "call_function" and str(u.target).startswith("aten.copy_") and u.args[0] is node for u in node.users
        )
    ]
