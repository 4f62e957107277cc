"""The variables of the environment by which a command line reaches the process that trains.

They are read, and nothing of PyTorch is imported: every Python process of the command does that.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BUDGET, ON_EXCESS, REPORT, OUTCOME = "LOWTIDE_BUDGET", "LOWTIDE_ON_EXCESS", "LOWTIDE_REPORT", "LOWTIDE_OUTCOME"
ENTRY = Path(__file__).resolve().parent / "entry"


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Attributes:
        budget: As typed.
        on_excess: See ``lowtide.fit``.
        report: A page to be written at the end, "": none.
        outcome: A file of JSON likewise, for whoever started the command.
    """

    budget: str
    on_excess: str = "warn"
    report: str = ""
    outcome: str = ""

    @property
    def fit_budget(self) -> int | str:
        """As ``lowtide.fit`` takes it."""
        return int(self.budget) if self.budget.strip().isdecimal() else self.budget


def read(variables: Mapping[str, str] = os.environ) -> Wanted | None:
    """What is wanted in this process; None: nothing."""
    if not (budget := variables.get(BUDGET, "").strip()):
        return None
    on_excess = variables.get(ON_EXCESS, "") or "warn"
    return Wanted(budget, on_excess, variables.get(REPORT, ""), variables.get(OUTCOME, ""))


def entering(variables: Mapping[str, str], wanted: Wanted) -> dict[str, str]:
    """``variables``, with which each Python process of a command has lowtide's hook and knows what is wanted."""
    path = os.pathsep.join([str(ENTRY), *filter(None, [variables.get("PYTHONPATH")])])
    asked = {BUDGET: wanted.budget, ON_EXCESS: wanted.on_excess, REPORT: wanted.report, OUTCOME: wanted.outcome}
    return {**variables, "PYTHONPATH": path, **{name: value for name, value in asked.items() if value}}
