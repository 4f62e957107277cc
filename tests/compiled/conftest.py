"""Compiled code of one test is none of the next one's: Dynamo counts what it compiles by code, which blocks share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def compile_anew(compile_plans):
    yield
    torch._dynamo.reset()
