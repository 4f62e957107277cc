"""Bytes, in and out: the only place where GiB is parsed or printed."""

import re

_UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER_UNIT = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]+|%)\s*$")
_WAY_OUT = (
    'Write bytes as an int, "6GiB" (2^30), "6GB" (10^9), "40%" of the plain step\'s activation memory, or "auto".'
)


def parse_budget(budget: int | str, name: str = "budget") -> int | float | str:
    """Return ``budget`` as bytes (int), a fraction of plain activation memory (float), or ``"auto"``.

    Args:
        name: Of the argument, for error messages.

    Raises:
        TypeError: ``budget`` is neither an int nor a string.
        ValueError: it is not positive, or not in a known unit.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise TypeError(f"{name}={budget!r} is a {type(budget).__name__}. {_WAY_OUT}")
    if isinstance(budget, int):
        if budget <= 0:
            raise ValueError(f"{name}={budget} bytes is not positive. {_WAY_OUT}")
        return budget
    if budget.strip().lower() == "auto":
        return "auto"
    match = _NUMBER_UNIT.match(budget)
    if match is None:
        raise ValueError(f"{name}={budget!r} is not an amount of memory. {_WAY_OUT}")
    number, unit = float(match[1]), match[2].lower()
    if unit != "%" and unit not in _UNITS:
        raise ValueError(f"{name}={budget!r}: {match[2]!r} is not a unit of memory. {_WAY_OUT}")
    if number <= 0:
        raise ValueError(f"{name}={budget!r} is not positive. {_WAY_OUT}")
    return number / 100 if unit == "%" else int(number * _UNITS[unit])


def format_bytes(count: int | float) -> str:
    """``1536 -> "1.50 KiB"``; exact below one KiB."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    if count < 1024:
        return f"{sign}{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{sign}{count:.2f} {unit}"
    return f"{sign}{count / 1024:.2f} TiB"
