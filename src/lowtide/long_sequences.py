"""Two changes to a model of transformers, where the logits or one layer's transients are the peak.

    chunk_loss   The logits never exist: the output embedding and the cross entropy are one call, which goes through the
                 tokens in chunks (``torch.nn.functional.linear_cross_entropy``). Not bitwise: the sums have another
                 order. The difference is measured on the first batch and told.
    tile_mlp     An MLP runs on one part of the sequence after the other, so that a plan can drop and make again a part
                 at a time. Rows do not mix in an MLP, so each gives what it gave: bit by bit in float32 on a CPU, where
                 bfloat16 kernels split odd numbers of rows in other ways. Weight gradients are sums in another order.
                 Not bitwise.

Bekman et al. 2025, "Arctic Long Sequence Training" (https://arxiv.org/abs/2506.13996), which calls both tiling.
Differs: a tile is not checkpointed by hand; the plan decides what of it is saved.

A changed module has a class of its own under the old name. Copies by deepcopy or pickle are of the old class.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import UnsupportedModelError
from lowtide.step.operators import is_wrapper_type
from lowtide.step.restore import preserve_training_state

AUTO = "auto"
_COMPARED_BYTES = 2**24  # of logits, at most, where the chunked loss is compared with the plain one
_IGNORED = -100


def prepare(
    model: nn.Module, *, chunk_loss: bool, tile_mlp: int | str | None, say: Callable[[str], None] | None
) -> Callable[[], None]:
    """Change ``model`` for long sequences; returns the undo.

    Args:
        tile_mlp: Number of tiles; ``"auto"``: as many as make a tile as long as the model is wide.
        say: Is told the chunked loss's difference, when the first batch has come. None: it is not measured.

    Raises:
        ValueError: ``tile_mlp`` is no number of tiles.
        UnsupportedModelError: the model is not built as this needs; it says what was looked for.
    """
    undos = [tile_mlps(model, tile_mlp)] if tile_mlp is not None else []
    try:
        if chunk_loss:
            undos.append(chunk_the_loss(model, say))
    except BaseException:
        _run_all(undos)
        raise
    return lambda: _run_all(undos)


def _run_all(undos: list[Callable[[], None]]) -> None:
    while undos:
        undos.pop()()


class _Changed(nn.Module):
    """A module whose class was replaced."""

    _lowtide_plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _blank, (self._lowtide_plain,), *state


def _blank(kind: type[nn.Module]) -> nn.Module:
    return object.__new__(kind)


def _change(module: nn.Module, kind: type[_Changed], **attributes: Any) -> Callable[[], None]:
    plain = type(module)
    module.__class__ = type(
        plain.__name__, (kind, plain), {"_lowtide_plain": plain, "__module__": plain.__module__, **attributes}
    )
    reference, changed = weakref.ref(module), module.__class__  # an undo keeps no model alive

    def undo() -> None:
        found = reference()
        if found is not None and found.__class__ is changed:
            found.__class__ = plain

    return undo


# -- the MLPs -----------------------------------------------------------------------------------------------------


class _TiledMlp(_Changed):
    _lowtide_tiles: int | str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward = super().forward
        rows = x.shape[-2] if x.dim() > 1 else 1
        tiles = math.ceil(rows / x.shape[-1]) if self._lowtide_tiles == AUTO else min(int(self._lowtide_tiles), rows)
        if tiles < 2:
            found: torch.Tensor = forward(x)
            return found
        return torch.cat([forward(tile) for tile in x.chunk(tiles, dim=-2)], dim=-2)


def tile_mlps(model: nn.Module, tiles: int | str) -> Callable[[], None]:
    """Run each MLP of ``model`` over ``tiles`` of the sequence; returns the undo.

    Raises: ValueError, UnsupportedModelError: see ``prepare``.
    """
    if tiles != AUTO and (not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1):
        raise ValueError(f'tile_mlp={tiles!r} is no number of tiles. Pass an int of 1 or more, or "auto".')
    found = [module for module in model.modules() if _is_mlp(module)]
    if not found:
        raise UnsupportedModelError(
            f"tile_mlp: no MLP was found in {type(model).__name__}. Looked for modules whose class name ends in MLP or "
            "FeedForward, and\nwhose parts are Linear layers, activations and dropout alone.\n"
            "Leave tile_mlp out, or call the MLP on parts of the sequence in the model itself."
        )
    undos = [_change(module, _TiledMlp, _lowtide_tiles=tiles) for module in found]
    return lambda: _run_all(undos)


def _is_mlp(module: nn.Module) -> bool:
    if not type(module).__name__.lower().endswith(("mlp", "feedforward")):
        return False
    parts = [part for part in module.modules() if part is not module and not list(part.children())]
    return sum(_is_linear(part) for part in parts) > 1 and all(_keeps_rows_apart(part) for part in parts)


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # transformers' own, in GPT-2


def _keeps_rows_apart(part: nn.Module) -> bool:
    home = type(part).__module__
    return _is_linear(part) or home in ("torch.nn.modules.activation", "torch.nn.modules.dropout",
                                        "transformers.activations")  # fmt: skip


# -- the loss -----------------------------------------------------------------------------------------------------


class _DeferredHead(_Changed):
    """The output embedding: where the loss is chunked, it hands on what it was given."""

    _lowtide_loss: "ChunkedLoss"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._lowtide_loss.defers:
            self._lowtide_loss.deferred = hidden, self.weight, self.bias
            return hidden
        found: torch.Tensor = super().forward(hidden)
        return found


class ChunkedLoss:
    """Stands where the model's ``loss_function`` stood.

    Attributes:
        defers: A forward pass with labels and gradients runs.
        deferred: What the head was given in it, its weight and bias.
    """

    def __init__(self, plain: Callable[..., torch.Tensor], say: Callable[[str], None] | None) -> None:
        self._plain, self._say, self._told = plain, say, say is None
        self.defers = False
        self.deferred: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self.defers = kwargs.get("labels") is not None and torch.is_grad_enabled()
        self.deferred = None

    def end(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """What came back as logits are none."""
        deferred, self.deferred, self.defers = self.deferred, None, False
        if deferred is None or output is None:
            return output
        if isinstance(output, tuple):
            return tuple(None if part is deferred[0] else part for part in output)
        output.logits = None
        return output

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As transformers' ``ForCausalLMLoss``, of the logits that there would be."""
        if self.deferred is None:
            others = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self._plain(logits, labels, vocab_size, shift_labels=shift_labels, **others, **kwargs)
        hidden, weight, bias = self.deferred
        if logits is not hidden:
            raise _unsupported("it computes with the logits before the loss (scales, caps or slices them)")
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        targets = shift_labels.view(-1).to(hidden.device)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if torch.is_autocast_enabled(hidden.device.type):  # as the head would have cast
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if not self._told and self._say is not None:
            self._told = True
            self._say(_difference(hidden, weight, bias, targets, ignore_index))
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = _chunked(hidden, weight, bias, targets, ignore_index, reduction)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def chunk_the_loss(model: nn.Module, say: Callable[[str], None] | None) -> Callable[[], None]:
    """Compute logits and loss of a causal model of transformers in chunks; returns the undo.

    Runs the model once, on two tokens, without gradients.

    Raises: UnsupportedModelError: see ``prepare``.
    """
    if not hasattr(functional, "linear_cross_entropy"):
        raise UnsupportedModelError(
            f"chunk_loss needs torch.nn.functional.linear_cross_entropy, which torch {torch.__version__} does not have."
            "\nInstall torch 2.13, or leave chunk_loss out."
        )
    causal = next((m for m in model.modules() if _has_own_loss(m) and _head_of(m) is not None), None)
    if causal is None:
        raise _unsupported("none of its modules has both")
    plain, head = causal.loss_function, _head_of(causal)
    if getattr(plain, "__name__", "") != "ForCausalLMLoss":
        raise _unsupported(f"its loss_function is {getattr(plain, '__name__', plain)}")
    if not isinstance(head, nn.Linear):
        raise _unsupported(f"its output embedding is a {type(head).__name__}")
    if is_wrapper_type(type(head.weight)):
        raise _unsupported("the output embedding's weight is sharded")
    loss = ChunkedLoss(plain, say)
    before = causal.__dict__.get("_loss_function")
    undo_head = _change(head, _DeferredHead, _lowtide_loss=loss)
    causal._loss_function = loss
    hooks = [
        causal.register_forward_pre_hook(loss.begin, with_kwargs=True),
        causal.register_forward_hook(loss.end, always_call=True),
    ]

    reference = weakref.ref(causal)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        undo_head()
        found = reference()
        if found is not None and found.__dict__.get("_loss_function") is loss:
            del found._loss_function
            if before is not None:
                found._loss_function = before

    try:
        _try_on_two_tokens(causal, loss)
    except BaseException:
        undo()
        raise
    return undo


def _has_own_loss(module: nn.Module) -> bool:
    """A wrapper, such as PEFT's, shows attributes of the model in it as if they were its own."""
    return hasattr(type(module), "loss_function") or "loss_function" in vars(module)


def _head_of(module: nn.Module) -> Any:
    find = getattr(module, "get_output_embeddings", None)
    return None if find is None else find()


def _try_on_two_tokens(causal: nn.Module, loss: ChunkedLoss) -> None:
    """Whether logits go from the head to the loss as they are, before a batch comes."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(causal.parameters()).device)
    loss._told = True  # of no batch
    try:
        with preserve_training_state(causal, ids, gradients="none"), torch.enable_grad():
            causal(input_ids=ids, labels=ids)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _unsupported(f"on two tokens it fails: {type(error).__name__}: {error}".splitlines()[0]) from error
    finally:
        loss._told = False


def _unsupported(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "chunk_loss needs a causal language model of transformers: one with a loss_function, which is ForCausalLMLoss, "
        f"and\nget_output_embeddings(), which gives an nn.Linear whose result goes to the loss as it is. Here {why}.\n"
        "Leave chunk_loss out, or call torch.nn.functional.linear_cross_entropy in the model itself."
    )


def _chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    reduction: str = "mean",
) -> torch.Tensor:
    options = nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(
        hidden, weight, targets, linear_bias=bias, ignore_index=ignore_index, reduction=reduction, options=options
    )


def _difference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, ignore_index: int
) -> str:
    """How far the chunked loss and the gradient that it hands back are from the plain ones, on some of the tokens."""
    most = max(16, _COMPARED_BYTES // (4 * weight.shape[0]))

    def found(chunks: bool, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        some, targets_of = hidden.detach()[rows].requires_grad_(), targets[rows]
        if chunks:
            loss = _chunked(some, weight, bias, targets_of, ignore_index)
        else:
            logits = functional.linear(some, weight, bias).float()
            loss = functional.cross_entropy(logits, targets_of, ignore_index=ignore_index)
        return loss.detach().float(), torch.autograd.grad(loss, some)[0].float()

    with _disable_current_modes(), torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is), torch.enable_grad():
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        rows = (targets != ignore_index).nonzero()[:most, 0]
        if not len(rows):
            return "chunk_loss: the first batch has no token with a label, so the loss was not compared"
        (loss, gradient), (chunked, its_gradient) = found(False, rows), found(True, rows)
        off = float((chunked - loss).abs() / loss.abs().clamp_min(1e-30))
        gradient_off = float((its_gradient - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30))
    return (
        f"chunk_loss is not bitwise: on {len(rows)} tokens of the first batch the loss is off by {off:.1e} of itself, "
        f"its gradient by {gradient_off:.1e} of the largest"
    )


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
