"""When a step holds so much more than planned that it leaves its plan."""

import pytest

from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.tape.program import TapedCall

MIB = 1 << 20
BEFORE, AFTER = [0, 10 * MIB, 20 * MIB, 30 * MIB], [10 * MIB, 20 * MIB, 30 * MIB, 40 * MIB]


def call_of(first: int, last: int) -> TapedCall:
    call = TapedCall()
    call.first_op, call.last_op = first, last
    return call


class Step:
    """One whose bytes are ``holds``, under a plan of four ops that takes 40 MiB of ``most``."""

    def __init__(self, most: int = 40 * MIB, start: int = 0, unsplit: int = 0) -> None:
        self.holds: int | None = start
        self.unsplit = unsplit
        self.planned = PlannedBytes(BEFORE, AFTER, 40 * MIB)
        self.planned.begin_step(most, lambda: self.holds, lambda: self.unsplit)
        self.planned.begin_call(call_of(0, 3))

    def leaves(self, op: int, holds: int | None, *, has_run: bool = True) -> bool:
        self.holds = holds
        return self.planned.is_passed(op, has_run=has_run)


def test_a_step_as_planned_stays():
    step = Step()

    assert not any(step.leaves(op, AFTER[op]) or step.leaves(op, BEFORE[op], has_run=False) for op in range(4))


@pytest.mark.parametrize("more, leaves", [(0.004, False), (0.02, True)])
def test_a_hundredth_of_what_may_live_decides(more, leaves):
    assert Step().leaves(1, int(20 * MIB + more * 40 * MIB)) == leaves


@pytest.mark.parametrize("most, leaves", [(40, True), (59, True), (61, False)])
def test_a_step_of_larger_sizes_goes_on_where_the_budget_has_room_for_all_of_it(most, leaves):
    assert Step(most * MIB).leaves(0, 15 * MIB) == leaves


def test_what_lived_beside_the_plan_when_the_call_began_does_not_grow():
    assert not Step(50 * MIB, start=5 * MIB).leaves(0, 15 * MIB)
    assert Step(42 * MIB, start=5 * MIB).leaves(0, 15 * MIB)


def test_at_an_unknown_place_only_what_may_live_at_most_decides():
    step = Step(50 * MIB)
    for holds, is_full in ((49 * MIB, False), (51 * MIB, True)):
        step.holds = holds
        assert step.planned.is_full() == is_full
    assert step.planned.passed_by == 11 * MIB


def test_nobody_leaves_where_nobody_counts():
    step = Step()

    assert not step.leaves(1, None) and not step.planned.is_full()
    step.planned.begin_call(call_of(0, 3))
    assert not step.leaves(1, 90 * MIB)


def test_calls_that_make_little_are_not_looked_into():
    planned = Step(400 * MIB).planned

    assert planned.rises_in(call_of(0, 3)) is False
    assert Step().planned.rises_in(call_of(0, 3)) is True
    assert planned.rises_in(call_of(0, -1)) is False


def test_an_allocator_is_asked_in_few_of_many_looks():
    """Asking takes as long as an op: in a plan whose steps hold larger blocks than planned it took most of the step."""
    step, asked = Step(), []
    step.planned.begin_step(40 * MIB, lambda: step.holds, lambda: asked.append(step.unsplit) or step.unsplit)
    step.planned.begin_call(call_of(0, 3))
    step.unsplit = 4 * MIB
    assert not any(step.leaves(op, (4 + 10 * (op + 1)) * MIB) for _ in range(40) for op in range(4))
    assert len(asked) <= 1 + 1 + 160 // 16
    assert any(step.leaves(op, (6 + 10 * (op + 1)) * MIB) for op in range(4))

    step.unsplit = 0  # none of it is, any more
    assert any(step.leaves(op, (4 + 10 * (op + 1)) * MIB) for _ in range(4) for op in range(4))


def test_few_of_many_ops_are_looked_at_and_none_that_is_large():
    """Each look takes as long as what the tape does for an op: of ops that make little it is one in eight."""
    looks = []
    small, num = 1 << 10, 400
    before = [small * op for op in range(num)] + [small * num]
    planned = PlannedBytes(before, [*before[1:], 20 * MIB], 40 * MIB)
    planned.begin_step(40 * MIB, lambda: looks.append(None) or 0)
    planned.begin_call(call_of(0, num))
    assert not any(planned.is_passed(op, has_run=False) for op in range(num))
    assert len(looks) <= 2 + num // 8

    planned.now = lambda: 22 * MIB
    assert planned.is_passed(num, has_run=True)


@pytest.mark.parametrize("unsplit, leaves", [(3, True), (4, False)])
def test_what_an_allocator_does_not_split_off_is_no_sign_of_other_sizes(unsplit, leaves):
    """1 MiB of it was there before the step."""
    step = Step(unsplit=1 * MIB)
    step.unsplit = unsplit * MIB

    assert step.leaves(1, 23 * MIB) == leaves
    step.holds = 43 * MIB
    assert step.planned.is_full() == leaves
