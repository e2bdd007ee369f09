"""Pictures: read, made into what a model takes, counted in tokens, numbered, and turned into features."""
