"""Rollouts: engine, rewards and environment of a run that generates, and the engine of evaluations.

Engine, rewards and environment are opened as the run opens them. The quick part makes a small rollout with an engine in
this process. Only checks of the full part ask a server, because it has to be sent the weights first.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from taut.checks.chat_template import quoted, short_place
from taut.checks.measure import restore_weights, weights_moved
from taut.checks.registry import Finding, Skip, check, failed, passed, skip_if, split_error, warned
from taut.checks.session import Session, cut_out, once, owned_by
from taut.data.rows.prompts import PromptRow, PromptSet
from taut.errors import ModelError, RenderError
from taut.evals.answers import to_reward_input
from taut.evals.training_evals import build_answering
from taut.inference import vllm_client
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.inference.vllm import ServerEngine
from taut.losses import advantages
from taut.methods.inputs import engine_of
from taut.rewards.custom import UserReward
from taut.rewards.reward_set import RewardResult, RewardSet
from taut.rewards.settings import Judged
from taut.rewards.verifier import RewardInput, Score
from taut.rl.environment import EnvironmentPool
from taut.rl.online import Online
from taut.rl.rollout import Group, Rollout, RolloutRequest, score_trees
from taut.rl.worker import RolloutWorker
from taut.train.monitors import TOLERANCE
from taut.types import Completion, FloatArray, Media, Prompt, Sample

# -- what rollouts are made with


def _online(session: Session) -> Online:
    """The source of steps of a run that generates."""
    source = session.trainer.source
    assert isinstance(source, Online)
    return source


@once
@owned_by("rollout.opens")
def rollout_worker(session: Session) -> RolloutWorker:
    """Engine, rewards and environment. A check that needs them is skipped for a run that does not generate."""
    skip_if(not session.is_generated, "the run generates nothing to learn from")
    skip_if(session.run.is_replayed, "the run trains on recorded rollouts and generates none")
    worker = _online(session).worker
    assert isinstance(worker, RolloutWorker)
    return worker


def close(session: Session) -> None:
    """Close everything opened for checks, if the session does not go on to train."""
    if "built" in vars(session) and session.is_generated:
        _online(session).close()


@check("rollout.opens", after=["model.trains"])
def engine_rewards_and_environment_open(session: Session) -> Finding:
    """Can engine, rewards and environment be opened as the run names them?"""
    opened = rollout_worker(session)
    rewards = [] if opened.reward_set is None else opened.reward_set.names
    names = opened.config.environment.names if opened.environments is not None else []
    environment = ", ".join(names) or None
    parts = [opened.config.engine, *rewards, *([environment] if environment else [])]
    notes = [
        f"{name} is {value}: {reason}"
        for name, value, reason in _online(session).rollouts.decisions
    ]
    return passed(", ".join(parts), len(rewards), "rewards", notes)


@check("rollout.room", after=["rollout.opens"])
def prompts_leave_room_for_answers(session: Session) -> Finding:
    """Is there room for answers after the prompts?

    The longest prompt and its answer, against the tokens that model and engine take in all.
    """
    engine, environments = rollout_worker(session).engine, rollout_worker(session).environments
    context: int | None = getattr(engine, "context", None)
    length_S = np.concatenate(list(session.train.sizes("tokens")))
    most = rollout_worker(session).config.grows
    unit, longest = f"of {len(session.train):,} prompts", int(length_S.max())

    def shown(index: Any) -> str:
        return f"{session.train.sample_id(int(index))}: {length_S[index]:,} tokens"

    says = f"tokens of the longest prompt, and {most:,} of an answer"
    if context is None:
        return passed(f"{says}; the model names no context", longest, "tokens")
    if (
        isinstance(engine, ServerEngine)
        and environments is None
        and engine.served_context is not None
    ):
        # a server cuts no answer: it refuses prompts whose answer may be longer than it takes
        served, model_context = engine.served_context, engine.model_context
        needed_S = length_S + (
            most if model_context is None else np.minimum(most, model_context - length_S)
        )
        long = np.flatnonzero(needed_S > served)
        if long.size:
            return failed(
                f"{long.size:,} {unit} and their answers may be longer than the server takes, {served:,} tokens",
                measured=(
                    [f"{shown(i)}, with an answer up to {needed_S[i]:,}" for i in long],
                    unit,
                ),
                remedy=f"start the server with --max-model-len {int(needed_S.max())}, or set rollout.max_new_tokens",
            )
    left_S = context - length_S
    # prompts that leave no room
    full = np.flatnonzero(left_S < max(1, 0.05 * most))  # less room is none
    if full.size:
        limit = "rollout.environment.max_tokens" if environments else "rollout.max_new_tokens"
        shorter = (
            f"data.max_length={context - most} with data.too_long=drop"
            if most < context
            else f"{limit}, now {most:,}, to at most {max(1, context - int(np.median(length_S))):,}"
        )
        return failed(
            f"{full.size:,} {unit} leave no room for an answer",
            measured=([f"{shown(i)} of {context:,}" for i in full], unit),
            remedy=f"set {shorter}, or use a model, or a server, with a longer context",
        )
    num_cut = int((left_S < most).sum())
    notes = []
    if num_cut:
        notes.append(f"after {num_cut:,} prompts the context of {context:,} cuts answers earlier")
    return passed(f"{says}, of {context:,}", longest, "tokens", notes)


def _environments(session: Session) -> EnvironmentPool:
    """The environments. Skips the check if none answers."""
    environments = rollout_worker(session).environments
    if environments is None:
        raise Skip("no environment answers: a path has one turn")
    return environments


@check("rollout.turns", after=["rollout.opens"])
def turns_are_joined_as_the_template_joins_them(session: Session) -> Finding:
    """Is what comes between two turns what the template writes there?

    If an environment answers: the rows' right answers stand for turns. Prompt, answer, what comes between, and again a
    prompt have to be, token for token, the conversation rendered as a whole. A template that writes turns otherwise
    once they are history keeps what comes between; that is a note.
    """
    environments = _environments(session)
    assert isinstance(session.train, PromptSet)
    # right answers stand for turns
    rows = [row for row in session.train.prompt_rows[:8] if row.references]
    turns = [(row.place, row.references[0].strip()) for row in rows]
    turns = turns or [("a stand-in", "an answer, and more of it")]
    rewritten, reply = [], {"role": "user", "content": "Go on."}
    for place, text in turns:
        turn = {"role": "assistant", "content": text}
        try:
            instead = environments.bridge.rewrites(turn, reply, environments.tools)
        except RenderError as error:
            says, remedy = split_error(error)
            return failed(
                "what the template writes after a turn depends on the turn",
                evidence=[f"{place}: after {text!r:.60}", says],
                remedy=remedy,
            )
        rewritten += [] if instead is None else [f"{place}: {instead}"]
    notes = []
    if rewritten:
        notes = [f"once history, {len(rewritten)} turns are written otherwise: {rewritten[0]}"]
    return passed("as the template writes it", len(turns), "turns", notes)


@check("rollout.reset", after=["rollout.turns"])
def environments_begin_anew(session: Session) -> Finding:
    """Does each environment begin anew for each trajectory, and answer the turn that it was given?

    The first row is played several times, with its right answer and with another one: the same turns have to lead to
    the same, and a turn's outcome must not be that of the turn before.
    """
    environments, train = _environments(session), session.train
    assert isinstance(train, PromptSet)
    row, kind = train.prompt_rows[0], environments.kind_of(train.prompt_rows[0])
    skip_if(kind.is_agent, "an agent asks by itself")

    def play(*texts: str) -> list[str]:
        """What reset and the steps return, in words."""

        def act() -> list[str]:
            game: Any = kind.make()
            begin = getattr(game, "reset", lambda _: None)(copy.deepcopy(dict(row.columns)))
            return [repr(begin), *(repr(game.step(text, [])) for text in texts)]

        outcome = environments.each({0: act})[0]
        return outcome.value or [f"{outcome.error}"]

    right, wrong = (*row.references, "yes")[0], "no idea"
    first, again, other, both = (
        play(*texts) for texts in ((right, wrong), (right, wrong), (wrong, right), (right, right))
    )
    says = remedy = ""
    if first != again:
        says = "an environment goes another way when the same turns are played again"
        remedy = "keep its state in the instance, set it in reset, and draw by the row"
    elif first[:-1] == other[:-1] == both[:-1] and first[-1] == both[-1] != other[-1]:
        says = "an environment answers the turn before: its second step goes by the first"
        remedy = "let step answer the text that it is given, and reward it"
    if not says:
        return passed("the same turns lead to the same", len(first), "outcomes")
    lines = [quoted(" ".join(it), 200) for it in (first, again if first != again else other)]
    return warned(says, evidence=[short_place(row.place), *lines], remedy=remedy)


# -- rewards

TOTAL = "the total"


class Marks(NamedTuple):
    """A reward's values for right answers and wrong ones, and its failures."""

    name: str
    judges: Judged
    full_marks: float | None
    """Value of a right answer; None if the reward has a scale of its own."""
    must_apply: bool
    """Whether it is a bug if the reward gives no number at all."""
    right: list[tuple[PromptRow, float]]
    others: list[float]
    """Values of the answers of another row."""
    empty: list[float]
    errors: list[str]

    @property
    def mean(self) -> float:
        return fmean(value for _, value in self.right)


class Graded(NamedTuple):
    """Answers to a row: right ones, right ones of another row, and an empty one; and the rewards' values for them."""

    row: PromptRow
    asked: list[list[RewardInput]]
    results: Sequence[list[RewardResult]] = ()

    @property
    def answers(self) -> list[RewardInput]:
        return [answer for some in self.asked for answer in some]


@check("rewards.gold", after=["rollout.opens"])
def rewards_know_right_answers(session: Session) -> Finding:
    """Do the run's rewards give right answers full marks?

    The right answers of the run's own questions are judged as the model's answers will be: each reference of a row and,
    if the row ends with an assistant's message, that message; the best of them counts. taut's own rewards of
    correctness give 1, and give no answer less. The best value of a function of the user's, a model or a judge is not
    known, so it is also given the answers of other rows, and an empty one: it has to tell them apart, and not by
    preferring the wrong ones. If rewards are added up (training), the total has to.

    Rewards of form (``judges``) have to be computable on these answers, and a function of the user's has to give a
    number for one of them at least. If no reward judges correctness, nothing else is asked.
    """
    graded = graded_rewards(session)
    skip_if(not session.ranks.is_writer, "the first rank judges for all")
    skip_if(not graded, "no rewards are set")
    findings = [
        judge_rewards(asked.reward_set, asked.graded, asked.max_errors, asked.key)
        for asked in graded
    ]
    order = ("failed", "passed", "skipped")
    return min(findings, key=lambda finding: order.index(finding.outcome))


class GradedRewards(NamedTuple):
    """A set of rewards, and what it says of right answers and wrong ones."""

    key: str
    """The table of the configuration that has ``rewards``; "" is the run itself, in which the total counts."""
    reward_set: RewardSet
    max_errors: float
    graded: list[Graded]


@once
def graded_rewards(session: Session) -> list[GradedRewards]:
    """The rewards of the run and of its evaluations; on the first rank, which judges for all."""

    def num_tokens(text: str) -> int:
        """With the token that ends it."""
        return len(session.tokenizer.encode(text, add_special_tokens=False)) + 1

    found, evaluated = [], session.run.eval.answers
    asked: list[Graded] = []
    if session.run.training_rewards:
        assert isinstance(session.train, PromptSet)
        asked = answers_to_judge(session.train.prompt_rows, num_tokens)
        if (rating := rollout_worker(session).rating) is not None:  # on every rank
            rating.rate([answer for row in asked for answer in row.answers], extract=False)
    if not session.ranks.is_writer:
        return []
    if session.run.training_rewards:
        reward_set = rollout_worker(session).reward_set
        assert reward_set is not None
        max_errors = _online(session).monitor.config.max_errors
        found.append(GradedRewards("", reward_set, max_errors, grade_all(reward_set, asked)))
    if evaluated.rewards:
        answering = build_answering(
            evaluated,
            session.run.data,
            session.inputs.renderer,
            engine_of(session.inputs, session.built.models, session.ranks),
            session.trainer,
            session.run.row_kind,
        )
        assert answering is not None
        assert answering.reward_set is not None
        graded = grade_all(answering.reward_set, answers_to_judge(answering.rows, num_tokens))
        more = (answering.reward_set, evaluated.max_errors, graded)
        found.append(GradedRewards("eval.answers", *more))
    return found


def answers_to_judge(rows: Sequence[PromptRow], num_tokens: Callable[[str], int]) -> list[Graded]:
    """Answers to the first rows with a right answer. A reward may be slow, and is asked about four times per row."""
    rows = [row for row in rows if row.references][:16]
    found = []
    for number, row in enumerate(rows):
        right, others = _right_answers(row), _right_answers(rows[(number + 1) % len(rows)])
        others = [] if set(others) & set(right) else others
        of_row = [
            [replace(to_reward_input(row, text), num_tokens=num_tokens(text)) for text in texts]
            for texts in (right, others, [""])
        ]
        found.append(Graded(row, of_row))
    return found


def grade_all(reward_set: RewardSet, asked: Sequence[Graded]) -> list[Graded]:
    """The rewards of the rows' right answers and wrong ones, all asked at once, side by side."""
    answers = [answer for of_row in asked for answer in of_row.answers]
    results = iter(reward_set.grade(answers, extract=False) if answers else ())
    return [
        of_row._replace(results=[[*islice(results, len(some))] for some in of_row.asked])
        for of_row in asked
    ]


def judge_rewards(
    reward_set: RewardSet, graded: Sequence[Graded], max_errors: float, key: str
) -> Finding:
    """Judge the rewards of the rows' right answers and wrong ones. ``key``: as of ``GradedRewards``."""
    if not graded:
        return Finding("skipped", "no row has a reference answer")
    judges_of, marks = reward_set.judges, list[Marks]()
    has_correct = any(judges_of[part.label] == "correctness" for part in reward_set.parts)
    for part in reward_set.parts:
        judges, is_own = judges_of[part.label], isinstance(part.verifier, UserReward)
        full_marks = part.verifier.full_marks if judges == "correctness" else None
        if not key and judges == "correctness" and full_marks is None:
            # the total is learned from: a reward with a scale of its own is asked within it
            judges, is_own = "form", False
        marks.append(_marks(part.label, judges, full_marks, is_own, graded))
    if not key and has_correct:
        marks.append(_marks(TOTAL, "correctness", None, True, graded))
    # the first fault of any reward
    setting = f"{key}.rewards" if key else "rewards"
    for reward in marks:
        if fault := _reward_fault(reward, len(graded), max_errors, setting):
            return fault
    if not has_correct:
        says = f"{', '.join(it.name for it in marks)} can be computed; no reward judges correctness"
        return passed(says, len(graded), "right answers")
    judging = [reward for reward in marks if reward.judges == "correctness"]
    notes = [
        f"{reward.name}: {reward.mean:.3g} on average of {len(graded)} right answers"
        for reward in judging
    ]
    says = f"right answers are known as right by {', '.join(reward.name for reward in judging)}"
    return passed(says, min(reward.mean for reward in judging), "on average", notes)


def _right_answers(row: PromptRow) -> list[str]:
    """Texts that answer a row correctly."""
    messages: Any = row.columns.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    is_answer = isinstance(last, dict) and last.get("role") == "assistant"
    whole = [last["content"]] if is_answer and isinstance(last.get("content"), str) else []
    return list(dict.fromkeys([*row.references, *whole]))


def _marks(
    name: str,
    judges: Judged,
    full_marks: float | None,
    must_apply: bool,
    graded: Sequence[Graded],
) -> Marks:
    """Values of the reward ``name``, or of all rewards together; of several right or wrong answers, the best."""

    marks = Marks(name, judges, full_marks, must_apply, [], [], [], [])
    for row, _, results in graded:
        scores = [
            [Score(one.total) if name == TOTAL else one.parts[name] for one in some]
            for some in results
        ]
        of_right, of_others, of_empty = (
            [score.value for score in some if score.value is not None] for some in scores
        )
        if error := scores[0][0].error:
            marks.errors.append(f"{row.place}: {error}")
        if of_right:
            marks.right.append((row, max(of_right)))
        if of_others:
            marks.others.append(max(of_others))
        marks.empty.extend(of_empty)
    return marks


def _reward_fault(marks: Marks, num_rows: int, max_errors: float, setting: str) -> Finding | None:
    """The fault of a reward, if there is one."""
    name, right = marks.name, marks.right
    if len(marks.errors) > max_errors * num_rows:
        return failed(
            f"{name} fails on {len(marks.errors)} of {num_rows} right answers",
            measured=(marks.errors, f"of {num_rows} are errors"),
            remedy=f"mend {name}, or leave it out of {setting}",
        )
    if marks.judges == "form" and (right or marks.others or not marks.must_apply):
        return None
    if not right:
        return failed(
            f"{name} applies to none of {num_rows} rows",
            measured=(0, f"of {num_rows} rows"),
            remedy=f"leave {name} out of {setting}, or ask it of other rows",
        )
    values, full = [value for _, value in right], marks.full_marks
    wrong = marks.others + marks.empty
    # right answers are to be worth more than wrong ones, and full marks
    if wrong and len({*wrong, *values}) == 1:
        if values[0] > 0 and name != TOTAL:
            return None
        mistake = "the same as any other answer"
    elif wrong and marks.mean < fmean(wrong):
        mistake = "less than other rows' answers"
    elif marks.empty and marks.mean <= fmean(marks.empty):
        mistake = "no more than no answer at all"
    elif full is not None and 2 * sum(value < full for value in values) > len(values):
        mistake = f"where it is {full:g} by its own measure"
    else:
        return None
    # an example that did not get them
    best = marks.full_marks or max(value for _, value in right)
    row = next((row for row, value in right if value < best), right[0][0])
    table = setting.removesuffix("rewards") if "." in setting else "rollout."
    return failed(
        f"{name} gives right answers {marks.mean:.3g} on average, {mistake}",
        measured=(marks.mean, "on average"),
        evidence=[f"{row.place}: right is {text!r:.60}" for text in _right_answers(row)[:2]],
        remedy=f"mend {name}; or name the column with whole answers ({table}reference); or, if it judges form, set "
        f'judges = "form" (in {setting}, or as an attribute of the function)',
    )


LARGE = 1e4
"""A reward above which squares and sums lose digits."""
NARROW, SMALL = 0.01, 1e-4
"""Spreads of rewards, as a part of their size and alone, below which dividing by them makes large updates of little."""
NONSENSE = ("lorem", "ipsum", "dolor", "sit", "amet", "elit", "sed", "magna") * 8


@check("rewards.steady", after=["rewards.gold"])
def rewards_are_functions_of_the_answer(session: Session) -> Finding:
    """Is a reward a function of the answer: the same again, of more than its length, on a scale to learn from?

    The user's own are asked about answers of some rows and about nonsense of 2 to 64 words, and again in another order;
    in the full part a second later. Where there are right answers, one of correctness must not go by length alone.
    """
    notes, is_full = [], session.part == "full"
    for asked in graded_rewards(session):
        inputs = [it for row in asked.graded[: 16 if is_full else 4] for it in row.answers]
        if not inputs and isinstance(session.train, PromptSet):
            inputs = [to_reward_input(session.train.prompt_rows[0], "yes")]
        inputs += [
            replace(inputs[0], text=" ".join(NONSENSE[:number]), num_tokens=2 * number + 1)
            for number in (2, 3, 5, 8, 12, 16, 24, 32, 48, 64)
            if inputs
        ]
        grade, parts = asked.reward_set.grade, asked.reward_set.parts
        own = [part.label for part in parts if isinstance(part.verifier, UserReward)]
        before = grade(inputs, own, extract=False) if own else []
        time.sleep(1.1 if own and is_full else 0.0)
        after = grade(inputs[::-1], own, extract=False)[::-1] if own else []
        for label in own:
            values, again = ([it.parts[label].value for it in some] for some in (before, after))
            lines = [
                f"{quoted(answer.text, 40)} gets {first}, then {second}"
                for answer, first, second in zip(inputs, values, again, strict=True)
                if first != second
            ]
            unit = f"of {len(inputs)} answers"
            if lines:
                return warned(
                    f"{label} gives {len(lines)} {unit} another reward when they are judged again",
                    measured=(lines, unit),
                    remedy="let it depend on answer and row alone: not on chance, time, order, or earlier answers",
                )
            together = _with_length(inputs, values)
            has_order = asked.graded and asked.reward_set.judges[label] == "correctness"
            if has_order and abs(together) > 0.95:
                more = "longer" if together > 0 else "shorter"
                return warned(
                    f"{label} goes by length alone: the {more} the answer, the more",
                    measured=(together, "correlation of ranks"),
                    remedy='nonsense was among them; correct it, or set judges = "form" if it is to judge length',
                )
        # the scale of what is learned from
        results = [it for row in asked.graded for some in row.results for it in some]
        totals = [result.total for result in results if result.total is not None] or [0.0]
        largest, apart = float(np.abs(totals).max()), float(np.ptp(totals))
        is_divided = not asked.key and session.is_policy_gradient
        if largest > LARGE or (is_divided and 0 < apart < max(NARROW * largest, SMALL)):
            says = f"rewards are as large as {largest:.3g}, right and wrong ones {apart:.3g} apart"
            remedy = "bring them to 0 to 1: large ones lose digits, and noise is divided by a narrow spread"
            return warned(says, measured=(largest, "the largest"), remedy=remedy)
        notes.append(f"as large as {largest:.3g}, right and wrong ones {apart:.3g} apart")
    skip_if(not notes, "no rewards are set")
    return passed("they are, on a scale to learn from", len(notes), "sets of rewards", notes)


def _with_length(inputs: Sequence[RewardInput], values: Sequence[float | None]) -> float:
    """Correlation of the ranks of values and lengths; 0 if fewer than six of either differ."""
    pairs = [(len(it.text), v) for it, v in zip(inputs, values, strict=True) if v is not None]
    lengths, ranks = (
        np.unique(column, return_inverse=True)[1] for column in np.reshape(pairs, (-1, 2)).T
    )
    is_told = min(len({*lengths}), len({*ranks})) >= 6
    return float(np.corrcoef(lengths, ranks)[0, 1]) if is_told else 0.0


# -- a small rollout


@once
def _small_rollout(session: Session) -> list[Group]:
    """Roll out the first prompts as in training, but fewer and shorter, without rewards. A check that needs them is
    skipped if there are none.
    """
    full = rollout_worker(session)
    skip_if(full.config.engine == "server", "a server is asked by engine.logps, in the full part")
    fork = full.config.fork
    config = replace(
        full.config,
        n=fork.leaves if fork.is_on else max(2, min(full.config.n, 3)),
        max_new_tokens=min(full.config.max_new_tokens, 8),
    )
    small = replace(full, config=config, reward_set=None, is_judged=False)
    prompts = range(min(2, len(full.prompts)))
    return list(small.take(RolloutRequest(0, _online(session).order, prompts=prompts)).groups)


@check(
    "rollout.groups",
    after=["attention.shared", "loss.dtype", "loss.tied", "loss.adapter_start", "rollout.room"],
)
def each_group_answers_one_prompt(session: Session) -> Finding:
    """Does each group have the answers to one prompt, each drawn by itself and compared with the others?

    A small rollout, group by group, and the advantages it would have if the first answer of each group were the good
    one. The engine's own draws say how probable equal answers are, which tells a stream that is used twice from a
    model that is sure.
    """
    groups, environments = _small_rollout(session), rollout_worker(session).environments
    wrong: list[str] = []
    sizes = {len(group.trajectories) for group in groups}
    if len(sizes) > 1:
        wrong.append(f"groups have {min(sizes)} to {max(sizes)} completions")
    # every completion begins with its prompt and differs from the others
    chance, same = 0.0, []  # of completions that are the same
    for number, group in enumerate(groups):
        names = Counter(trajectory.row.id for trajectory in group.trajectories)
        if len(names) > 1:
            wrong.append(
                f"group {number} has completions of {len(names)} prompts: {', '.join(names)}"
            )
        numbers = [trajectory.index for trajectory in group.trajectories]
        if len(set(numbers)) < len(numbers):
            wrong.append(f"{group.row.id}: completions are numbered {numbers}")
        first = {path.ids_T.tobytes(): path for path in reversed(group.trajectories)}
        for trajectory in group.trajectories:
            row, messages = trajectory.row, trajectory.first_messages
            name = f"{row.id}#{trajectory.index}"
            prompt: list[int] = row.ids_T.tolist()
            media: Sequence[Media] = row.media
            if environments is not None:
                kind, bridge = environments.kind_of(row), environments.bridge
                if kind.is_agent:  # what it asks, with tools of its own, is not of the row
                    prompt, media = [], ()
                elif messages is not None and (messages != row.prompt or kind.tools):
                    prompt, media = bridge.prompt_media(messages, kind.tools or row.tools)
            begin = trajectory.ids_T[: len(prompt)].tolist(), trajectory.media[: len(media)]
            if begin != (prompt, tuple(media)):
                wrong.append(f"{name} does not begin with its prompt")
            drawn_N = trajectory.logp_N[trajectory.num_inherited :]  # by itself, after its fork
            if first[trajectory.ids_T.tobytes()] is not trajectory and drawn_N.size:
                chance += float(drawn_N.sum())
                same.append(f"{name} is another completion of it once more")
    # each prompt has one group
    counts = Counter(group.row.id for group in groups)
    wrong += [f"{name} has two groups" for name, times in counts.items() if times > 1][:1]
    if chance < -14.0:  # one in a million: not by chance
        wrong += same
    wrong = wrong or _wrong_advantages(session, groups)
    if wrong:
        return failed(
            wrong[0],
            measured=(wrong, "differences"),
            remedy="answers would be compared with those to other prompts, or with themselves; please report this, "
            "with the settings of rollout",
        )
    num_completions = sum(len(group.trajectories) for group in groups)
    return passed(f"{len(groups)} groups, each of one prompt", num_completions, "completions")


def _wrong_advantages(session: Session, groups: Sequence[Group]) -> list[str]:
    """Faults of the advantages if the first completion without an error is the good one of its group. All completions
    end as if by themselves. The better one is better by a different amount in each group.
    """
    source = _online(session)
    credit = source.credit
    judged = []
    for number, group in enumerate(groups):
        # the first completion is the good one, by a margin of the group's own
        trajectories = [replace(t, finish_reason="stop") for t in group.trajectories]
        good = next(
            (at for at, trajectory in enumerate(trajectories) if trajectory.error is None), 0
        )
        rewards = [credit.good - (at != good) / (1 + number) for at in range(len(trajectories))]
        results = [RewardResult({"check": Score(reward)}, reward) for reward in rewards]
        pairs = zip(trajectories, results, strict=True)
        judged.append(Group(tuple(replace(path, reward_result=result) for path, result in pairs)))
    judged = Rollout(judged).rewarded
    counts = Counter(trajectory.name for group in judged for trajectory in group.trajectories)
    wrong = [f"{name} names {times} paths" for name, times in counts.items() if times > 1]
    if wrong or not judged or not session.is_policy_gradient:
        return wrong
    # advantages as the run would assign them
    scores = score_trees(session.trainer, credit.bare(judged), credit.wants, source.roles, 1)
    source.add_teacher_scores(scores, judged, 1)
    train_samples, _ = credit.assign(judged, scores)
    # these comparisons of rewards add up to 0 in each group
    centered = (advantages.group, advantages.mean, advantages.rloo, advantages.maxrl)
    if credit.estimator is None or credit.estimator.compare not in centered or credit.is_taught:
        return []
    advantage_of = {
        sample.id: float(sample.streams["advantage_N"][0])
        for train_sample in train_samples
        for sample in train_sample.tree.samples
    }
    if credit.estimator.is_whitened:
        # All have one offset: the mean over tokens is not that over samples.
        offset = fmean(advantage_of.values())
        advantage_of = {name: advantage - offset for name, advantage in advantage_of.items()}
    # they add up to 0, and the best answer has the largest
    for group in judged:
        each = [advantage_of[trajectory.name] for trajectory in group.trajectories]
        place = group.row.id
        if abs(sum(each)) > 1e-6 * sum(map(abs, each)):
            wrong.append(f"{place}: the advantages of its group add up to {sum(each):.3g}, not 0")
        elif credit.is_plain and len(each) > 1 and (max(each) != each[0] or each[0] <= 0):
            wrong.append(
                f"{place}: the best answer has an advantage of {each[0]:.3g}, another {max(each):.3g}"
            )
    return wrong


@check("rollout.text", after=["rollout.groups"])
def rewards_read_the_sampled_text(session: Session) -> Finding:
    """Do rewards read what was sampled, all of it and nothing else?

    The text is decoded here from the ids alone:

        text = the sampled ids of the last turn, without the token of the stop set that ended them, up to a stop text
    """
    trajectories = [
        trajectory
        for group in _small_rollout(session)
        for trajectory in group.trajectories
        if trajectory.error is None
    ]
    wrong = []
    for trajectory in trajectories:
        # the last turn: what was sampled after the last gap
        at_N = trajectory.sampled_at_N
        breaks = np.flatnonzero(np.diff(at_N) > 1)
        ids = trajectory.ids_T[at_N[breaks[-1] + 1 :] if breaks.size else at_N].tolist()
        if ids and ids[-1] in session.stops.ids:
            ids = ids[:-1]
        text = str(session.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        for stop in rollout_worker(session).config.stop:
            text = text.partition(stop)[0]
        if trajectory.text != text:
            name = f"{trajectory.row.id}#{trajectory.index}"
            wrong.append(f"{name}: rewards read {trajectory.text!r:.60}, sampled was {text!r:.60}")
    if wrong:
        return failed(
            f"the text of {len(wrong)} of {len(trajectories)} completions is not that of their tokens",
            measured=(wrong, f"of {len(trajectories)} completions"),
            remedy="rewards would judge what was not said; please report this",
        )
    return passed("texts are those of the sampled tokens", len(trajectories), "completions")


# -- the engine against the trainer

ENGINE_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 48, 8


class Sampled(NamedTuple):
    """An engine, its prompts and its answers."""

    engine: LocalEngine | ServerEngine
    prompts: list[Prompt]
    answers: list[Completion]


@once
def sampled(session: Session) -> Sampled:
    """Sample answers to the run's first prompts with the engine of rollouts, or else of evaluations. A check that needs
    them is skipped if there are none. A run that generates uses its own temperature and ends; a server is sent the
    weights before.
    """
    skip_if(session.is_scalar, "a reward model generates nothing")
    try:
        if session.is_generated and not session.run.is_replayed:
            engine: Any = rollout_worker(session).engine
        else:
            engine = engine_of(session.inputs, session.built.models, session.ranks)()
    except ModelError as error:
        raise Skip(str(error).partition(";")[0]) from error
    assert isinstance(engine, LocalEngine | ServerEngine)
    # the first samples up to their first target (prompts: whole), cut from the left and not within a picture
    prompts: dict[bytes, Prompt] = {}
    context = math.inf if engine.context is None else engine.context
    most = int(min(PROMPT_TOKENS, context - NEW_TOKENS))
    for index in session.first_samples[: 4 * ENGINE_PROMPTS]:
        sample = session.train[index]
        if most < 1 or len(prompts) == ENGINE_PROMPTS:
            break
        end = sample.num_tokens if session.is_generated else max(1, int(sample.target_at_N[0]))
        ids_T, media = cut_out(sample, end - most, end)
        if ids_T.size + NEW_TOKENS <= context:
            digests = "".join(part.picture.digest for part in media).encode()
            prompt = Prompt(sample.id, ids_T, media=media)
            prompts.setdefault(ids_T.tobytes() + digests, prompt)
    skip_if(not prompts, "no prompt leaves room for an answer")
    if isinstance(engine, ServerEngine):
        engine.update(0)
    different = [*prompts.values()]
    return Sampled(engine, different, engine.generate(different, _sampling(session)))


def _sampling(session: Session) -> Sampling:
    """Sampling in which every token can be drawn: from the model's own distribution, or as in the run's rollouts."""
    drawn = session.run.sampling(session.run.seed)
    return replace(drawn, n=min(2, drawn.n), max_new_tokens=min(NEW_TOKENS, drawn.max_new_tokens))


def _trainer_logps(
    session: Session, prompts: Sequence[Prompt], answers: Sequence[Completion]
) -> list[tuple[Sample, FloatArray]]:
    """Prompts with their answers as ids, and the trainer's logprobs of the answers' tokens."""
    prompt_of = {prompt.id: prompt for prompt in prompts}
    paths = []
    for completion in answers:
        if completion.ids_N.size:
            prompt = prompt_of[completion.prompt_id]
            ids_T = np.concatenate([prompt.ids_T, completion.ids_N])
            at_N = np.arange(prompt.ids_T.size, ids_T.size)
            name = f"{prompt.id}#{completion.index}" if completion.index else prompt.id
            paths.append(Sample(name, ids_T, at_N, np.ones(at_N.size), prompt.media))
    temperature = session.run.sampling(session.run.seed).temperature
    numbers = session.numbers(paths, temperature=temperature)
    return [(path, numbers[path.id].double().numpy()) for path in paths]


def _gaps(
    answers: Sequence[Completion], paths: Sequence[tuple[Sample, FloatArray]]
) -> list[FloatArray]:
    """Differences between the logprobs of the engine and those of the trainer."""
    drawn = [answer.logp_N for answer in answers if answer.logp_N is not None and answer.ids_N.size]
    pairs = zip(drawn, (logp_N for _, logp_N in paths), strict=True)
    return [np.nan_to_num(np.abs(left_N - right_N), nan=np.inf) for left_N, right_N in pairs]


def _engine_limit(session: Session, engine: LocalEngine | ServerEngine) -> float:
    """Maximum mean difference due to rounding; a server computes in a precision of its own."""
    served = vllm_client.TOLERANCE["bfloat16"] / 4 if isinstance(engine, ServerEngine) else 0.0
    return max(TOLERANCE[_engine_dtype(session)], served)


def _engine_dtype(session: Session) -> torch.dtype:
    """The compute dtype of the engine in this process."""
    is_sampled = session.is_generated and not session.run.is_replayed
    has_own = is_sampled and rollout_worker(session).config.dtype is not None
    return torch.bfloat16 if has_own else session.dtype


@check(
    "engine.logps",
    part="full",
    after=["attention.shared", "loss.dtype", "loss.tied", "loss.adapter_start"],
)
def engine_and_trainer_agree(session: Session) -> Finding:
    """Do engine and trainer agree on the logprobs of what is sampled?

    The engine's logprobs of the tokens it drew, against the scorer on prompt and completion, token in, token out. The
    mean over all tokens is compared, which rounding hardly moves. A ratio of the two is a part of every gradient of a
    method that learns from its own completions; for others it shows that what is evaluated is what trains.
    """
    engine, prompts, answers = sampled(session)
    # the engine answers at all
    refused = [answer for answer in answers if answer.logp_N is None or not answer.ids_N.size]
    if refused:
        return failed(
            f"the engine fails on {len(refused)} of {len(answers)} completions",
            evidence=[f"{answer.prompt_id}: {answer.error or 'no logprobs'}" for answer in refused],
            remedy="see what the engine, or the server's log, says of it",
        )
    # the mean over all tokens decides
    paths = _trainer_logps(session, prompts, answers)
    gaps = _gaps(answers, paths)
    gap_N = np.concatenate(gaps)
    mean, limit = float(gap_N.mean()), _engine_limit(session, engine)
    if mean > limit:
        worst = max(range(len(gaps)), key=lambda number: gaps[number].max())
        path, at = paths[worst][0], int(gaps[worst].argmax())
        token = session.tokenizer.decode([int(path.ids_T[path.target_at_N[at]])])
        if session.is_generated and not session.run.is_replayed:
            remedy = (
                "every gradient would have their ratio in it; set rollout.engine=local, or start the server with the "
                "model that trains, in its precision, and please report this"
            )
        else:
            remedy = (
                "evaluations would be of another model than the one that trains; set eval.answers.rewards=[] and "
                "stop_check.prompts=0, or engine=server, and please report this"
            )
        return failed(
            f"the engine's logprobs are {mean:.3g} nats a token off those of the trainer (at most {limit:g} is "
            "rounding)",
            measured=(mean, "nats a token"),
            evidence=f"{path.id}: token {at} of the answer, {token!r}: engine and trainer differ by "
            f"{gaps[worst][at]:.3g}",
            remedy=remedy,
        )
    return passed(f"{gap_N.size} tokens drawn, the same when scored", mean, "nats a token")


@check("engine.seed", part="full", after=["engine.logps"])
def the_same_seed_gives_the_same_completions(session: Session) -> Finding:
    """Does the same seed give the same completions, whatever is generated with them?

    The same prompts again, and half of them apart from the others: a completion's randomness is its own. In other
    company a token may change if its draw lies within rounding of a boundary; that is rare, and one completion may
    differ so. In bfloat16 it is not rare, and only the same call is made again.
    """
    engine, prompts, answers = sampled(session)
    is_server = isinstance(engine, ServerEngine)
    skip_if(is_server, "a server may answer otherwise when it is asked again")

    # in other company; in bfloat16 tokens often change there
    ways = {"asked the same again": (prompts, 0), "asked with fewer others": (prompts[1::2], 1)}
    if _engine_dtype(session) == torch.bfloat16:
        del ways["asked with fewer others"]
    for how, (some, may_change) in ways.items():
        names = {prompt.id for prompt in some}
        before = [answer for answer in answers if answer.prompt_id in names]
        lines = [
            f"{answer.prompt_id}: {answer.ids_N.tolist()[:6]}, then {other.ids_N.tolist()[:6]}"
            for answer, other in zip(before, engine.generate(some, _sampling(session)), strict=True)
            if answer.ids_N.tolist() != other.ids_N.tolist()
        ]
        if len(lines) > may_change:
            return failed(
                f"{len(lines)} of {len(before)} completions are others when {how}",
                measured=(lines, f"of {len(before)} completions"),
                remedy="an evaluation could not be had twice; please report this",
            )
    return passed(f"the same when {' and '.join(ways)}", len(answers), "completions")


SEEN = 10.0
"""Smallest visible difference, as a multiple of rounding."""


@check("rollout.update", part="full", after=["engine.logps"])
def the_engine_draws_from_updated_weights(session: Session) -> Finding:
    """After an update, does the engine draw from the new weights?

    All that trains is moved far, as no step would, and the engine updated. What it then draws is scored twice: by the
    moved weights, with which it has to agree, and by those put back. An engine with weights of its own, or adapters
    that it never gets, agrees with the latter. The move grows until the two can be told from each other.
    """
    rollout_worker(session)
    engine, prompts, _ = sampled(session)
    limit = _engine_limit(session, engine)
    try:
        for move in (0.1, 0.5, 2.0):
            with weights_moved(session, move) as copies:
                engine.update(1)
                answers = engine.generate(prompts, _sampling(session))
                # what it drew, scored by the moved weights and by those put back
                new = _trainer_logps(session, prompts, answers)
                restore_weights(session, copies)
            old = _trainer_logps(session, prompts, answers)
            off_new, off_old = (
                float(np.concatenate(_gaps(answers, paths)).mean()) for paths in (new, old)
            )
            if max(off_new, off_old) > SEEN * limit:
                break
    finally:
        engine.update(0)  # the weights are back
    if off_new > limit:
        return failed(
            f"after an update the engine is {off_new:.3g} nats a token off the new weights, {off_old:.3g} off the old",
            measured=(off_new, "nats a token"),
            evidence=[f"at most {limit:g} is rounding; weights moved by {move:g} of their spread"],
            remedy="rollouts would be of weights that never change; set rollout.engine=local, or look at what the "
            "server was sent, and please report this",
        )
    skip_if(off_old <= SEEN * limit, "no update makes a difference that is more than rounding")
    says = f"off the new weights; {off_old:.3g} off the old"
    return passed(says, off_new, "nats a token", ["weights put back"])
