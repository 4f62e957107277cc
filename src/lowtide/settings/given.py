"""The settings that a user gave: read key by key, each with its type checked, and what is found on the way."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from lowtide.errors import SettingsError
from lowtide.options import did_you_mean
from lowtide.settings.description import DEPRECATED, NOTE, NOTHING, SettingsFinding

_WORDS = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}

near = partial(did_you_mean, most=2)


class Given:
    """Settings of one framework, and the findings about them so far.

    Args:
        framework: For messages.
        values: By name; None counts as not given.
    """

    def __init__(self, framework: str, values: Mapping[str, Any]) -> None:
        self.framework = framework
        self._values = {name: value for name, value in values.items() if value is not None}
        self.findings: list[SettingsFinding] = []

    def inner(self, values: Mapping[str, Any], framework: str | None = None) -> "Given":
        """Other settings of the same user, whose findings go with these."""
        found = Given(framework or self.framework, values)
        found.findings = self.findings
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; also as the words that configuration files have."""
        value = self._values.get(name, default)
        plain = value.strip().lower() if isinstance(value, str) else value
        if not isinstance(plain, (bool, str)) or plain not in _WORDS:
            raise self.error(f"{name}={value!r} is neither true nor false.", f"Write {name}: true, or leave it out.")
        return _WORDS[plain]

    def count(self, name: str, least: int = 0) -> int | None:
        """A whole number, None where none is given."""
        value = self._values.get(name)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise self.error(f"{name}={value!r} is not a whole number from {least} up.", "Write such a number.")
        return value

    def ratio(self, name: str) -> float | None:
        """A number from 0 to 1, None where none is given."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise self.error(f"{name}={value!r} is not a share from 0 to 1.", "Write such a number.")
        return float(value)

    def words(self, name: str, allowed: Iterable[str] = ()) -> list[str] | None:
        """A list of words, also as one word or as ``"a,b"``; None where none is given."""
        value = self._values.get(name)
        if value is None:
            return None
        found = value.replace(",", " ").split() if isinstance(value, str) else list(value)
        allowed = list(allowed)
        if allowed and (wrong := [word for word in found if word not in allowed]):
            raise self.error(
                f"{name} has {wrong[0]!r}, which {self.framework} does not know.{near(wrong[0], allowed)}",
                f"Use some of {', '.join(allowed)}.",
            )
        return found

    def choice(self, name: str, allowed: Iterable[str]) -> str | None:
        """One of ``allowed``, None where none is given."""
        value, allowed = self._values.get(name), list(allowed)
        if value is not None and value not in allowed:
            raise self.error(
                f"{name}={value!r}: {self.framework} does not know it.{near(str(value), allowed)}",
                f"Use {' or '.join(map(repr, allowed))}.",
            )
        return value

    def section(self, name: str) -> dict[str, Any]:
        """A nested group of settings; empty where none is given."""
        value = self._values.get(name, {})
        if isinstance(value, str) and value.startswith("{"):  # as TrainingArguments take it on a command line
            with suppress(json.JSONDecodeError):
                value = json.loads(value)
        if not isinstance(value, Mapping):
            raise self.error(f"{name}={value!r} is a {type(value).__name__}.", f"Write {name} as names with values.")
        return dict(value)

    def error(self, what: str, way_out: str) -> SettingsError:
        return SettingsError(f"{self.framework} settings: {what}\n{way_out}")

    def does_nothing(self, key: str, why: str) -> None:
        self.findings.append(SettingsFinding(key, NOTHING, why))

    def deprecated(self, key: str, instead: str) -> None:
        self.findings.append(SettingsFinding(key, DEPRECATED, instead))

    def note(self, key: str, text: str) -> None:
        self.findings.append(SettingsFinding(key, NOTE, text))
