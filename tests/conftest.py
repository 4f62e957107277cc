"""What holds for every test, and what several files share."""

import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerator.build import NoCompilerError, cache_directory
from support import memory_growth, quick, slowest
from support.garbage import ShortCollections, SmallHeap
from support.gpu import is_gpus
from support.own_errors import OwnErrors
from support.quick_planner import QuickPlanner
from support.switched_device import Switched, switch_to
from support.training_steps import drop_everything, is_clean
from torch import nn

from lowtide.device import allocation_counter, planned_ops
from lowtide.pytorch_internals import COMPILED, why_unchecked
from lowtide.training import rehearsal

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


@pytest.fixture
def repeated() -> Iterator[Callable[[Callable[[], list[torch.Tensor]]], list[torch.Tensor]]]:
    """Of a plain run the tensors that it gives each time; on a GPU, where many sums add in any order, it runs twice.

    Where they differ, all of the test runs with deterministic kernels from there on. Where that does not help, there is
    nothing to compare, and the test is skipped.
    """

    def of(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        found = run()
        if not is_gpus(found[0].device) or all(map(torch.equal, found, run())):
            return found
        torch.use_deterministic_algorithms(True, warn_only=True)
        found = run()
        if not all(map(torch.equal, found, run())):
            pytest.skip("a plain run does not repeat its own bits on this GPU, with deterministic kernels either")
        return found

    yield of
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def compile_plans() -> None:
    """``lowtide.compile`` makes plans on this PyTorch."""
    if why := why_unchecked(COMPILED):
        pytest.skip(why)


@pytest.fixture
def counter_is_there() -> None:
    """The counter of the allocator's events; without a compiler there is none, and in CI that fails."""
    if not allocation_counter.is_there():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            allocation_counter.why_missing() or "it is not built yet"
        )


@pytest.fixture(scope="session")
def planned_ops_are_there() -> None:
    """What runs planned ops without Python; as ``counter_is_there``."""
    if not planned_ops.is_there():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(planned_ops.why_missing() or "it is not built yet")


@pytest.fixture(scope="session")
def accelerator() -> ModuleType:
    """The tests' own accelerator (tests/accelerator/README.md): the module that sets how it behaves."""
    try:
        return importlib.import_module("accelerator.device")
    except NoCompilerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="what make test runs (tests/support/quick.py)")
    parser.addoption("--report-slowest", metavar="FILE", help="write the slowest tests into a page between two marks")
    parser.addoption("--report-memory", metavar="MIB", type=int, help="list tests at which a process grew by so much")
    parser.addoption("--device", help="run with this default device: standin (tests/accelerator/README.md) or cuda")


def pytest_configure(config: pytest.Config) -> None:
    # Built once for all tests, and for what they start; each of them has a cache of its own.
    os.environ.setdefault("LOWTIDE_ALLOCATION_COUNTER", str(cache_directory() / "counter"))
    os.environ.setdefault("LOWTIDE_PLANNED_OPS", str(cache_directory() / "planned_ops"))
    allocation_counter.prepare(waits=True)
    planned_ops.prepare(waits=True)
    config.pluginmanager.register(ShortCollections())
    config.pluginmanager.register(SmallHeap())
    config.pluginmanager.register(OwnErrors())
    quick.choose(config)
    if quick.is_quick():
        config.pluginmanager.register(QuickPlanner())
    if config.getoption("--report-slowest"):
        config.pluginmanager.register(slowest.SlowestTests(config.getoption("--report-slowest")))
    if config.getoption("--report-memory") is not None:
        config.pluginmanager.register(memory_growth.MemoryGrowth(config.getoption("--report-memory")))
    if config.getoption("--device"):
        config.pluginmanager.register(Switched(switch_to(config.getoption("--device"))))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where the accelerator's tests run alone, files that do not speak of it are not imported: ten seconds less."""
    asked = config.option.markexpr.lstrip("(")
    alone = asked.startswith("accelerator") and " or " not in asked
    if alone and collection_path.suffix == ".py" and "accelerator" not in str(collection_path):
        return "accelerator" not in collection_path.read_text() or None
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    if "accelerator" in getattr(item, "fixturenames", ()):
        item.add_marker("accelerator")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A process that loads the accelerator has another default accelerator: it runs no other tests."""
    theirs = [item for item in items if item.get_closest_marker("accelerator")]
    if 0 < len(theirs) < len(items):
        config.hook.pytest_deselected(items=theirs)
        items[:] = [item for item in items if not item.get_closest_marker("accelerator")]
