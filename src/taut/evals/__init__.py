"""Evaluations, one per file: what a model is worth on data it did not train on."""
