"""What each part of the exact search is worth: every part switched off in turn, on the committed case graphs. One JSON
line per part, case and budget.

    python benchmarks/ablation.py --resume                  what the results lack; hours from nothing, cheapest first
    python benchmarks/ablation.py --parts none --out FILE   the search as it is; some minutes
    python benchmarks/ablation.py --compare OLD NEW         where two files differ; exit 1 where a plan is worse

No model is built and nothing is carried out: graphs and costs are those of ``tests/graphs``, plans are judged by the
simulator. A part is switched off by replacing functions or constants of the search while it runs (``PARTS``).

The search is deterministic, so a part that is never called for a pair of case and budget, or that always answers what
its replacement would, cannot change that pair's plan. Such pairs are not searched again: their line is that of the
search as it is, less the time inside the part, and says ``"ran": false``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).parent.parent
GRAPHS = ROOT / "tests" / "graphs"
RESULTS = Path(__file__).parent / "results" / "ablation_cpu.jsonl"
NONE = "none"  # no part switched off
BUDGETS = ("50%", "36%", "25%", "full's peak")
LEAST = "least"  # the least peak that is found: asked for what nothing can do
# Links that could carry all that is stored to and fro so many times in a plain step.
LINKS = {"disk x 0.3": 0.3, "disk x 2": 2.0}
LINKED_CASES = ("unet", "chain48", "toy", "decoder8_512")
LINKED_SHARES = ("36%", "9%")
WORSE, SLOWER = 0.1, 0.1  # points of overhead, share of CPU time: what ``--compare`` shows
MOST_S = 60.0  # of CPU, and as many times what the search as it is takes:
MOST_TIMES = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(NONE, *PARTS), default=[NONE, *PARTS], metavar="NAME")
    parser.add_argument("--cases", nargs="+", default=list(expected()), metavar="NAME")
    parser.add_argument("--budgets", nargs="+", default=[*BUDGETS, LEAST, *linked_budgets()], metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N", help="see ``stages``")
    parser.add_argument("--beside", action="store_true", help="run the search as it is again beside its parts")
    parser.add_argument("--resume", action="store_true", help="keep the lines that the results have, add the others")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    args = parser.parse_args()
    if args.compare:
        return compare(*(read(path) for path in args.compare))

    done = read(args.out) if args.resume and args.out.exists() else {}
    if not args.resume:
        args.out.unlink(missing_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    shared = {"benchmark": "ablation_cpu", **provenance()}

    def note(line: dict) -> None:
        line = shared | line
        done[key(line)] = line
        with args.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(said(line), file=sys.stderr, flush=True)

    def plain(case: str, budget: str) -> dict:
        """The search as it is: the quickest of the times it ran, and all of them."""
        line = plain_line(case, budget, parts)
        before = done.get((NONE, case, budget), {}).get("cpus", [])
        line["cpus"] = [*before, line["cpu_s"]]
        return line | {"cpu_s": min(line["cpus"])}

    parts = [part for part in args.parts if part != NONE]
    answer("unet", "50%", math.inf)  # what is imported and made ready on first use is no part's time
    for stage in args.stages:
        budgets = stages(args.budgets)[stage]
        pairs = [(case, budget) for case in args.cases for budget in budgets if asked(case, budget)]
        for pair in pairs:
            if (NONE, *pair) not in done and NONE in args.parts:
                note(plain(*pair))
        pairs.sort(key=lambda pair: done[NONE, *pair]["cpu_s"] if (NONE, *pair) in done else 0.0)
        for pair in pairs:
            left = [p for p in parts if stage in PARTS[p].stages and (p, *pair) not in done]
            ran = [p for p in left if runs(p, done[NONE, *pair])]
            if ran and args.beside:  # since what else the machine does changes
                note(plain(*pair))
            for part in left:
                note(part_line(part, *pair, done[NONE, *pair]))
    write(args.out, done)
    return 0


def write(out: Path, done: dict[tuple[str, str, str], dict]) -> None:
    """Each line once, in the order of parts, cases and budgets; parts that were removed since come last."""
    budgets, cases = [*BUDGETS, LEAST, *linked_budgets()], list(expected())
    parts = list(dict.fromkeys([NONE, *PARTS, *(line["part"] for line in done.values())]))
    lines = sorted(
        done.values(), key=lambda x: (parts.index(x["part"]), cases.index(x["case"]), budgets.index(x["budget"]))
    )
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def stages(budgets: list[str]) -> list[list[str]]:
    """What is looked at one after the other: see ``Part.stages``."""
    mine = [b for b in budgets if b in BUDGETS]
    return [mine, [b for b in budgets if b in linked_budgets()], [b for b in budgets if b == LEAST], mine, mine]


# What is replaced


@dataclass(frozen=True)
class Part:
    """One part of the search.

    Attributes:
        replaced: Functions, properties or constants, as ``module:name`` of ``lowtide.solvers``, and with what.
        reached: What is called where the part has a say, if that is not what is replaced.
        telling: The answer of what is replaced is all that it does, so that equal answers make equal plans.
        later: 1 or 2: looked at after the others.
        linked, least: Looked at for plans that move storages; for the least peak as well.
    """

    replaced: dict[str, Any]
    reached: tuple[str, ...] = ()
    telling: bool = True
    later: int = 0
    linked: bool = False
    least: bool = False

    @property
    def stages(self) -> tuple[int, ...]:
        """The places in ``stages`` where it is looked at."""
        if self.linked:
            return (1,)
        return ((0, 3, 4)[self.later], *((2,) if self.least else ()))


def none_found(*_: Any, **__: Any) -> list:
    return []


def nothing(*_: Any, **__: Any) -> None:
    return None


def no(*_: Any, **__: Any) -> bool:
    return False


def unchanged(_self: Any, evaluated: Any, *_: Any) -> Any:
    return evaluated


def one_by_one(self: Any, budget_bytes: int, ms_per_byte: float, deadline: float) -> Any:
    """``DecomposedSearch.choose_runs`` without any run of several segments."""
    return self.columns.choose(budget_bytes, self.columns.runs, 0.0)


def single_segments(self: Any, budget_bytes: int) -> Any:
    """``DecomposedSearch.fastest`` without what looks further."""
    return self.by_single_segments(budget_bytes)


def not_shared(self: Any) -> None:
    """``ColumnGeneration._reset_pools`` with columns of its own for each segment."""
    from lowtide.solvers.decomposition.pricing import ColumnPool, DualPrices, SegmentRun

    self.pools = self.distinct_pools = [ColumnPool(subgraph) for subgraph in self._subgraphs]
    self.runs = [SegmentRun(range(n, n + 1), pool, pool.subgraph.outside_bytes) for n, pool in enumerate(self.pools)]
    self.dual_prices = [DualPrices(0.0, 0.0, 0.0, None, 0.0)] * len(self.pools)
    self.total_ms = sum(g.ms for pool in self.pools for g in pool.coarse.groups) or 1.0
    self.byte_unit = max(max(p for pool in self.pools for p in pool.plain.peaks) / 1e3, 1.0)


def no_milp(self: Any, *_: Any, **__: Any) -> Any:
    """``MonolithicSearch._minimise``: nothing found, nothing known."""
    import numpy as np

    from lowtide.solvers.milp.highs import MilpResult

    return MilpResult("limit", np.zeros(0), math.inf, 0.0)


def rounded_columns(self: Any, prices: Any, deadline: float) -> float:
    """``ColumnPool._solve`` by rounding the relaxation instead of branch and bound."""
    from lowtide.solvers.graph_queries import complete_actions
    from lowtide.solvers.milp.peak_model import PeakModel

    model = PeakModel(self.coarse, None, prices=prices)
    relaxed = model.program.relax()
    if not len(relaxed.values) or not math.isfinite(relaxed.objective):
        return 0.0
    for share in (0.25, 0.5, 0.75):
        self.add(self.column(complete_actions(self.context.graph, *model.choice(relaxed.values, share))))
    bound = max(relaxed.objective - model.objective_slack, 0.0) * model.ms_unit
    bound += (prices.peak_ms + (prices.forward_ms or 0.0)) * self.context.graph.resident_bytes
    return bound + prices.kept_ms * self.fixed_bytes[0] + prices.forward_end_ms * self.fixed_bytes[1]


def eager_row(self: Any, terms: dict, *, lower: float = -math.inf, upper: float = math.inf, lazy: bool = False) -> int:
    return _row(self, terms, lower=lower, upper=upper)


def _row(self: Any, terms: dict, **limits: float) -> int:
    from lowtide.solvers.milp.highs import LinearProgram

    original = ORIGINALS.get("milp.highs:LinearProgram.row", LinearProgram.row)
    return original(self, terms, **limits)


def no_pins(self: Any) -> None:
    self.K = defaultdict(list)


ORIGINALS: dict[str, Any] = {}  # what is replaced at the moment
DECOMPOSED = ("decomposition.decomposed_search:DecomposedSearch.fastest",)
MONOLITHIC = ("milp.monolithic:MonolithicSearch.fastest",)

PARTS: dict[str, Part] = {
    # Beyond one layer a segment
    "all but single segments": Part(
        {"decomposition.decomposed_search:DecomposedSearch.fastest": single_segments},
        ("decomposition.decomposed_search:DecomposedSearch.choose_runs",),
        telling=False,
    ),
    "runs of several segments": Part(
        {"decomposition.decomposed_search:DecomposedSearch.choose_runs": one_by_one}, telling=False
    ),
    "LP rounding": Part({"decomposition.decomposed_search:round_relaxation": none_found}),
    "LP rounding: further slots": Part({"lp_rounding:violated_stages": none_found}),
    "local search from larger budgets": Part(
        {"decomposition.decomposed_search:DecomposedSearch._from_above": none_found}
    ),
    # Columns
    "columns with lower peaks": Part(
        {"decomposition.pricing:ColumnPool.add_lower_peaks": no}, telling=False, least=True
    ),
    "rounded columns": Part({"decomposition.pricing:ColumnPool.add_rounded": nothing}, telling=False, least=True),
    "columns between known ones": Part({"decomposition.master:ColumnGeneration._densify": no}),
    "cuts in pricing": Part(
        {"tuning:PRICING_CUT_ROUNDS": 1}, ("decomposition.pricing:ColumnPool._solve",), telling=False, later=1
    ),
    "pricing by MILP": Part({"decomposition.pricing:ColumnPool._solve": rounded_columns}, telling=False, later=1),
    "rows for forward's end": Part(
        {
            "decomposition.master:ColumnGeneration.separate_forward": property(no),
            "decomposition.pricing:ColumnPool.separate_forward": property(no),
        },
        DECOMPOSED,
        telling=False,
        later=1,
    ),
    "shared column pools": Part(
        {"decomposition.master:ColumnGeneration._reset_pools": not_shared}, telling=False, later=2
    ),
    "decomposition": Part({"exact:ExactSearch._columns": nothing}, DECOMPOSED, telling=False, later=2),
    # One model
    "monolithic MILP": Part(
        {"tuning:MONOLITHIC_SIZE": -1, "tuning:MONOLITHIC_NO_REPEATS_SIZE": -1}, MONOLITHIC, telling=False
    ),
    "monolithic MILP: rounding": Part(
        {"milp.monolithic:MonolithicSearch._round_relaxation": lambda self, *_: ([], self.context.floor_ms)},
        telling=False,
    ),
    "monolithic MILP: branch and bound": Part(
        {"milp.monolithic:MonolithicSearch._minimise": no_milp}, telling=False, least=True
    ),
    "least peak of equally fast plans": Part({"milp.monolithic:MonolithicSearch.lower_peak": unchanged}),
    # Beside the models
    "proof of infeasibility before the search": Part({"exact:bound_peak": lambda graph: 0}, least=True),
    "saving what fits": Part({"search_context:SearchContext.save_what_fits": unchanged}, least=True),
    "chain schedules near the least peak": Part(
        {"exact:ExactSearch._chain_schedules": property(none_found)},
        ("exact:ExactSearch._near_least_peak",),
        telling=False,
        least=True,
    ),
    "local search for the least peak": Part({"exact:descent": lambda context, start, **_: iter([start])}, least=True),
    # Of the model
    "ops grouped for replay": Part(
        {"tuning:MERGE_SHARE": math.inf}, ("milp.coarsening:CoarseGraph._groups",), telling=False, later=1
    ),
    "expensive ops in groups of their own": Part(
        {"tuning:KEEP_SHARE": -1.0}, ("milp.coarsening:CoarseGraph._groups",), telling=False, later=1
    ),
    "small outputs follow large ones": Part(
        {"tuning:TINY_OUTPUT_SHARE": 0.0}, ("milp.coarsening:CoarseGraph._groups",), telling=False, later=1
    ),
    "norms with their readers": Part({"decomposition.segments:_ends_what_it_could_begin": no}, later=1),
    "replays only on demand": Part({"milp.peak_model:PeakModel._lazy_rows": nothing}, telling=False, later=1),
    "tie-breaks": Part({"tuning:TIE_BREAK": 0.0}, ("milp.peak_model:PeakModel._columns",), telling=False, later=1),
    "burst rows from the start": Part(
        {"tuning:ALL_BURSTS_SIZE": -1}, ("milp.peak_model:PeakModel._columns",), telling=False, later=1
    ),
    "burst rows by cuts alone": Part(
        {"tuning:ALL_BURSTS_SIZE": math.inf}, ("milp.peak_model:PeakModel._columns",), telling=False, later=1
    ),
    # Of the bound
    "tightened bound": Part({"build_plan:tighten_bound": lambda context, budget, known, bound: bound}),
    "tightened bound: further slots": Part({"lower_bound.tighten_bound:violated_stages": none_found}),
    "bound: what a replay needs": Part(
        {"lower_bound.relaxation:Relaxation._memory_of_replays": nothing}, telling=False, later=1
    ),
    "bound: post-dominators": Part({"lower_bound.relaxation:Relaxation._same_burst": nothing}, telling=False, later=1),
    "bound: pins": Part({"lower_bound.relaxation:Relaxation._pinned": no_pins}, telling=False, later=1),
    "lazy rows": Part(
        {"milp.highs:LinearProgram.row": eager_row},
        ("lower_bound.relaxation:Relaxation._memory_at_moments",),
        telling=False,
        later=1,
    ),
    "no garbage collection": Part({"dispatch:gc_disabled": nullcontext}, telling=False, later=1),
    # With links
    "offload: local search": Part({"offload.search:OffloadSearch._improved": unchanged}, telling=False, linked=True),
    "offload: several link loads": Part(
        {"tuning:LINK_LOADS": (1.0,), "tuning:HEAVY_LINK_LOADS": (1.0,)},
        ("offload.search:OffloadSearch._carried",),
        telling=False,
        linked=True,
    ),
    "offload: large storages": Part(
        {"offload.search:OffloadSearch._carried": lambda *a: _only_saved(*a)}, telling=False, linked=True
    ),
    "offload: what the best plan saves": Part(
        {"offload.search:OffloadSearch._saved_by": lambda *a: _saved_before_offloads(*a)}, telling=False, linked=True
    ),
    "offload: delayed fetches": Part({"offload.transfer_schedule:_delay_fetches": no}, telling=False, linked=True),
    "offload: early fetches": Part(
        {"tuning:FETCH_DELAY_ROUNDS": 0}, ("offload.transfer_schedule:_latest_starts",), telling=False, linked=True
    ),
    "offload: limits on bytes in flight": Part(
        {"tuning:STORES_IN_FLIGHT": (2, 0)}, ("offload.transfer_schedule:_latest_starts",), telling=False, linked=True
    ),
}


def _only_saved(self: Any, storages: list[int], *arguments: Any) -> dict[int, str]:
    """``OffloadSearch._carried`` of nothing where all that is worth moving is asked for."""
    if storages is self.worth_moving:
        return {}
    return ORIGINALS["offload.search:OffloadSearch._carried"](self, storages, *arguments)


def _saved_before_offloads(self: Any, base: Any) -> list[int]:
    """``OffloadSearch._saved_by`` of plans that offload nothing yet; nothing of the best one, which is asked last."""
    offloads = any(a.endswith("offload") for a in base.candidate.actions.values())
    return [] if offloads else ORIGINALS["offload.search:OffloadSearch._saved_by"](self, base)


def runs(part: str, plain: dict) -> bool:
    """Whether the part had a say in that search."""
    said = plain["reached"].get(part, {"same": False})
    return said is not None and not said["same"]


def found_at(target: str) -> tuple[Any, str]:
    """The module or class, and the name in it."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(f"lowtide.solvers.{module}")
    *classes, name = path.split(".")
    for step in classes:
        owner = getattr(owner, step)
    inspect.getattr_static(owner, name)  # that there is one
    return owner, name


@contextmanager
def put(target: str, value: Any) -> Iterator[None]:
    owner, name = found_at(target)
    ORIGINALS[target] = before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
        del ORIGINALS[target]


@contextmanager
def without(part: str) -> Iterator[None]:
    with ExitStack() as stack:
        for target, value in PARTS[part].replaced.items():
            stack.enter_context(put(target, value))
        yield


@dataclass
class Watched:
    """What one function did in a search: calls, time in them, and whether its replacement would have said the same."""

    calls: int = 0
    cpu_s: float = 0.0
    same: bool = True
    inside: int = field(default=0, repr=False)


@contextmanager
def watching(parts: list[str]) -> Iterator[dict[str, Watched]]:
    """By target, what it did meanwhile."""
    found: dict[str, Watched] = {}
    with ExitStack() as stack:
        for part in parts:
            for target in PARTS[part].reached or PARTS[part].replaced:
                if target in found:
                    continue
                owner, name = found_at(target)
                function = inspect.getattr_static(owner, name)
                found[target] = Watched()
                instead = PARTS[part].replaced.get(target) if PARTS[part].telling else None
                stack.enter_context(put(target, watched(function, found[target], instead)))
        yield found


def watched(function: Callable, log: Watched, instead: Callable | None) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.calls += 1
        log.inside += 1
        start = time.process_time()
        try:
            answer = function(*args, **kwargs)
        finally:
            log.inside -= 1
            if not log.inside:
                log.cpu_s += time.process_time() - start
        if instead is not None and log.same:
            other = instead(*args, **kwargs)
            log.same = other is answer or bool(other == answer)
        return answer

    return call


# What is asked


@cache
def expected() -> dict[str, dict]:
    found = json.loads((GRAPHS / "expected.json").read_text())
    return dict(sorted(found.items(), key=lambda item: item[1]["ops"]))


@cache
def loaded(case: str) -> tuple[Any, Any]:
    from lowtide.graph import json_format

    return json_format.load(GRAPHS / f"{case}.json.gz"), json_format.load_costs(GRAPHS / f"{case}.costs.json.gz")


def linked_budgets() -> list[str]:
    return [f"{share}, {link}" for link in LINKS for share in LINKED_SHARES]


def asked(case: str, budget: str) -> bool:
    return budget not in linked_budgets() or case in LINKED_CASES


@cache
def fulls_peak(case: str) -> int:
    import lowtide

    return lowtide.solve(*loaded(case), method="full").predicted_peak_bytes


def question(case: str, budget: str) -> tuple[Any, Any, int | str, dict]:
    """Graph, costs, budget and options of one search; the graph a copy that has nothing cached."""
    from lowtide.graph.costs import DISK, Link

    graph, costs = loaded(case)
    limit: int | str = budget.partition(",")[0]
    options = {}
    if budget == "full's peak":
        limit = fulls_peak(case)
    elif budget == LEAST:
        limit = graph.resident_bytes
    elif budget in linked_budgets():
        stored = sum(graph.storages[s].bytes for s in graph.stored)
        rate = 2 * LINKS[budget.partition(", ")[2]] * stored / costs.plain_step_ms * 1e3
        costs = replace(costs, links={DISK: Link(rate, rate)})
        options = {"offload": ("disk",)}
    return replace(graph), costs, limit, options


class OutOfTime(BaseException):
    """No ``Exception``: nobody on the way is to catch it."""


@contextmanager
def at_most(cpu_s: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s if math.isfinite(cpu_s) else 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def answer(case: str, budget: str, most_s: float) -> dict:
    """What ``solve`` says, and its CPU time."""
    import lowtide

    graph, costs, limit, options = question(case, budget)
    start = time.process_time()
    try:
        with at_most(most_s):
            plan = lowtide.solve(graph, costs, limit, **options)
    except lowtide.BudgetInfeasibleError as error:
        cpu_s = time.process_time() - start
        line = {"status": "infeasible", "budget_bytes": error.budget_bytes, "peak_bytes": error.least_bytes}
        activations = error.least_bytes - graph.resident_bytes
    except OutOfTime:
        return {"status": "out of time", "cpu_s": time.process_time() - start}
    else:
        cpu_s = time.process_time() - start
        line = {
            "status": "ok",
            "plan_status": plan.status,
            "budget_bytes": plan.budget_bytes,
            "predicted_overhead": plan.predicted_overhead,
            "bound_overhead": None if plan.bound_ms is None else plan.bound_ms / plan.plain_step_ms - 1,
            "gap": None if plan.bound_ms is None else plan.gap,
            "peak_bytes": plan.predicted_peak_bytes,
            "solve_s": plan.solve_s,
        }
        activations = plan.predicted_peak_bytes - graph.resident_bytes
    plain = expected()[case]["simulated_plain_peak_bytes"] - graph.resident_bytes
    return line | {"fraction": activations / plain, "cpu_s": cpu_s}


def plain_line(case: str, budget: str, parts: list[str]) -> dict:
    """The search as it is, and which of ``parts`` had a say in it."""
    mine = [p for p in parts if PARTS[p].linked == (budget in linked_budgets())]
    with watching(mine) as found:
        line = {"part": NONE, "case": case, "budget": budget, "ran": True} | answer(case, budget, math.inf)
    says = {}
    for part in mine:
        logs = [found[t] for t in PARTS[part].reached or PARTS[part].replaced if t in found]
        telling = PARTS[part].telling and not PARTS[part].reached
        inside_s = sum(log.cpu_s for log in logs) if telling else None
        same = telling and all(log.same for log in logs)
        says[part] = {"same": same, "cpu_s": inside_s} if any(log.calls for log in logs) else None
    return line | {"reached": says}


def part_line(part: str, case: str, budget: str, plain: dict) -> dict:
    said = plain["reached"].get(part)
    line = {"part": part, "case": case, "budget": budget}
    if not runs(part, plain):
        same = {name: plain[name] for name in ANSWER if name in plain}
        return line | same | {"ran": False, "cpu_s": plain["cpu_s"] - (said["cpu_s"] if said else 0.0)}
    with without(part):
        return line | {"ran": True} | answer(case, budget, MOST_S + MOST_TIMES * plain["cpu_s"])


ANSWER = (
    "status", "plan_status", "budget_bytes", "predicted_overhead", "bound_overhead", "gap", "peak_bytes", "fraction",
)  # fmt: skip


# What was found


def key(line: dict) -> tuple[str, str, str]:
    return line["part"], line["case"], line["budget"]


def read(path: Path) -> dict[tuple[str, str, str], dict]:
    return {key(line): line for line in map(json.loads, path.read_text().splitlines())}


def said(line: dict) -> str:
    start = f"{line['part']:<32} {line['case']:<14} {line['budget']:<16} {line['status']:<10}"
    if "predicted_overhead" in line:
        start += f" {100 * line['predicted_overhead']:+7.2f} %, gap {100 * (line['gap'] or 0.0):.2f} %,"
    fraction = f" {line['fraction']:.4f} of plain," if "fraction" in line else ""
    return f"{start}{fraction} {line['cpu_s']:.2f} s{'' if line['ran'] else ' (same)'}"


def compare(old: dict[tuple, dict], new: dict[tuple, dict]) -> int:
    """Print where the two differ by more than noise; return 1 where a plan is worse."""
    worse = 0
    both = [k for k in old if k in new]
    for where in both:
        a, b = old[where], new[where]
        points = lost_points(a, b)
        seconds = b["cpu_s"] - a["cpu_s"]
        if abs(points) > WORSE or abs(seconds) > SLOWER * a["cpu_s"]:
            worse += points > WORSE
            print(
                f"{' / '.join(where):<50} {shown(a)} -> {shown(b)} ({points:+.2f} points), "
                f"{a['cpu_s']:.2f} -> {b['cpu_s']:.2f} s ({seconds / max(a['cpu_s'], 1e-9):+.0%})"
            )
    total = [sum(lines[k]["cpu_s"] for k in both) for lines in (old, new)]
    print(
        f"{len(both)} in both, {len(old) - len(both)} only in the old, {len(new) - len(both)} only in the new. "
        f"CPU {total[0]:.1f} -> {total[1]:.1f} s. Plans worse by more than {WORSE} points: {worse}."
    )
    return 1 if worse else 0


def lost_points(a: dict, b: dict) -> float:
    """How much worse ``b`` is than ``a``: points of overhead, or of memory where the least peak is what both found."""
    if a["status"] == b["status"] == "infeasible":
        return 100 * (b["fraction"] - a["fraction"])
    if "predicted_overhead" in a and "predicted_overhead" in b:
        return 100 * (b["predicted_overhead"] - a["predicted_overhead"])
    return math.inf if "predicted_overhead" in a else -math.inf if "predicted_overhead" in b else 0.0


def shown(line: dict) -> str:
    if "predicted_overhead" in line:
        return f"{100 * line['predicted_overhead']:+.2f} %"
    return f"{line['status']} {100 * line.get('fraction', math.nan):.2f} %"


if __name__ == "__main__":
    sys.exit(main())
