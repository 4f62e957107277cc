"""Megatron-Core's recomputation: whole layers in groups, or parts of every layer.

Read in megatron-core 0.16.1: ``TransformerConfig.__post_init__`` (what contradicts what; ``moe_layer_recompute`` sets
the selective granularity, whose default modules come along), ``TransformerBlock._checkpointed_forward`` (``uniform``:
groups of ``recompute_num_layers`` layers; ``block``: the first so many, each alone), ``TransformerLayer``, ``MoELayer``
and ``Attention`` (``layernorm``, ``moe_act`` and ``mla_up_proj`` discard their output, the others keep it).
"""

from torch import nn

from lowtide.settings.blocks import blocks, has_moe, parts, stacks
from lowtide.settings.description import Checkpoint, Description
from lowtide.settings.given import Given

# Name -> the part of a layer, and whether its output is made again too.
MODULES = {
    "core_attn": ("core_attn", False),
    "moe_act": ("expert_activation", True),
    "layernorm": ("norm", True),
    "mla_up_proj": ("mla_up_proj", True),
    "mlp": ("mlp", False),
    "moe": ("moe", False),
    "shared_experts": ("shared_experts", False),
}
# Name -> the part whose input moves.
OFFLOADED = {
    "attn_norm": ("norm", 0),
    "qkv_linear": ("qkv_linear", 0),
    "core_attn": ("core_attn", 0),
    "attn_proj": ("attn_proj", 0),
    "mlp_norm": ("norm", -1),
    "expert_fc1": ("moe", 0),
    "moe_act": ("expert_activation", 0),
}
_GRANULARITY, _METHOD, _LAYERS = "recompute_granularity", "recompute_method", "recompute_num_layers"
_MODULES, _OFFLOAD, _FINE = "recompute_modules", "offload_modules", "fine_grained_activation_offloading"
KEYS = (
    _GRANULARITY, _METHOD, _LAYERS, _MODULES, "moe_layer_recompute", _FINE, _OFFLOAD, "cpu_offloading",
    "cpu_offloading_num_layers", "distribute_saved_activations", "min_offloaded_tensor_size",
)  # fmt: skip


def describe(given: Given, model: nn.Module) -> Description:
    """What the fields of ``TransformerConfig`` mean.

    Raises:
        SettingsError: Megatron would raise.
    """
    granularity = given.choice(_GRANULARITY, ("full", "selective"))
    method = given.choice(_METHOD, ("uniform", "block"))
    count = given.count(_LAYERS)
    modules = given.words(_MODULES, MODULES)
    if given.flag("moe_layer_recompute"):
        granularity, modules = _moe_layer(given, granularity, modules)
    offloads = _offloads(given, model, granularity)
    layers = blocks(model)
    if not layers and (granularity or offloads):
        raise given.error(
            f"{type(model).__name__} has no repeated layers.",
            f"Leave {_GRANULARITY} out, or plan it with lowtide.solve.",
        )
    if given.flag("distribute_saved_activations"):
        given.does_nothing("distribute_saved_activations", "on one rank; it splits kept inputs over tensor parallelism")
    if granularity != "selective" and modules is not None:
        given.does_nothing(_MODULES, f'only {_GRANULARITY}="selective" reads it')
    checkpoints: tuple[Checkpoint, ...] = ()
    summary = "no recomputation"
    if granularity == "full":
        checkpoints, summary = _full(given, model, method, count)
    elif granularity == "selective":
        if count is not None:
            raise given.error(f'{_LAYERS}={count} with {_GRANULARITY}="selective".', f"Leave {_LAYERS} out.")
        if method is not None:
            given.does_nothing(_METHOD, f'only {_GRANULARITY}="full" reads it')
        modules = ["core_attn"] if modules is None else modules
        checkpoints = tuple(c for name in modules for c in _selected(given, model, layers, name))
        summary = f"of every layer {', '.join(modules)} run again"
    else:
        for name in (_METHOD, _LAYERS):
            if name in given:
                given.does_nothing(name, f"without {_GRANULARITY} nothing is recomputed")
    return Description(summary, checkpoints, offloads=offloads)


def _full(given: Given, model: nn.Module, method: str | None, count: int | None) -> tuple[tuple[Checkpoint, ...], str]:
    if method is None:
        raise given.error(
            f'{_GRANULARITY}="full" without {_METHOD}.',
            f'Add {_METHOD}: "uniform" (groups of layers) or "block" (the first layers), and {_LAYERS}.',
        )
    if count is None:
        raise given.error(f'{_GRANULARITY}="full" without {_LAYERS}.', f"Add {_LAYERS}: 1 or more.")
    chosen: list[tuple[str, ...]] = []
    every = stacks(model)
    for stack in every:
        if method == "block":
            chosen += [(path,) for path in stack[:count]]
            continue
        if count == 0 or len(stack) % count:
            raise given.error(
                f'{_METHOD}="uniform" cannot cut {len(stack)} layers into groups of {count}: Megatron runs past the '
                "last layer.",
                f"Set {_LAYERS} to a divisor of {len(stack)}.",
            )
        chosen += [tuple(stack[start : start + count]) for start in range(0, len(stack), count)]
    total = sum(map(len, every))
    if method == "uniform":
        return tuple(map(Checkpoint, chosen)), f"{total} layers in {len(chosen)} groups of {count}, each a checkpoint"
    if count == 0:
        given.does_nothing(_LAYERS, '0 with "block" recomputes no layer')
    elif count > max(map(len, every)):
        given.note(_LAYERS, f"{count}, and there are {max(map(len, every))}: all of them are checkpoints")
    return tuple(map(Checkpoint, chosen)), f"the first {len(chosen)} of {total} layers are checkpoints, each alone"


def _moe_layer(given: Given, granularity: str | None, modules: list[str] | None) -> tuple[str, list[str]]:
    given.deprecated("moe_layer_recompute", f'write {_GRANULARITY}: "selective" and {_MODULES}: ["moe"]')
    if granularity == "full":
        raise given.error(
            f'moe_layer_recompute with {_GRANULARITY}="full".', "Leave moe_layer_recompute out: full includes it."
        )
    if modules is None:
        given.note("moe_layer_recompute", f"switches core_attn on as well, the default of {_MODULES}")
        modules = ["core_attn"]
    return "selective", modules if "moe" in modules else [*modules, "moe"]


def _selected(given: Given, model: nn.Module, layers: list[str], name: str) -> list[Checkpoint]:
    role, discards = MODULES[name]
    found = [(path,) for layer in layers for path in parts(model, layer, role)]
    if not found and name == "core_attn":
        found = [(path,) for layer in layers for path in parts(model, layer, "attention")]
        if found:
            given.note("core_attn", "no module of its own here: taken as the ops from the first product to the last")
        return [Checkpoint(path, attention_only=True) for path in found] or _nothing(given, model, name)
    return [Checkpoint(path, discards_output=discards) for path in found] or _nothing(given, model, name)


def _nothing(given: Given, model: nn.Module, name: str) -> list[Checkpoint]:
    if name == "mlp" and has_moe(model):
        given.does_nothing(name, 'the model has no dense MLP; its experts are "moe"')
    else:
        given.does_nothing(name, f"no layer of {type(model).__name__} has such a part")
    return []


def _offloads(given: Given, model: nn.Module, granularity: str | None) -> tuple[str, ...]:
    names = given.words(_OFFLOAD, OFFLOADED) or []
    if given.flag("cpu_offloading"):
        if granularity is not None:
            raise given.error(
                f'cpu_offloading with {_GRANULARITY}="{granularity}": Megatron refuses both together.',
                "Keep one of the two.",
            )
        count = given.count("cpu_offloading_num_layers") or 0
        given.note("cpu_offloading", "Transformer Engine moves what these layers store; taken as their inputs")
        return tuple(path for stack in stacks(model) for path in stack[:count])
    if names and granularity == "full":
        raise given.error(
            f'{_OFFLOAD} with {_GRANULARITY}="full": a layer that runs again stores nothing inside that could move.',
            f'Leave {_OFFLOAD} out, or use {_GRANULARITY}: "selective".',
        )
    if names and not given.flag(_FINE):
        given.does_nothing(_OFFLOAD, f"{_FINE} is off")
        return ()
    if given.flag(_FINE) and not names:
        raise given.error(f"{_FINE} without {_OFFLOAD}.", f"Add {_OFFLOAD}: some of {', '.join(OFFLOADED)}.")
    if "attn_proj" in names and "core_attn" not in names:
        raise given.error(f"{_OFFLOAD} has attn_proj without core_attn, which Megatron refuses.", "Add core_attn.")
    moved: list[str] = []
    for name in names:
        role, which = OFFLOADED[name]
        found = [there[which] for layer in blocks(model) if (there := parts(model, layer, role))]
        if not found:
            given.does_nothing(name, f"no layer of {type(model).__name__} has such a part")
        moved += found
    return tuple(dict.fromkeys(moved))
