"""Plans come from a process beside training as ``solve`` would make them, and whatever happens to it, they come."""

import gc
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.case_graphs import load_case
from support.plan_requests import decoder_request, solved, text_of
from support.planner_children import ANSWERS_GARBAGE, CHATTERS, LIMIT_S, NEVER_ENDS, child_of, use_script
from support.strategies import linked_decoder

from lowtide.errors import BudgetInfeasibleError, PlannerFailedError
from lowtide.planning import planner_process
from lowtide.planning.plan_request import PlanRequest
from lowtide.planning.planner_process import PlannerProcess
from lowtide.solvers.arguments import absolute_bytes
from lowtide.solvers.improving_plans import improving_plans

IN_A_THREAD = "planned in a thread of the training process: "


@pytest.fixture(scope="module")
def shared():
    """One planner for the tests that do it no harm."""
    with PlannerProcess() as planner:
        yield planner


@pytest.fixture
def planner():
    with PlannerProcess() as planner:
        yield planner


# -- as solve would ---------------------------------------------------------------------------------------------


GRAPH, COSTS = linked_decoder(2.0)
REQUESTS = {
    "exact": decoder_request("50%"),
    "bytes": decoder_request(10**6),
    "options": decoder_request("50%", options={"gap": 0.0, "node_limit": 50}),
    "published": decoder_request("60%", layers=4, method="revolve"),
    "without a budget": decoder_request(None, method="every_n", options={"n": 2}),
    "tiers": PlanRequest(GRAPH, COSTS, "40%", offload={"disk": "1GiB"}),
    "a real step": PlanRequest(*load_case("chain48"), "36%"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_plan_is_that_of_solve_byte_for_byte(shared, name):
    pending = shared.submit(REQUESTS[name])

    plan = pending.plan(LIMIT_S)

    assert text_of(plan) == text_of(solved(REQUESTS[name]))
    assert (pending.source, pending.reason) == ("process", "")


@pytest.mark.parametrize("forbidden", [False, True], ids=["process", "thread"])
def test_an_infeasible_budget_raises_what_solve_raises(planner, monkeypatch, forbidden):
    if forbidden:
        monkeypatch.setattr(planner_process, "_command", lambda: ["/nonexistent"])
    request = decoder_request("5%")
    with pytest.raises(BudgetInfeasibleError) as expected:
        solved(request)

    pending = planner.submit(request)

    for method in (pending.plan, pending.first):
        with pytest.raises(BudgetInfeasibleError) as found:
            method(LIMIT_S)
        assert str(found.value) == str(expected.value)
        assert vars(found.value) == vars(expected.value)
    assert pending.source == ("thread" if forbidden else "process")


@pytest.mark.parametrize("forbidden", [False, True], ids=["process", "thread"])
def test_what_cannot_be_planned_raises_with_the_solvers_message(planner, monkeypatch, forbidden):
    if forbidden:
        monkeypatch.setattr(planner_process, "_command", lambda: ["/nonexistent"])

    pending = planner.submit(decoder_request(method="best"))

    with pytest.raises(PlannerFailedError, match="planning failed: ValueError: method='best' is not known"):
        pending.plan(LIMIT_S)
    assert planner.submit(decoder_request()).plan(LIMIT_S)  # nothing is broken


def test_the_first_plan_is_good_and_stays_when_the_best_one_comes(planner, monkeypatch):
    use_script(monkeypatch, NEVER_ENDS)
    request = decoder_request("60%")
    budget_bytes = absolute_bytes(request.graph, request.costs, "60%")
    pending = planner.submit(request)

    first = pending.first(LIMIT_S)

    assert text_of(first) == text_of(next(improving_plans(request.graph, request.costs, budget_bytes)))
    assert first.predicted_peak_bytes <= budget_bytes
    assert pending.first_done() and not pending.done()
    child_of(planner).kill()
    assert text_of(pending.plan(LIMIT_S)) == text_of(solved(request))
    assert pending.first() is first and pending.plan().predicted_step_ms <= first.predicted_step_ms


def test_where_nothing_is_quick_the_first_plan_is_the_plan(shared):
    pending = shared.submit(decoder_request("60%", method="revolve", layers=4))

    assert pending.first(LIMIT_S) is pending.plan(LIMIT_S)


def test_waiting_has_a_limit_and_the_time_that_planning_took_is_known(planner, monkeypatch):
    use_script(monkeypatch, NEVER_ENDS)
    pending = planner.submit(decoder_request("50%", method="rotor"))

    with pytest.raises(TimeoutError, match=r"no plan after 0.01 s: planning has taken \d+\.\d s so far"):
        pending.plan(0.01)
    so_far = pending.planning_s
    planner.close()
    with pytest.raises(PlannerFailedError):
        pending.plan(LIMIT_S)
    assert pending.planning_s == pending.planning_s >= so_far > 0


def test_one_process_serves_all_requests_from_all_threads(planner, monkeypatch):
    starts, popen = [], subprocess.Popen
    monkeypatch.setattr(planner_process.subprocess, "Popen", lambda *a, **k: starts.append(a) or popen(*a, **k))
    requests = [decoder_request(f"{percent}%") for percent in (45, 50, 55, 60)]
    pendings, start = {}, threading.Barrier(4)

    def submit(i):
        start.wait()
        pendings[i] = planner.submit(requests[i])

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for i, request in enumerate(requests):
        assert text_of(pendings[i].plan(LIMIT_S)) == text_of(solved(request))
    assert len(starts) == 1
    assert {pending.source for pending in pendings.values()} == {"process"}


def test_the_second_planner_finds_the_plan_of_the_first_in_the_cache(tmp_path):
    request = decoder_request(cache_dir=tmp_path)
    with PlannerProcess() as planner:
        first = planner.submit(request)
        plan = first.plan(LIMIT_S)
    with PlannerProcess() as planner:
        second = planner.submit(request)
        assert second.plan(LIMIT_S).to_json() == second.first().to_json() == plan.to_json()

        assert (first.source, second.source, second.reason) == ("process", "cache", "")
        (file,) = tmp_path.iterdir()
        file.write_bytes(b"damaged")
        third = planner.submit(request)
        assert text_of(third.plan(LIMIT_S)) == text_of(plan) and third.source == "process"
        assert third.reason.startswith("a cached plan was ignored: ")


# -- whatever happens to the process ----------------------------------------------------------------------------


def test_a_process_that_is_killed_while_it_solves_loses_nothing(planner, monkeypatch):
    with monkeypatch.context() as patch:
        use_script(patch, NEVER_ENDS)
        pending, waiting = planner.submit(decoder_request("60%")), planner.submit(decoder_request("50%"))
        pending.first(LIMIT_S)
    child_of(planner).kill()

    assert text_of(pending.plan(LIMIT_S)) == text_of(solved(decoder_request("60%")))
    assert (pending.source, pending.reason) == ("thread", IN_A_THREAD + "the planner's process was ended by signal 9")
    # A new process serves who came after.
    assert text_of(waiting.plan(LIMIT_S)) == text_of(solved(decoder_request("50%")))
    assert (waiting.source, waiting.reason) == ("process", "")


def test_work_that_nobody_waits_for_ends_and_the_next_request_is_served(planner, monkeypatch):
    with monkeypatch.context() as patch:
        use_script(patch, NEVER_ENDS)
        unwanted, waiting, never_begun = (planner.submit(decoder_request(b)) for b in ("60%", "50%", "40%"))
        unwanted.first(LIMIT_S)
        child = child_of(planner)
    unwanted.abandon()
    never_begun.abandon()

    assert unwanted.done() and unwanted.is_abandoned
    with pytest.raises(PlannerFailedError, match="given up"):
        never_begun.plan(LIMIT_S)
    assert text_of(waiting.plan(LIMIT_S)) == text_of(solved(decoder_request("50%")))
    assert (waiting.source, waiting.reason, planner._service._failures) == ("process", "", 0)
    child.wait(LIMIT_S)


def test_a_request_that_cannot_be_read_fails_and_the_next_one_is_served(planner, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(PlanRequest, "to_json", lambda self: {}["graph"])
        with pytest.raises(PlannerFailedError, match="planning failed: KeyError: 'graph'"):
            planner.submit(decoder_request()).plan(LIMIT_S)

    assert planner.submit(decoder_request()).plan(LIMIT_S)


def test_processes_that_are_lost_again_and_again_are_given_up(planner, monkeypatch):
    starts = []

    def command():
        starts.append(1)
        return [sys.executable, "-c", ANSWERS_GARBAGE]

    monkeypatch.setattr(planner_process, "_command", command)
    for _ in range(5):
        pending = planner.submit(decoder_request())
        assert pending.plan(LIMIT_S)
        assert pending.source == "thread" and "the planner's process wrote what is no answer (" in pending.reason

    assert len(starts) == planner_process.MOST_FAILURES


@pytest.mark.parametrize("error", [PermissionError(1, "Operation not permitted"), OSError(11, "no more"), ValueError()])
def test_where_processes_are_forbidden_a_thread_solves_and_nobody_asks_again(planner, monkeypatch, error):
    tries = []

    def forbidden(*args, **options):
        tries.append(args)
        raise error

    monkeypatch.setattr(planner_process.subprocess, "Popen", forbidden)
    first, second = planner.submit(decoder_request()), planner.submit(decoder_request("60%"))

    assert text_of(first.plan(LIMIT_S)) == text_of(solved(decoder_request()))
    assert second.plan(LIMIT_S)
    assert first.source == second.source == "thread"
    assert first.reason == second.reason == f"{IN_A_THREAD}the planner's process did not start: {error}"
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('Welcome', flush=True); input()", "wrote what is no answer (ValueError: b'Welcome')"),
        ("raise SystemExit('no module')", "ended with status 1: no module"),
        ("raise SystemExit(3)", "ended with status 3: it said nothing"),
        ("import time; time.sleep(600)", "nothing came in 1 s from the planner's process"),
    ],
)
def test_a_process_that_does_not_report_is_not_asked(planner, monkeypatch, script, reason):
    monkeypatch.setattr(planner_process, "START_LIMIT_S", 1.0 if "sleep" in script else LIMIT_S)
    use_script(monkeypatch, script)

    pending = planner.submit(decoder_request())

    assert pending.plan(LIMIT_S) and pending.source == "thread"
    assert pending.reason.startswith(IN_A_THREAD + "the planner's process did not start: ")
    assert reason in pending.reason


def test_what_a_solver_prints_reaches_neither_the_answers_nor_the_terminal(planner, monkeypatch, capfd):
    use_script(monkeypatch, CHATTERS)

    pending = planner.submit(decoder_request())

    assert pending.plan(LIMIT_S) and (pending.source, pending.reason) == ("process", "")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("attribute", ["executable", "frozen"])
def test_a_program_without_an_interpreter_starts_nothing(planner, monkeypatch, attribute):
    monkeypatch.setattr(sys, attribute, "" if attribute == "executable" else True, raising=False)

    pending = planner.submit(decoder_request())

    assert pending.plan(LIMIT_S) and pending.source == "thread"
    assert pending.reason.endswith("this program has no Python interpreter of its own")


def test_an_option_that_json_does_not_have_is_solved_in_the_thread(shared):
    request = decoder_request(options={"node_limit": np.int64(5)})

    pending = shared.submit(request)

    assert text_of(pending.plan(LIMIT_S)) == text_of(solved(request)) and pending.source == "thread"
    assert "the request cannot be written as JSON" in pending.reason
    assert shared.submit(decoder_request()).plan(LIMIT_S)


def test_a_thread_that_solves_leaves_collector_and_random_numbers_alone(planner, monkeypatch):
    monkeypatch.setattr(planner_process, "_command", lambda: ["/nonexistent"])
    states = random.getstate(), np.random.get_state()[1].tobytes()

    pending = planner.submit(decoder_request("50%"))
    while not pending.done():
        assert gc.isenabled()
        time.sleep(0.001)

    assert pending.plan() and (random.getstate(), np.random.get_state()[1].tobytes()) == states
