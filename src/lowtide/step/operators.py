"""Facts of one op that the dispatcher shows, and which operators must never be replayed, with reasons."""

from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey

from lowtide.device import values_off, vendor_kernels
from lowtide.device.block_size import in_blocks
from lowtide.device.dispatch import bytes_of
from lowtide.device.dispatch import is_opened_type as is_opened_type  # offered with the other facts of an op
from lowtide.device.dispatch import is_wrapper_type as is_wrapper_type  # likewise
from lowtide.device.dispatch import may_run_others as may_run_others  # likewise
from lowtide.device.dispatch import tensors_in as tensors_in
from lowtide.device.dispatch import tensors_of as tensors_of
from lowtide.measurement.op_inputs import COLLECTIVES

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

# These write running statistics without an alias annotation and without a version bump: replayed with
# ``training=True`` the statistics move twice.
HIDDEN_BUFFER_WRITERS = frozenset({
    "aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._batch_norm_with_update",
    "aten._batch_norm_impl_index", "aten.batch_norm_update_stats", "aten.batch_norm_gather_stats",
    "aten.batch_norm_gather_stats_with_counts", "aten.instance_norm", *vendor_kernels.BATCH_NORMS,
})  # fmt: skip
# Arguments that a replay leaves out: without running statistics the same kernel gives the same outputs in training
# mode and moves nothing. Checked bitwise for this one; its relatives on other devices stay saved.
OMITTED_IN_REPLAYS = {"aten.native_batch_norm": (3, 4)}
# They initialise nothing: other bits in another run, until an op fills what they made.
MAKE_UNINITIALISED = frozenset({
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided",
    "aten.empty_permuted",
})  # fmt: skip
# Their reserve or workspace output belongs to the one run that filled it (seen: a replayed LSTM layer on CPU gave
# gradients that differ).
OPAQUE_WORKSPACE = frozenset({"aten.mkldnn_rnn_layer", *vendor_kernels.RECURRENT})
# Give every element a new value whatever was there: after one of these, uninitialised memory is determined.
OVERWRITERS = frozenset({
    "aten.bernoulli_", "aten.copy_", "aten.exponential_", "aten.fill_", "aten.normal_", "aten.random_",
    "aten.uniform_", "aten.zero_",
})  # fmt: skip
# What backward formulas fill a zeroed gradient with: in place, but not where they see a dispatch mode.
SCATTERS = frozenset({
    torch.ops.aten.scatter_add.default, torch.ops.aten.scatter.src, torch.ops.aten.index_add.default,
    torch.ops.aten.index_put.default,
})  # fmt: skip
# Words that are weighted at a time: few, and made once, since a step that is within its budget has no room.
_CPU_WEIGHTS = torch.arange(1, 1 << 14, 2, dtype=torch.int64, device="cpu")
# On a device, where kernels have to be launched: a sheet, whose rows and columns are summed before they are weighted.
# It is flat: for columns of 1024 words CUDA's sum takes a workspace of twice the sheet.
_ROWS, _COLUMNS = 1 << 9, 1 << 10
_STRIDED = torch.strided
_CPU = torch.device("cpu")
COMMUNICATES = frozenset({*COLLECTIVES, "fsdp"})
DROPOUT = "dropout_p"
UNINITIALISED = "makes uninitialised memory"
WRITES = "writes in place"


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that the schema says are written; out= variants included."""
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written_tensors(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    if not (written := written_arguments(func)):
        return []
    return [t for i, name in written for t in tensors_in(args[i] if i < len(args) else kwargs.get(name))]


@cache
def may_draw_random_numbers(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def draws_random_numbers(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an op that may draw random numbers does on these arguments; attention without dropout does not."""
    position = _dropout_argument(func)
    if position is None:
        return True
    rate = args[position] if position < len(args) else kwargs.get(DROPOUT, 0.0)
    return bool(rate != 0.0)


@cache
def _dropout_argument(func: Any) -> int | None:
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == DROPOUT), None)


def shape_depends_on_values(func: Any, args: tuple) -> bool:
    """Whether what ``func`` makes is as large as the values of ``args`` say. Indices do where they are masks."""
    if func is torch.ops.aten.index.Tensor:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    return _may_depend_on_values(func)


@cache
def _may_depend_on_values(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def packet_name(func: Any) -> str:
    """``aten.mm`` of ``aten.mm.default``."""
    return str(func.overloadpacket) if hasattr(func, "overloadpacket") else str(func)


def why_not_replayed(func: Any, args: tuple, kwargs: dict) -> str:
    """The reason that this op must not run a second time; "" if it may."""
    packet = packet_name(func)
    training = any(a is True for a in args) or kwargs.get("training") is True or packet.endswith("_stats")
    if packet in HIDDEN_BUFFER_WRITERS and training and packet not in OMITTED_IN_REPLAYS:
        return "moves running statistics"
    if packet in MAKE_UNINITIALISED:
        return UNINITIALISED
    if packet in OPAQUE_WORKSPACE:
        return "leaves a workspace for its own backward only"
    if func.namespace in COLLECTIVES:
        return "is a collective"
    if kwargs.get("generator") is not None or any(isinstance(a, torch.Generator) for a in args):
        return "draws from a private generator"
    return WRITES if written_arguments(func) else ""


class Operator:
    """What is known of an operator once and for all: asked at each op, looked up once.

    Attributes:
        name: As ``packet_name`` says it.
        writes: Its schema names arguments that it writes.
        random: It may draw random numbers.
        may_omit: Some call of it leaves out arguments when it is replayed.
        is_unknown: It is no operator of PyTorch's own, and may write unseen.
        is_view: What it returns is memory that it was given, whatever its arguments.
    """

    __slots__ = ("_asks", "_func", "_why", "is_unknown", "is_view", "may_omit", "name", "random", "writes")

    def __init__(self, func: Any) -> None:
        self._func, self.name = func, packet_name(func)
        self.writes, self.random = bool(written_arguments(func)), may_draw_random_numbers(func)
        self.may_omit = self.name in _MAY_OMIT
        self.is_unknown = func.namespace not in _OF_PYTORCH
        self.is_view = bool(func.is_view) and not self.is_unknown and not _is_composite(func)
        arguments = func._schema.arguments
        self._asks = self.is_unknown or self.name in _MAY_MOVE_STATISTICS or any(map(_takes_generator, arguments))
        self._why = "" if self._asks else why_not_replayed(func, (), {})

    def why_not_replayed(self, args: tuple, kwargs: dict) -> str:
        return why_not_replayed(self._func, args, kwargs) if self._asks else self._why


class _Operators(dict[Any, Operator]):
    def __missing__(self, func: Any) -> Operator:
        found = self[func] = Operator(func)
        return found


OPERATORS = _Operators()
_MAY_OMIT, _MAY_MOVE_STATISTICS = frozenset(OMITTED_IN_REPLAYS), HIDDEN_BUFFER_WRITERS
_OF_PYTORCH = frozenset({"aten", "prims"})


def _is_composite(func: Any) -> bool:
    """Made of other operators: ``reshape`` may copy, and a mode sees it in inference mode."""
    return func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _takes_generator(argument: Any) -> bool:
    return "Generator" in str(argument.type)


def may_write_undeclared(func: Any) -> bool:
    """A collective that may write whatever it is given, though its schema names no write."""
    return func.namespace == "c10d" or (func.namespace in COLLECTIVES and packet_name(func).endswith("_"))


def omitted_in_replay(func: Any, args: tuple) -> tuple[int, ...]:
    """Positions of arguments that a replay of ``func`` passes as None: only in training are they not read."""
    positions = omittable_arguments(func)
    return positions if positions and any(a is True for a in args) else ()


@cache
def omittable_arguments(func: Any) -> tuple[int, ...]:
    """Positions of arguments that some call of ``func`` leaves out when it is replayed."""
    return OMITTED_IN_REPLAYS.get(packet_name(func), ())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Its ``.grad``. None for a result of ops, which has none: PyTorch warns whoever asks."""
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The one plain storage under ``tensor``; None for wrappers, sparse, nested, quantised, meta, functorch ones.

    Forward-mode derivatives that are zero have no memory: their storage is invalid.
    """
    if tensor.layout is not _STRIDED or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor._is_zerotensor():
        return None
    if type(tensor) is not torch.Tensor and is_wrapper_type(type(tensor)):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # functorch wrappers have none
        return None


def allocated_bytes(storage: torch.UntypedStorage) -> int:
    """As the device's allocator counts them."""
    device = storage.device
    return in_blocks(storage.nbytes(), "cpu" if device == _CPU else device.type)  # of which ``type`` is slow


def fills_its_storage(tensor: torch.Tensor) -> bool:
    """Dense and without overlap, in some order of its dimensions."""
    storage = storage_of(tensor)
    if storage is None or storage.nbytes() != tensor.numel() * tensor.element_size():
        return False
    return all(stride or size <= 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


@values_off.unread
def fingerprint(tensor: torch.Tensor) -> tuple[int, ...]:
    """Position-weighted sums of a tensor's bits: equal bits give equal sums, a change shows.

    Constant extra memory (a clone would double a step's largest tensors just when memory is short). Sums are
    modulo 2^64 with odd weights, so flips of signs or swaps of elements do not cancel as they would in a XOR.
    """
    storage = storage_of(tensor)
    if storage is None or storage.nbytes() == 0:
        return ()
    raw = bytes_of(storage)
    whole = raw[: raw.numel() // 8 * 8].view(torch.int64)
    rest = raw[whole.numel() * 8 :].to(torch.int64).sum()
    sums = _sums_on_cpu(whole) if raw.device.type == "cpu" else _sums_on_device(whole)
    found = tuple(torch.stack([rest, *sums]).cpu().tolist())
    return () if values_off.are_off else found


def _sums_on_cpu(words: torch.Tensor) -> list[torch.Tensor]:
    """A CPU has no temporary in ``dot``, and is ten times faster with it."""
    parts = words.split(_CPU_WEIGHTS.numel())
    return [torch.dot(part, _CPU_WEIGHTS[: part.numel()]) * (2 * i + 1) for i, part in enumerate(parts)]


def _sums_on_device(words: torch.Tensor) -> list[torch.Tensor]:
    """There is no integer ``dot`` there. Some vectors of ``_COLUMNS`` words are all that this allocates."""
    weights = torch.arange(1, 2 * _COLUMNS, 2, dtype=torch.int64, device=words.device)
    sheets = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    last = words[sheets.numel() :]
    of_last = (last * weights[: last.numel()]).sum()
    by_row, by_column = torch.zeros_like(of_last), torch.zeros_like(of_last)
    for i, rows in enumerate(sheets.split(_ROWS)):
        by_row += (rows.sum(1) * weights[: len(rows)]).sum() * (2 * i + 1)
        by_column += (rows.sum(0) * weights).sum() * (2 * i + 1)
    return [of_last, by_row, by_column]
