"""Attention over a flat run of tokens: the layout derived from reach, the backends, and which of them runs."""
