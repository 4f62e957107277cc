"""``lowtide pretend``: a training script, unmodified, at full size, on a GPU that is not there.

    command -> environment -> processes -> outcome -> report

``environments`` finds or makes the Python whose PyTorch is a CUDA build; ``command_run`` runs the command in it on the
CUDA stand-in (``cuda_standin``), whose ``script`` package watches from inside; ``outcome`` is what came of it,
``outcome_text`` and ``outcome_page`` show it; ``lowtide_inside`` is what runs in the process with ``--budget``.
"""
