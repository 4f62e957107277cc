"""What holds for every test."""

import itertools

import pytest

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    """No test reads or writes the user's cache, nor another test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"))
