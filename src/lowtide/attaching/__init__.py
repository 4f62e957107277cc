"""lowtide in programs whose code stays as it is: ``LOWTIDE_BUDGET=20GiB python train.py``, ``lowtide run``.

    the variable -> ``entry/sitecustomize.py`` (or the ``.pth`` file of ``lowtide run --enable``) -> ``entering``
    -> ``imports`` waits for torch, transformers and Lightning -> ``attachment`` attaches to the training, once
    -> ``outcome`` says at the end what came of it

Without the variable nothing of this is loaded. ``lowtide pretend --budget`` comes in by the same way.
"""
