"""The losses: frozen dataclasses of pure maths. ``loss.py`` defines what a loss is, ``registry.py`` lists them.

Losses import types, errors and torch only; their keys (``settings.py``) import no torch.
"""
