"""Mixed-integer linear programs, built as flat arrays and handed to HiGHS in one call.

HiGHS: Huangfu and Hall 2018, "Parallelizing the dual revised simplex method", https://highs.dev
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import highspy
import numpy as np

INFINITY = math.inf


@dataclass(frozen=True)
class Answer:
    """What HiGHS found.

    Attributes:
        status: ``optimal`` (within the gap), ``limit`` (nodes or time ran out) or ``infeasible``.
        values: By column; empty when nothing was found.
        objective: Of ``values``; infinite when nothing was found.
        bound: No solution has a smaller objective.
    """

    status: str
    values: np.ndarray
    objective: float
    bound: float


@dataclass(frozen=True)
class Relaxed:
    """The linear relaxation: its optimum, values by column, dual prices by row.

    The optimum is infinite where no values satisfy the rows, and NaN where HiGHS could not tell.
    """

    objective: float
    values: np.ndarray
    duals: np.ndarray


class Program:
    """min cost x, lower <= rows x <= upper, 0 <= x <= 1 unless said otherwise."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._values: list[float] = []

    def column(self, cost: float = 0.0, *, upper: float = 1.0, integer: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], *, lower: float = -INFINITY, upper: float = INFINITY) -> int:
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

    def minimise(self, *, gap: float, slack: float, node_limit: int, time_limit_s: float) -> Answer:
        """Solve; the same program and node limit give the same answer as long as time does not run out."""
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        # One thread and one seed: the same plan every time.
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("mip_abs_gap", slack)
        solver.setOptionValue("mip_max_nodes", node_limit)
        solver.setOptionValue("time_limit", time_limit_s)
        solver.passModel(self._model())
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else np.zeros(0)
        if status == highspy.HighsModelStatus.kOptimal:
            verdict = "optimal"
        elif status == highspy.HighsModelStatus.kInfeasible:
            verdict = "infeasible"
        else:
            verdict = "limit"
        pure_lp = not any(self.integer)
        bound = info.objective_function_value if pure_lp and found else info.mip_dual_bound
        return Answer(verdict, values, info.objective_function_value if found else INFINITY, bound)

    def relax(self) -> Relaxed:
        """Solve without integrality."""
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        model = self._model()
        model.integrality_ = []
        solver.passModel(model)
        solver.run()
        solution = solver.getSolution()
        status, optimum = solver.getModelStatus(), math.nan
        if status == highspy.HighsModelStatus.kOptimal:
            optimum = solver.getInfo().objective_function_value
        elif status == highspy.HighsModelStatus.kInfeasible:
            optimum = INFINITY
        return Relaxed(optimum, np.array(solution.col_value), np.array(solution.row_dual))

    def _model(self) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.row_upper)
        lp.col_cost_ = np.array(self.cost, dtype=np.float64)
        lp.col_lower_ = np.zeros(len(self.cost))
        lp.col_upper_ = np.array(self.upper, dtype=np.float64)
        lp.row_lower_ = np.array(self.row_lower, dtype=np.float64)
        lp.row_upper_ = np.array(self.row_upper, dtype=np.float64)
        kind = highspy.HighsVarType
        lp.integrality_ = [kind.kInteger if i else kind.kContinuous for i in self.integer]
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = lp.num_col_, lp.num_row_
        matrix.start_ = np.array(self._starts, dtype=np.int32)
        matrix.index_ = np.array(self._columns, dtype=np.int32)
        matrix.value_ = np.array(self._values, dtype=np.float64)
        return lp
