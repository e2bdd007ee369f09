"""A folder of its own for the one file that vLLM's process imports, so that the folder can be on its PYTHONPATH."""
