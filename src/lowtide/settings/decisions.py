"""From a description of settings to one decision for each stored tensor of a traced step."""

from collections.abc import Iterable

from lowtide.graph.costs import HOST, Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import CPU_OFFLOAD, SAVE, Moves
from lowtide.settings.description import NOTE, NOTHING, Checkpoint, Description, SettingsFinding
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions, movable, recomputable
from lowtide.units import format_bytes

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"})


def candidate_of(graph: StepGraph, costs: Costs, description: Description) -> tuple[Candidate, list[SettingsFinding]]:
    """What ``description`` decides on ``graph``, and what of it cannot be done there.

    Args:
        costs: A description that moves something needs the link to host memory in them.
    """
    findings: list[SettingsFinding] = []
    segment_of = _segments(graph, description.checkpoints)
    actions = _recomputed(graph, segment_of)
    inside = {s for op in segment_of for s in graph.ops[op].makes}
    stuck = [s for s, action in actions.items() if action == SAVE and s in inside and s not in recomputable(graph)]
    if stuck:
        size = format_bytes(sum(graph.storages[s].bytes for s in stuck))
        text = (
            f"{size} inside checkpoints cannot be made again op by op (written in place, mostly): the plan saves them"
        )
        findings.append(SettingsFinding("plan", NOTE, text))
    if segment_of and all(action == SAVE for action in actions.values()):
        findings.append(SettingsFinding("plan", NOTHING, "the checkpoints store nothing that could be made again"))
    moves = Moves()
    if description.moves:
        if HOST in costs.links:
            moved = _moved(graph, description, actions)
            actions |= dict.fromkeys(moved, CPU_OFFLOAD)
            # On the stream of the computation: a fetch begins when it is needed, and one transfer is under way.
            moves = Moves(max_inflight_bytes=max((graph.storages[s].bytes for s in moved), default=0))
        else:
            findings.append(
                SettingsFinding("offload", NOTHING, f"on a {graph.device} there is no host memory to move to")
            )
    return Candidate(dict(sorted(actions.items())), moves=moves), findings


def _segments(graph: StepGraph, checkpoints: Iterable[Checkpoint]) -> dict[int, tuple[Checkpoint, int]]:
    """By forward op the outermost checkpoint that it runs in, and which run of it."""
    by_path = {path: (number, c) for number, c in enumerate(checkpoints) for path in c.modules}
    runs: dict[tuple[int, int], int] = {}
    of_frame: dict[int, tuple[Checkpoint, int, int] | None] = {}
    for frame in sorted({op.frame for op in graph.forward_ops}):
        of_frame[frame] = None
        inner = frame
        while inner > 0:
            parent = graph.frames[inner].parent
            if found := by_path.get(graph.frames[inner].path):
                number, checkpoint = found
                # A module that is called twice is two checkpoints; modules of one checkpoint share the caller.
                run = runs.setdefault((number, inner if len(checkpoint.modules) == 1 else parent), len(runs))
                of_frame[frame] = checkpoint, run, inner
            inner = parent if parent != inner else -1
    segment_of: dict[int, tuple[Checkpoint, int]] = {}
    cores: dict[int, list[int]] = {}
    for op in graph.forward_ops:
        if found_run := of_frame[op.frame]:
            checkpoint, run, _ = found_run
            segment_of[op.id] = checkpoint, run
            if checkpoint.attention_only:
                cores.setdefault(run, []).append(op.id)
    for ops in cores.values():
        core = _attention_core(graph, ops)
        for outside in set(ops) - core:
            del segment_of[outside]
    return segment_of


def _attention_core(graph: StepGraph, ops: list[int]) -> set[int]:
    """Of an attention module's ops those from the first product of activations to the last."""
    names = [base_name(graph.ops[op].name) for op in ops]
    places = [at for at, name in enumerate(names) if "attention" in name or name in ("bmm", "baddbmm")]
    return set(ops[places[0] : places[-1] + 1]) if places else set()


def base_name(op: str) -> str:
    """``aten.mm.default -> mm``."""
    return op.split(".")[1] if "." in op else op


def _recomputed(graph: StepGraph, segment_of: dict[int, tuple[Checkpoint, int]]) -> dict[int, str]:
    """Actions that make again what checkpoints hold inside, except what they keep and what crosses their border."""
    kept = set()
    run_of = {op: run for op, (_, run) in segment_of.items()}
    for storage, readers in step_facts(graph).readers.items():
        maker = graph.storages[storage].op
        if maker is None or not any(run_of.get(op) != run_of.get(maker) for op in readers):
            continue
        if maker not in segment_of or not segment_of[maker][0].discards_output:
            kept.add(storage)
    products: dict[int, int] = {}
    for op, (checkpoint, run) in segment_of.items():
        name = base_name(graph.ops[op].name)
        if name not in checkpoint.keeps:
            continue
        if checkpoint.skips_every and name in PRODUCTS:
            products[run] = products.get(run, 0) + 1
            if products[run] % checkpoint.skips_every == 0:
                continue
        kept.update(graph.ops[op].makes)
    inside = {s for op in segment_of for s in graph.ops[op].makes}
    return complete_actions(graph, sorted((inside - kept) & graph.stored), kept)


def _moved(graph: StepGraph, description: Description, actions: dict[int, str]) -> list[int]:
    """Storages that stay stored and move to host memory."""
    free = [s for s in movable(graph) if actions.get(s) == SAVE]
    if (least := description.offloads_from_bytes) is not None:
        return [s for s in free if graph.storages[s].bytes >= least]
    calls = _segments(graph, [Checkpoint((path,)) for path in description.offloads])
    readers = step_facts(graph).readers
    found = []
    for storage in free:
        maker = graph.storages[storage].op
        assert maker is not None
        inside = {calls[op][1] for op in readers.get(storage, ()) if op in calls}
        # What every module reads (rotary tables, masks) is passed by keyword, and stays.
        if len(inside - {calls[maker][1]} if maker in calls else inside) in (1, 2):
            found.append(storage)
    return found
