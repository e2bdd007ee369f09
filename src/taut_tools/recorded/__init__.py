"""``taut rollouts`` and ``taut show --step``: print what a run recorded."""

from taut.commands.registry import LOOK, Command

ROLLOUTS = Command(
    "RUN [step=N] [sort=reward]",
    "print the rollouts of a step, with their rewards",
    "taut_tools.recorded.rollouts:run",
    "taut_tools.recorded.settings:Rollouts",
    group=LOOK,
    alone=("out",),
)

SHOW_STEP = Command(
    "--step N RUN",
    "print the samples of a step with the losses that a run recorded",
    "taut_tools.recorded.step:run",
    "taut_tools.recorded.settings:ShowStep",
    alone=("out",),
)
