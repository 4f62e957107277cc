"""Facts of a step agree with a plain walk over its events, and what is computed once per graph dies with the graph."""

import copy
import gc
import pickle
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from support.case_graphs import load_case
from support.quick import examples
from support.strategies import linked_decoder, small_graphs
from support.toy_graphs import chain, decoder, unit_costs

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.facts import step_facts
from lowtide.graph.memo import memo_of, once_per_graph
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.dispatch import METHODS, solve
from lowtide.solvers.lower_bound.bound import bound_peak, bound_peak_with_offload, bound_time
from lowtide.solvers.search_context import SearchContext


def events_of(graph, *kinds, storage=None, saved=None, op=None):
    """Indices of the events of ``kinds`` that concern one storage, saved tensor or op."""
    found = []
    for at, (kind, number) in enumerate(graph.events):
        about = None if kind == RUN else number if kind == FREE else graph.saved[number]
        if kind in kinds and (storage is None or about == storage) and (saved is None or number == saved):
            found += [at] if op is None or number == op else []
    return found


def by_key(keys, find):
    """``{key: found}`` for the keys of which ``find`` returns anything."""
    return {key: found for key in keys for found in [find(key)] if found or found == 0}


def first(events):
    return events[0] if events else None


def last(events):
    return events[-1] if events else None


def differences(graph):
    """Facts of ``graph`` that a walk of its own for each of them does not confirm."""
    facts, end = step_facts(graph), len(graph.events)
    storages, saved = range(len(graph.storages)), range(len(graph.saved))
    made = {s: op.id for op in graph.ops for s in op.makes}
    forward = [op for op in graph.ops if not op.backward]
    backward_runs = [at for at in events_of(graph, RUN) if graph.ops[graph.events[at][1]].backward]
    walked = {
        "run_event": by_key(range(len(graph.ops)), lambda o: first(events_of(graph, RUN, op=o))),
        "birth": {s: first(events_of(graph, RUN, op=op)) for s, op in made.items()},
        "death": by_key(storages, lambda s: first(events_of(graph, FREE, storage=s))),
        "packed": by_key(saved, lambda n: first(events_of(graph, PACK, saved=n))),
        "released": by_key(saved, lambda n: first(events_of(graph, RELEASE, saved=n))),
        "unpack_spans": by_key(
            saved,
            lambda n: list(
                zip_longest(events_of(graph, UNPACK, saved=n), events_of(graph, DROP, saved=n), fillvalue=end)
            ),
        ),
        "unpack_events": events_of(graph, UNPACK),
        "first_pack": by_key(storages, lambda s: first(events_of(graph, PACK, storage=s))),
        "first_use": by_key(storages, lambda s: first(events_of(graph, UNPACK, storage=s))),
        "last_reference": by_key(storages, lambda s: last(events_of(graph, RELEASE, DROP, storage=s))),
        "references": by_key(storages, lambda s: events_of(graph, FREE, PACK, UNPACK, DROP, RELEASE, storage=s)),
        "backward_start": min([*backward_runs, *events_of(graph, UNPACK), end]),
        "first_backward_run": min([*backward_runs, end]),
        "completed_by": {op.completes_inplace: op.id for op in graph.ops if op.completes_inplace is not None},
        "readers": by_key(storages, lambda s: [op.id for op in forward if s in op.reads]),
    }
    assert walked.keys() == vars(facts).keys()
    return [name for name, value in walked.items() if value != getattr(facts, name)]


@settings(max_examples=examples(60), deadline=None)
@given(graph=small_graphs(most_ops=8))
def test_facts_agree_with_a_plain_walk(graph):
    assert differences(graph) == []


def test_facts_agree_where_tensors_are_unpacked_twice_and_never_dropped():
    graph = chain(3)
    unpack, drop = events_of(graph, UNPACK)[0], events_of(graph, DROP)[0]
    number = graph.events[unpack][1]
    events = list(graph.events)
    events[drop + 1 : drop + 1] = [(DROP, number)]
    events[unpack:unpack] = [(UNPACK, number)]
    nested = replace(graph, events=tuple(events))
    undropped = replace(graph, events=tuple(e for e in graph.events if e[0] not in (DROP, RELEASE, FREE)))
    plain_forward = replace(graph, events=tuple(e for e in graph.events if e[0] in (RUN, PACK))[:4])

    assert differences(nested) == differences(undropped) == [] == differences(load_case("autocast")[0])
    assert step_facts(nested).unpack_spans[number] == [(unpack, drop + 1), (unpack + 1, drop + 2)]
    assert step_facts(undropped).unpack_spans[number] == [(first(events_of(undropped, UNPACK)), len(undropped.events))]
    assert step_facts(plain_forward).backward_start == 4


def test_the_comparison_itself_catches():
    graph = chain(3)
    step_facts(graph).death[1] -= 1

    assert differences(graph) == ["death"]


def test_a_result_is_computed_once_for_each_graph_and_not_for_its_copies():
    seen = []

    @once_per_graph
    def counted(graph):
        seen.append(id(graph))
        return len(seen)

    graph = chain(3)
    assert counted(graph) == counted(graph) == 1
    copies = [replace(graph), copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))]

    assert [counted(c) for c in copies] == [2, 3, 4, 5] and all(c == graph for c in copies)


def test_results_die_with_their_graph():
    graph = chain(3)
    facts = weakref.ref(step_facts(graph))
    assert facts() is not None and memo_of(graph)

    del graph

    assert facts() is None


@pytest.mark.parametrize("method", METHODS)
def test_nothing_that_solving_remembers_keeps_a_graph_alive(method):
    graph = decoder(layers=3)
    costs = unit_costs(graph)
    with suppress(BudgetInfeasibleError):
        solve(graph, costs, "60%", method=method)
    for bound in (bound_peak, bound_peak_with_offload):
        bound(graph)
    bound_time(SearchContext(graph, costs), graph.resident_bytes + 10_000)
    dead = weakref.ref(graph)

    del graph
    gc.collect()

    assert dead() is None


def test_nothing_that_planning_with_offload_remembers_keeps_a_graph_alive():
    graph, costs = linked_decoder(speed=1)
    budget = int(0.6 * simulate_actions(graph, costs, {}).peak_bytes)
    solve(graph, costs, budget, offload=("disk",))
    dead = weakref.ref(graph)

    del graph
    gc.collect()

    assert dead() is None
