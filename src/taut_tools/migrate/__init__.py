"""Recipes of other frameworks: find the known traps that they walk into, and write them as runs of taut.

``examine.py`` is the entry point. ``table/`` has the traps and the names of the frameworks' options as data,
``frameworks/`` the defaults and outcomes of options; ``topics/`` gives keys of taut their values. Importable without
torch and transformers.
"""

from taut.commands.registry import LOOK, Command

IMPORT = Command(
    "[KIND:]FILE [--processes N] [--force] > RUN.toml",
    "write another framework's recipe as the file of a run",
    "taut_tools.migrate.import_recipe:main",
    "taut_tools.migrate.import_recipe:ImportRecipe",
    group=LOOK,
    alone=("recipe",),
    is_raw=True,
    extras=(),
)
CHECK = Command(
    "--recipe KIND:FILE [--processes N] [--json]",
    "find what is wrong with another framework's recipe",
    "taut_tools.migrate.check_recipe:run",
    "taut_tools.migrate.check_recipe:CheckRecipe",
    extras=(),
)
