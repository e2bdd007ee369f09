"""Keys of ``taut eval tasks=...``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError
from taut.inference.settings import ModelUse

PREFIX = "lm-eval:"


@configclass
class EvaluateTasks(ModelUse):
    """Evaluate a model on tasks of lm-evaluation-harness."""

    tasks: str | list[str]
    """Tasks, separated by commas: lm-eval:NAME of a task, a group or a tag of the harness, or lm-eval:FILE.yaml of your
    own task."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples before each question; default: each task's own number."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Maximum documents of each task, taken from its start."""
    apply_chat_template: bool | None = None
    """Render questions with the chat template; default: true for a model that has one."""
    out: str | None = None
    """New directory for report.json and samples.jsonl."""

    rules: ClassVar[str] = """
        engine=server unread: it gives no logprobs of a prompt, which tasks ask for; expected engine=local; leave
            `engine` out
        required tasks=lm-eval:NAME[names]: nothing is asked
    """

    @property
    def names(self) -> list[str]:
        """Names of the tasks, without the prefix."""
        given = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks
        if given and not given[0].strip().startswith(PREFIX):
            raise ConfigError(
                f"tasks={given[0]}: expected where the task is from; write tasks={PREFIX}{given[0]}"
            )
        return [name for text in given if (name := text.strip().removeprefix(PREFIX))]
