"""The common part of the methods that learn from completions of the policy: prompts become rollouts, which are judged,
scored and made into trees (taut/rl). The methods differ in the credit of a completion, and in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from taut.config import Decision, configclass, home_path
from taut.data.batching import START, Cursor, Order
from taut.data.dataset import Dataset, Split
from taut.data.prompts import PromptSet, load_prompt_set
from taut.data.render import Renderer
from taut.data.schema import Kind
from taut.errors import ConfigError
from taut.evals.answers import EvalSampling
from taut.evals.during import AnswersConfig
from taut.inference.engine import Sampling
from taut.inference.local import LocalEngine
from taut.methods.inputs import Inputs, Language, MayChange, Models, Plan
from taut.methods.method import RunConfig
from taut.methods.reference import ReferenceConfig
from taut.models.load import context_length
from taut.rewards.in_process import files_read
from taut.rewards.panel import PanelConfig
from taut.rewards.registry import RewardSpec, files_of
from taut.rl import setup
from taut.rl.advantages import Credit
from taut.rl.monitors import Guard, RolloutMonitorConfig
from taut.rl.online import Crew, Online
from taut.rl.rollout import RolloutConfig
from taut.train.trainer import Monitor, StepSource, Trainer
from taut.types import Prompt

REWARD_ENDS = "add the reward stop to rewards, or lower optim.learning_rate"
"""The remedy where a method has no setting against truncated answers."""


@configclass
class OnlineMethod(RunConfig):
    """A method that learns from completions of the policy."""

    row_kinds: ClassVar[Mapping[Kind, str]] = {"prompt": ""}
    allows_noise: ClassVar[bool] = False
    generates: ClassVar[bool] = True
    may_change: ClassVar[MayChange] = RunConfig.may_change.plus(
        MayChange(
            freely=("grading", "rollout_monitor", "rollout.url", "rollout.server"),
            rounding=("rollout.local",),
        )
    )
    is_judged: ClassVar[bool] = True
    """Whether the method learns from rewards."""
    unread_guard_keys: ClassVar[Sequence[str]] = (
        "warn_logprob_difference",
        "max_logprob_difference",
        "warn_effective_size",
        "max_without_signal",
        "warn_kl",
        "warn_clipped",
        "warn_entropy",
        "warn_dropped",
        "warn_values",
    )
    """Keys of rollout_monitor without an effect: those on quantities of policy gradients."""

    rollout: RolloutConfig = RolloutConfig()
    rewards: str | list[str | RewardSpec] = field(default_factory=list)
    """Rewards of completions: names of docs/rewards.md, FILE.py:function, or tables with a weight and options. May be
    empty with an environment that gives rewards."""
    grading: PanelConfig = PanelConfig()
    rollout_monitor: RolloutMonitorConfig = RolloutMonitorConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval.every:
            raise ConfigError(
                f"eval.every={self.eval.every} measures a held-out loss, and what is learned here is generated; "
                "expected held-out answers; set eval.answers.every"
            )
        if self.rollout.dynamic_sampling_rounds and self.rollout.n == 1:
            raise ConfigError(
                f"rollout.dynamic_sampling_rounds={self.rollout.dynamic_sampling_rounds} with rollout.n=1: a "
                "single answer has none that its reward could differ from; expected rollout.n of 2 or more; raise it, "
                "or take rollout.dynamic_sampling_rounds out"
            )
        for name in self.unread_guard_keys:
            if getattr(self.rollout_monitor, name) != getattr(RolloutMonitorConfig, name):
                raise ConfigError(
                    f"rollout_monitor.{name}={getattr(self.rollout_monitor, name):g} watches policy gradients, and "
                    f"{self.command()} reads neither advantages nor the engine's log-probs; taut grpo and ppo "
                    "do; take it out"
                )
        if not self.rewards and self.is_judged and self.rollout.environment.name in (None, "tools"):
            raise ConfigError(
                f"rewards is not set, and {self.command()} learns from what completions are worth; expected a "
                "reward, or an environment that gives one; set rewards=exact_match"
            )

    # -- members of such a method

    def make_credit(self) -> Credit:
        """The Credit, which makes trees to train on of judged completions. It has state: one for each run."""
        raise NotImplementedError

    def loss_decisions(self) -> list[Decision]:
        """The settings of the loss that were chosen automatically, with reasons."""
        return []

    @property
    def scores_reference_first(self) -> bool:
        """Whether the reference scores a whole rollout once, before training on it, instead of each micro-batch of each
        step. True where its logprobs are part of the reward or more than one step uses them.
        """
        return False

    # -- data and loss

    @property
    def has_rewards(self) -> bool:
        return self.is_judged and not self.rollout.environment.is_on

    @property
    def ends_remedy(self) -> str:
        return REWARD_ENDS

    def extra_forwards(self) -> int:
        return super().extra_forwards() + self.make_credit().asked.policy

    # -- prompts and steps

    @property
    def grows(self) -> int:
        return self.rollout.grows

    def load_data(
        self, split: Split, renderer: Renderer, language: Language, *, looks_again: bool = True
    ) -> Dataset:
        longest = self.longest_sample(language.config)
        return load_prompt_set(self.data, split, renderer, longest, self.rollout.reference)

    def questions(self, data: Dataset) -> Sequence[Prompt]:
        assert isinstance(data, PromptSet)
        return data.prompts()

    def plan(self, train: Dataset, cursor: Cursor = START) -> Plan:
        """A step of the order is a rollout, and the prompts are repeated."""
        assert isinstance(train, PromptSet)
        rollout, batch, rows = self.rollout, self.batch, self.rows_of(train)
        groups = rows.prefix_groups(batch.group_min_tokens) if batch.group_prefixes else None
        size = batch.samples_per_step * rollout.minibatches
        order = Order(train.weights, self.seed, size, batch.shuffle, groups)
        num_steps = self.steps or order.num_steps(self.epochs or 1.0) * rollout.updates
        guard = Guard(self.rollout_monitor, self.method, self.ends_remedy)
        online = Online(rollout, train, order, self.make_credit(), guard, self.seed)
        return Plan(online, num_steps, cursor)

    def sampling(self, seed: int) -> Sampling:
        return self.rollout.sampling(seed)

    def monitors(self, source: StepSource) -> Sequence[Monitor]:
        """The guard, which also examines each rollout."""
        assert isinstance(source, Online)
        return [source.guard]

    def connect(
        self,
        trainer: Trainer,
        inputs: Inputs,
        models: Models,
        make_engine: Callable[..., LocalEngine],
    ) -> None:
        """Connect engine, rewards and environment, which are opened when they are first needed."""
        online = trainer.source
        assert isinstance(online, Online)
        setting = setup.Setting(
            config=self.rollout,
            rewards=self.rewards,
            grading=self.grading,
            credit=online.credit,
            is_judged=self.is_judged,
            decisions=self.loss_decisions(),
            prompts=online.prompts.prompt_rows,
            make_local=make_engine,
            renderer=inputs.renderer,
            stops=inputs.stops,
            context=context_length(inputs.config),
            scorer=models.scorer,
            compute=models.compute,
            dtype=models.loaded.dtype.dtype,
            seed=self.seed,
            ranks=trainer.ranks,
        )
        roles = trainer.roles if self.scores_reference_first else ()
        online.join(Crew(trainer, roles, partial(setup.open_roller, setting)))

    # -- files

    def input_files(self) -> list[str]:
        return [
            *super().input_files(),
            *map(str, self.user_code()),
            *files_read(self.rewards),
        ]

    def user_code(self) -> list[Path]:
        environment = self.rollout.environment
        named = [environment.name or "", *environment.tools]
        files = [home_path(name.rpartition(":")[0]) for name in named if ":" in name]
        return [*files_of(self.rewards), *files]

    @property
    def training_rewards(self) -> str | Sequence[str | RewardSpec]:
        return self.rewards

    # -- held-out answers

    @property
    def held_out_answers(self) -> AnswersConfig:
        """By default as in training."""
        answers, rollout = self.eval.answers, self.rollout
        is_asked = bool(self.data.eval) or answers.is_asked_for
        if answers.rewards or not self.has_rewards or not is_asked:
            return answers
        sampling = answers.sampling
        is_set = sampling.max_new_tokens != EvalSampling().max_new_tokens
        return replace(
            answers,
            rewards=self.rewards,
            reference=answers.reference or rollout.reference,
            sampling=replace(
                sampling,
                max_new_tokens=sampling.max_new_tokens if is_set else rollout.max_new_tokens,
                stop=sampling.stop or rollout.stop,
            ),
        )

    @property
    def decisions(self) -> list[Decision]:
        if not self.rollout.environment.is_on or not self.data.eval:
            return super().decisions
        reason = "they are judged without rollout.environment, which answers rollouts alone"
        value = "asked" if self.eval.answers.rewards else "not asked"
        decision = Decision("held-out answers", value, f"eval.answers.rewards; {reason}")
        return [*super().decisions, decision]

    def describe_rollouts(self, num_steps: int) -> str:
        return self.rollout.describe(num_steps, self.batch.samples_per_step)


def require_live_reference(reference: ReferenceConfig, without: str, *, is_read: bool) -> None:
    """Raise ConfigError for a reference without an effect, or one that is impossible. ``without``: the setting that
    disables it.
    """
    if reference.file is not None:
        raise ConfigError(
            f"reference.file={reference.file} cannot hold log-probs of completions that are yet to be generated; "
            "expected a live reference; take reference.file out"
        )
    if not is_read and reference != ReferenceConfig():
        raise ConfigError(
            f"settings of reference with {without}, where nothing is compared with it; expected none; take them "
            "out, or correct the other"
        )
