"""What ``benchmarks/gpu.py`` runs: the models and whether they fit, the contenders, the measurements, the report."""
