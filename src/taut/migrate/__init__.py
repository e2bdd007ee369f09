"""Other frameworks' recipes: which known traps they walk into, and the same run in taut.

``examine.py`` is the entry point. ``table/`` holds, as data, the traps, the names of the frameworks' options and their
outcomes in taut. Importable without torch and transformers.
"""
