"""``taut teach``: a teacher's top logprobs of a data set, in a file."""

from taut.commands.registry import TRAINING, Command

TEACH = Command(
    "MODEL data.train=FILE out=FILE",
    "write a teacher's top logprobs to a file, for distill",
    "taut_tools.teach.teach:run",
    "taut_tools.teach.settings:Teach",
    group=TRAINING,
    alone=("model",),
    result="taut_tools.teach.teach:teach",
)
