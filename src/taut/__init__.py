"""A stand-in until the library surface is written."""

__version__ = "0.1.0"
