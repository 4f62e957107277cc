"""Claims and foresight: the formula that must come out exactly, and tables that cannot hide a difference."""

import claims
import pytest
from foresight_table import claims_table, peaks_table, plans_table, ranks_table


@pytest.mark.parametrize(("s", "b", "h", "a"), [(128, 2, 64, 4), (64, 2, 256, 8)])
def test_korthikantis_formula_is_what_his_layer_stores(s, b, h, a):
    stored, statistics = claims.korthikanti_bytes(s, b, h, a)

    assert stored - statistics == s * b * (34 * h + 5 * a * s)
    assert statistics == 2 * 2 * 4 * s * b  # two norms, mean and deviation, float32


def line(**changes):
    origin = {"device": "cpu", "torch": "2", "transformers": "5", "commit": "abc"}
    case = {"architecture": "llama", "shape": [2, 64], "precision": "float32", "plan": "none", "status": "ok",
            "predicted_peak_bytes": 200, "measured_peak_bytes": 200, "resident_bytes": 100, "error": 0.0}  # fmt: skip
    return {**origin, **case, **changes}


def test_the_worst_error_is_the_one_farthest_from_zero():
    half = {"plan": "50%", "measured_peak_bytes": 150}
    lines = [
        line(),
        line(**half, predicted_peak_bytes=147, error=-0.02),
        line(**half, shape=[4, 64], predicted_peak_bytes=152, error=0.0125),
        {**{k: v for k, v in line(plan="35%").items() if k != "error"}, "status": "no plan fits"},
    ]

    table = peaks_table(lines)
    assert "| llama | 3 | 1 | -2.00 % |" in table
    assert "median 1.25 %, worst 2.00 %" in table and "In 1 more no plan exists" in table
    assert "| 50 % of the activations | 2 | 1.62 % | 2.00 % | 50 % |" in plans_table(lines)


def test_ranks_that_differ_are_not_hidden_by_those_that_are_equal():
    of_two = {"model": "mixtral", "way": "expert 2"}
    table = ranks_table(
        [
            line(**of_two, rank=0),
            line(**of_two, rank=1, measured_peak_bytes=201, error=-0.005),
            line(model="mixtral", way="tensor 2", rank=0),
        ]
    )

    assert "| mixtral | expert 2 | 2 | 1 | -0.50 % |" in table and "| mixtral | tensor 2 | 1 | 1 | 0 |" in table


def test_no_table_is_made_of_gradients_that_differ():
    with pytest.raises(SystemExit):
        peaks_table([line(status="differs")])


def test_every_verdict_has_a_word():
    claim = {**line(), "quoted": "8:1", "found": "9:1", "how": "traced"}
    assert "**wrong**" in claims_table([{**claim, "verdict": "wrong"}])
    with pytest.raises(KeyError):
        claims_table([{**claim, "verdict": "perhaps"}])
