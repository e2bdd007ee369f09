"""Steps of an answer among its sampled tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from taut.data.render.tokens import pieces_of
from taut.data.rows.prompts import PromptRow
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.advantages import turns_of
from taut.rl.sampler import Trajectory
from taut.rl.step_rewards import assign_step_rewards

PIECES = [b"", b"ab", b";", b" c", b"d", b" ;e", b"\xc3", b"\xa9"]
"""Token 0 is special; 6 and 7 are the two bytes of an e with an accent."""


def path(turns: list[list[int]], text: str, **more: Any) -> Trajectory:
    """A trajectory of these turns, a token of the environment's between two of them."""
    ids, at = [1, 1], list[int]()
    for turn in turns:
        at += range(len(ids), len(ids) + len(turn))
        ids += [*turn, 1]
    row = PromptRow("p", "p", np.array([1, 1]), (), (), None, {})
    sampled_at_N = np.array(at)
    zeros = np.zeros(len(at))
    return Trajectory(
        row, 0, np.array(ids[:-1]), sampled_at_N, zeros, zeros.astype(int), "stop", text, **more
    )


def reward_result(*steps: tuple[int, float]) -> RewardResult:
    total = sum(reward for _, reward in steps)
    return RewardResult({"prm": Score(total, steps=steps)}, total, steps)


def test_a_step_ends_with_the_token_that_holds_its_last_character() -> None:
    """ab ; _c d _;e <end>: the steps "ab", "cd" and "e" end in tokens 0, 3 and 4, the last with the end token, 5."""
    one = path([[1, 2, 3, 4, 5, 0]], "ab; cd ;e")
    found = assign_step_rewards(reward_result((2, 1.0), (6, -0.5), (9, 0.25)), one, PIECES)
    assert found.turn_rewards == ((0, 1.0), (3, -0.5), (5, 0.25))
    ends, rewards = turns_of(one.judged(found))
    assert (ends.tolist(), rewards.tolist()) == ([0, 3, 5], [1.0, -0.5, 0.25])


def test_the_steps_are_of_the_last_turn_and_what_others_gave_stays() -> None:
    two = path([[1, 1], [6, 7, 2, 1, 0]], "é;ab", turn_rewards=((1, 2.0),))
    found = two.judged(assign_step_rewards(reward_result((1, 0.5), (4, 0.25)), two, PIECES))
    assert found.turn_rewards == ((1, 2.0), (3, 0.5), (6, 0.25))


def test_a_space_that_decoding_drops_and_a_stop_that_is_cut_off_are_no_obstacle() -> None:
    one = path([[3, 4, 2, 1, 2]], "cd;ab")
    assert assign_step_rewards(reward_result((2, 0.5), (5, 0.1)), one, PIECES).turn_rewards == (
        (1, 0.5),
        (4, 0.1),
    )


def test_tokens_that_do_not_spell_the_answer_are_an_error_of_the_reward() -> None:
    found = assign_step_rewards(reward_result((2, 1.0)), path([[1, 2]], "xy"), PIECES)
    assert found.total is None
    assert str(found.error).startswith(
        "the tokens 'ab;' do not spell the answer 'xy'; expected its text"
    )


def test_verdicts_without_steps_or_without_a_total_are_left_alone() -> None:
    plain = RewardResult({"math": Score(1.0)}, 1.0)
    broken = RewardResult({"math": Score(error="none")}, None, ((2, 1.0),))
    for said in (plain, broken):
        assert assign_step_rewards(said, path([[1]], "ab"), PIECES) is said


def test_the_pieces_of_a_vocabulary_hold_no_special_token() -> None:
    from tests.helpers.tiny_tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    pieces = pieces_of(tokenizer)
    ids = tokenizer("the cat sat.", add_special_tokens=False)["input_ids"]
    assert b"".join(pieces[i] for i in ids).decode() == tokenizer.decode(ids)
    assert {pieces[i] for i in tokenizer.all_special_ids} == {b""}
