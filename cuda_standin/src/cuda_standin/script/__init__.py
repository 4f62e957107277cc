"""A training script, watched from inside its own process, which the script does not notice.

``STANDIN_SCRIPT`` names a JSON file with what is wanted (``Request``). When torch has been imported, ``start`` puts its
hooks; what was seen is written beside that file as ``report-PID.json``, after each step and at the end. After the steps
that were asked for the process ends with exit code 0.

Each file has one subject and knows PyTorch from 2.0 on: ``peaks`` and ``steps``, ``stops`` of the host,
``out_of_memory``, ``composition`` of the peak, ``ranks`` that do not exist, ``compiling``, ``weights`` that are not
there, ``deepspeed_ops`` that are not compiled, ``generation`` that no token ends.
"""

from cuda_standin.script.start import start

__all__ = ["start"]
