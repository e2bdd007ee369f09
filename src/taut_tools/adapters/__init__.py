"""Libraries of other projects that settings of a run name, each in one file that is imported where it is used.

Environments: ``rollout.environment.name=gym:ENV_ID`` and ``verifiers:ENV_ID``, tools ``mcp:COMMAND``. Reports:
``log.tensorboard``, ``log.wandb`` and ``log.trackio``.
"""
