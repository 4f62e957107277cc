"""Where a model has the parts that settings speak of: its repeated blocks, and attention, norms and experts in them."""

from torch import nn

_MOST = 0.67  # of a container's parameters in one entry: then its entries are parts, not layers that repeat
_MLP = ("mlp", "feed_forward", "ffn")
# The names that Megatron, transformers and torchtitan give to a part.
_NAMES = {
    "attention": ("self_attention", "self_attn", "attention", "attn"),
    "core_attn": ("core_attention", "core_attn"),
    "qkv_linear": ("linear_qkv", "q_proj", "wq", "c_attn"),
    "attn_proj": ("linear_proj", "o_proj", "wo", "out_proj"),
    "shared_experts": ("shared_experts", "shared_expert"),
    "mla_up_proj": ("linear_q_up_proj", "linear_kv_up_proj", "q_b_proj", "kv_b_proj"),
}
_ONE = ("attention", "core_attn", "qkv_linear", "attn_proj")  # the first of them is meant


def stacks(model: nn.Module) -> list[list[str]]:
    """Paths of the repeated blocks of each stack, in the model's order; no stack lies within a block of another.

    A stack is the outermost container with numbered entries of which none holds most of the parameters.
    """
    found: list[list[str]] = []
    taken: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if taken and f"{path}.".startswith(taken):
            continue
        entries = [(name, child) for name, child in module.named_children() if name.isdecimal()]
        sizes = [sum(p.numel() for p in child.parameters()) for _, child in entries]
        if len(entries) > 1 and 0 < max(sizes) <= _MOST * sum(sizes):
            prefix = f"{path}." if path else ""
            found.append([f"{prefix}{name}" for name, _ in entries])
            taken = (*taken, *(f"{block}." for block in found[-1]))
    return found


def blocks(model: nn.Module) -> list[str]:
    """Paths of all repeated blocks."""
    return [path for stack in stacks(model) for path in stack]


def parts(model: nn.Module, block: str, role: str) -> list[str]:
    """Paths of the modules in ``block`` that play ``role``; none where there is no such part.

    Args:
        role: ``norm``, ``mlp`` (dense), ``moe``, ``expert_activation``, or a name in ``_NAMES``.
    """
    module = model.get_submodule(block)
    inside = [(f"{block}.{path}", path.rpartition(".")[2]) for path, _ in module.named_modules() if path]
    children = {f"{block}.{name}": child for name, child in module.named_children()}
    if role == "norm":
        return [path for path, child in children.items() if "norm" in type(child).__name__.lower()]
    if role in ("mlp", "moe"):
        named = [path for path in children if role == "moe" or path.rpartition(".")[2] in _MLP]
        return [path for path in named if is_moe(children[path]) == (role == "moe")]
    if role in _NAMES:
        found = [path for path, name in inside if name in _NAMES[role]]
        return found[:1] if role in _ONE else found
    assert role == "expert_activation"
    return [path for path, name in inside if ".experts" in path and name in ("act_fn", "activation_func")]


def is_moe(module: nn.Module) -> bool:
    """Whether the module routes among experts."""
    return hasattr(module, "experts")


def has_moe(model: nn.Module) -> bool:
    return any(is_moe(module) for module in model.modules())
