"""A test in which an error of lowtide's own ends a step's plan fails, whatever it looks at itself."""

from types import SimpleNamespace

import pytest
from support.own_errors import OwnErrors

from lowtide.errors import UnsupportedModelError
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.training.lifecycle import Lifecycle


@pytest.fixture(params=[(Lifecycle, "fail"), (OnlineTape, "give_up")], ids=lambda where: where[1])
def caught(request, monkeypatch):
    """Where such an error is caught; here nothing comes of it."""
    owner, name = request.param
    monkeypatch.setattr(owner, name, lambda self, error: None)
    return lambda error: getattr(owner, name)(None, error)


def run_a_test_with(caught, error, marker):
    item = SimpleNamespace(get_closest_marker=lambda name: marker if name == "own_errors" else None)
    running = OwnErrors().pytest_runtest_call(item)
    next(running)
    caught(error)
    with pytest.raises(StopIteration):
        running.send(None)


@pytest.mark.own_errors  # of this one, too
def test_an_error_of_our_own_fails_the_test_that_does_not_bring_it_about(caught):
    with pytest.raises(pytest.fail.Exception, match="KeyError: 'ours'"):
        run_a_test_with(caught, KeyError("ours"), marker=None)
    run_a_test_with(caught, KeyError("ours"), marker=object())


def test_a_refusal_by_name_fails_none(caught):
    run_a_test_with(caught, UnsupportedModelError("named"), marker=None)
