"""What lowtide uses of PyTorch's own parts is listed in ``pytorch_internals``; an unknown version is told in a line."""

import ast
import logging
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide import pytorch_internals
from lowtide.pytorch_internals import CHECKED, COMPILED, DIAGNOSIS, FEATURES, FORECASTS, NOT_IN_ALL, STEPS
from lowtide.step import function_calls

TOLD, TOLD_OF_COMPILED = (f"{', '.join(v[:-1])} and {v[-1]}" for v in (CHECKED, COMPILED.checked))
SOURCE = Path(lowtide.__file__).parent
LISTED = {name for feature in FEATURES for name in (*feature.patched, *feature.read)}


def private_names(source: str) -> set[str]:
    """The private parts of PyTorch that ``source`` imports or names, each with all that stands before it."""
    tree, known, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            before = dotted(node.value)
            return before and f"{before}.{node.attr}"
        return known.get(node.id, "") if isinstance(node, ast.Name) else ""

    found |= {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = {n for n in found if any(p.startswith("_") and not p.startswith("__") for p in n.split("."))}
    # ``torch._C`` is a beginning of ``torch._C._x`` and nothing by itself.
    return {n for n in private if not any(other.startswith(f"{n}.") for other in private)}


USED = {
    path.relative_to(SOURCE).as_posix(): private_names(path.read_text())
    for path in SOURCE.rglob("*.py")
    if path.name != "pytorch_internals.py"
}


def is_listed(name: str) -> bool:
    return any(name == listed or name.startswith(f"{listed}.") for listed in LISTED)


def test_the_reader_finds_imports_names_and_aliases():
    source = (
        "from torch._C import _x as y\nimport torch.nn\nimport torch._a.b as c\ny(); c.d; torch.nn._e.f; torch.ones"
    )
    assert private_names(source) == {"torch._C._x", "torch._a.b.d", "torch.nn._e.f"}


def test_every_private_part_that_is_used_is_listed():
    used = {(name, path) for path, names in USED.items() for name in names}
    assert [use for use in sorted(used) if not is_listed(use[0])] == []


def test_every_part_that_is_read_is_used():
    used = {name for names in USED.values() for name in names}
    read = {name for feature in FEATURES for name in feature.read}
    assert [n for n in sorted(read) if not any(u == n or u.startswith(f"{n}.") for u in used)] == []


# Of other libraries' objects, by the library; and words that only look like one.
OF_OTHERS = {
    "_attn_implementation", "_from_config", "_loss_function", "_model_mapping", "_require_grads_hooks",
    "_prepare_inputs", "_metrics", "_resolve_parallel_plans", "_gradient_checkpointing_func", "_supports_sdpa",
    "_class_name",  # transformers and diffusers
    "_param_dict", "_shared_state",  # DeepSpeed, Accelerate
    "_batches_that_stepped", "_logger_connector",  # Lightning
    "_bit_generator", "_rand", "_exit", "_getframe", "_replace",  # NumPy, Python
}  # fmt: skip


def attributes_of_others(trees: list[ast.Module]) -> set[str]:
    """Private attributes that the sources read or set, and that nothing in them defines."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {
        node.attr for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }  # fmt: skip
    return {name for name in used - own if name.startswith("_") and not name.startswith(("__", "_lowtide"))}


def test_every_private_attribute_of_pytorchs_objects_is_listed():
    trees = [ast.parse((SOURCE / path).read_text()) for path in USED]
    dotted = {part for name in LISTED | {n for names in USED.values() for n in names} for part in name.split(".")}
    listed = {name for feature in FEATURES for name in feature.attributes}

    found = attributes_of_others(trees) - dotted - OF_OTHERS
    operators = {name for name in found if hasattr(torch.ops.aten, name)}

    assert sorted(found - operators - listed) == []
    assert attributes_of_others([ast.parse("x._y; self._z = x._z")]) == {"_y"}


def test_every_attribute_that_is_listed_is_named_in_the_sources():
    text = "".join((SOURCE / path).read_text() for path in USED)
    listed = {name for feature in FEATURES for name in feature.attributes}
    assert [name for name in sorted(listed) if not re.search(rf"\b{name}\b", text)] == []


def is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_installed_pytorch_has_what_is_listed():
    assert [name for name in sorted(LISTED - NOT_IN_ALL) if not is_there(name)] == []


def test_this_version_is_one_that_was_checked():
    short = ".".join(torch.__version__.split(".")[:2])
    unchecked = {feature.name for feature in FEATURES if pytorch_internals.why_unchecked(feature)}
    assert unchecked == ({COMPILED.name} if short == "2.11" else set())


@pytest.mark.parametrize(
    "version", ["2.11.0+cu130", "2.13.0+cpu", "2.14.1+cu130", "2.15.0a0+git1234", "2.15.0.dev20261126+cpu"]
)
def test_a_build_of_a_checked_version_is_checked(version, monkeypatch):
    monkeypatch.setattr(pytorch_internals, "VERSION", version)
    assert not pytorch_internals.is_unchecked(STEPS)


@pytest.fixture
def unknown_version(monkeypatch, caplog):
    """PyTorch 2.99, and the lines that were logged."""
    monkeypatch.setattr(pytorch_internals, "VERSION", "2.99.0")
    monkeypatch.setattr(pytorch_internals, "_said", set())
    # A fit of another test that lives on has the calls of Functions seen.
    monkeypatch.setattr(function_calls, "_installed", 0)
    if function_calls._BY_C:
        monkeypatch.setattr(function_calls._PLACE, "apply", function_calls._C_APPLY)
    elif "apply" in vars(function_calls._PLACE):
        monkeypatch.delattr(function_calls._PLACE, "apply")
    caplog.set_level(logging.WARNING, logger="lowtide")
    return lambda: [r.getMessage() for r in caplog.records if "PyTorch" in r.getMessage()]


class Doubles(torch.autograd.Function):
    """Its kernel is NumPy's: no operator shows it."""

    @staticmethod
    def forward(ctx, x):
        made = torch.empty_like(x)
        made.numpy()[:] = 2 * x.numpy()
        ctx.save_for_backward(made)
        return made.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient + 0 * ctx.saved_tensors[0]


class Call(nn.Module):
    def forward(self, x):
        return Doubles.apply(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    around = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Tanh())]
    return nn.Sequential(*around[:6], Call(), *around[6:], nn.Linear(64, 64))


def gradients(model, x) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.usefixtures("one_thread")
def test_a_fit_under_an_unknown_version_says_one_line_and_saves_what_functions_make(unknown_version):
    model, x = net(), torch.randn(256, 64)
    plain = gradients(model, x)

    with lowtide.fit(model, x, budget="60%") as fit, lowtide.fit(net(), x, budget="90%"):
        planned = gradients(model, x)
        names = {op.name for op in fit.graph.ops}
        assert fit.status().in_force

    assert all(map(torch.equal, plain, planned))
    assert not any("Doubles" in name for name in names)
    line = (
        f"PyTorch 2.99.0 was not checked with lowtide.fit ({TOLD} were). What custom autograd Functions "
        "make is saved; all else is planned, and Fit.verify() compares such a step with the plain one bit by bit."
    )
    assert unknown_version() == [f"lowtide: {line}"]
    assert fit.status().reasons.count(line) == 1
    assert str(fit.status()).count(line) == 1 and ".." not in str(fit.status())


@pytest.mark.usefixtures("one_thread")
def test_a_checked_version_plans_what_functions_make():
    model, x = net(), torch.randn(256, 64)
    with lowtide.fit(model, x, budget="60%") as fit:
        assert any("Doubles" in op.name for op in fit.graph.ops)


@pytest.mark.usefixtures("one_thread")
def test_compile_under_an_unknown_version_says_one_line_and_leaves_the_partitioner_alone(unknown_version, monkeypatch):
    from lowtide.compiled.partitioner import PlannedPartitioner

    monkeypatch.setattr(PlannedPartitioner, "__call__", lambda *args, **options: pytest.fail("it was asked"))
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)))
    model, x = lowtide.compile(layers, budget="50%"), torch.randn(8, 16)

    for _ in range(2):
        model(x).sum().backward()

    assert model.plan is None
    assert unknown_version() == [f"lowtide: {model.reason}"]
    assert model.reason == (
        f"PyTorch 2.99.0 was not checked with lowtide.compile ({TOLD_OF_COMPILED} were). Its layers are compiled as "
        "torch.compile does, without a plan: no budget is kept."
    )
    model.remove()


def test_diagnose_under_an_unknown_version_says_one_line_and_looks_at_nothing(unknown_version):
    found = lowtide.diagnose(nn.Linear(4, 4), torch.randn(2, 4))

    assert (list(found), found.checked) == ([], ())
    assert [f"lowtide: {note}" for note in found.notes] == unknown_version()
    assert f"PyTorch 2.99.0 was not checked with lowtide.diagnose ({TOLD} were). Nothing is" in found.notes[0]


def test_a_step_without_memory_under_an_unknown_version_says_one_line(unknown_version):
    from lowtide.hollow.mode import HollowMode

    for _ in range(2):
        HollowMode()
    assert unknown_version() == [f"lowtide: {pytorch_internals.why_unchecked(FORECASTS)}"]


@pytest.mark.parametrize("feature", [STEPS, COMPILED, DIAGNOSIS, FORECASTS], ids=lambda f: f.name)
def test_every_feature_says_what_was_checked_and_what_is_done_without_it(feature):
    assert feature.checked == (CHECKED[1:] if feature is COMPILED else CHECKED)
    assert feature.without and not feature.without.endswith(".")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("_storage_Use_Count", f"cannot import name '_storage_Use_Count' from 'torch._C' ({torch._C.__file__})"),
        ("_TorchDispatchModeKey", "module 'torch._C' has no attribute '_TorchDispatchModeKey'"),
    ],
)
def test_a_part_that_pytorch_lacks_is_named_with_the_versions_that_have_it(name, error):
    source = f"import torch\ndel torch._C.{name}\nimport lowtide\nlowtide.fit"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)

    assert done.stderr.splitlines()[-2:] == [
        f"lowtide.errors.UnsupportedPyTorchError: PyTorch {torch.__version__} lacks a part of its own that lowtide "
        f"needs: {error}.",
        f"Install one that has it: {TOLD} do.",
    ]


def test_the_readme_states_the_versions():
    readme = (SOURCE.parents[1] / "README.md").read_text()
    assert f"tested: {TOLD}" in readme
