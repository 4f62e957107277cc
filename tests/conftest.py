"""What holds for every test, and what several files share."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from support.training_steps import drop_everything, is_clean
from torch import nn

from lowtide.runtime import rehearsal

_numbers = itertools.count()


# Two workers share two cores. With more threads each, a convolution of one of them was once seen to wait for ever.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    """No test reads or writes the user's cache, nor another test's."""
    monkeypatch.delenv("LOWTIDE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"))


@pytest.fixture
def drops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits drop every storage that may be dropped."""
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread and known random numbers; nothing of a fit is left afterwards."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert is_clean(nn.Identity())
