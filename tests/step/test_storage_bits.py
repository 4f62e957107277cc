"""Sums and comparisons of a storage's bytes, where the device has memory for them and where it has not."""

import pytest
import torch

from lowtide.step import storage_bits
from lowtide.step.storage_bits import same_storage_bits, sum_of_words


@pytest.mark.parametrize("count", [1, 8, 1000, 3 * (1 << 22) + 5])
def test_without_memory_on_the_device_the_host_finds_the_same(monkeypatch, count):
    torch.manual_seed(count)
    a = torch.randint(-128, 128, (count,), dtype=torch.int8)  # sums that overflow, both ways
    b, other = a.clone(), a.clone()
    other[count // 2] += 1
    expected = sum_of_words(a)

    def refuse(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(storage_bits, "_sum_there", refuse)
    monkeypatch.setattr(storage_bits, "same_elements", refuse)
    monkeypatch.setattr(storage_bits, "_PIECE", 1 << 18)

    assert sum_of_words(a) == expected != sum_of_words(other)
    assert same_storage_bits(a, b) and not same_storage_bits(a, other)


def test_another_error_is_not_taken_for_that(monkeypatch):
    def fail(*_):
        raise RuntimeError("an error of another kind")

    monkeypatch.setattr(storage_bits, "_sum_there", fail)
    with pytest.raises(RuntimeError, match="another kind"):
        sum_of_words(torch.ones(8))
