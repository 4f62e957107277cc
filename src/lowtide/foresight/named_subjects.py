"""The model that ``--model`` names."""

from __future__ import annotations

from typing import Any

from lowtide.foresight.image_subjects import DiffusersSubject, TimmSubject, diffusers_config
from lowtide.foresight.subjects import ConfigSubject, ScriptSubject, Subject
from lowtide.inference.cache_plan import config_of
from lowtide.models.shipped import UnknownModelError, model_facts


def subject_named(name: str) -> Subject:
    """A shipped name, a config.json or its directory, an id of the hub, ``timm/NAME``, or ``SCRIPT.py:FUNCTION``.

    A config.json may be of transformers or of diffusers.

    Raises:
        UnknownModelError: none of these.
    """
    if ".py:" in name:
        return ScriptSubject(name)
    if name.startswith("timm/"):
        return TimmSubject(name)
    if (found := diffusers_config(name)) is not None:
        return DiffusersSubject(*found)
    try:
        facts = model_facts(name)
    except UnknownModelError as unknown:
        if name.count("/") != 1:
            raise
        facts = _from_hub(name, unknown)
        return ConfigSubject(facts, facts["config"])
    return ConfigSubject(facts, config_of(facts))


def _from_hub(name: str, unknown: UnknownModelError) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return {"name": name, "config": AutoConfig.from_pretrained(name, token=False)}
    except Exception as error:  # no network, no such model, or one that asks who you are
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnknownModelError(f"{unknown} The hub gave no configuration either: {first}") from error
