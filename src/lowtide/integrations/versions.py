"""Which versions of other libraries the integrations were tested with."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from lowtide.errors import IntegrationError

# Package -> the least version, and the first that is too new. Seams move between versions: tests run the real library.
SUPPORTED = {
    "accelerate": ("1.10", "2"),
    "deepspeed": ("0.19", "0.20"),
    "lightning": ("2.6", "2.7"),
    "megatron-core": ("0.16", "0.17"),
    "peft": ("0.17", "0.22"),
    "pytorch-lightning": ("2.6", "2.7"),
    "torchtitan": ("0.3", "0.4"),
    "transformers": ("5.0", "6"),
    "trl": ("1.16", "1.17"),
}


def check_version(package: str) -> None:
    """Refuse a ``package`` that is not there, or of a version that nobody has tried.

    Raises:
        IntegrationError: with the version found and the range.
    """
    least, too_new = SUPPORTED[package]
    install = f"pip install '{package}>={least},<{too_new}'"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise IntegrationError(f"{package} is not installed.\nInstall it: {install}.") from None
    if not Version(least) <= Version(Version(found).base_version) < Version(too_new):
        raise IntegrationError(
            f"{package} {found} was never tried: lowtide's seams are those of {least} up to, not including, "
            f"{too_new}.\nInstall one of these ({install}), or call lowtide.fit(model, budget=...) yourself where your "
            "loop begins."
        )
