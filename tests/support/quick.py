"""``pytest --quick``, which is ``make test``: without slow and thorough tests, with fewer examples and lazier planners.

An environment variable tells: processes that tests start have to know it too.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

_NAME = "LOWTIDE_QUICK_TESTS"
LEFT_OUT = ("slow", "thorough")


def choose(config: pytest.Config) -> None:
    """Deselect what is left out where ``--quick`` was given."""
    os.environ[_NAME] = "1" if config.getoption("--quick") else ""
    if is_quick():
        given = [f"({config.option.markexpr})"] if config.option.markexpr else []
        config.option.markexpr = " and ".join([*given, *(f"not {name}" for name in LEFT_OUT)])


def is_quick() -> bool:
    return bool(os.environ.get(_NAME))


def examples(count: int) -> int:
    """How many examples hypothesis draws for a law that has ``count`` in ``make test-all``."""
    return max(count // 4, 10) if is_quick() else count


def thorough_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` as parameters, all but the ``quick`` ones marked thorough; a tuple has one for each argument."""
    seldom = [value for value in values if value not in quick]
    rest = (pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.thorough) for v in seldom)
    return [*(value for value in values if value in quick), *rest]
