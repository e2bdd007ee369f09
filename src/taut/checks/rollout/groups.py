"""A small roll-out, group by group, and the advantages it would have, were the first answer of each group the good one.

That all answers to a prompt are one and the same has a probability, that of the engine's own draws: a stream that is
used twice is told from a model that is sure by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from taut.checks.finding import Finding, failed, passed
from taut.checks.rollout.opened import groups, obstacle, online, roller
from taut.checks.session import Session
from taut.losses import advantages
from taut.losses.advantages import Estimator
from taut.rewards.panel import Verdict
from taut.rewards.verifier import Score
from taut.rl.advantages import PolicyCredit, Rewarded, ShapingConfig, paths_of
from taut.rl.environment import World
from taut.rl.rollout import Group, scored
from taut.rl.sampler import Episode
from taut.types import Media

SHOWN = 3
UNLIKELY = -14.0
"""log-probability (one in a million) below which equal completions are no chance."""
CENTRED = (advantages.group, advantages.mean, advantages.rloo, advantages.maxrl)
"""Comparisons of rewards that add up to 0 in each group."""
ROUNDING = 1e-6


def ask(session: Session) -> Finding:
    """Has each group the answers to one prompt, each drawn by itself and compared with the others?"""
    why_not = obstacle(session)
    if why_not is not None:
        return why_not
    found = session.once(groups)
    wrong = [*_mixed(found, session.once(roller).world), *_repeated(found)]
    wrong = wrong or _miscredited(session, found)
    number = sum(len(group.episodes) for group in found)
    if wrong:
        return failed(
            wrong[0],
            number=len(wrong),
            unit="differences",
            evidence=wrong[:SHOWN],
            remedy="answers would be compared with those to other prompts, or with themselves; please report this, "
            "with the settings of rollout",
        )
    return passed(f"{len(found)} groups, each of one prompt", number, "completions")


def _mixed(found: Sequence[Group], world: World | None) -> Iterator[str]:
    """Completions that are not where they belong."""
    sizes = {len(group.episodes) for group in found}
    if len(sizes) > 1:
        yield f"groups have {min(sizes)} to {max(sizes)} completions"
    for number, group in enumerate(found):
        names = Counter(one.row.id for one in group.episodes)
        if len(names) > 1:
            yield f"group {number} has completions of {len(names)} prompts: {', '.join(names)}"
        numbers = [one.index for one in group.episodes]
        if len(set(numbers)) < len(numbers):
            yield f"{group.row.id}: completions are numbered {numbers}"
        for one in group.episodes:
            prompt, media = _prompt_of(one, world)
            begun = one.ids_T[: len(prompt)].tolist(), one.media[: len(media)]
            if begun != (prompt, tuple(media)):
                yield f"{one.row.id}#{one.index} does not begin with its prompt"
    if twice := [name for name, times in Counter(g.row.id for g in found).items() if times > 1]:
        yield f"{twice[0]} has two groups"


def _prompt_of(one: Episode, world: World | None) -> tuple[list[int], Sequence[Media]]:
    """What a path has to begin with: where there is an environment, its own messages and its tools."""
    if world is None or one.asked is None or (one.asked == one.row.prompt and not world.tools):
        return one.row.ids_T.tolist(), one.row.media
    return world.bridge.prompt_media(one.asked, world.tools or one.row.tools)


def _repeated(found: Sequence[Group]) -> list[str]:
    """Completions that are the same and need not be."""
    chance, same = 0.0, []
    for group in found:
        first = {one.ids_T.tobytes(): one for one in reversed(group.episodes)}
        for one in group.episodes:
            if first[one.ids_T.tobytes()] is not one:
                chance += float(one.logp_N.sum())
                same.append(f"{one.row.id}#{one.index} is another completion of it once more")
    return same if chance < UNLIKELY else []


def _miscredited(session: Session, found: Sequence[Group]) -> list[str]:
    """What the advantages of these completions are not, with the first of each group worth more than the others."""
    method = online(session)
    credit = method.credit
    judged = [_judged(group, credit.good, number) for number, group in enumerate(found)]
    paths = paths_of(judged, 0)
    names = [path.name for path in paths]
    wrong = [f"{name} names {times} paths" for name, times in Counter(names).items() if times > 1]
    if wrong or not paths or not isinstance(credit, PolicyCredit):
        return wrong
    said = scored(session.job, credit.bare(paths), credit.asked, method.crew.roles, 1)
    given = credit.trees(paths, said).advantages
    estimate = credit.ways.estimate
    if not isinstance(estimate, Estimator) or estimate.compare not in CENTRED:
        return []
    advantage_of = {name: float(advantage_N[0]) for name, advantage_N in given.items()}
    if estimate.is_whitened:  # all have one offset: the mean over tokens is not that over samples
        offset = sum(advantage_of.values()) / len(advantage_of)
        advantage_of = {name: advantage - offset for name, advantage in advantage_of.items()}
    is_plain = credit.ways.shaping == ShapingConfig() and credit.ways.penalty is None
    return list(_uncentred(paths, advantage_of, is_plain=is_plain))


def _uncentred(
    paths: Sequence[Rewarded], advantage_of: dict[str, float], *, is_plain: bool
) -> Iterator[str]:
    """Groups whose advantages do not add up to 0, or, where rewards are not shaped, do not follow them."""
    by_group: dict[int, list[Rewarded]] = {}
    for path in paths:
        by_group.setdefault(path.group, []).append(path)
    for group in by_group.values():
        each = [advantage_of[path.name] for path in group]
        place = group[0].episode.row.id
        if abs(sum(each)) > ROUNDING * sum(map(abs, each)):
            yield f"{place}: the advantages of its group add up to {sum(each):.3g}, not 0"
        elif is_plain and len(each) > 1 and (max(each) != each[0] or each[0] <= 0):
            yield f"{place}: the best answer has an advantage of {each[0]:.3g}, another {max(each):.3g}"


def _judged(group: Group, good: float, index: int) -> Group:
    """As if all had ended by themselves, and the first without an error was the good one; by how much, differs."""
    episodes: tuple[Episode, ...] = tuple(replace(e, finish_reason="stop") for e in group.episodes)
    first = next((number for number, one in enumerate(episodes) if one.error is None), 0)
    worth = [good - (number != first) / (1 + index) for number in range(len(episodes))]
    return Group(episodes, tuple(Verdict({"check": Score(w)}, w) for w in worth))
