"""Each wait, rounding rule and device guard of ``mutations.py`` is taken out once, and its test fails."""

import pytest

from accelerator.mutations import MUTATIONS, found


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what.replace(" ", "-"))
def test_its_test_fails_without_it(accelerator, mutation):
    seen, said = found(mutation)
    assert seen, said
