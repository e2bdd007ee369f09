"""Engine, rewards and environment of a run that generates, opened when they are first needed.

``methods/online.py`` fills in the ``Setting``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from taut.config import Decision
from taut.data.prompts import PromptRow
from taut.data.render import Renderer
from taut.data.stop_tokens import StopSet
from taut.errors import ConfigError, DataError, EngineError
from taut.inference.engine import require_text, require_usable
from taut.inference.local import LocalEngine
from taut.inference.reward_model import open_rater
from taut.inference.vllm import ServerEngine
from taut.inference.weight_sync import Trained
from taut.models.scorer import Scorer
from taut.rewards.in_process import require_judgeable
from taut.rewards.panel import Panel, PanelConfig, open_panel
from taut.rewards.registry import RewardSpec
from taut.rl.advantages import Credit
from taut.rl.environment import EnvironmentConfig, World, open_world
from taut.rl.rollout import RESERVED, Roller, RolloutConfig
from taut.sandbox import shared
from taut.train.distributed import Ranks


class Setting(NamedTuple):
    """What a run has to generate with."""

    config: RolloutConfig
    rewards: str | Sequence[str | RewardSpec]
    grading: PanelConfig
    credit: Credit
    is_judged: bool
    """Whether rewards are what is learned from."""
    decisions: Sequence[Decision]
    """(key, value, reason) of what was chosen for the user about the loss."""
    prompts: Sequence[PromptRow]
    make_local: Callable[..., LocalEngine]
    renderer: Renderer
    stops: StopSet
    context: int | None
    """Tokens a prompt and its completion may have."""
    scorer: Scorer
    compute: Callable[[], AbstractContextManager[Any]]
    """The precision context of a forward."""
    dtype: torch.dtype
    seed: int
    ranks: Ranks


def open_roller(setting: Setting) -> Roller:
    """All that a roll-out needs. Raises TautError where it cannot be had; every rank calls it."""
    config, credit, rewards = setting.config, setting.credit, setting.rewards
    require_judgeable(rewards, setting.ranks.size, ahead=config.asynchronous)
    prompts = [row.as_prompt() for row in setting.prompts]
    if config.engine == "server":
        require_text(prompts)
    ranks = setting.ranks.on_cpu() if config.asynchronous else setting.ranks
    panel: Panel | None = None
    if ranks.is_writer and rewards:
        panel = open_panel(rewards, setting.grading, reserved=RESERVED, open_rater=open_rater)
    engine = None
    try:
        without = [] if panel is None else _require_answers(panel, config, setting.prompts)
        engine = _engine(setting, ranks)
        require_usable(prompts, engine.context)
        tokens = setting.stops.ids, engine.context
        world = open_world(
            config.environment,
            setting.renderer,
            *tokens,
            ranks,
            rows=setting.prompts,
            stop=config.stop,
        )
        if credit.asked.bootstrap:
            _require_no_cut(config.environment, world)
    except BaseException:
        if panel is not None:
            panel.close()
        if isinstance(engine, ServerEngine):
            engine.close()
        raise
    return Roller(
        config=config,
        prompts=setting.prompts,
        engine=engine,
        panel=panel,
        world=world,
        seed=setting.seed,
        ranks=ranks,
        is_judged=setting.is_judged,
        is_useful=credit.is_useful,
        needs_one=credit.needs_one,
        settled=[*without, *_settled(setting, panel, engine, world)],
    )


def _require_no_cut(config: EnvironmentConfig, world: World | None) -> None:
    """Raise ConfigError for an environment that rewards a cut path itself: that reward would be replaced."""
    if world is not None and hasattr(world.make, "cut"):
        raise ConfigError(
            "ppo.bootstrap_truncated=true replaces the reward of a cut path by the critic's value, and "
            f"{config.name} has a method cut, which says what a cut path is worth; expected one of the two; take one "
            "out"
        )


def _settled(
    setting: Setting,
    panel: Panel | None,
    engine: LocalEngine | ServerEngine,
    world: World | None,
) -> list[Decision]:
    """What was chosen for the user."""
    found = [*setting.decisions, *(world.decisions if world is not None else [])]
    if isinstance(engine, ServerEngine):
        found += engine.decisions
    if panel is not None:
        found += panel.decisions
    environment = setting.config.environment
    if "python" in environment.tools:
        chosen = shared(remote=environment.remote).mechanism
        found.append(Decision("sandbox", chosen.name, chosen.reason))
    return list(dict.fromkeys(found))


def _require_answers(
    panel: Panel, config: RolloutConfig, prompts: Sequence[PromptRow]
) -> list[Decision]:
    """What is decided about rows that rewards say nothing of. Raises DataError where that is all of them."""
    needing = [part.label for part in panel.parts if part.verifier.needs_reference]
    without = [row for row in prompts if not row.references]
    if not needing or not without:
        return []
    is_all = len(without) == len(prompts) and len(needing) == len(panel.parts)
    if is_all and not config.environment.is_on:
        raise DataError(
            f"{without[0].place}: the row has no right answer, nor has any other, and {needing[0]} holds answers to "
            "one; expected a column such as answer; name it with rollout.reference, or take other rewards"
        )
    value = f"nothing of {len(without):,} of {len(prompts):,} rows"
    return [Decision(needing[0], value, f"they have no right answer ({without[0].place} is one)")]


def _engine(setting: Setting, ranks: Ranks) -> LocalEngine | ServerEngine:
    config = setting.config
    if config.engine == "local":
        return setting.make_local(config=config.local)
    assert config.url is not None
    tokenizer, stop_ids = setting.renderer.tokenizer, setting.stops.ids
    server = ServerEngine.open(config.url, config.server, tokenizer, stop_ids, setting.context)
    try:
        if server.kind == "none" or (server.kind != "processed" and config.temperature != 1):
            raise EngineError(
                f"server: {config.url} gives {server.kind} log-probs; expected those of what it samples from, at "
                f"temperature {config.temperature:g}; start it with --logprobs-mode processed_logprobs"
            )
        return server.follow(Trained(setting.scorer, ranks, setting.dtype, setting.compute))
    except BaseException:
        server.close()
        raise
