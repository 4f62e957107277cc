"""Every backward is seen once, whoever else wraps PyTorch's entry to it, and in whichever order they come and go."""

from contextlib import contextmanager

import torch
from torch import autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.step import backward_entry


class Observer:
    def __init__(self):
        self.seen = 0

    def before_backward(self, roots, *, creates):
        self.seen += 1

    def after_backward(self, roots, error, *, retains, creates):
        assert error is None


def backward():
    x = torch.ones(2, requires_grad=True)
    x.square().sum().backward()
    assert torch.equal(x.grad, 2 * torch.ones(2))


def test_who_wraps_our_entry_keeps_it_while_observers_go_and_come(monkeypatch):
    before = autograd.graph._engine_run_backward
    forget = backward_entry.observe(first := Observer())
    ours, passed_on = autograd.graph._engine_run_backward, []

    def theirs(*args, **kwargs):
        passed_on.append(args)
        return ours(*args, **kwargs)

    for module in (autograd, autograd.graph):
        monkeypatch.setattr(module, "_engine_run_backward", theirs)
    backward()
    forget()
    backward()
    second = Observer()
    forget = backward_entry.observe(second)
    backward()
    forget()

    assert (first.seen, second.seen, len(passed_on)) == (1, 1, 3)
    assert autograd.graph._engine_run_backward is theirs
    monkeypatch.undo()
    backward_entry._set(before)


def test_what_backward_runs_within_outlives_observers_that_are_dropped_in_it():
    before, entered = autograd.graph._engine_run_backward, []

    @contextmanager
    def counted():
        entered.append(None)
        yield

    class Around:
        def __enter__(self):
            self.inside = counted()
            return self.inside.__enter__()

        def __exit__(self, *error):
            return self.inside.__exit__(*error)

    dropped = Observer()
    backward_entry.observe(dropped)
    with backward_entry.runs_within(Around()):
        backward()
        del dropped
        observer = Observer()
        with backward_entry.observed_by(observer):
            backward()
        backward()

    assert observer.seen == 1 and len(entered) == 3
    backward()
    assert len(entered) == 3
    assert autograd.graph._engine_run_backward is before


def test_a_backward_that_a_compiler_derives_from_fake_tensors_is_nobodys():
    """Dynamo compiles in the middle of a forward pass: no step ends there."""
    observer = Observer()
    with backward_entry.observed_by(observer):
        with FakeTensorMode():
            x = torch.ones(2, requires_grad=True)
            x.square().sum().backward()
        assert observer.seen == 0
        backward()
    assert observer.seen == 1
