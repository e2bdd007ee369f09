"""The tables of options, one file for each framework. ``TABLES`` is the list of them, by the name before the file's."""

from __future__ import annotations

from taut.migrate.frameworks import axolotl, llamafactory, openrlhf, swift, trl
from taut.migrate.frameworks.tables import Lacking, Tables

__all__ = ["TABLES", "Lacking", "Tables"]

TABLES: dict[str, Tables] = {
    "trl": trl.TRL,
    "open-r1": trl.OPEN_R1,
    "swift": swift.SWIFT,
    "megatron": swift.MEGATRON,
    "openrlhf": openrlhf.OPENRLHF,
    "llamafactory": llamafactory.LLAMAFACTORY,
    "axolotl": axolotl.AXOLOTL,
}
