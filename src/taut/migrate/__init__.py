"""Other frameworks' recipes: which known traps they walk into, and the same run in taut.

``examine.py`` is the entry point. ``table/`` holds, as data, the traps and the names of the frameworks' options,
``frameworks/`` the defaults and outcomes of options; ``topics/`` gives keys of taut their values. Importable without
torch and transformers.
"""
