"""The base of methods that learn from completions of the policy: prompts become rollouts, which are judged, scored and
made into trees (taut/rl). The methods differ in the credit of a completion, and in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from taut.config import Code, Decision, configclass, home_path
from taut.conflicts import conflict
from taut.data.settings import Kind, Split
from taut.errors import ConfigError, DataError, EngineError
from taut.evals.settings import AnswersConfig, EvalSampling
from taut.inference.settings import Sampling
from taut.methods.method import RunConfig
from taut.methods.settings import MayChange
from taut.rewards.settings import GradingConfig, RewardSpec
from taut.rl.settings import RolloutConfig, RolloutMonitorConfig

if TYPE_CHECKING:  # pyarrow takes long to import
    import torch

    from taut.data.dataset import Dataset
    from taut.data.order import Cursor
    from taut.data.render.render import Renderer
    from taut.data.rows.messages import Tool
    from taut.data.rows.prompts import PromptRow
    from taut.inference.local import LocalEngine
    from taut.inference.vllm import ServerEngine
    from taut.methods.inputs import Inputs, Language, Models, Plan
    from taut.rewards.reward_set import RewardSet
    from taut.rl.advantages import Credit
    from taut.rl.environment import EnvironmentPool
    from taut.rl.online import Online
    from taut.rl.rating import SharedRating
    from taut.rl.recorded import RecordedRollouts, Recording
    from taut.rl.teachers import Teachers
    from taut.rl.worker import RolloutWorker
    from taut.train.distributed import Ranks
    from taut.train.trainer import Monitor, StepSource, Trainer
    from taut.types import Prompt

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
    corrects_rollouts: ClassVar[bool] = False
    """Whether the method can weight tokens by the ratio of trainer to engine."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: Code | list[Code | RewardSpec] = field(default_factory=list)
    """Rewards of completions: names of docs/rewards.md, FILE.py:function, or tables with a weight and options. May be
    empty with an environment that gives rewards."""
    grading: GradingConfig = field(default_factory=GradingConfig)
    rollout_monitor: RolloutMonitorConfig = field(default_factory=RolloutMonitorConfig)

    @property
    def allows_noise(self) -> bool:
        return False

    rules: ClassVar[str] = """
        eval.every=1epoch[is_repeated] unread: there is no held-out loss of what is generated; expected held-out
            answers; set `eval.answers.every`
        rollout.dynamic_sampling_rounds excludes rollout.n=1: a single answer has none that its reward could differ
            from; expected `rollout.n` of 2 or more; raise it, or leave `rollout.dynamic_sampling_rounds` out
        rollout.difficulty_filter needs rewards[is_judged]
        rollout_monitor.warn_logprob_difference rollout_monitor.max_logprob_difference
            rollout_monitor.warn_effective_size rollout_monitor.max_without_signal rollout_monitor.warn_kl
            rollout_monitor.warn_clipped rollout_monitor.warn_entropy rollout_monitor.warn_dropped
            rollout_monitor.warn_values needs method=grpo|ppo: there are no policy gradients to watch
        rollout.dtype needs method=grpo|ppo[corrects_rollouts]: rollouts of another precision are not corrected for
        rollout.dtype needs dtype=float32: it makes rollouts of a model that trains in float32 faster
        required rewards=exact_match[rewards] rollout.environment.name=FILE.py:Class[asks] rollout.replay_from
            where method[is_judged]: the method learns from what completions are worth
        rollout.fork.turns needs method=grpo[compares_trees]: answers are compared as if each had been sampled by
            itself; expected taut grpo with grpo.advantage=tree; set that, or leave `rollout.fork.turns` out
        rewards[charges_steps] needs method=ppo[reads_turn_rewards] rollout.replay_from: a reward has
            steps.charge=true, and whole answers are charged; expected taut ppo, or grpo.advantage_level=turn; use one,
            or leave steps.charge out
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        replayed = self.rollout.replay_from
        if (
            replayed is not None
            and self.out is not None
            and home_path(replayed).resolve() == home_path(self.out).resolve()
        ):
            why = "this run has yet to record what it trains on"
            raise conflict(
                self,
                "rollout.replay_from out",
                why,
                "expected another run; name it, or another `out`",
            )

    @property
    def charges_steps(self) -> bool:
        """Whether a reward is charged to the steps of an answer."""
        from taut.rewards.registry import charges_steps

        return charges_steps(self.rewards)

    @property
    def compares_trees(self) -> bool:
        """Whether answers that begin alike are compared by the segments in which they differ."""
        return False

    @property
    def is_judged(self) -> bool:
        """Whether the run learns from rewards."""
        return True

    def make_credit(self) -> Credit:
        """Make the Credit, which turns judged completions into trees to train on. It has state, so each run has its
        own.
        """
        raise NotImplementedError

    def teachers_opener(self, inputs: Inputs, models: Models) -> Callable[[], Teachers] | None:
        """The function that opens the teachers that score rollouts before training on them; None if there are no
        teachers.
        """
        return None

    @property
    def reads_turn_rewards(self) -> bool:
        """Whether turns, and steps of an answer, are assigned their own rewards."""
        return False

    def loss_decisions(self) -> list[Decision]:
        """Return the settings of the loss that were chosen, with reasons."""
        return []

    @property
    def scores_reference_first(self) -> bool:
        """Whether the reference scores a whole rollout once, before training on it, instead of each micro-batch of each
        step. True if its logprobs are part of the reward or several steps use them.
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
        first_rows: int | None = None,
    ) -> Dataset:
        from taut.data.render.tokens import token_bytes
        from taut.data.rows.prompts import load_prompt_set

        longest, recording = self.longest_sample(language.config), self.recording
        if split == "train" and recording is not None:
            recording.require_vocabulary(token_bytes(language.tokenizer))
        reference = self.rollout.reference
        tools_of = self.tools_of if split == "train" else None  # held-out prompts have none
        return load_prompt_set(self.data, split, renderer, longest, reference, tools_of)

    @cached_property
    def tools_of(self) -> Callable[[Mapping[str, Any]], tuple[Tool, ...]]:
        """Columns of a row -> the tools of its environment, which every command puts into prompts as the run does."""
        from taut.rl.environment import offered_tools

        return offered_tools(self.rollout.environment)

    def first_prompts(self, inputs: Inputs, rows: Sequence[PromptRow]) -> list[Prompt | str]:
        """The first prompt of the policy for each of these rows, as in training; if an environment or agent fails to
        give one, the reason.
        """
        from taut.rl.environment import open_environments
        from taut.rl.sampler import first_prompts

        environment, stop_ids = self.rollout.environment, inputs.stops.ids
        if not environment.asks or self.is_replayed:
            return [row.as_prompt() for row in rows]
        pool = open_environments(environment, inputs.renderer, stop_ids, rows=rows)
        assert pool is not None
        with closing(pool):
            return first_prompts(rows, pool)

    def questions(self, data: Dataset) -> Sequence[Prompt]:
        from taut.data.rows.prompts import PromptSet

        assert isinstance(data, PromptSet)
        return data.prompts()

    def plan(self, train: Dataset, cursor: Cursor | None = None) -> Plan:
        """Plan steps of which each is a rollout; the prompts are repeated."""
        from taut.data.order import START
        from taut.data.rows.prompts import PromptSet
        from taut.methods.inputs import Plan
        from taut.rl.monitors import RolloutMonitor
        from taut.rl.online import Online

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
        return Plan(online, num_steps, cursor or START)

    def sampling(self, seed: int) -> Sampling:
        return self.rollout.sampling(seed)

    def monitors(self, source: StepSource) -> Sequence[Monitor]:
        """The monitors of a step; one of them also examines each rollout."""
        from taut.rl.online import Online

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
        """Connect engine, rewards and environment, or recorded rollouts, which are opened when first needed."""
        from taut.rl.online import Online

        assert isinstance(source, Online)
        worker: Callable[[], RolloutWorker | RecordedRollouts]
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
        """Recorded rollouts to train on instead of new ones. Raises ConfigError if they cannot be trained on."""
        if self.rollout.replay_from is None:
            return None
        from taut.rl.recorded import Recording

        return Recording.open(self.rollout.replay_from)

    def _open_replay(self, recording: Recording, inputs: Inputs) -> RecordedRollouts:
        from taut.rl.recorded import RecordedRollouts

        reason = (
            "rollout.replay_from: no engine is opened and nothing judged; under other settings than those of that run "
            "the policy that trains is not the one that was sampled from"
        )
        value = f"those that {recording.out} recorded"
        return RecordedRollouts(
            recording=recording,
            config=self.rollout,
            is_judged=self.is_judged,
            num_rows=inputs.num_rows,
            longest=inputs.longest,
            image_store=inputs.renderer.image_store,
            decisions=[Decision("rollouts", value, reason), *self.loss_decisions()],
        )

    def open_worker(
        self,
        source: Online,
        inputs: Inputs,
        models: Models,
        make_engine: Callable[..., LocalEngine],
        ranks: Ranks,
    ) -> RolloutWorker:
        """Open engine, rewards and environment; every rank calls it. Raises TautError if one of them cannot be used."""
        from taut.data.render.tokens import pieces_of
        from taut.inference.engine import require_text, require_usable
        from taut.inference.reward_model import open_rater
        from taut.inference.vllm import ServerEngine
        from taut.rewards.registry import charges_steps, models_of, read_parts
        from taut.rewards.reward_set import open_rewards
        from taut.rl.environment import open_environments
        from taut.rl.rating import SharedRating
        from taut.rl.rollout import RESERVED
        from taut.rl.worker import RolloutWorker

        config, credit, rows = self.rollout, source.credit, source.prompts.prompt_rows
        prompts = [row.as_prompt() for row in rows]
        if config.engine == "server":
            require_text(prompts)

        # Rewards: on the writer; reward models in this process on every rank.
        reward_set: RewardSet | None = None
        rating: SharedRating | None = None
        own = open_rater if ranks.size == 1 else partial(open_rater, device=ranks.device)
        if ranks.size > 1 and models_of(self.rewards) and not config.lag:
            rating = SharedRating(read_parts(self.rewards, RESERVED), own, ranks)
        if ranks.is_writer and self.rewards:
            opener = own if rating is None else rating.given
            reward_set = open_rewards(
                self.rewards, self.grading, reserved=RESERVED, open_rater=opener
            )
        engine: LocalEngine | ServerEngine | None = None
        environments: EnvironmentPool | None = None
        try:
            without = [] if reward_set is None else self._rows_without_answer(reward_set, rows)
            # Engine.
            if config.engine == "local":
                engine = make_engine(config=config.local, **self._precision(models))
            else:
                engine = self._open_server(inputs, models, ranks)
            require_usable(prompts, engine.context)

            # Environments.
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
            # The reward of an environment that judges cut paths would be replaced.
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
            if reward_set is not None:
                reward_set.close()
            if environments is not None:
                environments.close()
            if isinstance(engine, ServerEngine):
                engine.close()
            raise
        return RolloutWorker(
            config=config,
            prompts=rows,
            engine=engine,
            reward_set=reward_set,
            environments=environments,
            seed=self.seed,
            ranks=ranks,
            is_judged=self.is_judged,
            judges_together=bool(models_of(self.rewards)),
            rating=rating,
            pieces=pieces_of(inputs.renderer.tokenizer) if charges_steps(self.rewards) else None,
            decisions=[*without, *self.rollout_decisions(reward_set, engine, environments)],
        )

    def _precision(self, models: Models) -> dict[str, Any]:
        """Return the engine's precision if it differs from the trainer's. Raises ModelError for a GPU without such
        arithmetic.
        """
        from taut.models.precision import compute_context, resolve_dtype

        if self.rollout.dtype is None:
            return {}
        device = models.scorer.device
        dtype = resolve_dtype(self.rollout.dtype, device).dtype
        return {"compute": partial(compute_context, dtype, device)}

    def _rows_without_answer(
        self, reward_set: RewardSet, asked: Sequence[PromptRow]
    ) -> list[Decision]:
        """Decide on rows without a right answer. Raises DataError if no row has one and all rewards need it."""
        needing = [part.label for part in reward_set.parts if part.verifier.needs_reference]
        without = [row for row in asked if not row.references]
        if not needing or not without:
            return []
        is_all = len(without) == len(asked) and len(needing) == len(reward_set.parts)
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
        """Open the server and send it the weights that train. Raises EngineError if it reports logprobs of another
        distribution than it samples from.
        """
        from taut.inference.vllm import ServerEngine
        from taut.inference.weight_sync import TrainingModel
        from taut.models.load import context_length

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
            return server.follow(TrainingModel(models.scorer, ranks, dtype, models.compute))
        except BaseException:
            server.close()
            raise

    def rollout_decisions(
        self,
        reward_set: RewardSet | None,
        engine: LocalEngine | ServerEngine,
        environments: EnvironmentPool | None,
    ) -> list[Decision]:
        """Decisions made for the user about the loss, the environment, the engine and the rewards."""
        from taut.inference.vllm import ServerEngine

        decisions = [
            *self.loss_decisions(),
            *(environments.decisions if environments is not None else []),
        ]
        if isinstance(engine, ServerEngine):
            decisions += engine.decisions
        if reward_set is not None:
            decisions += reward_set.decisions
        return list(dict.fromkeys(decisions))

    # -- files

    def input_files(self) -> list[str]:
        from taut.rewards.registry import files_read

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
        from taut.rewards.registry import files_of

        return [*files_of(self.rewards), *self.rollout.environment.code]

    @property
    def training_rewards(self) -> str | Sequence[str | RewardSpec]:
        return () if self.is_replayed else self.rewards

    # -- held-out answers

    @property
    def held_out_answers(self) -> AnswersConfig:
        """The settings of held-out answers; by default as in training."""
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
        from taut.models.precision import DTYPES

        if self.rollout.engine == "server" or self.is_replayed:
            return None
        return dtype if self.rollout.dtype is None else DTYPES[self.rollout.dtype]

    def describe_rollouts(self, num_steps: int) -> str:
        return self.rollout.describe(num_steps, self.batch.samples_per_step)
