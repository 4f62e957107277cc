"""What the checkpointing settings of any framework mean on one model, in one form: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOTHING, DEPRECATED, FAILS, NOTE = "does nothing", "deprecated", "fails", "note"


@dataclass(frozen=True)
class SettingsFinding:
    """What is worth knowing about one setting.

    Attributes:
        kind: ``does nothing``, ``deprecated``, ``fails`` or ``note``.
    """

    key: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.kind}: {self.text}" if self.kind != NOTE else f"{self.key}: {self.text}"


@dataclass(frozen=True)
class Checkpoint:
    """Modules that run as one checkpoint: what they are given is kept, what they make inside is made again.

    Attributes:
        modules: Their paths; several run one after the other within one checkpoint.
        keeps: Names of operators (``mm``) whose outputs are kept inside.
        skips_every: Of the matrix products in ``keeps``, every n-th one is not kept; 0: all are.
        attention_only: Of the module's own ops only the attention core, from the first to the last product in it.
        discards_output: The output is made again too, and not only what is inside.
    """

    modules: tuple[str, ...]
    keeps: frozenset[str] = frozenset()
    skips_every: int = 0
    attention_only: bool = False
    discards_output: bool = False


@dataclass(frozen=True)
class Description:
    """What settings mean on one model.

    Attributes:
        summary: In words, for a report.
        offloads: Paths of modules whose inputs move to host memory.
        offloads_from_bytes: Every tensor of this size or more that stays stored moves to host memory; None: none does.
        kept_ratio: Share of the stored bytes that may stay, as PyTorch's compiler decides it; None: no such rule.
        enable: Arguments of transformers' ``activation_checkpointing_enable`` where that is how it is carried out.
    """

    summary: str
    checkpoints: tuple[Checkpoint, ...] = ()
    offloads: tuple[str, ...] = ()
    offloads_from_bytes: int | None = None
    kept_ratio: float | None = None
    enable: Mapping[str, Any] | None = None
    findings: tuple[SettingsFinding, ...] = field(default=())

    @property
    def moves(self) -> bool:
        """Whether anything moves to host memory."""
        return bool(self.offloads) or self.offloads_from_bytes is not None
