"""Keys of rewards."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import Code, configclass
from taut.conflicts import conflict

Place: TypeAlias = Literal["here", "process", "remote", "model"]
"""The place where a verifier runs: in the caller's thread (it is quick and cannot hang), in a worker process that is
killed where it takes too long, at a server, or as a model in the process that trains."""
Judged: TypeAlias = Literal["correctness", "form"]
"""The judged quality: correctness (right answers score higher than wrong ones), or form (length, style, format),
which says nothing about right and wrong."""
Aggregation: TypeAlias = Literal["min", "mean", "last", "product", "sum"]


@configclass
class StepsConfig:
    """A process reward model's reading of an answer, step by step."""

    separator: Annotated[str, Field(min_length=1)] | None = None
    """The text between two steps, as that of the model's training data. By default the whole answer gets one number."""
    mark: Annotated[str, Field(min_length=1)] | None = None
    """A text that stands after each step where the model reads it, before the separator or in place of one that it ends
    with: its number is read at the last token of it. For models that were trained so. By default it is read at the last
    token of the step."""
    tokens: list[str] = field(default_factory=list)
    """For a causal language model that judges a step by the token after it: that of right and that of wrong, as in
    ["+", "-"]. Its number is the difference of their logits. By default the model has a head for numbers."""
    aggregate: Aggregation = "min"
    """The reward, from the probability of each step to be right. min, mean, last, product, sum."""
    charge: bool = False
    """Charge each step's tokens with its part of the reward, as turns are with the rewards of an environment's steps.
    For taut ppo, and taut grpo with advantage_level=turn. The default charges the whole answer."""

    rules: ClassVar[str] = """
        charge aggregate mark tokens needs separator: an answer has steps only where the text between them is given
    """

    def __post_init__(self) -> None:
        if len(self.tokens) not in (0, 2):
            remedy = "expected that of right and that of wrong, as in ['+', '-']; set both"
            raise conflict(self, "tokens", f"there are {len(self.tokens)}", remedy)


@configclass
class RewardSpec:
    """One reward and its settings."""

    name: Code
    """Name of a reward, or FILE.py:function."""
    weight: float = 1.0
    """Factor of its value in the total. 0: it is logged and does not count."""
    label: str | None = None
    """Name of its metric. By default the reward's name, or the function's."""
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Time limit for an answer, in seconds. The default depends on the reward; rewards that cannot hang have none."""
    inside: str | None = None
    """Judge only the content of the last tag of this name; an answer without the tag is judged as an empty one."""
    after: str | None = None
    """Judge only what follows the last such mark, as </think>; an answer without the mark is judged as an empty one."""
    judges: Judged | None = None
    """correctness: the check rewards.gold requires that right answers score higher than wrong ones. form (length,
    style, format): it requires only that the reward can be computed. The default depends on the reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the reward; for FILE.py:function, arguments by name."""

    rules: ClassVar[str] = """
        at most one of inside after: each names the part of an answer that is judged
    """

    @property
    def metric(self) -> str:
        """Name of its metric."""
        return self.label or self.name.rpartition(":")[2]


@configclass
class GradingConfig:
    """Processes and requests of rewards; they do not change values."""

    workers: Annotated[int, Field(ge=1)] = 4
    """Processes for rewards that compute: math, json_schema, FILE.py:function and the like."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """Requests to servers at a time."""
