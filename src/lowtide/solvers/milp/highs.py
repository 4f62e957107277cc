"""Mixed-integer linear programs, built as flat arrays and handed to HiGHS in one call.

HiGHS: Huangfu and Hall 2018, "Parallelizing the dual revised simplex method", https://highs.dev
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import highspy
import numpy as np

from lowtide.solvers import tuning

INFINITY = math.inf
Array = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class MilpResult:
    """What HiGHS found."""

    status: str  # ``optimal`` (within the gap), ``limit`` (nodes or time ran out) or ``infeasible``
    values: np.ndarray  # by column; empty when nothing was found
    objective: float  # of ``values``; infinite when nothing was found
    bound: float  # no solution has a smaller objective
    iterations: int  # of the simplex method: time by count


@dataclass(frozen=True)
class LpResult:
    """The linear relaxation: its optimum, values by column, dual prices by row.

    The optimum is infinite where no values satisfy the rows, and NaN where HiGHS could not tell.
    """

    objective: float
    values: np.ndarray
    duals: np.ndarray


class LinearProgram:
    """min cost x, lower <= rows x <= upper, 0 <= x <= 1 unless said otherwise."""

    def __init__(self) -> None:
        self.cost, self.upper, self.integer = list[float](), list[float](), list[bool]()
        self.row_lower, self.row_upper = list[float](), list[float]()
        self._starts, self._columns, self._values = [0], list[int](), list[float]()
        self._lazy: set[int] = set()

    def column(self, cost: float = 0.0, *, upper: float = 1.0, integer: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(
        self, terms: dict[int, float], *, lower: float = -INFINITY, upper: float = INFINITY, lazy: bool = False
    ) -> int:
        """Add a row; a lazy one may be left out by ``relax`` where it would hardly matter."""
        if lazy:
            self._lazy.add(len(self.row_upper))
        self._columns += terms.keys()
        self._values += terms.values()
        self._starts.append(len(self._columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return len(self.row_upper) - 1

    def activity(self, row: int, values: np.ndarray) -> float:
        """The row's left-hand side at ``values``; columns added since count as 0."""
        span = slice(self._starts[row], self._starts[row + 1])
        return sum(
            v * float(values[c])
            for c, v in zip(self._columns[span], self._values[span], strict=True)
            if c < len(values)
        )

    def minimise(
        self,
        *,
        gap: float,
        slack: float,
        node_limit: int,
        time_limit_s: float,
        light: bool = False,
        first: bool = False,
        cutoff: float = INFINITY,
    ) -> MilpResult:
        """Solve; the same program and node limit give the same answer as long as time does not run out.

        Args:
            light: Without presolve, feasibility jump and the searches of neighbourhoods that are programs of their own:
                a third of the time on small programs whose root is nearly the optimum; large ones need them.
            first: Stop at the first solution, and do not look hard for one: for a proof that there is none.
            cutoff: Solutions above this objective are not looked for; a row has to forbid them all the same.
        """
        options: dict[str, bool | int | float | str] = {
            # One seed: the same plan every time.
            "random_seed": 0, "mip_rel_gap": gap, "mip_abs_gap": slack, "mip_max_nodes": node_limit,
            "time_limit": time_limit_s, "objective_bound": cutoff,
        }  # fmt: skip
        if light or first:
            options |= {"mip_heuristic_run_rins": False, "mip_heuristic_run_rens": False}
        if light:
            options |= {"presolve": "off", "mip_heuristic_run_feasibility_jump": False}
        if first:
            options |= {
                "mip_max_improving_sols": 1, "mip_allow_restart": False, "mip_heuristic_effort": 0.0,
                "mip_heuristic_run_root_reduced_cost": False, "mip_heuristic_run_feasibility_jump": False,
            }  # fmt: skip
        solver = _quiet_solver(options)
        solver.passModel(self._model(self._rows()))
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else np.zeros(0)
        statuses = {highspy.HighsModelStatus.kOptimal: "optimal", highspy.HighsModelStatus.kInfeasible: "infeasible"}
        pure_lp = not any(self.integer)
        bound = info.objective_function_value if pure_lp and found else info.mip_dual_bound
        objective = info.objective_function_value if found else INFINITY
        return MilpResult(statuses.get(status, "limit"), values, objective, bound, info.simplex_iteration_count)

    def relax(self) -> LpResult:
        """Solve without integrality.

        Lazy rows come in as the optimum of the others breaks them; in a large program only as long as that moves it,
        since every optimum on the way is a lower bound of the last. A small program has all rows from the start.
        """
        solver = _quiet_solver({})
        matrix = self._rows()
        lazy = self._lazy if len(self.row_upper) > tuning.LAZY_ROWS_SMALL else set[int]()
        rows = [row for row in range(len(self.row_upper)) if row not in lazy]
        model = self._model(matrix.take(rows))
        model.integrality_ = []
        solver.passModel(model)
        waiting = np.array(sorted(lazy), dtype=np.int64)
        pending = matrix.take(waiting)
        optimum, large = -INFINITY, len(self.row_upper) > tuning.LAZY_ROWS_LARGE
        while True:
            solver.run()
            status, before = solver.getModelStatus(), optimum
            if status == highspy.HighsModelStatus.kOptimal:
                optimum = solver.getInfo().objective_function_value
            else:
                optimum = INFINITY if status == highspy.HighsModelStatus.kInfeasible else math.nan
            values = np.array(solver.getSolution().col_value)
            if not len(waiting) or not math.isfinite(optimum):
                break
            if large and optimum > 0 and optimum - before <= tuning.LAZY_ROWS_GAIN * optimum:
                break
            broken = pending.broken(values)
            if not broken.any():
                break
            rows += waiting[broken].tolist()
            new = pending.take(broken)
            solver.addRows(
                len(new.lower), new.lower, new.upper, len(new.columns), new.starts[:-1], new.columns, new.values
            )
            waiting, pending = waiting[~broken], pending.take(~broken)
        duals = np.zeros(len(self.row_upper))
        found = np.array(solver.getSolution().row_dual)
        duals[rows[: len(found)]] = found
        return LpResult(optimum, values, duals)

    def copy(self) -> LinearProgram:
        """The same program, to which rows can be added apart."""
        other = copy(self)
        for name, value in vars(self).items():
            setattr(other, name, value.copy())
        return other

    def _rows(self) -> _Rows:
        return _Rows(self._starts, self._columns, self._values, self.row_lower, self.row_upper)

    def _model(self, rows: _Rows) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(rows.lower)
        lp.col_cost_ = np.array(self.cost, dtype=np.float64)
        lp.col_lower_ = np.zeros(len(self.cost))
        lp.col_upper_ = np.array(self.upper, dtype=np.float64)
        lp.row_lower_, lp.row_upper_ = rows.lower, rows.upper
        kind = highspy.HighsVarType
        lp.integrality_ = [kind.kInteger if i else kind.kContinuous for i in self.integer]
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = lp.num_col_, lp.num_row_
        matrix.start_, matrix.index_, matrix.value_ = rows.starts, rows.columns, rows.values
        return lp


class RepeatedRelaxation:
    """The relaxation of one program, solved again and again from the last basis as its costs and limits change.

    Attributes:
        pivots: Iterations of the simplex method so far: a count that stands in for a clock.
    """

    def __init__(self, program: LinearProgram) -> None:
        self._solver = _quiet_solver({})
        self.pivots = 0
        model = program._model(program._rows())
        model.integrality_ = []
        self._solver.passModel(model)
        self._row_upper = list(program.row_upper)

    def values(self, program: LinearProgram) -> np.ndarray:
        """The optimal values for the present costs and upper row limits of ``program``; empty where there are none.

        Nothing else of the program may have changed.
        """
        solver, columns = self._solver, len(program.cost)
        solver.changeColsCost(columns, np.arange(columns, dtype=np.int32), np.array(program.cost, dtype=np.float64))
        for row, upper in enumerate(program.row_upper):
            if upper != self._row_upper[row]:
                solver.changeRowBounds(row, program.row_lower[row], upper)
        self._row_upper = list(program.row_upper)
        solver.run()
        self.pivots += solver.getInfo().simplex_iteration_count
        optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return np.array(solver.getSolution().col_value) if optimal else np.zeros(0)


def _quiet_solver(options: Mapping[str, bool | int | float | str]) -> highspy.Highs:
    """HiGHS on one thread, so that it gives the same answer every time."""
    solver = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, **options}.items():
        solver.setOptionValue(name, value)
    return solver


def seconds_left(deadline: float) -> float:
    """Seconds until ``deadline`` (of ``time.perf_counter()``), and always enough to begin."""
    return max(deadline - time.perf_counter(), 0.1)


class _Rows:
    """Some rows as arrays: entries one after the other, row i from ``starts[i]`` to ``starts[i + 1]``."""

    def __init__(self, starts: Array, columns: Array, values: Array, lower: Array, upper: Array) -> None:
        self.starts = np.asarray(starts, dtype=np.int32)
        self.columns = np.asarray(columns, dtype=np.int32)
        self.values = np.asarray(values, dtype=np.float64)
        self.lower = np.asarray(lower, dtype=np.float64)
        self.upper = np.asarray(upper, dtype=np.float64)

    def take(self, rows: Sequence[int] | np.ndarray) -> _Rows:
        """Those rows: by number, or by a mask."""
        begin, length = self.starts[:-1][rows], np.diff(self.starts)[rows]
        ends = np.cumsum(length)
        taken = np.repeat(begin - ends + length, length) + np.arange(length.sum())
        starts = np.concatenate([[0], ends])
        return _Rows(starts, self.columns[taken], self.values[taken], self.lower[rows], self.upper[rows])

    def broken(self, values: np.ndarray) -> np.ndarray:
        """Which rows do not hold at ``values``, as a mask."""
        sums = np.add.reduceat(np.append(self.values * values[self.columns], 0.0), self.starts[:-1])
        return np.maximum(self.lower - sums, sums - self.upper) > tuning.ROW_TOLERANCE
