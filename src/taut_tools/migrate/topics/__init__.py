"""Carry a recipe's options into a draft, topic by topic. ``convert.py`` calls these functions in order."""
