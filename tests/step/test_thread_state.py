"""What lies in PyTorch's state of a thread is held there, whether or not that version of PyTorch counts it."""

import sys

import pytest
import torch

from lowtide.step.module_calls import stash_in_tls


class Held:
    pass


@pytest.mark.parametrize("counts", [True, False])
def test_a_reference_in_the_state_of_a_thread_is_counted_once(counts, monkeypatch):
    held: list[object] = []
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", lambda key, value: held.append(value) if counts else None)
    value = Held()
    before = sys.getrefcount(value)

    stash_in_tls("lowtide.test", value)

    assert sys.getrefcount(value) == before + 1


def test_the_installed_pytorch_keeps_what_is_stashed():
    value = Held()
    before = sys.getrefcount(value)

    stash_in_tls("lowtide.test", value)

    assert sys.getrefcount(value) == before + 1
    assert torch._C._get_obj_in_tls("lowtide.test") is value
