"""The user's training step, run a few times and put back as it was: what the checks look at."""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from lowtide.device.out_of_memory import is_out_of_memory, let_go_of_frames
from lowtide.device.timing import calls_ms
from lowtide.doctor import checkpoint_seam
from lowtide.doctor.finding import Gain
from lowtide.doctor.kept_state import attributes_kept, generators_kept
from lowtide.doctor.outcome import Outcome, copied, distance, on_host, same
from lowtide.doctor.step_listener import CheckpointCall, Held, StepListener
from lowtide.errors import StepError
from lowtide.gc_control import gc_disabled
from lowtide.measurement.allocator import peak_bytes
from lowtide.step import module_calls
from lowtide.step.autograd_leaves import walk
from lowtide.step.batches import call_model, first_rows, rows, without_history
from lowtide.step.data_parallel import unwrapped
from lowtide.step.restore import Gradients, preserve_training_state
from lowtide.tracing.tracer import Step, default_loss, run_step
from lowtide.verifier import suspended

# Opens a change of the step. A module that it yields is called in the model's place.
Change = Callable[[], AbstractContextManager[Any]]
_EQUAL_EPS = 16  # distances below so many units of the coarsest precision in the step are rounding
_MOST_NOISE = 1e-3
_TIMES_NOISE = 10  # a distance has to be, to be no noise


@dataclass(frozen=True)
class Measured:
    """What a step takes."""

    peak_bytes: int
    flops: int


class StepUnderTest:
    """A model, its batch and its step, with what a look at them shows. Everything is found once, when first asked for.

    Attributes:
        model: The module inside DDP or an engine. wrapper: What the user has.
        arguments: A Trainer's arguments, if given. optimizer: Likewise.
        notes: What could not be looked at, and why.
        plain_fits: False where ``plain`` had to be put together from several steps.
    """

    def __init__(
        self, model: nn.Module, batch: Any, step: Step | None = None, *, arguments: Any = None, optimizer: Any = None
    ) -> None:
        self.wrapper, self.model = model, unwrapped(model)
        self.batch, self.step = without_history(batch), step
        self.arguments, self.optimizer = arguments, optimizer
        self.notes: list[str] = []
        self.plain_fits = True
        self.is_compiled = bool(module_calls.compiled_parts(self.model))

    # -- runs -----------------------------------------------------------------------------------------------

    @contextmanager
    def preserved(self, gradients: Gradients = "none") -> Iterator[None]:
        """Inside, steps may run; afterwards all is as before, Python attributes of modules and own generators too."""
        with ExitStack() as stack:
            stack.enter_context(suspended(self.model))
            stack.enter_context(attributes_kept(self.model))
            stack.enter_context(generators_kept(self.model))
            stack.enter_context(preserve_training_state(self.model, self.batch, gradients=gradients))
            stack.enter_context(torch.enable_grad())
            yield

    def run(self, inside: AbstractContextManager[Any] | None = None) -> Outcome:
        """One step from the present state."""
        with self.preserved(), inside or nullcontext():
            loss, output = run_step(self.model, self.batch, self.step)
            loss.backward()
            del output
            return Outcome(
                on_host(loss),
                {n: copied(p.grad) for n, p in self.model.named_parameters() if p.requires_grad},
                {n: on_host(b) for n, b in self.model.named_buffers()},
                torch.get_rng_state(),
            )

    def measured_under(self, change: Change = nullcontext) -> Measured:
        """Peak and floating-point operations of a step inside ``change()``. Gradients are there before, as in every
        step that accumulates."""
        with self.preserved("zeroed"), change() as changed:
            peak = peak_bytes(lambda: self._once(changed), self.device)
        with self.preserved(), change() as changed, self._seen_by(FlopCounterMode(display=False)) as counter:
            self._once(changed)
        return Measured(peak, counter.get_total_flops())

    @contextmanager
    def _seen_by(self, mode: AbstractContextManager[Any]) -> Iterator[Any]:
        """Inside a dispatch mode compiled code runs as it is. Dynamo of PyTorch 2.13 would leave it so for good."""
        with torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext(), mode as entered:
            yield entered

    def _once(self, changed: Any) -> None:
        model = changed if isinstance(changed, nn.Module) else self.model
        loss, _output = run_step(model, self.batch, self.step)  # held while backward runs
        loss.backward()

    def gain(self, mended: Change, sick: Change = nullcontext, rounds: int = 5) -> Gain:
        """What a step inside ``mended()`` needs less than one inside ``sick()``, the step as it is. Times are taken in
        turns, and are no gain unless every turn says the same. A step that fails is told: what was found stays true."""
        try:
            return self._gain(mended, sick, rounds)
        except Exception as error:
            let_go_of_frames(error)
            return Gain(why_not=f"the mended step fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}")

    def _gain(self, mended: Change, sick: Change, rounds: int) -> Gain:
        before = self.measured if sick is nullcontext else self.measured_under(sick)
        less = before.peak_bytes - self.measured_under(mended).peak_bytes
        samples: tuple[list[float], list[float]] = [], []
        for turn in range(1 + rounds):
            for way, taken in list(zip((sick, mended), samples))[:: 1 if turn % 2 else -1]:
                with self.preserved(), way() as changed, gc_disabled():
                    ms = calls_ms(lambda: self._once(changed), 1, self.device, time.process_time)
                taken += [ms] if turn else []  # the first ones warm up
        gained = [a - b for a, b in zip(*samples)]
        agree = min(gained) > 0 or max(gained) < 0
        return Gain(less, statistics.median(gained) if agree else None, statistics.median(samples[0]))

    # -- what is found once ---------------------------------------------------------------------------------

    @functools.cached_property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    @functools.cached_property
    def failure(self) -> Exception | None:
        """What the step as it is set up raises, where the step without checkpointing runs."""
        try:
            self.as_it_is  # noqa: B018
        except Exception as error:
            return error
        return None

    @functools.cached_property
    def as_it_is(self) -> Outcome:
        return self.run()

    @functools.cached_property
    def plain(self) -> Outcome:
        """The same step with every checkpointed call made plain: at once, or each alone where that does not fit."""
        one_by_one = self.failure is None and self.calls and not any(c.parent for c in self.calls)
        try:
            return self.run(checkpoint_seam.plain_calls())
        except Exception as error:
            if not one_by_one or not _can_do_with_less(error):
                raise
            let_go_of_frames(error)
        found = self._plain_one_by_one()
        self.plain_fits = False
        self.notes.append("the plain step does not fit in memory: each checkpointed call was made plain alone")
        return found

    def _plain_one_by_one(self) -> Outcome:
        """The step as it is, but for what is another value with one call or another made plain."""
        now = self.as_it_is
        found = Outcome(now.loss, {**now.gradients}, {**now.buffers}, now.generator)
        for call in self.calls:
            one = self.run(checkpoint_seam.plain_calls({call.number}))
            for name, gradient in one.gradients.items():
                if distance(now.gradients[name], gradient) > distance(now.gradients[name], found.gradients[name]):
                    found.gradients[name] = gradient
            found.buffers.update((n, b) for n, b in one.buffers.items() if not same(b, now.buffers.get(n)))
            found = replace(
                found,
                loss=found.loss if same(one.loss, now.loss) else one.loss,
                generator=found.generator if same(one.generator, now.generator) else one.generator,
            )
        return found

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the step, and what it is compared with, run in the memory that there is."""
        try:
            _ = self.as_it_is, not self.is_compiled and self.calls and self.plain
        except Exception as error:
            if _can_do_with_less(error):
                let_go_of_frames(error)
                return False
        return True

    def fitting(self) -> "StepUnderTest":
        """This set-up with as many rows of the batch as fit, halved until they do; itself where none does."""
        smaller, count = self, rows(self.batch)
        while not smaller.fits:
            count //= 2
            if not count:
                return self
            cut = first_rows(self.batch, count)
            smaller = StepUnderTest(self.wrapper, cut, self.step, arguments=self.arguments, optimizer=self.optimizer)
        if smaller is not self:
            smaller.notes.append(
                f"the whole batch does not fit in memory: {count} of its {rows(self.batch)} rows were used"
            )
        return smaller

    @functools.cached_property
    def seen(self) -> StepListener:
        """The step as it is, observed. Where it fails, what was seen until then."""
        return self._observed(nullcontext())

    def _observed(self, change: AbstractContextManager[Any]) -> StepListener:
        observer = StepListener(self.model, self.batch, compare=True)
        with self.preserved(), self._seen_by(observer.watching()), change:
            try:
                with observer.storing():
                    loss, output = run_step(self.model, self.batch, self.step)
                observer.cache_bytes = _cache_bytes(output)
                observer.nodes = {node.name() for node in walk([loss])}
                observer.in_backward = True
                observer.backward_autocast = torch.is_autocast_enabled(self.device.type)
                loss.backward()
            except Exception:
                if self.failure is None:  # it is in backward, or a plain step that fails: then the checks say so
                    raise
        return observer

    @functools.cached_property
    def calls(self) -> list[CheckpointCall]:
        """Checkpointed calls of the step, in order."""
        return self.seen.calls

    @functools.cached_property
    def measured(self) -> Measured:
        return self.measured_under()

    @functools.cached_property
    def measured_plain(self) -> Measured:
        return self.measured_under(checkpoint_seam.plain_calls)

    @functools.cached_property
    def held(self) -> tuple[list[Held], list[Held]]:
        """Storages of a step that outlive it, after one step and after two."""
        observer, found = StepListener(self.model, self.batch, compare=False, own_lines=True), []
        with self.preserved():
            run_step(self.model, self.batch, self.step)  # sets aside the gradients of other models, and holds leaves
            with self._seen_by(observer.watching()):
                for _ in range(2):
                    output = call_model(self.model, self.batch) if self.step is None else None
                    loss = default_loss(output) if self.step is None else self.step(self.model, self.batch)
                    loss.backward()
                    del loss, output
                    for p in self.model.parameters():
                        p.grad = None
                    gc.collect()
                    found.append(observer.held())
        return found[0], found[1]

    # -- words ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def flagged(self) -> list[str]:
        """Paths of modules whose own flag says that they are checkpointed."""
        own = ((n, m) for n, m in self.model.named_modules() if "gradient_checkpointing" in vars(m))
        return [n for n, m in own if m.gradient_checkpointing is True]

    @functools.cached_property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return self.wrapper if isinstance(self.wrapper, DistributedDataParallel) else None

    @functools.cached_property
    def distance(self) -> float:
        """The largest relative distance of a gradient as it is from that of the plain step; inf where one is missing
        or not finite in one of them alone."""
        return max([distance(self.as_it_is.gradients[n], g) for n, g in self.plain.gradients.items()], default=0.0)

    @property
    def rounding(self) -> float:
        """Distances up to here are rounding."""
        return _EQUAL_EPS * torch.finfo(self.seen.least_precise).eps

    @functools.cached_property
    def differing_again(self) -> list[str]:
        """What differs between two runs of the step from the same state."""
        return self.as_it_is.differing(self._again)

    @functools.cached_property
    def _again(self) -> Outcome:
        return self.run()

    @functools.cached_property
    def noise(self) -> float:
        """The largest relative distance of a gradient between two runs from the same state."""
        return max([distance(self._again.gradients[n], g) for n, g in self.as_it_is.gradients.items()], default=0.0)

    @property
    def unsteady(self) -> bool:
        """The step differs from run to run by more than kernels that add in another order: nothing can be compared."""
        return self.noise > _MOST_NOISE

    @functools.cached_property
    def gradients_differ(self) -> bool:
        """Whether checkpointing changes gradients by more than rounding and noise; it is proven on this step."""
        comparable = self.failure is None and bool(self.calls) and not self.is_compiled and not self.unsteady
        return comparable and self.distance > max(self.rounding, _TIMES_NOISE * self.noise)


def checked(model: Any, batch: Any, step: Step | None) -> None:
    """Raises: TypeError, StepError: there is no step to look at."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not an nn.Module.")
    if not any(p.requires_grad for p in model.parameters()):
        raise StepError("the model has no trainable parameter.\nSet requires_grad=True on what you want to train.")


def _can_do_with_less(error: Exception) -> bool:
    """Whether an allocator has refused this process alone: others would wait for steps that they do not run."""
    refused = is_out_of_memory(error) or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return refused and not (several and torch.distributed.get_world_size() > 1)


def _cache_bytes(output: Any) -> int:
    # Its name is ``cache`` from transformers 5.24 on, which warns where it is asked for by the old one.
    name = next((n for n in ("cache", "past_key_values") if isinstance(output, dict) and n in output), None)
    cache = None if name is None else output[name]
    layers = getattr(cache, "layers", ())
    tensors = [t for layer in layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
