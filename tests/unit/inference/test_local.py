"""The local engine's bookkeeping: what is computed, when it ends, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import STATEFUL, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import replace
from taut.errors import DataError, ModelError, NonFiniteError
from taut.inference.local import LocalEngine
from taut.inference.settings import ConversationConfig, Sampling
from taut.models.attention_backends import PREFIX
from taut.models.cpu import cpu_matmul, packed_weights
from taut.models.scorer import Scorer
from taut.types import Completion, IntArray, Prompt

DRAWN = Sampling(max_new_tokens=6, seed=3)
VOCABULARY = len(tiny_tokenizer())


class Watched(Scorer):
    """Counts what each forward computes."""

    def __init__(self, name: str = "llama") -> None:
        model = tiny_model(name, vocab_size=VOCABULARY, dtype=torch.float32)
        model.set_attn_implementation(PREFIX + "reference")
        super().__init__(model)
        self.sizes: list[int] = []

    def next_logits(self, ids_T: torch.Tensor, *rest: object) -> torch.Tensor:
        self.sizes.append(ids_T.numel())
        return super().next_logits(ids_T, *rest)


def engine(
    scorer: Scorer, stop_ids: tuple[int, ...] = (), context: int | None = 64, **config: float
) -> LocalEngine:
    return LocalEngine(
        scorer,
        tiny_tokenizer(),
        stop_ids,
        context=context,
        config=ConversationConfig(**config),  # type: ignore[arg-type]
    )


def ids(size: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(3, 90, size)


def prompts(*sizes: int) -> list[Prompt]:
    return [Prompt(f"p{n}", ids(size, n)) for n, size in enumerate(sizes)]


def test_nothing_is_padded_and_a_prompt_is_computed_once() -> None:
    scorer = Watched()
    engine(scorer).generate(prompts(5, 20, 11), replace(DRAWN, {"n": 4}))
    assert scorer.sizes == [5 + 20 + 11, *[12] * 5]


def test_a_completion_names_the_update_before_it() -> None:
    local = engine(Watched())
    versions = []
    for version in (0, 5):
        local.update(version)
        versions += [one.version for one in local.generate(prompts(3), DRAWN)]
    assert versions == [0, 5]


def continued(asked: list[Prompt], done: list[Completion], size: int) -> list[Prompt]:
    """The next turns: each prompt with its completion and ``size`` more tokens."""
    return [
        Prompt(p.id, np.concatenate([p.ids_T, c.ids_N, ids(size, n + 50)]))
        for n, (p, c) in enumerate(zip(asked, done, strict=True))
    ]


def test_a_turn_computes_what_came_since_the_last_one() -> None:
    """Its own last token, which no forward has had, and what was said to it."""
    scorer = Watched()
    local, asked = engine(scorer, context=None), prompts(20, 31)
    with local.conversation():
        for _ in range(3):
            done = local.generate(asked, DRAWN)
            asked = continued(asked, done, 4)
    first = sum(p.ids_T.size - 3 * (DRAWN.max_new_tokens + 4) for p in asked)
    assert scorer.sizes == [first, *[2] * 5, *[2 * (1 + 4), *[2] * 5] * 2]


def test_prompts_that_are_equal_are_computed_once_even_if_they_are_long() -> None:
    """As the first turns of a group are, each a prompt of its own."""
    scorer = Watched()
    asked = [Prompt(f"p{n}", ids(30, n // 3)) for n in range(6)]
    engine(scorer, prefill_tokens=20).generate(asked, DRAWN)
    assert [size for size in scorer.sizes if size > 6] == [30, 30]


def test_a_turn_whose_history_was_edited_computes_it_from_there() -> None:
    scorer = Watched()
    local, asked = engine(scorer), prompts(40)
    with local.conversation():
        (turn,) = continued(asked, local.generate(asked, DRAWN), 4)
        turn.ids_T[25] = 2
        scorer.sizes.clear()
        local.generate([turn], DRAWN)
    assert scorer.sizes[0] == turn.ids_T.size - 25


def test_after_a_conversation_nothing_is_kept() -> None:
    scorer = Watched()
    local, asked = engine(scorer), prompts(40)
    for _ in range(2):
        scorer.sizes.clear()
        with local.conversation():
            local.generate(asked, DRAWN)
            with pytest.raises(AssertionError, match="conversation"):
                local.update(1)
        assert scorer.sizes[0] == 40
        local.update(1)


def test_without_room_for_what_is_kept_each_turn_computes_its_prompt() -> None:
    scorer = Watched()
    local, asked = engine(scorer, prefix_cache_gib=0), prompts(40)
    with local.conversation():
        (turn,) = continued(asked, local.generate(asked, DRAWN), 4)
        scorer.sizes.clear()
        local.generate([turn], DRAWN)
    assert scorer.sizes[0] == turn.ids_T.size


def test_what_is_computed_again_for_want_of_room_is_counted() -> None:
    """As many tokens as the forwards have more than those of a cache with room for all; what two prompts begin with
    counts once, as it is computed once. The bytes that are said to hold all, do.
    """

    def computed(gib: float) -> tuple[int, int, int]:
        scorer = Watched()
        local, asked = engine(scorer, prefix_cache_gib=gib), prompts(40, 30, 20)
        asked.append(Prompt("p3", asked[0].ids_T.copy()))
        for _ in range(2):  # of one call after another
            with local.conversation():
                turn = asked
                for _ in range(2):
                    turn = continued(turn, local.generate(turn, DRAWN), 4)
                local.generate(turn, DRAWN)
        lost, num_bytes = local.take_lost()
        assert local.take_lost() == (0, 0)
        return sum(scorer.sizes), lost, num_bytes

    least, lost, _ = computed(2.0)
    assert lost == 0
    all_tokens, lost, num_bytes = computed(2**15 / 2**30)
    assert lost == all_tokens - least > 50
    assert computed(num_bytes / 2**30) == (least, 0, num_bytes)
    assert computed(0.0)[1:] == (0, 0)  # nothing was to be kept


def test_a_common_beginning_is_computed_once() -> None:
    scorer = Watched()
    common = ids(30)
    asked = [Prompt(f"p{n}", np.append(common, ids(4, n + 1))) for n in range(5)]
    engine(scorer).generate(asked, DRAWN)
    assert scorer.sizes[0] == 30 + 5 * 4


def test_finished_ones_leave_at_once_and_waiting_ones_enter() -> None:
    scorer = Watched()
    asked = [
        replace_room(p, room) for p, room in zip(prompts(7, 7, 7, 7), (2, 5, 3, 2), strict=True)
    ]
    done: list[Completion] = []
    found = engine(scorer, sequences=2).generate(asked, DRAWN, done.append)
    # The first two; one step, then the first is done and the third enters; ...
    assert scorer.sizes == [14, 2, 7, 2, 2, 7, 2]
    assert [c.ids_N.size for c in found] == [2, 5, 3, 2]
    assert [c.prompt_id for c in done] == ["p0", "p2", "p1", "p3"]
    assert [c.prompt_id for c in found] == ["p0", "p1", "p2", "p3"]


def replace_room(prompt: Prompt, size: int) -> Prompt:
    return Prompt(prompt.id, prompt.ids_T, size)


def test_more_samples_than_places_share_one_prefill() -> None:
    scorer = Watched()
    found = engine(scorer, sequences=3).generate(prompts(9), replace(DRAWN, {"n": 7}))
    assert scorer.sizes == [9, *[3] * 5, *[3] * 5, *[1] * 5]
    assert [c.index for c in found] == list(range(7))
    assert len({tuple(c.ids_N) for c in found}) > 1


def test_the_prefill_budget_is_kept_but_for_a_prompt_alone() -> None:
    scorer = Watched()
    engine(scorer, prefill_tokens=12).generate(
        prompts(5, 6, 5, 30), replace(DRAWN, {"max_new_tokens": 1})
    )
    assert scorer.sizes == [11, 5, 30]


def test_the_context_cuts() -> None:
    (found,) = engine(Watched(), context=12).generate(prompts(9), DRAWN)
    assert (found.ids_N.size, found.finish_reason) == (3, "length")


def test_a_stop_token_ends_at_once_and_is_kept() -> None:
    scorer = Watched()
    (free,) = engine(scorer).generate(prompts(9), DRAWN)
    stop = int(free.ids_N[2])
    first = free.ids_N.tolist().index(stop)
    (found,) = engine(scorer, (stop,)).generate(prompts(9), DRAWN)
    assert found.ids_N.tolist() == free.ids_N[: first + 1].tolist()
    assert found.finish_reason == "stop"
    assert found.text == tiny_tokenizer().decode(free.ids_N[:first])


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    scorer = Watched()
    (free,) = engine(scorer).generate(prompts(9), DRAWN)
    whole = tiny_tokenizer().decode(free.ids_N)
    stop = whole[len(whole) // 2 :][:2]
    (found,) = engine(scorer).generate(prompts(9), replace(DRAWN, {"stop": [stop]}))
    assert found.finish_reason == "stop"
    assert found.ids_N.size <= free.ids_N.size
    assert found.text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([Prompt("a.jsonl:3", np.empty(0, dtype=np.int64))], "a.jsonl:3: the prompt has no token"),
        (
            [Prompt("a.jsonl:4", ids(64))],
            "a.jsonl:4: the prompt has 64 tokens and the model's context is 64",
        ),
        ([Prompt("same", ids(3)), Prompt("same", ids(4))], "same: two prompts have this id"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_computed(
    asked: list[Prompt], message: str
) -> None:
    scorer = Watched()
    with pytest.raises(DataError, match=message):
        engine(scorer).generate([Prompt("good", ids(5)), *asked], DRAWN)
    assert scorer.sizes == []


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_logits_that_are_not_finite_name_the_prompt(temperature: float) -> None:
    scorer, asked = Watched().train(), prompts(9, 4)
    planted = int(asked[1].ids_T[2])
    assert planted not in asked[0].ids_T
    with torch.no_grad():
        scorer.model.get_input_embeddings().weight[planted] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^p1: after 4 tokens the model gives logits"):
        engine(scorer).generate(asked, replace(DRAWN, {"temperature": temperature}))
    assert scorer.training


@pytest.mark.parametrize("name", STATEFUL)
def test_layers_with_state_are_refused_by_name(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"state across tokens .*engine=server \(rollout\.engine=server"
    ):
        engine(Scorer(tiny_model(name, dtype=torch.float32)))


def test_rope_that_depends_on_the_length_keeps_to_its_first_regime() -> None:
    found = engine(Watched("phi3_longrope"), context=256)
    assert found.context == 32


# -- packed weights


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every product of an engine may use packed weights, at once; the number of weights packed."""
    made = [0]

    def counting(pack: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*arguments: object) -> torch.Tensor:
            made[0] += 1
            return pack(*arguments)

        return counted

    for name in ("pack_float32", "pack_bf16"):
        pack = getattr(packed_weights, name)
        monkeypatch.setattr(packed_weights, name, counting(pack))
    for name, value in (("SMALLEST", 1), ("STAYS", 1), ("PAYS", 1)):
        monkeypatch.setattr(packed_weights, name, value)
    before = cpu_matmul.active()
    engines = [name for name in cpu_matmul.EVERY if "rows" in name]
    cpu_matmul.use(cpu_matmul.CpuMatmul(f"mkl; packed for {', '.join(engines)}"))
    yield made
    cpu_matmul.use(before)


def packing_engine(**config: float) -> LocalEngine:
    scorer = Watched()
    cpu_matmul.install(scorer.model)
    return engine(scorer, **config)


WIDE = Sampling(n=3, max_new_tokens=6, seed=3)


@pytest.mark.skipif(not packed_weights.has_mkl_packed(), reason="this PyTorch has no MKL")
def test_packed_weights_change_nothing_but_rounding(packings: list[int]) -> None:
    plain = packing_engine(packed_gib=0.0).generate(prompts(5, 20, 11), WIDE)
    assert packings == [0]
    packed = packing_engine().generate(prompts(5, 20, 11), WIDE)
    assert packings[0] >= 7 * 2 + 1, "each linear layer, and the head"
    for one, other in zip(plain, packed, strict=True):
        assert one.ids_N.tolist() == other.ids_N.tolist()
        assert one.logp_N is not None and other.logp_N is not None
        assert np.abs(one.logp_N - other.logp_N).max() < 1e-5


@pytest.mark.skipif(not packed_weights.has_mkl_packed(), reason="this PyTorch has no MKL")
@pytest.mark.parametrize(
    "is_narrow",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not cpu_matmul.has_bf16(), reason="no bf16 arithmetic")
        ),
    ],
)
def test_packed_weights_are_never_those_of_before_an_update(
    is_narrow: bool, packings: list[int]
) -> None:
    """PyTorch's fused AdamW does not advance the version counters of what it changes."""

    def compute() -> AbstractContextManager[None]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_narrow)  # type: ignore[return-value]

    used, other = packing_engine(), packing_engine(packed_gib=0.0)
    used._compute = other._compute = compute
    before = used.generate(prompts(5, 20), WIDE)
    assert packings[0]
    optimizer = torch.optim.AdamW(used.scorer.parameters(), lr=0.5, fused=True)
    for parameter in used.scorer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other.scorer.load_state_dict(used.scorer.state_dict())
    after, wanted = (one.generate(prompts(5, 20), WIDE) for one in (used, other))
    for old, new, right in zip(before, after, wanted, strict=True):
        assert old.logp_N is not None and new.logp_N is not None and right.logp_N is not None
        assert old.ids_N.tolist() != new.ids_N.tolist()
        assert new.ids_N[0] == right.ids_N[0]
        assert abs(new.logp_N[0] - right.logp_N[0]) < (0.1 if is_narrow else 1e-4)
