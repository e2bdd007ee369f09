"""``taut eval tasks=lm-eval:NAME``: evaluate on tasks of lm-evaluation-harness with the local engine."""

from taut.commands.registry import Command

TASKS = Command(
    "MODEL tasks=lm-eval:NAME[,NAME ...]",
    "evaluate a model on tasks of lm-evaluation-harness",
    "taut_tools.lm_eval.evaluate:run",
    "taut_tools.lm_eval.settings:EvaluateTasks",
    alone=("model",),
    extras=("train", "lm-eval"),
)
