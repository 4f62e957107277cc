"""What the overhead of whole fitted steps is measured on."""

import dropping_layers


def test_plans_that_drop_layers_are_in_force_while_they_are_timed(monkeypatch):
    monkeypatch.setattr(dropping_layers, "SIZES", ((16, 8, 1),))
    lines = list(dropping_layers.dropping_layers(rounds=2))

    assert [line["method"] for line in lines] == [f"fit, {name}" for name in dropping_layers.DROPPING]
    assert all(line["step_ratio"] > 0 for line in lines)
