"""The plan of a compiled step: variants are proposed, one is chosen for each layer, its code is read, and compiled.

The solver's estimate of a variant is enough to choose it, but not to promise a peak: the peak is read from its code.
Then the choice is made again with that peak, until all chosen variants are read, compiled and timed. A last few rounds
propose variants between the chosen ones, or leaner ones where nothing fits.
"""

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lowtide.compiled import saved_sets
from lowtide.compiled.captured_layer import Variant
from lowtide.compiled.choice import BETWEEN, Choice, Moment, Option, fastest_within, least_peak, peak_moment, peak_of
from lowtide.compiled.compiled_plan import CompiledPlan, PlannedVariant, decisions_of, evidence_of
from lowtide.compiled.layer_calls import LEAST, PLAIN, LayerShape
from lowtide.compiled.proof import measure_ms, why_not_equal
from lowtide.compiled.saved_sets import SavedSet
from lowtide.errors import BudgetInfeasibleError
from lowtide.plan import COMPILED
from lowtide.units import format_bytes

_ROUNDS = 2
_BELIEF_ERROR, _BELIEF_ERROR_OF_EXTRA = 0.01, 0.2  # of the plain time and of what is believed beyond it: mostly off
_LEAST_ERROR = 0.01  # of a time that was measured, whatever its samples say
_WORTH = 0.002  # of the layers' time, by which another choice has to be faster
_LEANER = 0.6  # of the peak in backward, where nothing fits
_IN_PLACE_OF_REFUSED = (1.0, 0.97, 0.94, 0.9, 0.85)  # of the limit
_ABOVE_REFUSED = (1.05, 1.15, 1.3)  # of the least peak


class StepPlanner:
    """Plans the steps of one set of input shapes.

    Args:
        moments: Of a watched step.
        shapes: What each layer runs.
        resident_bytes: What lives through the whole step.
        state_bytes: Of an optimizer, among these.
        margin_bytes: How far a layer's code was from the allocator in the watched step: every peak counts so much more.
        handed_on: Layers whose outputs are inputs of other layers, which hold them.
    """

    def __init__(
        self,
        moments: Sequence[Moment],
        shapes: Mapping[str, LayerShape],
        resident_bytes: int,
        *,
        state_bytes: int = 0,
        margin_bytes: int = 0,
        handed_on: Collection[str] = (),
    ) -> None:
        self._handed_on = handed_on
        self.moments = [replace(moment, extra_bytes=moment.extra_bytes + margin_bytes) for moment in moments]
        self.shapes, self.resident_bytes, self.margin_bytes = shapes, resident_bytes, margin_bytes
        self._state_bytes = state_bytes
        self._distinct = list(dict.fromkeys(shapes.values()))
        self.refused = [f"{v.name}: {v.refused}" for s in self._distinct for v in s.variants.values() if v.refused]
        self._made: list[CompiledPlan] = []

    @property
    def plain_peak_bytes(self) -> int:
        """Absolute, with every layer compiled as PyTorch does."""
        return self.resident_bytes + peak_of(self.moments, self._options(ready=True), dict.fromkeys(self.shapes, PLAIN))

    def plan(self, budget: int | float | None) -> CompiledPlan:
        """Choose and compile.

        Args:
            budget: Absolute bytes, or a fraction of what the plain compiled step needs beyond residents.

        Raises:
            BudgetInfeasibleError: no choice fits; ``least_bytes`` is what would do.
        """
        start_s = time.perf_counter()
        for shape in self._distinct:
            if not shape.whole:  # of a whole graph a step takes as long as a step: only what is chosen is timed
                self._time(shape, list(shape.variants))
        plain_bytes = self.plain_peak_bytes
        budget_bytes = budget
        if isinstance(budget, float):
            budget_bytes = self.resident_bytes + int(budget * (plain_bytes - self.resident_bytes))
        limit = None if budget_bytes is None else int(budget_bytes) - self.resident_bytes
        if limit is None or plain_bytes - self.resident_bytes <= limit:
            for shape in self._distinct:
                self._time(shape)
            choice = self._choice_of(dict.fromkeys(self.shapes, PLAIN))
        else:
            choice = self._within(limit)
        for shape in self._distinct:
            shape.keep_known("")
        self._made.append(self._plan_of(choice, limit, plain_bytes, start_s))
        return self._made[-1]

    def add_margin(self, more_bytes: int) -> None:
        """Every peak counts so much more from now on: what the allocator has taken beyond a plan."""
        self.moments = [replace(moment, extra_bytes=moment.extra_bytes + more_bytes) for moment in self.moments]
        self.margin_bytes += more_bytes

    def add_state(self, state_bytes: int) -> bool:
        """An optimizer keeps so much. Whether that is more than was known: it is resident from now on."""
        more_bytes = max(0, state_bytes - self._state_bytes)
        self._state_bytes += more_bytes
        self.resident_bytes += more_bytes
        return more_bytes > 0

    def has_made(self, plan: CompiledPlan) -> bool:
        return any(plan is made for made in self._made)

    def _within(self, limit: int) -> Choice:
        search = self._digest(limit)
        if any(search not in shape.known.searched for shape in self._distinct):
            self._prepare(limit)
        while True:
            found = fastest_within(self.moments, self._options(ready=True), limit)
            if found is not None and self._make_runnable(found):
                if any(search not in shape.known.searched for shape in self._distinct):
                    self._prepare(limit)
                continue
            if found is not None and any([self._time(self.shapes[at], [name]) for at, name in found.variants.items()]):
                continue
            if found is not None:
                for shape in self._distinct:
                    shape.keep_known(search)
                return found
            if any([shape.make_least() for shape in self._distinct]):
                continue
            leanest = self._leanest()
            if leanest.peak_bytes > limit or not self._advance(leanest):
                break
        least_bytes = self.resident_bytes + leanest.peak_bytes
        budget_bytes = self.resident_bytes + limit
        raise BudgetInfeasibleError(
            f"no plan fits budget={format_bytes(budget_bytes)}: the compiled layers need at least "
            f"{format_bytes(least_bytes)}, of which {format_bytes(self.resident_bytes)} live through the whole step.\n"
            "Raise the budget, or reduce the batch." + self._left_out(),
            budget_bytes=budget_bytes,
            least_bytes=least_bytes,
        )

    def _digest(self, limit: int) -> str:
        """Of all that decides what a search proposes, but for the times of ops."""
        layers = [(name, shape.captured.key) for name, shape in self.shapes.items()]
        facts = [(m.kind, m.layer, m.live_bytes, m.extra_bytes, sorted(m.open.items())) for m in self.moments]
        return hashlib.sha256(repr((limit, layers, facts)).encode()).hexdigest()[:32]

    def _make_runnable(self, choice: Choice) -> bool:
        """Compile what is chosen and known from an earlier run only. Whether there was any."""
        chosen = {(self.shapes[layer], name) for layer, name in choice.variants.items()}
        known = {(shape, name): shape.variants[name] for shape, name in chosen if shape.variants[name].run is None}
        self._compile(known)
        for (shape, name), found in known.items():
            if shape.variants[name].refused or shape.variants[name].memory != found.memory:
                shape.known.searched.clear()  # it is not what it was, so the search may find others
        return bool(known)

    def _prepare(self, limit: int) -> None:
        """Propose sets, read and compile those that are worth it."""
        if any(shape.whole for shape in self._distinct):
            self._prepare_whole(limit)
        else:
            self._prepare_layers(limit)

    def _prepare_layers(self, limit: int) -> None:
        """Propose sets, and read and compile those of the fastest choice that fits."""
        for shape in self._distinct:
            shape.make_least()
            shape.propose_front()
        self._try_pytorchs(limit)
        rounds = 0
        while rounds < _ROUNDS:
            choice = fastest_within(self.moments, self._options(), limit)
            if choice is not None and not self._is_worth(choice, limit):
                break
            if choice is not None and self._advance(choice):
                continue  # with what code takes, measured times, and without what was refused
            rounds += 1
            if not (self._lean_further() if choice is None else self._refine(choice)):
                break
        for shape in self._distinct:
            self._time(shape, list(shape.variants))

    def _try_pytorchs(self, limit: int) -> None:
        """Read what PyTorch would save in all layers alike under the largest of its memory budgets that fits.

        By sums of ops it may look too slow to be tried. Where code has no price, it is compiled too. It is timed with
        what is compiled next, as each timing runs the plain variant as well.
        """
        priced = all(shape.variants[PLAIN].code_ms for shape in self._distinct)

        def alike(budget: int) -> dict[str, str]:
            return {layer: shape.name_of(shape.pytorchs[budget]) for layer, shape in self.shapes.items()}

        for budget in reversed(range(min(len(shape.pytorchs) for shape in self._distinct))):
            while all((variants := alike(budget)).values()):
                peak_bytes = peak_of(self.moments, self._options(), variants)
                if peak_bytes > limit:
                    break
                if not self._advance(Choice(variants, peak_bytes, 0.0), kernels=not priced, times=False):
                    return

    def _is_worth(self, choice: Choice, limit: int) -> bool:
        """Whether what ``choice`` has that is not compiled is worth the seconds that takes: times are only believed."""
        chosen = [(self.shapes[layer], name) for layer, name in choice.variants.items()]
        if all(name in shape.variants and shape.variants[name].is_tried for shape, name in chosen):
            return True
        ready = fastest_within(self.moments, self._options(ready=True), limit)
        return ready is None or choice.layers_ms <= (1 - _WORTH) * ready.layers_ms

    def _prepare_whole(self, limit: int) -> None:
        """The model as one graph: read the sets that come close to the limit from below, and compile the fastest.

        Where it is refused, sets that take somewhat less come in its place; where all that stores least is, sets that
        store somewhat more.
        """
        (shape,) = self._distinct
        for share in _IN_PLACE_OF_REFUSED:
            self._read_near(shape, int(share * limit))
            choice = fastest_within(self.moments, self._options(), limit)
            if choice is None:
                break
            self._advance(choice)
            usable = {name for name, v in shape.variants.items() if v.is_tried and not v.refused}
            if not usable.isdisjoint(choice.variants.values()):
                return
        shape.make_least()
        least = shape.variants.get(LEAST)
        if least is not None and least.refused:
            for share in _ABOVE_REFUSED:
                self._read_near(shape, int(share * self._step_peak(least)))

    def _step_peak(self, variant: Variant) -> int:
        """Of the model as one graph, by its code."""
        (layer,) = self.shapes
        return peak_of(self.moments, self._options(refused=True), {layer: variant.name})

    def _read_near(self, shape: LayerShape, limit: int) -> None:
        between = [m.live_bytes + m.extra_bytes for m in self.moments if m.kind == BETWEEN and m.open]
        shape.read_near(limit, self._step_peak, max(between, default=0))

    def _left_out(self) -> str:
        reasons = [f"{name}: {v.refused}" for s in self._distinct for name, v in s.variants.items() if v.refused]
        if not reasons:
            return ""
        return (
            f"\n{len(reasons)} variants were left out, the first of them {reasons[0]}. In bfloat16 and float16, "
            "round_as_eager=True makes more of them agree."
        )

    def _leanest(self) -> Choice:
        """The choice with the lowest peak, all code read that decides over it."""
        while True:
            choice = least_peak(self.moments, self._options())
            if not self._advance(choice, kernels=False):
                return choice

    def _advance(self, choice: Choice, *, kernels: bool = True, times: bool = True) -> bool:
        """Read the code of what is chosen, or compile it once all is read. Whether there was anything to do."""
        chosen = {(self.shapes[layer], name) for layer, name in choice.variants.items()}
        unread = [(shape, name) for shape, name in chosen if name in shape.proposed]
        for shape, name in unread:
            shape.read(name)
            read = shape.variants.get(name)
            if read is not None and read.refused:
                self.refused.append(f"{name}: {read.refused}")
            elif kernels and read is not None:  # compilers begin: with these bytes it is mostly chosen again
                read.kernels.begin()
        if unread or not kernels:
            return bool(unread)
        uncompiled = [(shape, name) for shape, name in chosen if not shape.variants[name].is_tried]
        self._compile(uncompiled, times=times)
        return bool(uncompiled)

    def _options(self, *, ready: bool = False, refused: bool = False) -> dict[str, list[Option]]:
        """By layer; ``ready``: only what is compiled; ``refused``: what was left out too."""
        by_shape = {
            (id(shape), held): _options_of(shape, ready=ready, refused=refused, outputs_held=held)
            for shape in self._distinct
            for held in (True, False)
        }
        return {layer: by_shape[id(shape), layer in self._handed_on] for layer, shape in self.shapes.items()}

    def _choice_of(self, variants: dict[str, str]) -> Choice:
        options = self._options(ready=True)
        ms = {(layer, o.name): o.step_ms for layer, found in options.items() for o in found}
        return Choice(variants, peak_of(self.moments, options, variants), sum(ms[item] for item in variants.items()))

    def _time(self, shape: LayerShape, names: Collection[str] = ()) -> bool:
        """Time the plain variant and these, where they are compiled and untimed. Whether there were any."""
        plain = shape.variants[PLAIN]
        wanted = [shape.variants[name] for name in dict.fromkeys([PLAIN, *names])]
        untimed = [v for v in wanted if v.run is not None and not v.refused and not v.step_ms]
        if untimed:
            measure_ms(shape.captured, plain, [v for v in untimed if v is not plain])
        return bool(untimed)

    def _compile(self, chosen: Collection[tuple[LayerShape, str]], *, times: bool = True) -> None:
        """Compile variants that were only read, all at once; prove them, and time what is compiled and untimed."""
        for shape in self._distinct:
            read = [shape.variants[name] for of, name in chosen if of is shape]
            made = [shape.captured.compiled(variant) for variant in read]
            reasons = why_not_equal(shape.captured, made, shape.variants[PLAIN]) if made else []
            for before, variant, reason in zip(read, made, reasons, strict=True):
                self._take(shape, before, variant, reason)
        for shape in {shape: None for shape, _ in chosen} if times else ():
            self._time(shape, [name for of, name in chosen if of is shape] if shape.whole else list(shape.variants))

    def _take(self, shape: LayerShape, read: Variant, variant: Variant, why_not: str) -> None:
        """``variant`` in the place of what was only read of it."""
        variant.refused = why_not
        if variant.memory == read.memory:
            variant.take_time_of(read)
        shape.variants[variant.name] = variant
        if variant.refused:
            self.refused.append(f"{variant.name}: {variant.refused}")
        elif variant.memory != read.memory:
            self.refused.append(
                f"{variant.name}: its code took other bytes when it was compiled; the second reading counts"
            )

    def _refine(self, choice: Choice) -> bool:
        """Propose sets between each chosen one and the next larger. Whether there are new ones."""
        found = False
        for shape in self._distinct:
            layer = shape.captured.layer
            assert layer is not None
            chosen = {choice.variants[name] for name, s in self.shapes.items() if s is shape}
            sizes = sorted({option.stored_bytes for option in _options_of(shape, ready=False)})
            wanted = []
            for name in chosen:
                mine = shape.variants[name].memory.stored_bytes
                larger = [size for size in sizes if size > mine]
                wanted += [(mine + size) // 2 for size in larger[:1]]
            sets = [saved_sets.within(layer, size, None) for size in wanted]
            found |= shape.propose([s for s in sets if s is not None])
        return found

    def _lean_further(self) -> bool:
        """Propose sets with a lower peak in backward than all that were read. Whether there are new ones."""
        found = False
        for shape in self._distinct:
            layer = shape.captured.layer
            assert layer is not None
            sets = []
            for option in sorted(_options_of(shape, ready=False), key=lambda o: o.stored_bytes)[:3]:
                peak = option.stored_bytes + option.backward_bytes
                sets.append(saved_sets.within(layer, option.stored_bytes, int(_LEANER * peak)))
                sets.append(saved_sets.within(layer, int(1.5 * option.stored_bytes), int(_LEANER * peak)))
            found |= shape.propose([s for s in sets if s is not None])
        return found

    def _plan_of(self, choice: Choice, limit: int | None, plain_bytes: int, start_s: float) -> CompiledPlan:
        plain_ms = sum(shape.variants[PLAIN].step_ms for shape in self.shapes.values())
        counts: dict[tuple[int, str], list[str]] = {}
        for layer, name in choice.variants.items():
            counts.setdefault((id(self.shapes[layer]), name), []).append(layer)
        used: list[PlannedVariant] = []
        for (_, name), layers in counts.items():
            shape = self.shapes[layers[0]]
            memory, step_ms = shape.variants[name].memory, _expected_ms(shape, shape.variants[name])
            used.append(PlannedVariant(name, len(layers), memory.stored_bytes, memory.backward_peak_bytes, step_ms))
        moment = peak_moment(self.moments, self._options(ready=True), choice.variants)
        inside = decisions_of(self.shapes, choice.variants)
        return CompiledPlan(
            method=COMPILED,
            decisions=tuple(inside.decisions),
            frames=tuple(inside.frames),
            ops=tuple(inside.ops),
            graph_fingerprint="",  # no traced step's
            budget_bytes=None if limit is None else limit + self.resident_bytes,
            predicted_peak_bytes=self.resident_bytes + choice.peak_bytes,
            plain_peak_bytes=plain_bytes,
            resident_bytes=self.resident_bytes,
            predicted_step_ms=choice.layers_ms,
            plain_step_ms=plain_ms,
            bound_ms=None,
            status="feasible",
            region="layers",
            solve_s=time.perf_counter() - start_s,
            device=self._distinct[0].captured.device.type,
            evidence=evidence_of(moment),
            margin_bytes=self.margin_bytes,
            layers=dict(choice.variants),
            variants=tuple(used),
            at_peak="" if moment is None else f"{moment.kind} {moment.layer}".strip(),
            refused=tuple(dict.fromkeys([*self.refused, *(r for s in self._distinct for r in s.unreadable.values())])),
        )


def _options_of(shape: LayerShape, *, ready: bool, refused: bool = False, outputs_held: bool = True) -> list[Option]:
    """Bytes and time of each variant: by its code where that was read, else by the solver's estimate.

    Args:
        outputs_held: By a next layer, whatever this one saves.
    """
    found = [
        Option(
            name,
            _stored_bytes(v, outputs_held),
            v.memory.forward_peak_bytes,
            v.memory.backward_peak_bytes,
            _expected_ms(shape, v),
        )
        for name, v in shape.variants.items()
        if (refused or not v.refused) and (v.is_tried or not ready)
    ]
    for name, saved in [] if ready else list(shape.proposed.items()):
        beyond = max(0, saved.backward_bytes - saved.stored_bytes)
        found.append(Option(name, saved.stored_bytes, saved.forward_bytes, beyond, _believed_ms(shape, saved)))
    return found


def _expected_ms(shape: LayerShape, variant: Variant) -> float:
    """Time of a layer's step under a variant that has code: as measured, drawn towards what the others make believe;
    only what they make believe where it has not run.

    Of several variants the choice takes the one that was lucky when it was timed, so times would be too short where
    samples differ much. What is measured counts by its error. What is believed is in proportion to what the variant
    computes besides, as it is of the others, and counts by how far that is off mostly.
    """
    if not variant.step_ms:
        return _believed_ms(shape, variant.saved, variant.code_ms)
    plain = shape.variants[PLAIN]
    ran = _ran(shape, variant.code_ms, without=variant)
    if not variant.error or not ran:
        return variant.step_ms
    slope = sum(w * extra * took for extra, took, w in ran) / sum(w * extra**2 for extra, _, w in ran)
    extra_ms = max(0.0, slope) * _extra_ms(shape, variant.saved, variant.code_ms)
    error_ms = variant.error * variant.step_ms
    belief_error_ms = max(_BELIEF_ERROR * plain.step_ms, _BELIEF_ERROR_OF_EXTRA * extra_ms)
    share = belief_error_ms**2 / (error_ms**2 + belief_error_ms**2)
    return share * variant.step_ms + (1 - share) * (plain.step_ms + extra_ms)


def _believed_ms(shape: LayerShape, saved: SavedSet, code_ms: float = 0.0) -> float:
    """Estimated time of a layer's step under a variant that has not run.

    What it takes beyond the plain one is by its code, or by the sum of its ops where there is no code yet, which is too
    much, since fused ops take less time than alone, and never too little. Variants that have run say how much too much:
    the more a variant computes, the longer its step, and what was measured otherwise is spread over its neighbours.
    """
    plain, own = shape.variants[PLAIN], _extra_ms(shape, saved, code_ms)
    ran = _ran(shape, code_ms)
    if not ran:
        return plain.step_ms + own
    extras, took, weights = zip(*ran, strict=True)
    extras, took = (0.0, *extras), (0.0, *_rising(took, weights))
    believed = own * took[-1] / extras[-1] if own > extras[-1] else float(np.interp(own, extras, took))
    return plain.step_ms + (believed if code_ms else min(own, believed))


def _extra_ms(shape: LayerShape, saved: SavedSet, code_ms: float) -> float:
    """What a variant computes beyond the plain one: by its code, or by the sum of its ops where that has no price."""
    return code_ms - shape.variants[PLAIN].code_ms if code_ms else saved.recompute_ms


def _ran(shape: LayerShape, code_ms: float, without: Variant | None = None) -> list[tuple[float, float, float]]:
    """Of the variants that have run and compute more than the plain one, the least first: what they compute and take
    beyond it, and how much that counts.

    Args:
        code_ms: Of the variant that is asked for: 0 where it goes by sums of ops.
    """
    plain = shape.variants[PLAIN]
    return sorted(
        (extra, v.step_ms - plain.step_ms, 1.0 / max(v.error, _LEAST_ERROR) ** 2)
        for v in shape.variants.values()
        if v.step_ms and v is not plain and v is not without
        if (extra := _extra_ms(shape, v.saved, v.code_ms if code_ms else 0.0)) > 0
    )


def _rising(numbers: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The numbers from zero up that never fall and are closest to ``numbers`` by squares: those that fall are pooled.

    Ayer et al., "An Empirical Distribution Function for Sampling with Incomplete Information", 1955,
    https://doi.org/10.1214/aoms/1177728423.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for number, weight in zip(numbers, weights, strict=True):
        pools.append((number, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, its, few), (other, theirs, more) = pools[-2:]
            pools[-2:] = [((one * its + other * theirs) / (its + theirs), its + theirs, few + more)]
    return [max(0.0, mean) for mean, _, count in pools for _ in range(count)]


def _stored_bytes(variant: Variant, outputs_held: bool) -> int:
    return variant.memory.stored_bytes + (0 if outputs_held else variant.memory.saved_output_bytes)
