"""Functions are called after an import, also where another package stands before all finders as this one does."""

import importlib
import importlib.util
import sys

import pytest

from lowtide.attaching import imports


class OtherFirst:
    """Of another package: lets all others find the module, as tracers of programs and the stand-in for CUDA do."""

    def __init__(self):
        self.asked = 0

    def find_spec(self, name, path=None, target=None):
        if name != "imported_late":
            return None
        self.asked += 1
        others = (finder for finder in sys.meta_path if finder is not self)
        if self.asked > 9:
            raise RecursionError("they ask each other")
        try:
            return next((found for other in others if (found := other.find_spec(name, path, target)) is not None), None)
        finally:
            self.asked -= 1


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("number = 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if type(finder) is not imports._Finder])
    yield "imported_late"
    sys.modules.pop("imported_late", None)
    imports._after.pop("imported_late", None)


def order(called, module):
    imports.after_import(module, lambda found: called.append(found.number))


@pytest.mark.parametrize("place", [0, 1])
def test_a_finder_that_asks_all_others_before_or_after_this_one_is_no_circle(module, place):
    called = []
    order(called, module)
    sys.meta_path.insert(place, OtherFirst())

    assert importlib.import_module(module).number == 3
    assert called == [3] and not imports._asked


def test_two_that_ask_all_others_are_a_circle_without_the_guard(module, monkeypatch):
    monkeypatch.setattr(imports, "_asked", type("Nothing", (set,), {"__contains__": lambda *_: False})())
    order([], module)
    sys.meta_path.insert(0, OtherFirst())
    with pytest.raises(RecursionError):
        importlib.import_module(module)


def test_who_only_asks_whether_a_module_is_there_calls_nothing(module):
    called = []
    order(called, module)
    assert importlib.util.find_spec(module) is not None and called == []
    importlib.import_module(module)
    assert called == [3]
