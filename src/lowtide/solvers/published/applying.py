"""A published method meets graphs that its authors did not think of. Searches go on without it, and say so."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.errors import LowtideError

logger = logging.getLogger("lowtide")


@contextmanager
def applying(method: str) -> Iterator[None]:
    """What runs here belongs to ``method``.

    Raises:
        ValueError: it does not apply, as it says itself or as any error inside it shows.
    """
    try:
        yield
    except (ValueError, LowtideError):
        raise
    except Exception as error:
        raise ValueError(
            f"method={method!r} does not apply to this step: {type(error).__name__}: {error}.\n"
            'Use method="exact", which does.'
        ) from error


@contextmanager
def left_out_where_it_fails(method: str) -> Iterator[None]:
    """What runs here is one of several starting points of a search: an error in it ends nothing."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        logger.info("lowtide: method %s left out of the search: %s", method, why)
