"""The common part of the methods that learn from completions of the policy: prompts become rollouts, which are judged,
scored and made into trees (taut/rl). The methods differ in the credit of a completion, and in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from taut.config import Decision, changed, configclass, home_path
from taut.data.dataset import Dataset, Split
from taut.data.order import START, Cursor
from taut.data.prompts import PromptRow, PromptSet, load_prompt_set
from taut.data.render import Renderer
from taut.data.schema import Kind
from taut.data.token_bytes import pieces_of, token_bytes
from taut.errors import ConfigError, DataError, EngineError
from taut.evals.answers import EvalSampling
from taut.evals.during import AnswersConfig
from taut.inference.engine import Sampling, require_text, require_usable
from taut.inference.local import LocalEngine
from taut.inference.reward_model import open_rater
from taut.inference.vllm import ServerEngine
from taut.inference.weight_sync import Trained
from taut.methods.inputs import Inputs, Language, MayChange, Models, Plan
from taut.methods.method import RunConfig
from taut.methods.reference import ReferenceConfig
from taut.methods.rollout_teachers import RolloutTeachersConfig
from taut.models.load import context_length
from taut.models.precision import DTYPES, compute_context, resolve_dtype
from taut.rewards.panel import Panel, PanelConfig, open_panel
from taut.rewards.registry import (
    RewardSpec,
    charges_steps,
    files_of,
    files_read,
    models_of,
    read_parts,
)
from taut.rl.advantages import Credit
from taut.rl.environment import EnvironmentPool, open_environments
from taut.rl.monitors import RolloutMonitor, RolloutMonitorConfig
from taut.rl.online import Online
from taut.rl.rating import SharedRating
from taut.rl.rollout import RESERVED, RolloutConfig, RolloutSource, RolloutWorker
from taut.rl.teachers import Teachers
from taut.sandbox import shared
from taut.train.distributed import Ranks
from taut.train.trainer import Monitor, StepSource, Trainer
from taut.types import Prompt

if TYPE_CHECKING:  # pyarrow takes long to import
    from taut.rl.replay import Recording, Replay

REWARD_ENDS = "add the reward stop to rewards, or lower optim.learning_rate"
"""The remedy where a method has no setting against truncated answers."""


@configclass
class OnlineMethod(RunConfig):
    """A method that learns from completions of the policy."""

    row_kinds: ClassVar[Mapping[Kind, str]] = {"prompt": ""}
    generates: ClassVar[bool] = True
    may_change: ClassVar[MayChange] = RunConfig.may_change.plus(
        MayChange(
            freely=(
                "grading",
                "rollout_monitor",
                "rollout.urls",
                "rollout.server",
                "rollout.replay_from",  # what was recorded is hashed
            ),
            rounding=("rollout.local",),
        )
    )
    unread_monitor_keys: ClassVar[Sequence[str]] = (
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
    corrects_rollouts: ClassVar[bool] = False
    """Whether the method can weight tokens by the ratio of trainer to engine."""

    rollout: RolloutConfig = RolloutConfig()
    rewards: str | list[str | RewardSpec] = field(default_factory=list)
    """Rewards of completions: names of docs/rewards.md, FILE.py:function, or tables with a weight and options. May be
    empty with an environment that gives rewards."""
    grading: PanelConfig = PanelConfig()
    rollout_monitor: RolloutMonitorConfig = RolloutMonitorConfig()

    @property
    def allows_noise(self) -> bool:
        return False

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
        if self.rollout.difficulty_filter and not self.is_judged:
            raise ConfigError(
                f"rollout.difficulty_filter={self.rollout.difficulty_filter:g}: {self.command()} has no rewards that "
                "could say which prompts teach nothing; expected a method with rewards; take it out"
            )
        for name in changed(self.rollout_monitor, self.unread_monitor_keys):
            raise ConfigError(
                f"rollout_monitor.{name}={getattr(self.rollout_monitor, name):g} watches policy gradients, and "
                f"{self.command()} reads neither advantages nor the engine's logprobs; taut grpo and ppo "
                "do; take it out"
            )
        if self.rollout.dtype is not None and not self.corrects_rollouts:
            raise ConfigError(
                f"rollout.dtype={self.rollout.dtype}: {self.command()} cannot correct for rollouts of another "
                "precision than the trainer's; taut grpo and ppo can; take it out"
            )
        if self.rollout.dtype is not None and self.dtype != "float32":
            raise ConfigError(
                f"rollout.dtype={self.rollout.dtype} with dtype={self.dtype or 'chosen by the hardware'}; expected "
                "dtype=float32, whose rollouts it makes faster; set that, or take rollout.dtype out"
            )
        replayed = self.rollout.replay_from
        is_own = (
            replayed is not None
            and self.out is not None
            and home_path(replayed).resolve() == home_path(self.out).resolve()
        )
        if is_own:
            raise ConfigError(
                f"rollout.replay_from={replayed} is the out of this run, which has yet to record what it trains "
                "on; expected another run; name it, or another out"
            )
        rewarding = [name for name in self.rollout.environment.names if name != "tools"]
        has_own = bool(rewarding) or replayed is not None
        if not self.rewards and self.is_judged and not has_own:
            raise ConfigError(
                f"rewards is not set, and {self.command()} learns from what completions are worth; expected a "
                "reward, or an environment that gives one; set rewards=exact_match"
            )
        if self.rollout.fork.is_on and not self.compares_trees:
            raise ConfigError(
                f"rollout.fork.turns={self.rollout.fork.turns}, and this {self.command()} compares answers as if each "
                "had been sampled by itself; expected taut grpo with grpo.advantage=tree, which compares what paths "
                "have after their fork; set that, or take rollout.fork out"
            )
        if charges_steps(self.rewards) and not (self.reads_turn_rewards or self.is_replayed):
            raise ConfigError(
                f"a reward has steps.charge=true, and {self.command()} charges whole answers; expected a method that "
                "charges turns; use taut ppo, or taut grpo with grpo.advantage_level=turn, or take steps.charge out"
            )

    # -- members of such a method

    @property
    def compares_trees(self) -> bool:
        """Whether answers that begin alike are compared by the segments in which they differ."""
        return False

    @property
    def is_judged(self) -> bool:
        """Whether the run learns from rewards."""
        return True

    def make_credit(self) -> Credit:
        """The Credit, which makes trees to train on of judged completions. It has state: one for each run."""
        raise NotImplementedError

    def require_rollouts_for(self, teachers: RolloutTeachersConfig) -> None:
        """Raise ConfigError where teachers cannot judge what is generated."""
        if teachers.privileged is not None and self.rollout.environment.is_on:
            raise ConfigError(
                "distill.privileged with rollout.environment: an environment may begin a conversation by itself, and "
                "the prompt is what the teacher sees otherwise; expected one of the two; take one out"
            )

    def teachers_opener(self, inputs: Inputs, models: Models) -> Callable[[], Teachers] | None:
        """What opens the teachers that score rollouts before they are trained on; None: there are none."""
        return None

    @property
    def reads_turn_rewards(self) -> bool:
        """Whether turns, and steps of an answer, are charged with their own rewards."""
        return False

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
        is_unset = self.is_replayed and not self.rewards
        return self.is_judged and not self.rollout.environment.is_on and not is_unset

    @property
    def ends_remedy(self) -> str:
        return REWARD_ENDS

    def extra_forwards(self) -> int:
        return super().extra_forwards() + self.make_credit().wants.logp

    # -- prompts and steps

    @property
    def is_replayed(self) -> bool:
        return self.rollout.replay_from is not None

    @property
    def grows(self) -> int:
        return self.rollout.grows

    def load_data(
        self,
        split: Split,
        renderer: Renderer,
        language: Language,
        *,
        looks_again: bool = True,
        ranks: Ranks | None = None,
    ) -> Dataset:
        longest, recording = self.longest_sample(language.config), self.recording
        if split == "train" and recording is not None:
            recording.require_vocabulary(token_bytes(language.tokenizer))
        return load_prompt_set(self.data, split, renderer, longest, self.rollout.reference)

    def questions(self, data: Dataset) -> Sequence[Prompt]:
        assert isinstance(data, PromptSet)
        return data.prompts()

    def plan(self, train: Dataset, cursor: Cursor = START) -> Plan:
        """A step of the order is a rollout, and the prompts are repeated."""
        assert isinstance(train, PromptSet)
        rollout, batch, rows = self.rollout, self.batch, self.rows_of(train)
        order = rows.order(batch, self.seed, batch.samples_per_step * rollout.minibatches)
        num_steps = self.steps or order.num_steps(self.epochs or 1.0) * rollout.updates
        if (recording := self.recording) is not None:
            recording.require_fits(
                rollout, batch.samples_per_step, num_steps, is_judged=self.is_judged
            )
        monitor = RolloutMonitor(self.rollout_monitor, self.method, self.ends_remedy)
        online = Online(rollout, train, order, self.make_credit(), monitor, self.seed)
        return Plan(online, num_steps, cursor)

    def sampling(self, seed: int) -> Sampling:
        return self.rollout.sampling(seed)

    def monitors(self, source: StepSource) -> Sequence[Monitor]:
        """The monitor, which also examines each rollout."""
        assert isinstance(source, Online)
        return [source.monitor]

    def connect(
        self,
        source: StepSource,
        inputs: Inputs,
        models: Models,
        make_engine: Callable[..., LocalEngine],
        ranks: Ranks,
        get_trainer: Callable[[], Trainer],
    ) -> Online:
        """With engine, rewards and environment, or recorded rollouts, which are opened when they are first needed."""
        assert isinstance(source, Online)
        worker: Callable[[], RolloutSource]
        worker = partial(self.open_worker, source, inputs, models, make_engine, ranks)
        if (recording := self.recording) is not None:
            worker = partial(self._open_replay, recording, inputs)
        return replace(
            source,
            get_trainer=get_trainer,
            roles=models.roles if self.scores_reference_first else (),
            open_worker=worker,
            open_teachers=self.teachers_opener(inputs, models),
        )

    @cached_property
    def recording(self) -> Recording | None:
        """The rollouts that are trained on instead of new ones. Raises ConfigError where they cannot be."""
        if self.rollout.replay_from is None:
            return None
        from taut.rl.replay import Recording

        return Recording.open(self.rollout.replay_from)

    def _open_replay(self, recording: Recording, inputs: Inputs) -> Replay:
        from taut.rl.replay import Replay

        reason = (
            "rollout.replay_from: no engine is opened and nothing judged; under other settings than those of that run "
            "the policy that trains is not the one that was sampled from"
        )
        value = f"those that {recording.out} recorded"
        return Replay(
            recording=recording,
            config=self.rollout,
            is_judged=self.is_judged,
            num_rows=inputs.num_rows,
            longest=inputs.longest,
            image_store=inputs.renderer.image_store,
            settled=[Decision("rollouts", value, reason), *self.loss_decisions()],
        )

    def open_worker(
        self,
        source: Online,
        inputs: Inputs,
        models: Models,
        make_engine: Callable[..., LocalEngine],
        ranks: Ranks,
    ) -> RolloutWorker:
        """Open engine, rewards and environment. Raises TautError if one of them cannot be used; every rank calls it."""
        config, credit, rows = self.rollout, source.credit, source.prompts.prompt_rows
        prompts = [row.as_prompt() for row in rows]
        if config.engine == "server":
            require_text(prompts)
        panel: Panel | None = None
        rating: SharedRating | None = None
        own = open_rater if ranks.size == 1 else partial(open_rater, device=ranks.device)
        if ranks.size > 1 and models_of(self.rewards) and not config.lag:
            rating = SharedRating(read_parts(self.rewards, RESERVED), own, ranks)
        if ranks.is_writer and self.rewards:
            opener = own if rating is None else rating.given
            panel = open_panel(self.rewards, self.grading, reserved=RESERVED, open_rater=opener)
        engine: LocalEngine | ServerEngine | None = None
        environments: EnvironmentPool | None = None
        try:
            without = [] if panel is None else self._rows_without_answer(panel, rows)
            if config.engine == "local":
                engine = make_engine(config=config.local, **self._precision(models))
            else:
                engine = self._open_server(inputs, models, ranks)
            require_usable(prompts, engine.context)
            environments = open_environments(
                config.environment,
                inputs.renderer,
                inputs.stops.ids,
                engine.context,
                ranks,
                rows=rows,
                stop=config.stop,
                fork=config.fork,
            )
            if config.environment.agents and not credit.takes_branches:
                raise ConfigError(
                    f"rollout.environment has {config.environment.agents[0]}, and what an agent asks may branch, which "
                    "turns and penalties of tokens do not; expected taut grpo with advantage_level=trajectory and no "
                    "KL penalty in the reward; set those, or take an environment"
                )
            # An environment that rewards a cut path itself: that reward would be replaced.
            if (
                credit.bootstraps_cut
                and environments is not None
                and any(hasattr(kind.make, "cut") for kind in environments.kinds)
            ):
                raise ConfigError(
                    "ppo.bootstrap_truncated=true replaces the reward of a cut path by the critic's value, and "
                    f"{', '.join(config.environment.names)} has a method cut, which says what a cut path is worth; "
                    "expected one of the two; take one out"
                )
        except BaseException:
            if panel is not None:
                panel.close()
            if environments is not None:
                environments.close()
            if isinstance(engine, ServerEngine):
                engine.close()
            raise
        return RolloutWorker(
            config=config,
            prompts=rows,
            engine=engine,
            panel=panel,
            environments=environments,
            seed=self.seed,
            ranks=ranks,
            is_judged=self.is_judged,
            judges_together=bool(models_of(self.rewards)),
            rating=rating,
            is_useful=credit.is_useful,
            needs_one=credit.needs_one,
            pieces=pieces_of(inputs.renderer.tokenizer) if charges_steps(self.rewards) else None,
            settled=[*without, *self.rollout_decisions(panel, engine, environments)],
        )

    def _precision(self, models: Models) -> dict[str, Any]:
        """The engine's precision where it is not the trainer's. Raises ModelError for a GPU that has no such
        arithmetic.
        """
        if self.rollout.dtype is None:
            return {}
        device = models.scorer.device
        dtype = resolve_dtype(self.rollout.dtype, device).dtype
        return {"compute": partial(compute_context, dtype, device)}

    def _rows_without_answer(self, panel: Panel, asked: Sequence[PromptRow]) -> list[Decision]:
        """A decision about rows without a right answer. Raises DataError if all rewards need one and no row has it."""
        needing = [part.label for part in panel.parts if part.verifier.needs_reference]
        without = [row for row in asked if not row.references]
        if not needing or not without:
            return []
        is_all = len(without) == len(asked) and len(needing) == len(panel.parts)
        if is_all and not self.rollout.environment.is_on:
            raise DataError(
                f"{without[0].place}: the row has no right answer, nor has any other, and {needing[0]} holds answers "
                "to one; expected a column such as answer; name it with rollout.reference, or take other rewards"
            )
        value = f"nothing of {len(without):,} of {len(asked):,} rows"
        return [
            Decision(needing[0], value, f"they have no right answer ({without[0].place} is one)")
        ]

    def _open_server(self, inputs: Inputs, models: Models, ranks: Ranks) -> ServerEngine:
        """The server, which gets the weights that train. Raises EngineError if its logprobs are not those of what it
        samples from.
        """
        config, context = self.rollout, context_length(inputs.config)
        assert config.urls is not None
        tokenizer, stop_ids = inputs.renderer.tokenizer, inputs.stops.ids
        server = ServerEngine.open(config.urls, config.server, tokenizer, stop_ids, context)
        try:
            if server.kind == "none" or (server.kind != "processed" and config.temperature != 1):
                raise EngineError(
                    f"server: {config.urls} gives {server.kind} logprobs; expected those of what it samples from, at "
                    f"temperature {config.temperature:g}; start it with --logprobs-mode processed_logprobs"
                )
            dtype = models.loaded.dtype.dtype
            return server.follow(Trained(models.scorer, ranks, dtype, models.compute))
        except BaseException:
            server.close()
            raise

    def rollout_decisions(
        self,
        panel: Panel | None,
        engine: LocalEngine | ServerEngine,
        environments: EnvironmentPool | None,
    ) -> list[Decision]:
        """What was decided for the user about the loss, the environment, the engine and the rewards."""
        decisions = [
            *self.loss_decisions(),
            *(environments.decisions if environments is not None else []),
        ]
        if isinstance(engine, ServerEngine):
            decisions += engine.decisions
        if panel is not None:
            decisions += panel.decisions
        if self.rollout.lag and models_of(self.rewards):
            value = "judge between updates, on the first rank"
            reason = "rollout.lag: groups are judged as they are taken, while nothing trains"
            decisions.append(Decision("reward models", value, reason))
        if self.rollout.oversample:
            value = f"{self.rollout.oversample} more prompts asked than taken"
            reason = (
                "rollout.oversample; it favours short answers: compare oversample_tokens_mean, of those dropped, with "
                "tokens_mean in the event rollout"
            )
            decisions.append(Decision("oversampling", value, reason))
        environment = self.rollout.environment
        if "python" in environment.tools:
            chosen = shared(remote=environment.remote).mechanism
            decisions.append(Decision("sandbox", chosen.name, chosen.reason))
        return list(dict.fromkeys(decisions))

    # -- files

    def input_files(self) -> list[str]:
        replayed = self.rollout.replay_from
        return [
            *super().input_files(),
            *map(str, self._code()),
            *files_read(self.rewards),
            *([] if replayed is None else [replayed]),
        ]

    def user_code(self) -> list[Path]:
        return [] if self.is_replayed else self._code()

    def _code(self) -> list[Path]:
        """Files of the user's code that are named."""
        named = self.rollout.environment.code
        files = [home_path(name.rpartition(":")[0]) for name in named]
        return [*files_of(self.rewards), *files]

    @property
    def training_rewards(self) -> str | Sequence[str | RewardSpec]:
        return () if self.is_replayed else self.rewards

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

    def engine_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        if self.rollout.engine == "server" or self.is_replayed:
            return None
        return dtype if self.rollout.dtype is None else DTYPES[self.rollout.dtype]

    def describe_rollouts(self, num_steps: int) -> str:
        return self.rollout.describe(num_steps, self.batch.samples_per_step)


def require_live_reference(reference: ReferenceConfig, without: str, *, is_read: bool) -> None:
    """Raise ConfigError for a reference without an effect, or one that is impossible. ``without``: the setting that
    disables it.
    """
    if reference.file is not None:
        raise ConfigError(
            f"reference.file={reference.file} cannot hold logprobs of completions that are yet to be generated; "
            "expected a live reference; take reference.file out"
        )
    if not is_read and reference != ReferenceConfig():
        raise ConfigError(
            f"settings of reference with {without}, where nothing is compared with it; expected none; take them "
            "out, or correct the other"
        )
