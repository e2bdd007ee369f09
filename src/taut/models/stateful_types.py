"""Layer types that keep state, by their names in config.json. No torch here: ``taut check --recipe`` asks too."""

STATEFUL_TYPES = frozenset(
    {
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        "mamba",
        "mamba2",
        "recurrent",
        "ssm",
        "rwkv",
    }
)
"""Layer types of a config that carry state from token to token."""
