"""``taut score``: a reward model's scores of a file of answers."""

from taut.commands.registry import USE, Command

SCORE = Command(
    "MODEL data=FILE out=FILE",
    "score a file of answers with a reward model, as JSONL",
    "taut_tools.score.score:run",
    "taut_tools.score.settings:Score",
    group=USE,
    alone=("model",),
    result="taut_tools.score.score:score",
)
