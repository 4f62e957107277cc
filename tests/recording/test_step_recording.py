"""An online tape tells a listener of its step; the record of one is made of nothing else."""

import torch
from support.online_steps import layers, online, recorded, recording_of
from support.training_steps import differing

from lowtide.recording.listener import ToldSaved
from lowtide.recording.watched_times import WatchedTimes
from lowtide.tape.online.online_tape import OnlineTape


class Told:
    """A listener that writes down what it is told, and does nothing else."""

    sharding = None

    def __init__(self):
        self.times, self.ops, self.calls, self.what = WatchedTimes(torch.device("cpu")), [], [], []
        self.open, self.num_given = set(), 0

    def begin_call(self, *args):
        pass

    def run_op(self, tape, func, args, kwargs):
        self.ops.append(func)
        return tape.run_op(func, args, kwargs)

    def function(self, call):
        return call.run()

    def enter(self, path):
        self.calls.append(path)

    def leave(self):
        self.calls.append(None)

    def stored(self, tensor, packed, value):
        self.what.append(value is not None)
        self.open.add(len(self.what))
        return ToldSaved(self, len(self.what), packed, may_be_remade=value is not None)

    def given(self, saved, tensor):
        assert saved.number in self.open and isinstance(tensor, torch.Tensor)
        self.num_given += 1

    def released(self, number):
        self.open.remove(number)

    def note_unseen_node(self):
        self.what.append("unseen")

    def before_backward(self, *, creates):
        self.ops.append(("backward", creates))


def test_a_listener_is_told_of_each_op_and_of_what_autograd_stores_from_pack_to_release(monkeypatch):
    monkeypatch.setattr("support.online_steps.recording_of", lambda tape: tape.listener)
    model, x, told = layers(num=3), torch.randn(32, 64), Told()
    expected, _ = online(model, x, 0, make=OnlineTape)

    found, tape = online(model, x, 0, make=lambda model, budget: OnlineTape(model, budget, listener=told))

    assert differing(expected, found) == [] and tape.releaser.num_released > 0
    at = told.ops.index(("backward", False))
    assert told.ops[:at].count(torch.ops.aten.addmm.default) == 3  # and what is made again in backward is no op of it
    assert not told.ops[at:].count(torch.ops.aten.addmm.default)
    assert told.calls.count(None) == len(told.calls) / 2 > 3
    assert not told.open and told.num_given == len(told.what) and True in told.what and False in told.what


def test_a_listener_that_fails_ends_its_record_and_not_the_step(monkeypatch):
    model, x = layers(num=2), torch.randn(32, 64)
    expected, _ = online(model, x, float("inf"))
    monkeypatch.setattr("lowtide.recording.recorder.Recorder.number_of", lambda self, tensor: 1 // 0)

    found, tape = online(model, x, float("inf"), make=recorded)

    assert recording_of(tape).problem.startswith("ZeroDivisionError") and not tape.problem
    assert differing(expected, found) == []
