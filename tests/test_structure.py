"""A module imports only from the stages above its own, and plain data stays free of torch."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "lowtide"

# docs/design/index.md says what the order means. A new top-level module gets its place here, in the same commit.
STAGES = (
    "errors", "units", "options", "gc_control", "cache_files", "explanation", "graph", "plan", "simulation", "solvers",
    "models", "scratch_file", "pytorch_internals", "device", "measurement", "estimation", "hollow", "step",
    "recording", "tracing", "shapes", "tape", "side_by_side", "verifier", "rank_consensus", "long_sequences", "reports",
    "planning", "training", "compiled", "argument_checks",
    "settings", "inference", "doctor",
)  # fmt: skip
# They put the stages together, so they see all of them.
ANYTHING = (
    "__init__",
    "__main__",
    "api",
    "cli",
    "scripts",
    "demo",
    "integrations",
    "foresight",
    "pretending",
    "attaching",
    "commands",
)
# These run from JSON on a machine without torch, and can be fuzzed.
PLAIN = STAGES[: STAGES.index("scratch_file")]
# Plain data as well, in packages that hold more.
PLAIN_MODULES = (
    ("device.block_size",)
    + tuple(
        f"shapes.{name}"
        for name in (
            "dimensions",
            "interpolation",
            "block_rounding",
            "shape_family",
            "derived_costs",
            "plain_peak",
            "buckets",
        )
    )
    + ("estimation.device_table", "estimation.op_classes")
)
PUBLIC_FUNCTIONS = {
    "trace",
    "measure",
    "estimate",
    "solve",
    "simulate",
    "fit",
    "apply",
    "verify",
    "frontier",
    "from_settings",
    "diagnose",
    "checkpoint",
    "checkpoint_sequential",
    "compile",
}

MODULES = sorted(p.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".") for p in SOURCE.rglob("*.py"))


def stage_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(module: str, source: str) -> set[str]:
    """Every dotted name that ``source`` imports anywhere, functions and type-checking blocks included."""
    package = ["lowtide", *module.split(".")][:-1]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # "from lowtide import plan" imports a stage, "from lowtide.plan import Plan" a name of one.
            names.update([f"{origin}.{a.name}" for a in node.names] if origin == "lowtide" else [origin])
    return names


def complaints(module: str, source: str) -> list[str]:
    """What the import rules have against ``source`` standing at ``module``."""
    stage = stage_of(module)
    imported = imports_of(module, source)
    found = []
    if stage in PLAIN or module in PLAIN_MODULES:
        found += [f"{stage} holds plain data, but imports {n}" for n in imported if n.split(".")[0].startswith("torch")]
    if stage in ANYTHING:
        return found
    for name in sorted(imported):
        # The version is a constant of the package, which imports no stage before one of its names is asked for.
        if name.split(".")[0] != "lowtide" or name == "lowtide.__version__":
            continue
        target = name.split(".")[1] if "." in name else "__init__"
        if target not in STAGES or STAGES.index(target) > STAGES.index(stage):
            found.append(f"{stage} imports {name}, which stands below it")
    return found


def test_there_is_something_to_check():
    assert {"errors", "graph.step_graph", "measurement.allocator"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_place_and_imports_only_from_above(module):
    assert stage_of(module) in STAGES + ANYTHING, f"give {module} a place in STAGES"

    path = SOURCE / (module.replace(".", "/") + ".py")

    assert complaints(module, path.read_text()) == []


@pytest.mark.parametrize("module", MODULES)
def test_no_module_bears_the_name_of_a_public_function(module):
    assert not PUBLIC_FUNCTIONS & set(module.split("."))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph.json_format", "import torch"),
        ("shapes.shape_family", "import torch"),
        ("graph.json_format", "def f():\n    from torch.nn import Module"),
        ("plan", "from lowtide.simulation.simulator import simulate"),
        ("solvers.exact", "from lowtide import tracing"),
        ("solvers.exact", "from ..tape import record"),
        ("tape.replay", "import lowtide.verifier"),
        ("measurement.op_times", "from lowtide import fit"),
        ("reports.html", "from lowtide.cli import main"),
    ],
)
def test_the_check_itself_catches(module, source):
    assert len(complaints(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "solvers.exact",
            "from lowtide.solvers.lower_bound.bound import b\nfrom . import bound\nfrom ..graph import costs",
        ),
        ("tracing.tracer", "import torch\nfrom lowtide.measurement.op_inputs import describe"),
        ("api", "from lowtide.cli import main"),
        ("plan", "from lowtide import errors"),
        ("plan", "from lowtide import __version__"),
    ],
)
def test_the_check_itself_lets_pass(module, source):
    assert complaints(module, source) == []


# What only CUDA has, by the file of the device layer that marks it. Nothing else in the package names a vendor, but the
# lists of operators that others keep, as they have them.
CUDA_ALONE = {
    "simulation.caching_allocator": ('"mps"',),  # whose allocator has other rules
    "simulation.kernel_blocks": ('"cuda"',),  # whose kernels ask for memory in that order
    "settings.torchtitan": ("_scaled_dot_product_cudnn_attention",),
    "settings.trl": ("_scaled_dot_product_cudnn_attention",),
    "commands.bench": ("cudnn_attention",),
    "doctor.checks.value_compile_budget": ("torch-xpu-ops#4501",),  # a thread
    "device.streams": ("a CUDA graph", 'device.type == "cuda"', "torch.cuda.is_current_stream_capturing"),
    "integrations.torchtitan": ("_CUDA_GRAPHS",),  # whose setting has that name
    "device.out_of_memory": ("cuBLAS and cuDNN",),  # whose errors have no class of their own
    "device.kept_workspaces": ("cuBLAS keeps a workspace", "_clearCublasWorkspaces"),
    "device.numeric_flags": ("cuDNN's", "cudnn", "_get_cublas_", '("cuda", '),
    "pytorch_internals": ("_get_cudnn_", "_get_cublas_", "_use_cudnn_"),  # of the flags that decide bits
    "device.vendor_kernels": ("cudnn", "miopen"),
    "step.ctc_lengths": ("_use_cudnn_ctc_loss",),
    "device.pinning": ('accelerator_type() == "cuda"', "torch.cuda.cudart()", 'torch.ones(1, device="cuda")'),
}
# They plan for CUDA's kernels on a machine without them, and run none. So do all of ``hollow`` and ``pretending``.
PLAN_FOR_CUDA = {"tracing.sources", "estimation.device_table", "estimation.roofline", "foresight.assumptions"}
VENDORS = re.compile(
    r"torch\.cuda|[\"']cuda\b|\.cuda\(|\bis_cuda\b|\bfrom torch import cuda|\b(hip|xpu|mps)\b"
    r"|\b_?CUDA_(?!ALLOC_CONF|VISIBLE_DEVICES)"  # the environment's names
    r"|(?i:cudnn|cublas|cufft|cusparse|nvidia|nccl|nvtx|miopen|rocm|rocblas)"
)


def vendors_named(module: str, source: str) -> list[str]:
    """Lines of ``source`` that name a vendor's device, without what the device layer may."""
    if stage_of(module) in ("hollow", "pretending") or module in PLAN_FOR_CUDA:
        return []
    for allowed in CUDA_ALONE.get(module, ()):
        source = source.replace(allowed, "")
    return [line for line in source.splitlines() if VENDORS.search(line)]


@pytest.mark.parametrize("module", MODULES)
def test_no_vendor_is_named_outside_what_only_cuda_has(module):
    source = (SOURCE / (module.replace(".", "/") + ".py")).read_text()

    assert vendors_named(module, source) == []
    assert all(allowed in source for allowed in CUDA_ALONE.get(module, ()))


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        'x.to("cuda")',
        "x.to('cuda:0')",
        "x = x.cuda()",
        "if x.is_cuda:",
        "from torch import cuda",
        'device.type in ("xpu", "mps")',
        "torch.backends.cudnn.benchmark = True",
        'os.environ["CUBLAS_WORKSPACE_CONFIG"]',
        "import nvidia",
        'dist.init_process_group("nccl")',
        "_CUDA_GENERATOR_BYTES = 16",
    ],
)
def test_a_vendor_that_is_named_is_found(line):
    assert vendors_named("api", line) == [line] == vendors_named("device.pinning", line)


MOST_SOLVER_LEVELS = 10  # one of them is the context that all searches share


def files_imported(sources):
    """By module the modules that it imports, of those that ``sources`` names; type-checking imports count."""
    found = {}
    for module, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}: write imports in full"
                names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        found[module] = {name.removeprefix("lowtide.") for name in names} & sources.keys() - {module}
    return found


def longest_chain(imported):
    """The longest row of modules in which each imports the next one.

    Raises:
        CycleError: modules import each other in a circle.
    """
    below = {}
    for module in TopologicalSorter(imported).static_order():
        below[module] = [module, *max((below[name] for name in sorted(imported[module])), key=len, default=[])]
    return max(below.values(), key=len)


def sources_under(prefix=""):
    return {m: (SOURCE / (m.replace(".", "/") + ".py")).read_text() for m in MODULES if m.startswith(prefix)}


def test_no_files_import_each_other_in_a_circle():
    assert len(longest_chain(files_imported(sources_under()))) > 10


def test_a_solver_stands_on_few_others():
    assert len(longest_chain(files_imported(sources_under("solvers.")))) <= MOST_SOLVER_LEVELS


def test_chains_and_circles_are_found():
    sources = {
        "a": "from lowtide.s import b",
        "s.b": "def f():\n    import lowtide.s.c",
        "s.c": "from lowtide.d import name",
        "d": "",
    }
    assert longest_chain(files_imported(sources)) == ["a", "s.b", "s.c", "d"]
    sources["d"] = "if TYPE_CHECKING:\n    from lowtide.s.b import Name"
    with pytest.raises(CycleError):
        longest_chain(files_imported(sources))


def test_plain_data_runs_without_torch_in_the_process():
    plain = [f"lowtide.{m.removesuffix('.__init__')}" for m in MODULES if stage_of(m) in PLAIN or m in PLAIN_MODULES]
    script = f"import sys\nfor name in {plain!r}: __import__(name)\nassert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
