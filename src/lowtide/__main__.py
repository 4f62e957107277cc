"""``python -m lowtide``, as ``lowtide``: where the command is not on the path, in a container or under a launcher."""

import sys

from lowtide.cli import main

if __name__ == "__main__":
    sys.exit(main())
