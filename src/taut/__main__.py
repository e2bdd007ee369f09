"""``python -m taut`` and ``torchrun ... -m taut``: the command line."""

import os
import sys

from taut.cli import main

code = main()
if "RANK" in os.environ:
    # Threads of the process group may outlive it; now and then they abort a rank in its last moments, all work done or
    # its error printed, and torchrun then ends the others.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
