"""``python -m zoo`` in ``benchmarks/``."""

import sys

from zoo.runner import main

sys.exit(main())
