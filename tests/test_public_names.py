"""Every public name resolves."""

import pytest

import lowtide


@pytest.mark.parametrize("name", lowtide.__all__)
def test_a_public_name_resolves_to_something_of_that_name(name):
    assert getattr(lowtide, name).__name__ == name


def test_the_contracts_names_are_all_there():
    stages = {"fit", "trace", "measure", "solve", "frontier", "simulate", "apply", "verify"}
    errors = {"BudgetInfeasibleError", "PlanMismatchError", "ReplayError", "LowtideError"}

    assert stages | errors | {"Plan", "FrontierPoint", "Offload"} <= set(lowtide.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'lowtide' has no attribute 'fitt'"):
        lowtide.fitt  # noqa: B018
