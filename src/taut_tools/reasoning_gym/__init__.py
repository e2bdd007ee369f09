"""The reward ``reasoning_gym``: the score of a task's own verifier."""
