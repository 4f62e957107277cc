"""A choice of actions and replays that is not a plan yet: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.plan import Moves


@dataclass(frozen=True)
class Candidate:
    """A solver's answer before it is a plan.

    Attributes:
        replays: By storage id, how often a recomputed storage may be replayed; 1 where absent (see ``Decision``).
        bound_ms: No plan that the method searches has a shorter step; None where it does not know.
        status: ``optimal``, ``feasible`` or ``fixed``, as in ``Plan``.
        moves: When offloaded storages travel.
        capacities: Most bytes by tier that the searched plans may offload; None: any number. The bound holds for them.
    """

    actions: dict[int, str]
    status: str = "fixed"
    bound_ms: float | None = None
    provenance: dict[str, str] = field(default_factory=dict)
    replays: dict[int, int] = field(default_factory=dict)
    moves: Moves = field(default_factory=Moves)
    capacities: Mapping[str, int | None] = field(default_factory=dict)
