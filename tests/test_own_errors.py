"""A test in which an error of lowtide's own ends a step's plan fails, whatever it looks at itself."""

from types import SimpleNamespace

import pytest
from support.own_errors import OwnErrors

from lowtide.errors import UnsupportedModelError
from lowtide.tape.online.online_tape import OnlineTape


def run_a_test_with(error, marker):
    item = SimpleNamespace(get_closest_marker=lambda name: marker if name == "own_errors" else None)
    running = OwnErrors().pytest_runtest_call(item)
    next(running)
    OnlineTape.give_up(SimpleNamespace(problem=""), error)
    with pytest.raises(StopIteration):
        running.send(None)


@pytest.mark.own_errors  # of this one
def test_an_error_of_our_own_fails_the_test_that_does_not_bring_it_about():
    with pytest.raises(pytest.fail.Exception, match="KeyError: 'ours'"):
        run_a_test_with(KeyError("ours"), marker=None)
    run_a_test_with(KeyError("ours"), marker=object())


def test_a_refusal_by_name_fails_none():
    run_a_test_with(UnsupportedModelError("named"), marker=None)
