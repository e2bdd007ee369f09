"""The parts of environments: tools, the settings of a service that runs programs (``remote.py``), and adapters to
other people's environments, one file each.

An adapter imports the library that it adapts, and no other file does. ``rl/environment.py`` says what an environment
is, and loads them.
"""
