"""Commands that use a finished model: one file each, with a configclass and ``run(config) -> exit code``."""
