"""Tools around a run, one folder each: they read recipes, show runs, curate data and so on. The core imports none.

Each tool adds commands, rewards and the like by entry points in this package's pyproject.toml
(taut.commands.registry), as other packages do, and imports no other tool, so that any of them can be removed.
"""
