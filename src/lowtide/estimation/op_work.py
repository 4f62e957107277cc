"""Work of one op signature: floating-point operations and bytes moved. Nothing is allocated: tensors are on ``meta``.

Operations are counted by PyTorch's own registry (``torch.utils.flop_counter``): a multiply and an add count as two.
The registry counts every score of attention; kernels of causal attention skip those that the mask leaves out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from lowtide.estimation.op_classes import COMPUTE, class_of
from lowtide.measurement.op_inputs import described_tensors, rebuild

CACHED_BYTES = 1 << 18  # an op on less leaves the code of the next ones in the caches


@dataclass(frozen=True)
class Work:
    """What one call does.

    Attributes:
        kind: Its class; see ``op_classes.class_of``.
        dtype: Of its largest floating-point tensor; ``float32`` where it has none.
        flops: 0 where the op is none that the registry counts.
        read_bytes: Of the tensors that it is given; an expanded dimension counts once, a gather reads what it makes.
        variant: What runs at another speed within the class: matrix products by which operands are transposed (``nn``,
            ``nt``, ``tn``, ``tt``, ``batched``; "" for neither), grouped convolutions, what belongs to backward.
        problems: Independent ones in the call: heads of attention, matrices of a batch. The rate depends on one's size.
    """

    kind: str
    dtype: str
    flops: int
    read_bytes: int
    variant: str = ""
    problems: int = 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of measured rates that suit it, the closest first."""
        own = (f"{self.kind}_{self.variant}.{self.dtype}",) if self.variant else ()
        return (*own, f"{self.kind}.{self.dtype}")

    @property
    def computes(self) -> bool:
        """Whether its operations are what takes the time, not its bytes."""
        return self.kind in COMPUTE and self.flops > 0


def work_of(signature: Mapping[str, Any]) -> Work:
    """Return the work of one call; never fails: what cannot be counted has ``flops=0``."""
    name = signature["op"]
    kind = class_of(name)
    tensors = described_tensors([signature.get("args", []), signature.get("kwargs", {})])
    floats = [t for t in tensors if "float" in t["dtype"]]
    none: dict[str, Any] = {"dtype": "float32", "t": []}
    largest = max(floats, key=lambda t: math.prod(t["t"]), default=none)
    read = sum(_read_bytes(t) for t in tensors)
    if kind == "gather" and tensors:
        # The table itself is not read, only the rows that are asked for: as many bytes as are made.
        read -= max(_read_bytes(t) for t in tensors)
    flops = _flops(signature, name) if kind in COMPUTE else 0
    if kind == "attention" and flops:
        flops = int(flops * _share_of_scores(signature, name))
    variant = _variant(kind, name, tensors)
    problems = math.prod(largest["t"][:-2]) if kind == "attention" or variant == "batched" else 1
    return Work(kind, largest["dtype"], flops, read, variant, max(1, problems))


def _flops(signature: Mapping[str, Any], name: str) -> int:
    if "flash_attention_for_cpu" in name:
        return _cpu_attention_flops(signature, backward="backward" in name)
    namespace, _, rest = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), rest.rpartition(".")[0], None)
    if packet not in flop_registry:
        return _product_flops(signature) if class_of(name) == "matmul" else 0
    try:
        func, args, kwargs = rebuild(_on_meta(dict(signature)), "meta")
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
        with torch.no_grad():
            made = func(*args, **kwargs)
        return int(flop_registry[packet](*args, **kwargs, out_val=made))
    except Exception:  # an opaque argument, or no kernel on meta: then its bytes alone count
        return 0


def _share_of_scores(signature: Mapping[str, Any], name: str) -> float:
    """Scores that are computed: 1, or of causal attention those of keys up to each query, about a half."""
    namespace, packet, overload = name.split(".")
    arguments = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema.arguments
    known = dict(zip((a.name for a in arguments), signature.get("args", []))) | dict(signature.get("kwargs", {}))
    if not known.get("is_causal") or "query" not in known or "key" not in known:
        return 1.0
    queries, keys = known["query"]["t"][-2], known["key"]["t"][-2]
    full = min(queries, keys)
    scores = full * (full + 1) // 2 + (queries - full) * keys
    return scores / (queries * keys) if queries and keys else 1.0


def _product_flops(signature: Mapping[str, Any]) -> int:
    """Of products that the registry does not know, grouped ones of a mixture of experts above all."""
    tensors = [t for t in described_tensors(signature.get("args", [])) if "float" in t["dtype"]][:2]
    if len(tensors) < 2:
        return 0
    left, right = (t["t"] for t in tensors)
    return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)


def _on_meta(value: Any) -> Any:
    """``value`` with every device rewritten; else ``rebuild`` would allocate what was on the CPU."""
    if isinstance(value, dict):
        return {k: "meta" if k == "device" and isinstance(v, str) else _on_meta(v) for k, v in value.items()}
    return [_on_meta(v) for v in value] if isinstance(value, list) else value


def _cpu_attention_flops(signature: Mapping[str, Any], *, backward: bool) -> int:
    """The registry has no formula for the CPU's kernel: two products forward, five backward."""
    tensors = described_tensors(signature.get("args", []))[1 if backward else 0 :]
    if len(tensors) < 3:
        return 0
    query, key = tensors[0]["t"], tensors[1]["t"]
    return (5 if backward else 2) * 2 * math.prod(query) * key[-2]


def _variant(kind: str, name: str, tensors: list[dict[str, Any]]) -> str:
    backward = "backward" in name
    if "grouped_mm" in name:  # a mixture of experts: tokens by experts, or both transposed for the weights' gradient
        return "grouped" if any(len(t["t"]) == 3 for t in tensors) else "grouped_tn"
    if kind == "matmul":
        matrices = [t for t in tensors if len(t["t"]) >= 2][-2:]
        if any(len(t["t"]) > 2 for t in matrices):
            return "batched"
        # Swapped strides are a transposed view, as autograd and ``nn.Linear`` pass them.
        letters = "".join("t" if t["stride"][-1] != 1 and t["stride"][-2] == 1 else "n" for t in matrices)
        return "" if letters == "nn" else letters
    if kind == "conv" and len(tensors) > 2 * backward:
        given, weight = tensors[backward : backward + 2]
        grouped = "grouped" if weight["t"][1] < given["t"][1] else ""
        return "_".join(filter(None, (grouped, "backward" if backward else "")))
    return "backward" if backward else ""


def _read_bytes(tensor: Mapping[str, Any]) -> int:
    count = math.prod(size for size, step in zip(tensor["t"], tensor["stride"]) if step or not size)
    dtype = getattr(torch, tensor["dtype"], torch.float32)
    return int(count * dtype.itemsize)
