"""Objects that are named as text, ``module:name``, and their modules' imports.

Torch and transformers make half a million objects that live as long as the process. The garbage collector looked
through them seven times while they were imported, and once more at the end of the process: 2.0 of the 5.4 s of CPU
that a command took to import what training needs and end. So it rests during the import, and leaves alone afterwards
what is there.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any


def named(name: str) -> Any:
    """The object that ``module:name`` names; its module is imported where it is not yet. Objects that exist then are
    never collected (``gc.freeze``): for a process that is taut's own.
    """
    module, _, attribute = name.partition(":")
    if module not in sys.modules and gc.isenabled():
        gc.disable()
        try:
            import_module(module)
        finally:
            gc.freeze()
            gc.enable()
    return getattr(import_module(module), attribute)
