"""Revolve and rotor on bare chains: closed forms, schedules played step by step, and everything tried on small ones."""

import heapq
import itertools
from math import comb, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from lowtide.solvers.published.chain import ALL, BACKWARD, CK, EMPTY, Stage, Step
from lowtide.solvers.published.revolve import extra_steps, repetitions, revolve_schedule
from lowtide.solvers.published.rotor import tabulate


class BadScheduleError(Exception):
    pass


def play(stages, schedule):
    """(time, peak bytes, most checkpoints) of a schedule; the chain's own input is there and not counted.

    The input of the stage whose history is being made is no checkpoint, it is counted in bytes only.
    """
    inputs, everything, current = set(), set(), None  # a^k held as checkpoints, ā^k, and the a^k that passes through
    ms, peak, most, turn = 0.0, 0, 0, len(stages) - 1

    def held():
        return sum(stages[k].output_bytes for k in inputs) + sum(stages[k].saved_bytes for k in everything)

    for kind, k in schedule:
        stage, before = stages[k], k - 1
        if k and before not in inputs | everything and current != before:
            raise BadScheduleError(f"{kind} {k}: its input is not there")
        if kind == BACKWARD:
            if k != turn or k not in everything:
                raise BadScheduleError(f"{kind} {k}: not its turn")
            peak = max(peak, held() + stage.gradient_bytes + stage.backward_overhead_bytes)
            ms += stage.backward_ms
            everything.remove(k)
            inputs.discard(before)
            turn, current = turn - 1, None
            continue
        passing = 0
        if kind == EMPTY and before not in inputs | everything:
            passing = stages[before].output_bytes if k else 0
        elif kind != EMPTY and k and before not in everything:
            inputs.add(before)
        if kind == ALL:
            everything.add(k)
            extra, current = stage.save_overhead_bytes, None
        else:
            extra, current = passing + stage.output_bytes + stage.run_overhead_bytes, k
        peak = max(peak, held() + extra + stages[turn].gradient_bytes)
        ms += stage.forward_ms
        most = max(most, len(inputs)) if kind == CK else most
    if turn >= 0:
        raise BadScheduleError("backward is not complete")
    return ms, peak, most


def uniform(length, saved_bytes):
    return [Stage(1.0, 1.0, 1, saved_bytes)] * length


def test_the_player_refuses_what_cannot_be_run():
    stages = uniform(2, 3)
    good = [Step(CK, 0), Step(ALL, 1), Step(BACKWARD, 1), Step(ALL, 0), Step(BACKWARD, 0)]
    assert play(stages, good) == (5.0, 4, 0)
    for bad in (good[1:], good[:2] + good[3:], good[:-1], [Step(ALL, 0), *good[3:]]):
        with pytest.raises(BadScheduleError):
            play(stages, bad)


# Revolve


def test_the_closed_form_is_the_least_over_all_places_of_the_next_snapshot():
    least = {}
    for snapshots, steps in itertools.product(range(1, 8), range(1, 41)):
        if steps == 1:
            least[steps, snapshots] = 0
        elif snapshots == 1:
            least[steps, snapshots] = steps * (steps - 1) // 2
        else:
            least[steps, snapshots] = min(
                d + least[steps - d, snapshots - 1] + least[d, snapshots] for d in range(1, steps)
            )
        assert extra_steps(steps, snapshots) == least[steps, snapshots]


@pytest.mark.parametrize("snapshots", range(1, 7))
def test_a_published_implementation_takes_as_many_steps(snapshots):
    from checkpoint_schedules import Forward, HRevolve, MultistageCheckpointSchedule, Revolve

    for steps in range(2, 25):
        one_level = HRevolve(steps, snapshots, 0)
        for oracle in (Revolve(steps, snapshots), MultistageCheckpointSchedule(steps, snapshots, 0), one_level):
            forward = 0
            for action in oracle:
                forward += action.n1 - action.n0 if isinstance(action, Forward) else 0
                if oracle.is_exhausted:
                    break
            assert forward == steps + extra_steps(steps, snapshots)


@pytest.mark.parametrize("snapshots", range(1, 7))
def test_a_schedule_takes_the_steps_of_the_closed_form_and_no_more_snapshots(snapshots):
    for steps in range(1, 40):
        schedule = revolve_schedule(steps, snapshots)
        # The input of the chain is the first snapshot.
        ms, _, most = play(uniform(steps, 100), schedule)
        assert ms == 2 * steps + extra_steps(steps, snapshots)
        assert most + 1 <= snapshots
        for stage in range(steps):
            again = sum(step.stage == stage and step.kind in (CK, EMPTY) for step in schedule)
            assert again <= repetitions(steps, snapshots)


def test_ten_steps_with_three_snapshots_are_taken_at_0_4_and_7():
    schedule = revolve_schedule(10, 3)

    sweep = schedule[: schedule.index(Step(BACKWARD, 9))]
    assert [stage for kind, stage in sweep if kind == CK] == [0, 4, 7]
    assert extra_steps(10, 3) == 15 and comb(3 + 2, 3) == 10  # β(3, 2): each step at most twice


def test_fifty_steps_with_seven_snapshots_take_the_105_forward_steps_that_a_published_run_counts():
    """``numfwd`` of Revolve as Argonne's Checkpointing.jl counts it.

    https://github.com/Argonne-National-Laboratory/Checkpointing.jl, test/runtests.jl
    """
    again = [step for step in revolve_schedule(50, 7) if step.kind in (CK, EMPTY)]

    assert len(again) == extra_steps(50, 7) == 105


# Rotor


def search(stages, limit, *, persistent=True):
    """Least time within ``limit`` by trying every order of steps; ``persistent``: what is stored stays until used."""
    a, a_bar = [x.output_bytes for x in stages], [x.saved_bytes for x in stages]
    start = (frozenset(), frozenset(), None, len(stages) - 1)
    queue, done, ties = [(0.0, 0, start)], set(), itertools.count(1)
    while queue:
        ms, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        inputs, everything, current, turn = state
        if turn < 0:
            return ms

        def held(inputs, everything):
            return sum(a[k] for k in inputs) + sum(a_bar[k] for k in everything)

        def push(cost, peak, state, ms=ms):
            if peak <= limit:
                heapq.heappush(queue, (ms + cost, next(ties), state))

        if not persistent:
            for k in inputs:
                push(0, 0, (inputs - {k}, everything, current, turn))
            for k in everything:
                push(0, 0, (inputs, everything - {k}, current, turn))
        there = inputs | everything | {-1}
        if turn in everything and turn - 1 in there:
            x = stages[turn]
            peak = held(inputs, everything) + x.gradient_bytes + x.backward_overhead_bytes
            push(x.backward_ms, peak, (inputs - {turn - 1}, everything - {turn}, None, turn - 1))
        for k in range(turn + 1):
            if k - 1 not in there and current != k - 1:
                continue
            x, delta = stages[k], stages[turn].gradient_bytes
            keeping = inputs | {k - 1} if k - 1 not in there else inputs
            if k not in everything:
                peak = held(keeping, everything | {k}) + delta + x.save_overhead_bytes
                push(x.forward_ms, peak, (keeping, everything | {k}, None, turn))
            if k == turn or k in there:
                continue
            run = a[k] + x.run_overhead_bytes + delta
            push(x.forward_ms, held(keeping, everything) + run, (keeping, everything, k, turn))
            if k - 1 not in there:
                push(x.forward_ms, held(inputs, everything) + a[k - 1] + run, (inputs, everything, k, turn))
    return inf


@st.composite
def chains(draw):
    def few(least=0):
        return draw(st.integers(least, 4))

    stages = []
    for _ in range(draw(st.integers(1, 5))):
        output = few()
        stages.append(Stage(float(few(1)), float(few(1)), output, output + few(), few(), few(), few(), few()))
    return stages


@settings(max_examples=examples(150), deadline=None)
@given(stages=chains(), data=st.data())
def test_rotor_is_the_best_persistent_schedule_and_plays_as_told(stages, data):
    table = tabulate(stages, 40)
    limit = data.draw(st.integers(0, 40))

    assert table.least_ms(limit) == search(stages, limit)
    if table.least_ms(limit) < inf:
        ms, peak, _ = play(stages, table.schedule(limit))
        assert ms == table.least_ms(limit) and peak <= limit


@settings(max_examples=examples(50), deadline=None)
@given(stages=chains())
def test_rotor_in_coarse_units_never_claims_what_does_not_fit(stages):
    exact, coarse = tabulate(stages, 60), tabulate(stages, 20, 3)

    for limit in range(0, 60, 3):
        assert coarse.least_ms(limit) >= exact.least_ms(limit)
        if coarse.least_ms(limit) < inf:
            assert play(stages, coarse.schedule(limit // 3))[1] <= limit


@pytest.mark.parametrize("snapshots", range(1, 6))
def test_rotor_on_equal_steps_that_hold_one_history_at_a_time_is_revolve(snapshots):
    for steps in range(1, 16):
        history = snapshots + 1  # so large that two never fit
        # Revolve has the input of the chain among its snapshots, rotor that of the stage whose history is being made.
        limit = snapshots + history
        assert tabulate(uniform(steps, history), limit).least_ms(limit) == 2 * steps + extra_steps(steps, snapshots)


def test_rotor_takes_the_times_of_the_authors_own_code():
    """What ``_compute_table`` of rotor gives for a chain whose outputs are all of size 1, by memory limit.

    https://gitlab.inria.fr/hiepacs/rotor, in the copy of https://github.com/hpcaitech/ColossalAI (``solver_rotor``). It
    counts the gradient of a stage's input in that stage's backward, and ends with a stage for the loss.
    """
    forward, backward = [3, 1, 4, 1, 5, 9, 2, 6, 0], [5, 3, 5, 8, 9, 7, 9, 3, 2]
    outputs, saved = [1] * 8 + [0], [3, 8, 4, 6, 2, 6, 4, 3, 0]
    stages = [
        Stage(float(f), float(b), out, kept, out, backward_overhead_bytes=1)
        for f, b, out, kept in zip(forward, backward, outputs, saved, strict=True)
    ]
    theirs = {11: 109, 12: 106, 13: 102, 14: 99, 15: 97, 16: 93, 18: 91, 19: 90, 20: 89, 22: 88, 23: 86, 26: 84, 31: 83}

    table = tabulate(stages, 40)

    assert table.least_ms(10) == inf
    assert {limit: table.least_ms(limit) for limit in theirs} == theirs
    assert table.least_ms(37) == 83 and table.least_ms(38) == sum(forward) + sum(backward) == 82


def test_rotor_with_room_for_everything_runs_each_stage_once():
    stages = [Stage(2.0, 3.0, 1, 4), Stage(5.0, 7.0, 1, 4)]

    assert tabulate(stages, 8).least_ms(8) == 17.0
    assert tabulate(stages, 7).least_ms(7) == 19.0
    assert tabulate(stages, 3).least_ms(3) == inf


def test_a_schedule_that_drops_what_it_has_stored_may_be_faster():
    """The known weakness of rotor: ā^1 takes nothing, but holds on to a^0, which there is no room for at the turn."""
    stages = [Stage(1.0, 1.0, 1, 1), Stage(1.0, 1.0, 0, 0), Stage(1.0, 1.0, 1, 2)]

    assert tabulate(stages, 2).least_ms(2) == search(stages, 2) == 8.0
    assert search(stages, 2, persistent=False) == 7.0
