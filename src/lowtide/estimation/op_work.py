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

# Classes whose ops write each number from those at its place.
_BY_ELEMENT = ("elementwise", "copy", "transcendental")
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
            ``nt``, ``tn``, ``tt``, ``batched``; "" for neither), grouped convolutions, what belongs to backward, ops on
            lists of tensors (``foreach``) and whole optimizers (``fused``).
        problems: Independent ones in the call: heads of attention, matrices of a batch. The rate depends on one's size.
        is_odd: A matrix product in 16 bits with rows of an odd length, a vocabulary of 50,257 for one: kernels for
            them load one number at a time.
        access: Of an elementwise op that cannot go through its tensors as they lie in memory: ``strided`` (broadcast,
            transposed, with gaps, or of several dtypes), ``cast`` (a copy to another dtype, else as it lies); else "".
        elements: That such an op writes; 0 where ``access`` is "".
    """

    kind: str
    dtype: str
    flops: int
    read_bytes: int
    variant: str = ""
    problems: int = 1
    is_odd: bool = False
    access: str = ""
    elements: int = 0

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
    access, elements = _access(kind, name, tensors) if kind in _BY_ELEMENT and not variant.startswith("f") else ("", 0)
    is_odd = kind == "matmul" and _has_odd_rows(tensors)
    return Work(kind, largest["dtype"], flops, read, variant, max(1, problems), is_odd, access, elements)


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
        # The registry of PyTorch 2.11 has no formula for fewer heads of keys than of queries.
        return _attention_flops(signature, name) if name.startswith("aten._scaled_dot_product") else 0


def _share_of_scores(signature: Mapping[str, Any], name: str) -> float:
    """Scores that are computed: 1, or of causal attention those of keys up to each query, about a half."""
    known = _named(signature, name)
    if not known.get("is_causal") or "query" not in known or "key" not in known:
        return 1.0
    queries, keys = known["query"]["t"][-2], known["key"]["t"][-2]
    full = min(queries, keys)
    scores = full * (full + 1) // 2 + (queries - full) * keys
    return scores / (queries * keys) if queries and keys else 1.0


def _named(signature: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments by the names of the operator's schema."""
    namespace, packet, overload = name.split(".")
    arguments = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema.arguments
    return dict(zip((a.name for a in arguments), signature.get("args", []))) | dict(signature.get("kwargs", {}))


def _attention_flops(signature: Mapping[str, Any], name: str) -> int:
    """Two products forward; backward computes the scores again and has four more."""
    query, key, value = (_named(signature, name)[word]["t"] for word in ("query", "key", "value"))
    scores = math.prod(query[:-1]) * key[-2]
    widths = 3 * query[-1] + 2 * value[-1] if "backward" in name else query[-1] + value[-1]
    return int(2 * scores * widths)


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
    if "foreach" in name:
        return "foreach"
    return "fused" if "fused_adam" in name or "fused_sgd" in name else "backward" if backward else ""


def _access(kind: str, name: str, tensors: list[dict[str, Any]]) -> tuple[str, int]:
    many = [t for t in tensors if math.prod(t["t"]) > 1]
    counts = [math.prod(t["t"]) for t in many]
    if not many or 0 in counts:
        return "", 0
    if name.startswith(("aten.cat.", "aten.stack.")):
        return ("strided", sum(counts)) if any(_order(t) is None for t in many) else ("", 0)
    orders = {_order(t) for t in many}
    dtypes = {t["dtype"] for t in many if kind == "copy" or "float" in t["dtype"]}
    if None in orders or len(orders) > 1 or (len(dtypes) > 1 and kind != "copy"):
        return "strided", max(counts)
    return ("cast", max(counts)) if len(dtypes) > 1 else ("", 0)


def _order(tensor: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Which dimensions lie within which; None where the tensor has gaps or one number stands for several."""
    steps = sorted((step, size, i) for i, (size, step) in enumerate(zip(tensor["t"], tensor["stride"])) if size > 1)
    expected = 1
    for step, size, _ in steps:
        if step != expected:
            return None
        expected *= size
    return tuple(i - len(tensor["t"]) for _, _, i in steps)


def _has_odd_rows(tensors: list[dict[str, Any]]) -> bool:
    matrices = [t for t in tensors if len(t["t"]) >= 2][-2:]
    if len(matrices) < 2 or any(t["dtype"] not in ("bfloat16", "float16") for t in matrices):
        return False
    left, right = matrices
    rows = [left["t"][-2] if left["stride"][-1] != 1 else left["t"][-1]]
    rows.append(right["t"][-2] if right["stride"][-1] != 1 else right["t"][-1])
    rows.append(right["t"][-1])  # of what is made
    return any(length > 1 and length % 2 for length in rows)


def _read_bytes(tensor: Mapping[str, Any]) -> int:
    count = math.prod(size for size, step in zip(tensor["t"], tensor["stride"]) if step or not size)
    dtype = getattr(torch, tensor["dtype"], torch.float32)
    return int(count * dtype.itemsize)
