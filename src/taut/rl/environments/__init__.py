"""What environments are made of: tools, and adapters to other people's environments, one file each.

Each file imports the library that it adapts, and nothing else does. ``rl/environment.py`` says what an environment is,
and loads them.
"""
