"""The second run of a script finds its plan; what is not exactly that plan, or not good now, is not used."""

import gzip
import json
import multiprocessing
import os
import stat
from dataclasses import replace

import pytest
from support.plan_requests import decoder_request, solved, text_of
from support.strategies import linked_decoder

from lowtide import cache_files
from lowtide.graph.costs import DISK, Link
from lowtide.planning import plan_cache
from lowtide.planning.plan_cache import PlanCache
from lowtide.planning.plan_request import PlanRequest
from lowtide.planning.worker import answers

REQUEST = decoder_request()
PLAN = solved(REQUEST)


@pytest.fixture
def cache(tmp_path):
    return PlanCache(tmp_path / "plans")


def with_times(request: PlanRequest, factor_of) -> PlanRequest:
    op_ms = tuple(ms * factor_of(i) for i, ms in enumerate(request.costs.op_ms))
    return replace(request, costs=replace(request.costs, op_ms=op_ms))


def rewritten(cache, **changes):
    """Change fields of the entry of ``REQUEST``."""
    path = cache.path(REQUEST)
    body = {**json.loads(gzip.decompress(path.read_bytes())), **changes}
    cache_files.write_file(path, gzip.compress(json.dumps(body).encode()))


def test_the_second_run_finds_the_plan_of_the_first(cache):
    assert cache.find(REQUEST).plan is None and cache.find(REQUEST).reason == ""

    assert cache.keep(REQUEST, PLAN) == ""
    found = PlanCache(cache.directory).find(decoder_request())

    assert found.plan.to_json() == PLAN.to_json() and found.reason == ""


def test_by_default_plans_lie_in_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "mine"))
    PlanCache().keep(REQUEST, PLAN)

    (path,) = (tmp_path / "mine" / "plans").iterdir()
    assert path == PlanCache().path(REQUEST)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("factor_of", [lambda i: 3.0, lambda i: 0.9 + 0.2 * (i % 2)], ids=["slower", "noisy"])
def test_times_that_differ_as_runs_do_find_the_same_plan(cache, factor_of):
    cache.keep(REQUEST, PLAN)

    assert cache.find(with_times(REQUEST, factor_of)).plan == PLAN


def test_a_plan_for_other_times_serves_until_another_one_is_made(cache):
    cache.keep(REQUEST, PLAN)
    heaviest = max(range(len(REQUEST.costs.op_ms)), key=REQUEST.costs.op_ms.__getitem__)
    others = with_times(REQUEST, lambda i: 50.0 if i == heaviest else 1.0)

    found = cache.find(others)

    assert found.plan is None
    assert found.reason.startswith("a cached plan served until another one was made: ops take other times than when it")
    assert found.meanwhile.decisions == PLAN.decisions
    assert found.meanwhile.plain_step_ms == pytest.approx(others.costs.plain_step_ms)  # of now, not of then

    first, *_, last = answers(replace(others, cache_dir=cache.directory))
    assert first.result == found.meanwhile and first.cached and not first.final
    assert last.final and not last.cached and last.result.predicted_step_ms <= first.result.predicted_step_ms
    assert found.reason in last.reason


def test_times_of_compiled_code_and_notes_for_readers_find_the_same_plan_for_the_graph_at_hand(cache):
    cache.keep(REQUEST, PLAN)
    other = replace(REQUEST.graph, recorded_ms={0: 1.5}, provenance={"batch": "another description"})
    assert other.fingerprint != REQUEST.graph.fingerprint

    found = cache.find(replace(REQUEST, graph=other)).plan

    assert found.graph_fingerprint == other.fingerprint
    assert replace(found, graph_fingerprint=PLAN.graph_fingerprint) == PLAN


GRAPH = REQUEST.graph
OTHERS = {
    "another budget": replace(REQUEST, budget="51%"),
    "another method": replace(REQUEST, method="rotor"),
    "another option": replace(REQUEST, options={"node_limit": 5}),
    "another tier": replace(REQUEST, offload={"disk": None}),
    "another device": replace(REQUEST, costs=replace(REQUEST.costs, device_name="another")),
    "another model": decoder_request(layers=3),
    "another size": replace(REQUEST, graph=replace(GRAPH, resident={"parameters": 1001})),
    "another order": replace(REQUEST, graph=replace(GRAPH, events=(*GRAPH.events[:-2], *GRAPH.events[:-3:-1]))),
    "another torch": replace(REQUEST, graph=replace(GRAPH, provenance={"torch": "99.0"})),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_decides_whether_a_plan_is_valid_has_a_plan_of_its_own(cache, what):
    cache.keep(REQUEST, PLAN)

    assert cache.path(OTHERS[what]) != cache.path(REQUEST)
    assert cache.find(OTHERS[what]).plan is None


def test_another_lowtide_has_plans_of_its_own(cache, monkeypatch):
    before = cache.path(REQUEST)
    monkeypatch.setattr(plan_cache, "__version__", "99.0")

    assert cache.path(REQUEST) != before


@pytest.mark.parametrize("keep", [0, 1, 20, -1, -200])
def test_a_truncated_file_is_ignored_and_replaced(cache, keep):
    cache.keep(REQUEST, PLAN)
    path = cache.path(REQUEST)
    cache_files.write_file(path, path.read_bytes()[:keep])

    found = cache.find(REQUEST)

    assert found.plan is None and "\n" not in found.reason
    assert found.reason.startswith(f"a cached plan was ignored: {path} is damaged (")
    cache.keep(REQUEST, PLAN)
    assert cache.find(REQUEST).plan == PLAN


@pytest.mark.parametrize("data", [b"", b"\x00" * 50, b"{}", b"[]", b"null", b"[" * 100_000, b'{"version": 1}'])
def test_garbage_is_ignored(cache, data):
    for content in (data, gzip.compress(data)):
        cache_files.write_file(cache.path(REQUEST), content)
        found = cache.find(REQUEST)
        assert found.plan is None and "is damaged" in found.reason


def test_a_file_of_another_version_is_ignored(cache):
    cache.keep(REQUEST, PLAN)
    rewritten(cache, version=plan_cache.VERSION + 1)

    assert "it is of version 2, this lowtide reads version 1" in cache.find(REQUEST).reason


def test_a_plan_under_another_key_is_ignored(cache):
    other = decoder_request("60%")
    cache.keep(other, solved(other))
    os.replace(cache.path(other), cache.path(REQUEST))

    assert "it holds the plan for another step" in cache.find(REQUEST).reason


def test_a_plan_that_the_simulator_finds_above_its_budget_is_ignored(cache):
    everything_saved = replace(PLAN, decisions=tuple(replace(d, action="save") for d in PLAN.decisions))
    cache.keep(REQUEST, everything_saved)

    found = cache.find(REQUEST)

    assert found.plan is None and f"its budget {PLAN.budget_bytes} bytes" in found.reason


def test_a_plan_that_the_graph_does_not_allow_is_ignored(cache):
    wrong = replace(PLAN, decisions=tuple(replace(d, storage=0, action="recompute") for d in PLAN.decisions))
    cache.keep(REQUEST, wrong)

    assert "storage 0 cannot be recomputed" in cache.find(REQUEST).reason


def test_a_file_of_another_user_is_ignored(cache, monkeypatch):
    cache.keep(REQUEST, PLAN)
    monkeypatch.setattr(cache_files.os, "geteuid", lambda: os.getuid() + 1)

    found = cache.find(REQUEST)

    assert found.plan is None and f"belongs to user {os.getuid()}" in found.reason


def test_a_file_that_others_may_write_is_ignored(cache):
    cache.keep(REQUEST, PLAN)
    os.chmod(cache.path(REQUEST), 0o622)

    assert "others may write to it" in cache.find(REQUEST).reason


@pytest.mark.parametrize("where", ["/proc/self/nothing", "/dev/null/plans"])
def test_a_directory_that_cannot_be_written_is_done_without(where):
    cache = PlanCache(where)

    assert cache.keep(REQUEST, PLAN).startswith("the plan is not kept for later runs: ")
    assert cache.find(REQUEST).plan is None


def test_the_least_recently_used_plans_go(cache, monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    requests = [replace(REQUEST, options={"node_limit": n}) for n in (1, 2, 3, 4)]
    for age, request in zip((40, 30, 20), requests):
        cache.keep(request, PLAN)
        os.utime(cache.path(request), (1e9 - age, 1e9 - age))
    left_by_a_killed_writer = cache.directory / "x-1.new"
    left_by_a_killed_writer.touch()
    os.utime(left_by_a_killed_writer, (1e9 - 50, 1e9 - 50))

    assert cache.find(requests[0]).plan == PLAN  # used just now
    cache.keep(requests[3], PLAN)

    assert [cache.find(r).plan is not None for r in requests] == [True, False, True, True]
    assert len(list(cache.directory.iterdir())) == 3


def _keep(directory, plans):
    for _ in range(20):
        for plan in plans:
            assert PlanCache(directory).keep(REQUEST, plan) == ""


def test_processes_may_write_one_key_at_the_same_time(cache):
    plans = [PLAN, replace(PLAN, status="feasible", solve_s=1.0)]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_keep, args=(cache.directory, plans[::step])) for step in (1, -1)]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        found.append(cache.find(REQUEST))

    assert all(writer.exitcode == 0 for writer in writers)
    assert {f.reason for f in found} == {""} and cache.find(REQUEST).plan in plans
    assert len(list(cache.directory.iterdir())) == 1


class TestTiers:
    GRAPH, COSTS = linked_decoder(2.0)
    REQUEST = PlanRequest(GRAPH, COSTS, "40%", offload={DISK: 2**40})
    PLAN = solved(REQUEST)
    MOVED = PLAN.bytes_by_action["disk_offload"]

    def test_a_plan_that_moves_is_found_while_there_is_room(self, cache):
        assert self.MOVED > 0
        cache.keep(self.REQUEST, self.PLAN)

        assert text_of(cache.find(replace(self.REQUEST, offload={DISK: self.MOVED})).plan) == text_of(self.PLAN)
        assert "has room for" in cache.find(replace(self.REQUEST, offload={DISK: self.MOVED - 1})).reason

    @pytest.mark.parametrize(("factor", "used"), [(1.2, True), (0.8, True), (1.8, False), (0.5, False)])
    def test_a_link_of_another_speed_needs_another_plan(self, cache, factor, used):
        cache.keep(self.REQUEST, self.PLAN)
        link = self.COSTS.links[DISK]
        links = {DISK: Link(link.store_bytes_per_s * factor, link.fetch_bytes_per_s)}

        found = cache.find(replace(self.REQUEST, costs=replace(self.COSTS, links=links)))

        assert (found.plan is not None) == used
        assert used or "the disk tier is not as fast, beside the step" in found.reason
