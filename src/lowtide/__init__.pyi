"""The public names and where each lives: read by type checkers, and by ``__init__.py`` to load a name on first use."""

from lowtide.api import fit as fit
from lowtide.compiled.compiled_model import CompiledModel as CompiledModel
from lowtide.compiled.compiled_model import compile as compile
from lowtide.compiled.compiled_plan import CompiledPlan as CompiledPlan
from lowtide.doctor.diagnosis import Diagnosis as Diagnosis
from lowtide.doctor.diagnosis import diagnose as diagnose
from lowtide.doctor.finding import Finding as Finding
from lowtide.errors import BudgetExceededError as BudgetExceededError
from lowtide.errors import BudgetInfeasibleError as BudgetInfeasibleError
from lowtide.errors import GraphFormatError as GraphFormatError
from lowtide.errors import IntegrationError as IntegrationError
from lowtide.errors import LowtideError as LowtideError
from lowtide.errors import PlanMismatchError as PlanMismatchError
from lowtide.errors import PlannerFailedError as PlannerFailedError
from lowtide.errors import ReplayError as ReplayError
from lowtide.errors import SettingsError as SettingsError
from lowtide.errors import StepError as StepError
from lowtide.errors import TierError as TierError
from lowtide.errors import UnsupportedModelError as UnsupportedModelError
from lowtide.estimation.roofline import estimate as estimate
from lowtide.graph.costs import Costs as Costs
from lowtide.graph.step_graph import StepGraph as StepGraph
from lowtide.measurement.op_times import measure as measure
from lowtide.options import Offload as Offload
from lowtide.plan import Plan as Plan
from lowtide.pretending.calls import pretend as pretend
from lowtide.pretending.outcome import PretendReport as PretendReport
from lowtide.settings.settings_plan import from_settings as from_settings
from lowtide.simulation.simulator import Timeline as Timeline
from lowtide.simulation.simulator import simulate as simulate
from lowtide.solvers.dispatch import solve as solve
from lowtide.solvers.pareto_front import FrontierPoint as FrontierPoint
from lowtide.solvers.pareto_front import frontier as frontier
from lowtide.tape.attach import apply as apply
from lowtide.tracing.sources import trace as trace
from lowtide.training.checkpointed_call import checkpoint as checkpoint
from lowtide.training.checkpointed_call import checkpoint_sequential as checkpoint_sequential
from lowtide.training.fitted_model import Fit as Fit
from lowtide.training.status import Status as Status
from lowtide.verifier import Verification as Verification
from lowtide.verifier import verify as verify

__version__: str
__all__: list[str]
