"""Weights of messages and of parts of answers: which tokens get which, in the samples, the cache and the loss."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tiny_tokenizers import TEMPLATES, tiny_tokenizer

from taut.config import load
from taut.data.dataset import build_renderer, load_dataset
from taut.data.packing import ALONE, pack
from taut.data.render.render import Renderer
from taut.data.render.token_weights import Part, TokenWeights
from taut.data.rows.messages import Completion, Document, read_conversation
from taut.data.settings import DataConfig, TokenWeight
from taut.data.store.shards import ShardBuilder, require_sound
from taut.errors import ConfigError, DataError, RenderError
from taut.losses.loss import count_units
from taut.losses.supervised import CrossEntropy
from taut.methods import METHODS
from taut.methods.sft import Sft
from taut.types import Sample, Scores

EMPTY_THOUGHT = TokenWeight(pattern=r"^<think>\s*</think>\s*", weight=0)
ASKED = {"role": "user", "content": "What is 2 plus 3?"}
CALL = "Let me see. <tool_call>add(2, 3)</tool_call> Done."


def answered(content: str, **keys: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": content, **keys}]


def weighed(sample: Sample, template: str) -> list[tuple[str, float]]:
    """The text of each run of neighboring targets of one weight."""
    runs: list[tuple[list[int], float]] = []
    last = -2
    for at, weight in zip(sample.target_at_N.tolist(), sample.weight_N.tolist(), strict=True):
        if at != last + 1 or runs[-1][1] != weight:
            runs.append(([], weight))
        runs[-1][0].append(int(sample.ids_T[at]))
        last = at
    return [(tiny_tokenizer(template).decode(ids), weight) for ids, weight in runs]


def rendered(
    messages: list[dict[str, Any]], *rules: TokenWeight, template: str = "chatml"
) -> list[tuple[str, float]]:
    renderer = Renderer(tiny_tokenizer(template), token_weights=rules)
    samples = renderer.render(read_conversation(messages, "f:1"))
    return [run for sample in samples for run in weighed(sample, template)]


def test_parts_do_not_overlap_and_the_first_pattern_listed_wins() -> None:
    """By hand: of two matches at 0 the first pattern's; the next search begins after it, at "cab"."""
    rules = [TokenWeight(pattern="ab", weight=2), TokenWeight(pattern="abc|ca", weight=3)]
    assert TokenWeights(rules).parts("abcab") == [Part(0, 2, 2), Part(2, 4, 3)]
    assert TokenWeights([TokenWeight(pattern="x*", weight=2)]).parts("ab xx") == [Part(3, 5, 2)]
    assert TokenWeights([TokenWeight(pattern="^a", weight=2)]).parts("a\na") == [Part(0, 1, 2)]
    assert TokenWeights([TokenWeight(pattern="a.b", weight=2)]).parts("a\nb") == [Part(0, 3, 2)]


def test_a_token_has_the_weight_of_its_first_character_that_is_not_blank() -> None:
    """By hand: the tokens "a", " b", " ", "bc", "c" of "a b bcc", with b = 2 and a blank = 3: the space of " b" does
    not count, and "bc" begins with b.
    """
    weights = TokenWeights([TokenWeight(pattern="b", weight=2), TokenWeight(pattern=" ", weight=3)])
    spans = [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7)]
    assert weights.of("a b bcc", spans).tolist() == [1, 2, 3, 2, 1]


def test_an_empty_thought_is_read_and_not_learned() -> None:
    assert rendered(answered("Five."), EMPTY_THOUGHT, template="qwen3") == [("Five.<|im_end|>", 1)]
    full = answered("Five.", reasoning_content="add them")
    (run,) = rendered(full, EMPTY_THOUGHT, template="qwen3")
    assert run == ("<think>\nadd them\n</think>\n\nFive.<|im_end|>", 1)


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"gemma"}))
def test_a_part_has_its_weight_and_the_end_token_has_none(template: str) -> None:
    """Whatever the tokenizer: the text of the tokens of weight 2 is the match, up to the tokens' bounds."""
    runs = rendered(
        answered(CALL),
        TokenWeight(pattern="<tool_call>.+?</tool_call>", weight=2),
        template=template,
    )
    (heavy,) = [text for text, weight in runs if weight == 2]
    assert heavy.strip() == "<tool_call>add(2, 3)</tool_call>"
    assert runs[-1][1] == 1
    whole = "".join(text for text, _ in runs)
    assert whole == "".join(text for text, _ in rendered(answered(CALL), template=template))


def test_a_pattern_sees_the_answer_alone() -> None:
    """The question has the words too; ``.*`` matches the answer up to its end token."""
    assert rendered(answered("2 plus 3 is 5."), TokenWeight(pattern="2 plus 3", weight=3)) == [
        ("2 plus 3", 3),
        (" is 5.<|im_end|>", 1),
    ]
    assert rendered(answered("5"), TokenWeight(pattern=".*", weight=3)) == [
        ("5", 3),
        ("<|im_end|>", 1),
    ]


def test_a_message_s_weight_is_a_factor() -> None:
    turns = [*answered("2 plus 3 is 5.", weight=0.5), *answered("It is 5.", weight=0)]
    turns += answered("5", weight=4)
    assert rendered(turns, TokenWeight(pattern="5", weight=3)) == [
        ("2 plus 3 is ", 0.5),
        ("5", 1.5),
        (".<|im_end|>", 0.5),
        ("5", 12),
        ("<|im_end|>", 4),
    ]


def test_a_completion_has_weights() -> None:
    renderer = Renderer(
        tiny_tokenizer("llama3"), token_weights=[TokenWeight(pattern="is 5", weight=2)]
    )
    (sample,) = renderer.render(Completion("f:1", "What is 5?", " It is 5."))
    assert [(text.strip(), weight) for text, weight in weighed(sample, "llama3")] == [
        ("It", 1),
        ("is 5", 2),
        (".<|eot_id|>", 1),
    ]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": "Hi", "weight": 2}, "weight is 2 on a user message"),
        ({"role": "assistant", "content": "Hi", "weight": -1}, "weight is -1"),
        ({"role": "assistant", "content": "Hi", "weight": "much"}, "weight"),
        ({"role": "assistant", "content": "Hi", "weight": 0, "train": True}, "remove the other"),
        ({"role": "assistant", "content": "Hi", "loss_scale": 2}, "expected train or weight"),
    ],
)
def test_weights_that_mean_nothing_are_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_conversation([ASKED, message], "f:1")


def test_what_has_no_answers_is_refused() -> None:
    rules = [TokenWeight(pattern="a", weight=2)]
    with pytest.raises(RenderError, match="text without an answer"):
        Renderer(tiny_tokenizer("chatml"), token_weights=rules).render(Document("f:1", "a text"))
    with pytest.raises(RenderError, match=r"data\.targets=all"):
        Renderer(tiny_tokenizer("chatml"), targets="all").render(
            read_conversation(answered("Hi", weight=2), "f:1")
        )
    words = ["model=m", "data.train=a"]
    weights = "data.token_weights=[{pattern = 'a', weight = 2}]"
    assert load(Sft, None, [*words, weights]).data.token_weights == (
        TokenWeight(pattern="a", weight=2),
    )
    for wrong, says in (
        ([weights, "data.targets=all"], "data.targets=all"),
        (["data.token_weights=[{pattern = '(', weight = 2}]"], "is no regular expression"),
        (
            ["data.token_weights=[{pattern = 'a', weight = -2}]"],
            "greater than or equal to 0|at least 0",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            load(Sft, None, [*words, *wrong])


@pytest.mark.parametrize("method", ["grpo", "reward"])
def test_methods_that_learn_no_answers_refuse_it(method: str) -> None:
    words = ["model=m", "data.train=a", "data.token_weights=[{pattern = 'a', weight = 2}]"]
    words += ["rewards=exact_match"] if method == "grpo" else []
    with pytest.raises(
        ConfigError,
        match=f"data.token_weights=.* with method={method}: .*; leave data.token_weights out",
    ):
        load(METHODS[method], None, words)


def test_weights_are_kept_by_the_cache(tmp_path: Path) -> None:
    """A second load reads the cache; rows of one weight have no array there."""
    rows = [{"messages": answered("5")}, {"messages": answered("It is 6.")}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        train=str(path),
        cache=str(tmp_path / "c"),
        token_weights=(TokenWeight(pattern="5", weight=3),),
    )
    renderer = build_renderer(config, tiny_tokenizer("chatml"))
    first = load_dataset(config, "train", renderer, 512)
    again = load_dataset(config, "train", renderer, 512)
    assert again.report.is_cached and not first.report.is_cached
    for data in (first, again):
        assert data[0].weight_N.tolist() == [3, 1]
        assert (data[1].weight_N == 1).all()
    plain = DataConfig(train=str(path), cache=str(tmp_path / "c"))
    other = load_dataset(plain, "train", build_renderer(plain, tiny_tokenizer("chatml")), 512)
    assert not other.report.is_cached and other.fingerprint != first.fingerprint
    assert not list((tmp_path / "c").rglob(f"{other.parts[0].key}/*/target_weight.npy"))
    assert list((tmp_path / "c").rglob(f"{first.parts[0].key}/*/target_weight.npy"))


def test_the_denominator_is_the_sum_of_weights() -> None:
    """By hand: of a token of weight 3 and an end token of weight 1 with logprobs -1 and -2, cross entropy is
    (3 * 1 + 1 * 2) / (3 + 1) = 5/4.
    """
    renderer = Renderer(
        tiny_tokenizer("chatml"), token_weights=[TokenWeight(pattern="5", weight=3)]
    )
    (sample,) = renderer.render(read_conversation(answered("5"), "f:1"))
    packed, loss = pack([sample], ALONE), CrossEntropy()
    scores = Scores(logp_N=torch.tensor([-1.0, -2.0], dtype=torch.float64))
    total = loss(scores, packed).terms["cross_entropy"]
    assert float(total) / count_units(loss.units["cross_entropy"], packed) == pytest.approx(
        1.25, 1e-12
    )


def test_a_weight_in_the_cache_that_is_not_above_0_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": answered("5", weight=2)}) + "\n")
    config = DataConfig(train=str(path), cache=str(tmp_path / "c"))
    data = load_dataset(config, "train", build_renderer(config, tiny_tokenizer("chatml")), 512)
    arrays = {name: np.array(array) for name, array in data.parts[0].shards[0].arrays.items()}
    require_sound(arrays)
    arrays["target_weight"][0] = 0
    with pytest.raises(ValueError, match="target_weight"):
        require_sound(arrays)


@pytest.mark.parametrize("weights", list(product((1.0, 2.0), repeat=3)))
def test_weights_stay_with_their_targets_when_blocks_are_joined(weights: tuple[float, ...]) -> None:
    """Blocks whose weights are all 1 have no array of them, until they are joined to one that has."""
    builder, expected = ShardBuilder(), list[float]()
    for number, weight in enumerate(weights, start=1):
        block, targets = ShardBuilder(), np.arange(1, number + 2)
        sample = Sample(f"f:{number}", np.arange(number + 2), targets, np.full(number + 1, weight))
        block.add([(number, sample.id, [sample])])
        builder.extend(block)
        expected += [weight] * (number + 1)
    arrays = builder.build().arrays
    assert arrays.get("target_weight", np.ones(9)).tolist() == expected
    assert ("target_weight" in arrays) == (2.0 in weights)


def test_a_stored_sample_has_its_own_weights_and_reads() -> None:
    """A sample has more targets than reads, so the offsets of one are wrong for the other."""
    builder, samples = ShardBuilder(), list[Sample]()
    for number in (1, 2, 3):
        targets = np.arange(1, number + 3)
        samples.append(
            Sample(
                f"f:{number}",
                np.arange(number + 3),
                targets,
                number + targets / 8,
                read_at_R=targets[:number],
                read_values={"label": 10.0 * number + np.arange(number)},
            )
        )
    builder.add((number, sample.id, [sample]) for number, sample in enumerate(samples, start=1))
    shard = builder.build()
    for index, sample in enumerate(samples):
        stored = shard.sample(index, sample.id)
        assert stored.weight_N.tolist() == sample.weight_N.tolist()
        assert stored.read_at_R is not None and sample.read_at_R is not None
        assert stored.read_at_R.tolist() == sample.read_at_R.tolist()
        assert stored.read_values["label"].tolist() == sample.read_values["label"].tolist()
