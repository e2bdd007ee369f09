"""Faults of runs that learn from what they generate: prompts, rollouts, their groups and rewards."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tests.checks.planting import Place, fault
from tests.helpers.tiny_tokenizers import CHATML

from taut.checks.session import Session
from taut.inference import local
from taut.inference.engine import Texts
from taut.losses import advantages
from taut.methods import reference
from taut.rl import worker
from taut.types import Wants

GAME = """\
from taut.rl.environment import Step

class {name}:
    def step(self, text, calls):
        return Step(messages=[{{"role": "user", "content": "again"}}])

    def cut(self):
        return 1.0
"""
LONG_TURNS = CHATML.replace(
    "'<|im_end|>\\n'",
    "('<|im_end|>\\n\\n' if message.content|length > 30 else '<|im_end|>\\n')",
)
"""ChatML with an empty line after long messages."""


def sums(number: int = 12) -> list[dict[str, Any]]:
    """Questions with their answers."""
    return [
        {
            "messages": [{"role": "user", "content": f"the cat and {at} birds and {at + 1} dogs"}],
            "answer": str(2 * at + 1),
        }
        for at in range(number)
    ]


def generating(
    place: Place, rows: Sequence[Mapping[str, Any]] | None = None, **keys: Any
) -> Session:
    """A run of GRPO whose reward knows right answers."""
    fixed = {"method": "grpo", "rewards": "exact_match", "rollout__n": 3}
    data = place.data(sums() if rows is None else rows)
    return place.session(data=data, **{**fixed, "rollout__max_new_tokens": 12, **keys})


@fault("rollout.opens", says="Game", part="quick")
def an_environment_by_another_name(place: Place, is_faulty: bool) -> Session:
    """The file has no class of that name."""
    path = place.directory / "game.py"
    path.write_text(GAME.format(name="Play" if is_faulty else "Game"))
    return generating(place, rewards=[], rollout__environment__name=f"{path}:Game")


@fault("rollout.room", says="data.max_length=216", part="quick")
def prompts_that_fill_the_context(place: Place, is_faulty: bool) -> Session:
    """A prompt is nearly as long as the model's context, and one token can follow it."""
    rows, keys = (
        sums(),
        {"data__max_length": 256, "data__too_long": "drop", "rollout__max_new_tokens": 40},
    )
    session = generating(place, rows, **keys)
    if is_faulty:
        message = {"role": "user", "content": ""}
        own = session.renderer.prompt_ids([message], ()).size
        message["content"] = "a" * (255 - own)  # a token each
        rows[3]["messages"] = [message]
        session = generating(place, rows, **keys)
    return session


@fault("rollout.turns", says="depends on the turn", part="quick")
def an_end_of_turn_that_depends_on_the_turn(place: Place, is_faulty: bool) -> Session:
    """After a long answer the template leaves a line empty, after a short one none."""
    template, game = place.directory / "template.jinja", place.directory / "game.py"
    template.write_text(LONG_TURNS if is_faulty else CHATML)
    game.write_text(GAME.format(name="Game"))
    rows = [{**row, "answer": f"{row['answer']} and then some birds in the sky"} for row in sums()]
    keys = {"data__template": str(template), "rollout__environment__name": f"{game}:Game"}
    return generating(place, rows, rewards=[], **keys)


@fault("rollout.groups", says="completions of 2 prompts", part="quick")
def groups_of_answers_to_several_prompts(place: Place, is_faulty: bool) -> Session:
    """Rollouts come back sample by sample, and are cut into groups as if they came prompt by prompt: class 38."""
    original = worker.sample_trajectories

    def dealt(*args: Any) -> Any:
        return sorted(original(*args), key=lambda trajectory: trajectory.index)

    if is_faulty:
        place.patch.setattr(worker, "sample_trajectories", dealt)
    return generating(place)


@fault("rollout.groups", says="is another completion of it once more", part="quick")
def one_stream_for_all_answers_to_a_prompt(place: Place, is_faulty: bool) -> Session:
    """The number of a sample is no part of its stream, so that all answers to a prompt are one."""
    make = local.stream_seed
    if is_faulty:
        place.patch.setattr(local, "stream_seed", lambda seed, name, index: make(seed, name, 0))
    return generating(place)


@fault("rollout.groups", says="advantages of its group add up to", part="quick")
def advantages_over_the_whole_roll_out(place: Place, is_faulty: bool) -> Session:
    """Rewards are compared with the mean of all prompts' answers."""
    return _compared_with_all(place, is_faulty)


def _compared_with_all(place: Place, is_faulty: bool, **keys: Any) -> Session:
    centered = advantages._centered
    if is_faulty:
        place.patch.setattr(advantages, "_centered", lambda r, group: centered(r, 0 * group))
    return generating(place, **keys)


@fault("rollout.groups", says="advantages of its group add up to", part="quick")
def a_whitened_baseline_over_the_whole_roll_out(place: Place, is_faulty: bool) -> Session:
    """The same, where all advantages are shifted and divided afterwards."""
    return _compared_with_all(place, is_faulty, grpo__advantage="reinforce_pp_baseline")


@fault("rollout.text", says="sampled was", part="quick")
def texts_without_their_last_character(place: Place, is_faulty: bool) -> Session:
    """What rewards are given lacks its end."""
    text = Texts.text
    if is_faulty:
        place.patch.setattr(Texts, "text", lambda *args: text(*args)[:-1])
    return generating(place)


@fault("rollout.update", says="off the new weights")
def an_engine_that_updates_never_reach(place: Place, is_faulty: bool) -> Session:
    """The engine has a copy of the weights, which is right until the first update: class 19."""
    make = local.LocalEngine.__init__

    def apart(self: Any, scorer: Any, *args: Any, **keywords: Any) -> None:
        make(self, copy.deepcopy(scorer), *args, **keywords)

    if is_faulty:
        place.patch.setattr(local.LocalEngine, "__init__", apart)
    return generating(place)


@fault("engine.logps", says="off those of the trainer")
def log_probs_without_the_temperature(place: Place, is_faulty: bool) -> Session:
    """The engine draws at the run's temperature, and reports logprobs of the model as it is: class 16."""
    draw = local.draw

    def plain(logits_BV: Any, sampling: Any, history: Any, uniform_B: Any) -> Any:
        drawn = draw(logits_BV, sampling, history, uniform_B)
        return drawn._replace(logp_B=drawn.logp_one_B)

    if is_faulty:
        place.patch.setattr(local, "draw", plain)
    return generating(place, rollout__temperature=0.6)


@fault("rewards.gold", says="less than", part="quick")
def a_reward_with_the_wrong_sign(place: Place, is_faulty: bool) -> Session:
    """Right answers are what is taken off."""
    return generating(
        place, rewards=[{"name": "exact_match", "weight": -1.0 if is_faulty else 1.0}]
    )


@fault("rewards.gold", says="the same as any other answer", part="quick")
def rewards_that_cancel(place: Place, is_faulty: bool) -> Session:
    """Two rewards say the same, and one of them is taken off: all answers are worth nothing."""
    other = {"name": "contains", "weight": -1.0 if is_faulty else 0.5}
    return generating(place, rewards=["exact_match", other])


@fault("reference.start", says="by the reference", part="quick")
def a_reference_at_another_temperature(place: Place, is_faulty: bool) -> Session:
    """The reference is scored as it is, the policy at the run's temperature."""
    make = reference.Start.__init__

    def warm(self: Any, *args: Any, **keywords: Any) -> None:
        make(self, *args, **keywords)
        self._wants = Wants()

    if is_faulty:
        place.patch.setattr(reference.Start, "__init__", warm)
    return generating(place, rollout__temperature=0.6, grpo__kl_coef=0.1)


@fault("data.leak", says="the prompt ends with the whole answer", part="quick")
def prompts_that_end_with_the_right_answer(place: Place, is_faulty: bool) -> Session:
    """The answer that the reward looks for was left in the question."""
    rows = sums()
    for row in rows if is_faulty else []:
        row["messages"][0]["content"] += f" are {row['answer']}"
    return generating(place, rows)


@fault("template.prompt", says="no generation prompt", part="quick")
def prompts_without_the_header_of_an_answer(place: Place, is_faulty: bool) -> Session:
    """The template ignores add_generation_prompt, so that each answer would have to begin with its own header."""
    path = place.directory / "template.jinja"
    path.write_text(CHATML.replace("add_generation_prompt", "false") if is_faulty else CHATML)
    return generating(place, data__template=str(path))


@fault("data.columns", says="context", part="quick")
def a_passage_that_the_prompt_lacks(place: Place, is_faulty: bool) -> Session:
    """Questions are about a passage in a column that no format reads."""
    name = "context" if is_faulty else "passage_id"
    rows = [
        {"prompt": row["messages"], "answer": row["answer"], name: f"{at} birds saw the big cat"}
        for at, row in enumerate(sums())
    ]
    return generating(place, rows)


GAMES = """\
from taut.rl.environment import Step

SEEN = []

class Sound:
    def reset(self, row):
        self.turns = 0

    def step(self, text, calls):
        self.turns += 1
        return Step([{"role": "user", "content": f"{self.turns}: {text}"}], self.turns > 3, float("7" in text))

class Shared:
    def step(self, text, calls):
        SEEN.append(text)
        return Step([{"role": "user", "content": f"{len(SEEN)}: {text}"}], len(SEEN) % 4 == 0, 1.0)

class Late:
    def __init__(self):
        self.last = ""

    def step(self, text, calls):
        last, self.last = self.last, text
        return Step([{"role": "user", "content": f"you said {last}"}], False, float("7" in last))
"""


def _playing(place: Place, name: str, is_faulty: bool) -> Session:
    path = place.directory / "games.py"
    path.write_text(GAMES)
    rows = [{**row, "answer": "7"} for row in sums()]
    spec = f"{path}:{name if is_faulty else 'Sound'}"
    return generating(place, rows, rewards=[], rollout__environment__name=spec)


@fault("rollout.reset", says="keep its state in the instance", part="quick", outcome="warning")
def an_environment_whose_state_is_shared(place: Place, is_faulty: bool) -> Session:
    """What was said is kept in the file, for all trajectories together."""
    return _playing(place, "Shared", is_faulty)


@fault("rollout.reset", says="answers the turn before", part="quick", outcome="warning")
def an_environment_a_step_behind(place: Place, is_faulty: bool) -> Session:
    """Each step returns what the turn before it would have led to."""
    return _playing(place, "Late", is_faulty)
