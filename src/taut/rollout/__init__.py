"""Engines: prompts of token ids in, completions out. ``local`` runs on the weights in this process, ``server`` asks an
OpenAI-compatible endpoint. ``engine.py`` is what they have in common, ``open.py`` opens one."""
