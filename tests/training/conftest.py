"""A model with layers, and a budget in which something has to go."""

import pytest
from support.watched_training import Layered, activation_bytes, batch_of, resident_bytes


@pytest.fixture
def model():
    return Layered()


@pytest.fixture
def budget(model):
    """A budget in which something has to go."""
    return resident_bytes(model) + int(0.6 * activation_bytes(model, batch_of()))
