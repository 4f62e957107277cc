"""The frameworks whose settings are known: add one here, with a file that says what its settings mean."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lowtide.errors import SettingsError
from lowtide.settings import (
    accelerate,
    colossalai,
    deepspeed,
    megatron,
    roll,
    torch_policies,
    torchtitan,
    transformers,
    trl,
)
from lowtide.settings.description import Description
from lowtide.settings.given import Given, near


@dataclass(frozen=True)
class Framework:
    """How to read the settings of one framework.

    Attributes:
        keys: Every name that it reads.
        describe: What they mean; what it finds goes into ``Given``.
        sections: Nested groups whose names may stand at the top as well.
        groups: Names whose value is a group of settings.
        own: Names of which one has to be there for the framework to be guessed; by default any will do.
    """

    keys: tuple[str, ...]
    describe: Callable[[Given, nn.Module], Description]
    sections: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


FRAMEWORKS = {
    "transformers": Framework(transformers.KEYS, transformers.describe, groups=transformers.GROUPS),
    "trl": Framework(trl.KEYS, trl.describe, groups=transformers.GROUPS),
    "roll": Framework(roll.KEYS, roll.describe, roll.SECTIONS, own=roll.OWN),
    "megatron": Framework(megatron.KEYS, megatron.describe),
    "colossalai": Framework(colossalai.KEYS, colossalai.describe),
    "deepspeed": Framework(deepspeed.KEYS, deepspeed.describe, groups=deepspeed.GROUPS),
    "torchtitan": Framework(torchtitan.KEYS, torchtitan.describe, torchtitan.SECTIONS),
    "accelerate": Framework(accelerate.KEYS, accelerate.describe, groups=accelerate.GROUPS),
    "torch": Framework(torch_policies.KEYS, torch_policies.describe),
}
_SUBJECT = ("checkpointing", "recompute", "offload", "activation", "memory_budget", "selective_ac")
_NOT_OURS = ("activation_function", "activation_func", "hidden_activation", "activation_dropout")


def describe(model: nn.Module, settings: Mapping[str, Any], framework: str | None = None) -> Description:
    """What ``settings`` mean on ``model``.

    Args:
        framework: Whose they are; None: whoever has such names, where that is clear.

    Raises:
        SettingsError: a name or value is not known, settings contradict each other, or it is not clear whose they are.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings is a {type(settings).__name__}. Pass a dict of names and values.")
    values = normalised(settings)
    name = framework_of(values) if framework is None else framework
    check_framework(name)
    known = FRAMEWORKS[name]
    values = flattened(values, known.sections)
    for key in values:
        if key not in known.keys:
            raise SettingsError(
                f"{name} settings: {key!r} is not known.{near(key, known.keys)}\nThese are: {', '.join(known.keys)}."
            )
    given = Given(name, values)
    return replace(known.describe(given, model), findings=tuple(given.findings))


def check_framework(name: str | None) -> None:
    """Raises: SettingsError: it is not known."""
    if name is not None and name not in FRAMEWORKS:
        raise SettingsError(
            f"framework={name!r} is not known.{near(str(name), FRAMEWORKS)}\nUse one of {', '.join(FRAMEWORKS)}."
        )


def normalised(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names as Python spells them: ``--recompute-method -> recompute_method``."""
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in settings.items()}


def flattened(values: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """``values`` with the contents of ``sections`` at the top."""
    found = {name: value for name, value in values.items() if name not in sections}
    for section in sections:
        inner = values.get(section)
        if isinstance(inner, Mapping):
            found |= flattened(normalised(inner), sections)
        elif inner is not None:
            found[section] = inner
    return found


def framework_of(values: Mapping[str, Any]) -> str:
    """The one framework that knows all of ``values``.

    Raises:
        SettingsError: none does, or several do.
    """
    candidates = [name for name, known in FRAMEWORKS.items() if _knows(known, values)]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        every = {key for known in FRAMEWORKS.values() for key in known.keys}
        strange = next((key for key in values if key not in every), "")
        hint = f" {strange!r} is not known.{near(strange, every)}" if strange else ""
        raise SettingsError(
            f"no framework has all of {', '.join(values) or 'no settings'}.{hint}\n"
            f"Say whose they are: framework= (or --framework, or that key in the file) one of {', '.join(FRAMEWORKS)}."
        )
    raise SettingsError(
        f"{', '.join(values)} may be settings of {' or '.join(candidates)}.\n"
        "Say whose they are: framework= (or --framework) one of them."
    )


def _knows(known: Framework, values: Mapping[str, Any]) -> bool:
    flat = flattened(values, known.sections)
    if known.own and not any(name in flat for name in known.own):
        return False
    named = bool(flat) and all(key in known.keys for key in flat)
    return named and all((name in known.groups) == isinstance(value, Mapping) for name, value in flat.items())


def about_memory(settings: Mapping[str, Any], framework: str | None) -> tuple[dict[str, Any], list[str]]:
    """Of a whole configuration file the settings that are meant for this, and the names of all others.

    A name that is nearly one of those, or that speaks of checkpointing, is kept: a typo must not be lost.
    """
    known = FRAMEWORKS.values() if framework is None else [FRAMEWORKS[framework]]
    keys = {name for entry in known for name in entry.keys}
    kept: dict[str, Any] = {}
    others = []
    sections = [section for entry in known for section in entry.sections]
    for name, value in flattened(normalised(settings), sections).items():
        speaks = any(word in name for word in _SUBJECT) and name not in _NOT_OURS
        if name in keys or speaks or near(name, keys):
            kept[name] = value
        else:
            others.append(name)
    return kept, others
