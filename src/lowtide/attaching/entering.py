"""Called in every Python process of a command, before its script: waits for what can be attached to."""

from types import ModuleType

from lowtide.attaching import variables
from lowtide.attaching.imports import after_import

_entered = False


def enter() -> None:
    """Wait for torch, transformers and Lightning, if a budget is wanted here. Twice is once."""
    global _entered
    wanted = variables.read()
    if wanted is None or _entered:
        return
    _entered = True

    def torch_is_there(_: ModuleType) -> None:
        from lowtide.attaching import attachment

        attachment.start(wanted)

    def of_transformers(module: ModuleType) -> None:
        from lowtide.attaching import trainers

        trainers.watch_transformers(module)

    def of_lightning(module: ModuleType) -> None:
        from lowtide.attaching import trainers

        trainers.watch_lightning(module)

    after_import("torch", torch_is_there)
    after_import("transformers.trainer", of_transformers)
    for library in ("lightning.pytorch", "pytorch_lightning"):
        after_import(f"{library}.trainer.trainer", of_lightning)
