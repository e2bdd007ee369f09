"""Other frameworks' recipes: what is in them, which known traps they walk into, and the same run in taut.

``examine.py`` is the way in. ``table/`` holds the traps, the names of the frameworks' options and what becomes of them
in taut, as data.
"""
