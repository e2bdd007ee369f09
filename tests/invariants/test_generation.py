"""What the local engine says of a token is what the scorer says, and what else is in the batch changes nothing.

In float64, for every architecture that is carried: windows, softcaps, sinks, experts. Reference: each completion alone
in a micro-batch of the training scorer.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import CARRIED, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import replace
from taut.data.packing import ALONE, pack
from taut.inference.local import LocalEngine
from taut.inference.settings import ConversationConfig, Sampling
from taut.models.attention_backends import PREFIX
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.types import Completion, Prompt, Sample

LIMIT = 1e-9
STOP = (2,)
CPU = torch.device("cpu")
DRAWN = Sampling(n=3, max_new_tokens=12, temperature=1.0, seed=5)


def scorer_of(name: str) -> Scorer:
    model = tiny_model(name)
    model.set_attn_implementation(PREFIX + "reference")
    return Scorer(model)


def engine_of(scorer: Scorer, **config: float) -> LocalEngine:
    return LocalEngine(
        scorer,
        tiny_tokenizer(),
        STOP,
        context=200,
        compute=partial(compute_context, torch.float64, CPU),
        config=ConversationConfig(**config),  # type: ignore[arg-type]
    )


def prompts(num: int = 6) -> list[Prompt]:
    """Some alike, some with a long common beginning, one the beginning of another, one twice."""
    generator = np.random.default_rng(0)
    common = generator.integers(3, 90, 40)
    tails = [generator.integers(3, 90, size) for size in (5, 1, 9)]
    ids = [
        generator.integers(3, 90, 7),
        *(np.concatenate([common, tail]) for tail in tails),
        common,
        generator.integers(3, 90, 1),
        np.concatenate([common, tails[0]]),
    ]
    return [Prompt(f"p{number}", some) for number, some in enumerate(ids[:num])]


def scored(scorer: Scorer, prompt: Prompt, completion: Completion) -> np.ndarray:
    ids_T = np.concatenate([prompt.ids_T, completion.ids_N])
    at = np.arange(prompt.ids_T.size, ids_T.size)
    sample = Sample("alone", ids_T, at, np.ones(at.size))
    with torch.no_grad(), compute_context(next(scorer.parameters()).dtype, CPU):
        return scorer(pack([sample], ALONE)).logp_N.numpy()


@pytest.mark.parametrize("name", CARRIED)
def test_log_probs_are_the_scorers(name: str) -> None:
    scorer = scorer_of(name)
    asked = prompts(7)
    found = engine_of(scorer).generate(asked, DRAWN)
    assert [(c.prompt_id, c.index) for c in found] == [(p.id, i) for p in asked for i in range(3)]
    by_id = {prompt.id: prompt for prompt in asked}
    assert max(c.ids_N.size for c in found) > 6  # longer than the windows
    for completion in found:
        wanted = scored(scorer, by_id[completion.prompt_id], completion)
        assert np.abs(completion.logp_N - wanted).max() < LIMIT
        assert np.abs(completion.logp_one_N - wanted).max() < LIMIT
        ended = completion.ids_N[-1] in STOP
        assert completion.finish_reason == ("stop" if ended else "length")
        assert not np.isin(completion.ids_N[:-1], STOP).any()
        assert ended or completion.ids_N.size == DRAWN.max_new_tokens


@pytest.mark.parametrize(
    "name", slow_except(["gemma2"], ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
)
def test_what_else_is_in_the_batch_changes_nothing(name: str) -> None:
    scorer = scorer_of(name)
    together = engine_of(scorer).generate(prompts(7), DRAWN)
    for config in ({"sequences": 1}, {"sequences": 4}, {"sequences": 5, "prefill_tokens": 10}):
        others = engine_of(scorer, **config).generate(prompts(7)[::-1], DRAWN)
        assert_same(together, others)


def test_a_prompt_alone_is_a_prompt_among_others() -> None:
    scorer = scorer_of("qwen2")
    together = engine_of(scorer).generate(prompts(7), DRAWN)
    alone = [c for p in prompts(7) for c in engine_of(scorer).generate([p], DRAWN)]
    assert_same(together, alone)


def test_in_float32_log_probs_agree_to_its_rounding() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    model.set_attn_implementation(PREFIX + "reference")
    scorer = Scorer(model)
    engine = LocalEngine(scorer, tiny_tokenizer(), STOP, context=200)
    by_id = {prompt.id: prompt for prompt in prompts(7)}
    for completion in engine.generate(list(by_id.values()), DRAWN):
        wanted = scored(scorer, by_id[completion.prompt_id], completion)
        assert np.abs(completion.logp_N - wanted).max() < 1e-5


def assert_same(left: list[Completion], right: list[Completion]) -> None:
    by_key = {(c.prompt_id, c.index): c for c in right}
    assert len(by_key) == len(left)
    for completion in left:
        other = by_key[completion.prompt_id, completion.index]
        assert completion.ids_N.tolist() == other.ids_N.tolist()
        assert completion.finish_reason == other.finish_reason
        assert np.abs(completion.logp_N - other.logp_N).max() < LIMIT


def turns(engine: LocalEngine) -> list[Completion]:
    """Four rounds: each prompt goes on after its completion. In the third, one goes on twice, another's history has
    been edited, and there is one more.
    """
    sampling = replace(DRAWN, {"n": 1})
    generator = np.random.default_rng(1)
    asked, completions = prompts(7), []
    for number in range(4):
        if number == 2:
            again, edited = Prompt("fork", asked[0].ids_T), asked[2].ids_T.copy()
            edited[30] = 91
            asked[2] = Prompt(asked[2].id, edited)
            asked += [again, Prompt("new", generator.integers(3, 90, 17))]
        done = engine.generate(asked, sampling)
        completions += [dataclasses.replace(c, prompt_id=f"{c.prompt_id}@{number}") for c in done]
        said = [generator.integers(3, 90, 1 + index) for index in range(len(asked))]
        asked = [
            Prompt(prompt.id, np.concatenate([prompt.ids_T, completion.ids_N, more]))
            for prompt, completion, more in zip(asked, done, said, strict=True)
        ]
    return completions


@pytest.mark.parametrize("name", slow_except(["gemma2"], CARRIED))
def test_turns_are_sampled_as_without_what_is_kept_of_earlier_ones(name: str) -> None:
    scorer = scorer_of(name)
    wanted = turns(engine_of(scorer))
    few = 2**16 / 2**30  # bytes of some of the conversations
    for config in ({}, {"sequences": 3, "prefill_tokens": 30}, {"prefix_cache_gib": few}):
        engine = engine_of(scorer, **config)
        with engine.conversation():
            assert_same(wanted, turns(engine))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
        {"temperature": 0.0, "n": 1},
        {"temperature": 0.0, "n": 1, "repetition_penalty": 1.3},
    ],
)
def test_the_policy_is_the_librarys(changes: dict[str, float]) -> None:
    """The processors of transformers, on the scorer's logits of each completion alone."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    sampling = replace(DRAWN, changes)
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    if sampling.temperature > 0:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    scorer = scorer_of("llama")
    asked = {prompt.id: prompt for prompt in prompts(4)}
    for completion in engine_of(scorer).generate(list(asked.values()), sampling):
        ids = np.concatenate([asked[completion.prompt_id].ids_T, completion.ids_N])
        start = ids.size - completion.ids_N.size
        scorer.model.set_attn_implementation("eager")
        logits = scorer.model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0].detach()
        scorer.model.set_attn_implementation(PREFIX + "reference")
        one = logits.log_softmax(-1)
        for number, token in enumerate(completion.ids_N):
            at = start + number
            policy = chain(torch.tensor(ids[:at])[None], logits[at - 1][None])[0].log_softmax(-1)
            assert abs(completion.logp_one_N[number] - float(one[at - 1, token])) < 1e-5
            if sampling.temperature == 0:
                assert completion.logp_N[number] == 0
                assert int(policy.argmax()) == token
            else:
                assert abs(completion.logp_N[number] - float(policy[token])) < 1e-5


def test_tokens_streams_what_generate_gives() -> None:
    engine = engine_of(scorer_of("qwen3"))
    sampling = replace(DRAWN, {"n": 1})
    prompt = prompts()[1]
    streamed = list(engine.tokens(prompt, sampling))
    (whole,) = engine.generate([prompt], sampling)
    assert streamed == whole.ids_N.tolist()


def test_nothing_outside_is_moved() -> None:
    scorer = scorer_of("llama").train()
    before = torch.random.get_rng_state()
    engine_of(scorer).generate(prompts(), DRAWN)
    assert torch.equal(before, torch.random.get_rng_state())
    assert scorer.training
    assert all(parameter.grad is None for parameter in scorer.parameters())
