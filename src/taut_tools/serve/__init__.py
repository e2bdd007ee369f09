"""``taut serve-reward``: serve a reward model over HTTP."""

from taut.commands.registry import USE, Command

REWARD = Command(
    "MODEL [port=5000]",
    "serve a reward model over HTTP",
    "taut_tools.serve.reward:run",
    "taut_tools.serve.settings:ServeReward",
    group=USE,
    alone=("model",),
)
