"""Versions that nobody has tried are refused by name."""

import pytest

from lowtide import IntegrationError
from lowtide.integrations import versions


@pytest.mark.parametrize(
    "found, is_refused", [("0.9", True), ("1.0", False), ("1.9.3+cpu", False), ("1.9rc1", False), ("2.0", True)]
)
def test_only_versions_in_the_range_pass(found, is_refused, monkeypatch):
    monkeypatch.setitem(versions.SUPPORTED, "torch", ("1.0", "2.0"))
    monkeypatch.setattr(versions, "version", lambda package: found)
    if is_refused:
        with pytest.raises(IntegrationError, match=rf"torch {found} was never tried.*1\.0.*2\.0"):
            versions.check_version("torch")
    else:
        versions.check_version("torch")


def test_a_package_that_is_not_there_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(versions.SUPPORTED, "no-such-package", ("1.0", "2.0"))
    with pytest.raises(IntegrationError, match=r"no-such-package is not installed.\nInstall it: pip install"):
        versions.check_version("no-such-package")
