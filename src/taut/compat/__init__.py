"""Other frameworks' recipes: what is in them, which known traps they walk into, and the same run in taut.

``examine.py`` is the way in. ``table/`` holds the traps and the names of the frameworks' options, as data.
"""
