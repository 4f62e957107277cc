"""Each check speaks on a real reproduction, and is silent on the same set-up mended."""

import pytest
import torch
from support.sick_setups import ROWS, SICK, Case, diagnosed
from torch import nn

import lowtide
from lowtide.doctor.checks import waste_compiles_nothing
from lowtide.doctor.registry import all_checks


class Partly(nn.Module):
    """Of two layers and a parameter of its own, one layer reaches the loss."""

    def __init__(self):
        super().__init__()
        self.bias, self.layer, self.idle = nn.Parameter(torch.zeros(64)), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x)


# Mended by other code, not by a setting. LT203 has one where layers have flags.
NO_SETTING = {
    "LT001",
    "LT004",
    "LT009",
    "LT011",
    "LT102",
    "LT108",
    "LT203",
    "LT207",
    "LT214",
    "LT302",
    "LT305",
    "LT307",
}


@pytest.mark.parametrize("name", SICK)
def test_a_check_speaks_on_what_is_wrong_and_is_silent_on_what_is_mended(name, monkeypatch):
    code = name.split()[0]
    sick, mended = SICK[name]
    if code == "LT214":
        monkeypatch.setattr(waste_compiles_nothing, "_compiles_own_modules", lambda: False)

    found = diagnosed(sick(), code)
    assert found.codes == (code,) and not found.notes, found
    assert found[0].evidence and found[0].mend
    assert bool(found[0].fix) == (code not in NO_SETTING)
    compile(found[0].fix, code, "exec")

    healthy = diagnosed(mended(), code)
    assert not healthy and not healthy.notes, healthy


def test_what_gets_no_gradient_is_frozen_by_the_fix_and_nothing_else():
    model = Partly()

    (found,) = lowtide.diagnose(model, ROWS, only=["LT006"])
    exec(found.fix, {"model": model})

    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"bias", "idle.weight", "idle.bias"}
    assert not lowtide.diagnose(model, ROWS, only=["LT006"])


def test_where_pytorch_compiles_its_own_modules_nothing_is_said_of_them(monkeypatch):
    monkeypatch.setattr(waste_compiles_nothing, "_compiles_own_modules", lambda: True)
    assert not diagnosed(SICK["LT214"][0](), "LT214")


def test_pytorch_compiles_its_own_modules_from_2_14_on():
    from_2_14 = torch.__version__ >= torch.torch_version.TorchVersion("2.14")
    assert waste_compiles_nothing._compiles_own_modules() == from_2_14


def test_a_scripted_part_of_a_compiled_module_is_pytorchs_own_too(monkeypatch):
    monkeypatch.setattr(waste_compiles_nothing, "_compiles_own_modules", lambda: False)
    model = nn.Sequential(torch.jit.script(nn.Linear(64, 64)), nn.ReLU())
    model.compile(backend="eager")
    assert diagnosed(Case(model), "LT214")


def test_a_look_at_what_trl_does_leaves_checkpointing_as_it_is_set():
    case = SICK["LT110"][0]()
    before = [(dict(vars(m)), list(m._forward_hooks)) for m in case.model.modules()]

    assert diagnosed(case, "LT110")

    assert before == [(dict(vars(m)), list(m._forward_hooks)) for m in case.model.modules()]


def test_every_check_is_shown():
    assert all_checks().keys() == {name.split()[0] for name in SICK} | {"LT109"}  # tests/integrations/test_deepspeed.py
