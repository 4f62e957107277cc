"""Checkpointing of a chain whose steps differ: the dynamic program of rotor.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", https://hal.inria.fr/hal-02352969 (ACM TOMS 50(2), 2024). Symbols are in
``chain.py``. C(s, t, m) is the least time of forward and backward through stages s..t within m bytes, where a^(s-1) is
there already and not counted in m, and δ^t is:

    C(s, s, m) = u_f^s + u_b^s                                                           if m >= m_all
    C(s, t, m) = min of
        C1: Σ_{k=s..s'-1} u_f^k + C(s', t, m - ω(a^(s'-1))) + C(s, s'-1, m), s < s' <= t  if m >= m_∅
            (F_ck^s, F_∅ up to a new checkpoint, then the right part, then the left one)
        C2: u_f^s + C(s+1, t, m - ω(ā^s)) + u_b^s                                        if m >= m_all
            (F_all^s, then the rest, then B^s)

Optimal among *persistent* schedules, those that keep what they store until its backward; the paper shows that others
may be faster.

Differs: stages are repeated layers with what stands before and after them (``chain.py`` says how times and bytes are
read off a step), o_f is one number for a run that keeps everything and another for one that does not, and m_∅ looks at
the stages that a run passes through only. Published as a plan for one memory limit; here the plans of every limit are
simulated, and the fastest whose peak fits is taken, because the tape frees some values earlier than the model says.

Known weakness: of each layer it keeps either everything or only the input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.solvers import tuning
from lowtide.solvers.published.chain import ALL, BACKWARD, CK, EMPTY, Stage, Step, StepChain
from lowtide.solvers.published.lazy_candidates import LazyCandidate
from lowtide.solvers.search_context import SearchContext


@dataclass(frozen=True)
class Table:
    """C(s, t, m) of one chain, for m = 0, 1, ... units.

    Attributes:
        unit_bytes: Sizes are rounded up to multiples of it: 1 is exact.
        time_ms: ``(stages, stages, units + 1)``; infinite where nothing fits.
        choice: The s' of C1, or s for C2 and for a single stage.
        outputs, saved: ω(a^k) and ω(ā^k) in units.
    """

    unit_bytes: int
    time_ms: np.ndarray
    choice: np.ndarray
    outputs: list[int]
    saved: list[int]

    def least_ms(self, limit_bytes: int) -> float:
        """Least time of the whole chain within ``limit_bytes``, its input not counted; infinite if there is none."""
        return float(self.time_ms[0, -1, min(limit_bytes // self.unit_bytes, self.time_ms.shape[2] - 1)])

    def schedule(self, units: int) -> list[Step]:
        """The schedule behind ``time_ms[0, -1, units]``, which must be finite."""
        found: list[Step] = []
        parts: list[Step | tuple[int, int, int]] = [(0, len(self.outputs) - 1, units)]
        while parts:
            part = parts.pop()
            if isinstance(part, Step):
                found.append(part)
                continue
            s, t, m = part
            middle = int(self.choice[s, t, m])
            if middle == s:
                found.append(Step(ALL, s))
                parts.append(Step(BACKWARD, s))
                if s < t:
                    parts.append((s + 1, t, m - self.saved[s]))
            else:
                found += [Step(CK, s), *(Step(EMPTY, k) for k in range(s + 1, middle))]
                parts += [(s, middle - 1, m), (middle, t, m - self.outputs[middle - 1])]
        return found


def tabulate(stages: Sequence[Stage], units: int, unit_bytes: int = 1) -> Table:
    """Solve the dynamic program for every limit up to ``units`` times ``unit_bytes``."""

    def rounded(count: int) -> int:
        return -(-count // unit_bytes)

    n = len(stages)
    a = [rounded(x.output_bytes) for x in stages]
    a_bar = [rounded(x.saved_bytes) for x in stages]
    delta = [rounded(x.gradient_bytes) for x in stages]
    o_run = [rounded(x.run_overhead_bytes) for x in stages]
    o_save = [rounded(x.save_overhead_bytes) for x in stages]
    o_b = [rounded(x.backward_overhead_bytes) for x in stages]
    u_f, u_b = [x.forward_ms for x in stages], [x.backward_ms for x in stages]

    m = np.arange(units + 1)
    time_ms = np.full((n, n, units + 1), np.inf)
    choice = np.zeros((n, n, units + 1), dtype=np.int32)
    right = np.full((n, n, units + 1), np.inf)  # right[s', t, m] = C(s', t, m - ω(a^(s'-1)))

    for t in range(n):
        for s in range(t, -1, -1):
            m_all = max(delta[t] + a_bar[s] + o_save[s], delta[s] + a_bar[s] + o_b[s])
            if s == t:
                best = np.full(units + 1, u_f[s] + u_b[s])
            else:
                best = u_f[s] + _less(time_ms[s + 1, t], a_bar[s]) + u_b[s]
            best[m < m_all] = np.inf
            chosen = np.full(units + 1, s, dtype=np.int32)
            if s < t:
                # Row k - s is the choice s' = k + 1, after a run through stages s..k.
                passing = [delta[t] + (a[k - 1] if k > s else 0) + a[k] + o_run[k] for k in range(s, t)]
                c1 = np.cumsum(u_f[s:t])[:, None] + right[s + 1 : t + 1, t] + time_ms[s, s:t]
                c1[m < np.maximum.accumulate(passing)[:, None]] = np.inf
                place = c1.argmin(axis=0)
                c1_best = c1[place, m]
                chosen = np.where(c1_best < best, s + 1 + place, chosen)
                best = np.minimum(best, c1_best)
            time_ms[s, t], choice[s, t] = best, chosen
            if s:
                right[s, t] = _less(best, a[s - 1])
    return Table(unit_bytes, time_ms, choice, a, a_bar)


def _less(times: np.ndarray, units: int) -> np.ndarray:
    """``times`` with ``units`` less memory."""
    return np.concatenate((np.full(min(units, len(times)), np.inf), times[: max(len(times) - units, 0)]))


def rotor(context: SearchContext) -> list[LazyCandidate]:
    """One plan per schedule that is optimal for some memory limit.

    Raises:
        ValueError: no layer repeats.
    """
    chain = StepChain(context, "rotor")
    stages = chain.stages()
    most = _enough_bytes(stages)
    table = tabulate(stages, tuning.ROTOR_UNITS + 2 * len(stages), max(-(-most // tuning.ROTOR_UNITS), 1))
    whole = table.time_ms[0, -1]
    schedules: dict[tuple[Step, ...], None] = {}
    for units in np.flatnonzero(np.isfinite(whole))[::-1]:
        schedules.setdefault(tuple(table.schedule(int(units))))
    return [chain.lazy_candidate(schedule) for schedule in schedules]


def _enough_bytes(stages: Sequence[Stage]) -> int:
    """Within so many bytes everything can be saved."""
    held = most = 0
    last = stages[-1].gradient_bytes
    for x in stages:
        held += x.saved_bytes
        most = max(most, held + max(last + x.save_overhead_bytes, x.gradient_bytes + x.backward_overhead_bytes))
    return most
