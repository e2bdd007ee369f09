"""The engine in this process: generates with the very weights that train.

    prefill   prompts are packed flat, common prefixes once; the keys and values of every attention layer, also those
              of pictures, are cut into the stretches of the prompts' tree and kept once
    decode    one forward per step over one new token of each live completion, flat (attention/decode.py); positions
              continue after the pictures of its prompt (vision/placeholders.py)

Between the calls of one ``conversation()`` keys and values are kept (prefix_cache.py): of a prompt that goes on from an
earlier one, as each turn does, only the new tokens are computed (attention/extension.py).

A completion that ends leaves the batch at once and a waiting one enters; the order depends on counts only, never on
time. Under several ranks the prompts are divided and all ranks run equally many forwards (sharded weights need that).
The training mode is restored, and no global random state is read or changed.

Sampling: logits -> the next token of every completion, its logprob under the model, and its logprob under the
distribution it was drawn from:

    z = logits of the model               logp_one = log_softmax(z)[id]
    y = truncate(penalize(z) / temperature)   logp = log_softmax(y)[id]
    id = the first v with  sum_{w <= v} softmax(y)_w > u

One number u per token decides, drawn from the completion's own stream: the rest of the batch changes a token only where
u lies within rounding of the boundary between two. The sum is taken in float64. Temperature 0: argmax y, logp 0.

Not supported: models with state across tokens (refused by name), weights on other machines.
Shapes: logits [B, V] of B completions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.attention.decode import Decoding, Group, KeysValues, Own, Stretch, is_similar, stack
from taut.attention.extension import extend
from taut.attention.layout import Layout
from taut.attention.running_sums import running_sums
from taut.data.packing import PackPolicy, common_prefix, pack
from taut.errors import ModelError, NonFiniteError
from taut.inference.engine import Engine, OnDone, Texts, require_usable, room, stream_seed
from taut.inference.prefix_cache import Kept, PrefixCache, Run, key_of, num_known
from taut.inference.settings import ConversationConfig, LocalConfig, Sampling
from taut.io import progress
from taut.models import architecture
from taut.models.cpu import cpu_matmul
from taut.models.cpu.packed_weights import PackedWeights
from taut.models.precision import cast_once
from taut.models.scorer import Scorer, evaluating
from taut.train.distributed import Ranks
from taut.types import (
    Completion,
    FinishReason,
    IntArray,
    Packed,
    Prompt,
    Sample,
    to_device,
    to_host,
)
from taut.vision.placeholders import next_position

BLOCK = 256
"""Tokens whose probabilities are summed together before the block with the drawn one is searched."""


class Drawn(NamedTuple):
    """The sampled tokens of one step."""

    ids_B: Tensor
    logp_B: Tensor
    """Logprobs under the policy they were drawn from."""
    logp_one_B: Tensor
    """Logprobs under the model at temperature 1."""


def draw(
    logits_BV: Tensor, sampling: Sampling, history: Sequence[Sequence[int]], uniform_B: Tensor
) -> Drawn:
    """The next token of each row. ``history``: the ids so far, read where there is a repetition penalty;
    ``uniform_B``: float64 in [0, 1)."""
    policy_BV = policy_logits(logits_BV, sampling, history)
    if sampling.temperature == 0:
        ids_B = policy_BV.argmax(-1)
        logp_B = torch.zeros_like(policy_BV[:, 0])
    else:
        ids_B, logp_B = _invert(policy_BV, uniform_B)
    if sampling.is_plain:
        return Drawn(ids_B, logp_B, logp_B)
    picked_B = logits_BV.gather(1, ids_B[:, None]).squeeze(1)
    return Drawn(ids_B, logp_B, picked_B - logits_BV.logsumexp(-1))


def policy_logits(
    logits_BV: Tensor, sampling: Sampling, history: Sequence[Sequence[int]]
) -> Tensor:
    """Logits of the policy: -inf for tokens that cannot be drawn. ``logits_BV`` is not changed."""
    z = logits_BV
    penalty = sampling.repetition_penalty
    if penalty != 1:
        z = z.clone()
        for row, ids in zip(z, history, strict=True):
            seen = torch.tensor(sorted(set(ids)), device=z.device)
            row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if sampling.temperature not in (0, 1):
        z = z / sampling.temperature
    if sampling.temperature == 0:
        return z
    if 0 < sampling.top_k < z.shape[1]:
        kth = z.topk(sampling.top_k, dim=-1).values[:, -1:]
        z = z.masked_fill(z < kth, -torch.inf)
    if sampling.top_p < 1:
        # The most likely tokens until they reach top_p; the token that crosses it is kept.
        ordered, order = z.sort(stable=True, dim=-1, descending=True)
        p = ordered.softmax(-1)
        is_left_out = running_sums(p) - p >= sampling.top_p
        is_left_out[:, 0] = False
        mask = torch.zeros_like(is_left_out).scatter(1, order, is_left_out)
        z = z.masked_fill(mask, -torch.inf)
    if sampling.min_p > 0:
        p = z.softmax(-1)
        z = z.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), -torch.inf)
    return z


def _invert(z: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse transform sampling: the tokens at ``uniform_B``, and their logprobs."""
    # The unnormalized probabilities, summed by blocks.
    top = z.amax(-1, keepdim=True)
    weights = (z - top).exp_()
    num_rows, size = weights.shape
    whole = -(-size // BLOCK) * BLOCK
    if whole != size:
        weights = torch.nn.functional.pad(weights, (0, whole - size))
    blocks = weights.view(num_rows, -1, BLOCK)
    until = running_sums(blocks.sum(-1, dtype=torch.float64))
    # The block in which the sum passes u, then the token in it.
    goal = uniform_B.to(until)[:, None] * until[:, -1:]
    block = torch.searchsorted(until, goal, right=True).clamp_(max=until.shape[1] - 1)
    before = torch.where(block > 0, until.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows, device=z.device), block.squeeze(1)]
    at = torch.searchsorted(running_sums(inside, torch.float64), goal - before, right=True)
    last = inside.ne(0).cumsum(-1).argmax(-1, keepdim=True)  # rounding must not step past the end
    ids_B = (block * BLOCK + torch.minimum(at, last)).squeeze(1)
    logp_B = z.gather(1, ids_B[:, None]) - top - until[:, -1:].log().to(z.dtype)
    return ids_B, logp_B.squeeze(1)


NOTHING = np.empty(0)
SHARE = PackPolicy(share_prefixes=True, min_saved_tokens=16)


@dataclass(eq=False, slots=True)
class Row:
    """A completion under way."""

    prompt: Prompt
    index: int
    room: int
    random: np.random.Generator
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    logp_one: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Prefilled:
    """A prompt with its keys and values, and completions that have not begun."""

    rows: deque[Row]
    path: tuple[Stretch, ...]
    is_alone: bool
    """Whether one completion alone sees the last stretch."""
    logits_V: Tensor


@dataclass(eq=False, slots=True)
class _Call:
    """The state of one call of ``generate``."""

    sampling: Sampling
    waiting: deque[Prompt]
    packed: PackedWeights
    begun: deque[Prefilled] = field(default_factory=deque)
    groups: list[Group] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)
    """The rows of each group."""

    @property
    def num_live(self) -> int:
        return sum(map(len, self.rows))

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.begun or self.groups)


def require_stateless(model: nn.Module, name: str) -> None:
    """Raise ModelError for a model whose layers carry state from token to token. ``name``: of the model, for people."""
    if stateful := architecture.stateful_layers(model):
        raise ModelError(
            f"{name} has layers with state across tokens ({', '.join(stateful[:3])}); expected attention only; serve "
            "the model, and set engine=server (rollout.engine=server where it trains)"
        )


class LocalEngine:
    """Generates with a Scorer's model. See engine.py for what ``generate`` takes and returns."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        *,
        context: int | None,
        compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
        config: LocalConfig = ConversationConfig(),  # noqa: B008 (frozen)
        ranks: Ranks | None = None,
    ) -> None:
        """``context``: tokens a prompt and its completion may have; ``compute``: the precision context of a forward.

        Raises ModelError for a model whose layers carry state from token to token.
        """
        require_stateless(scorer.model, type(architecture.unwrap(scorer.model)).__name__)
        rope = architecture.length_dependent_rope(scorer.model)
        if rope is not None:  # beyond it the angles of the tokens already kept would change
            context = min(context or rope[1], rope[1])
        self.scorer, self.context, self.config = scorer, context, config
        self.stop_ids = frozenset(stop_ids)
        self.texts = Texts(tokenizer, stop_ids)
        self.version = 0
        self._cache: PrefixCache | None = None
        self._lost = 0, 0
        self.compute, self._ranks = compute, ranks or Ranks(0, 1, scorer.device)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[Completion]:
        """``sampling.n`` completions of each prompt, in the order of prompts and samples.

        Under several ranks ``on_done`` gets this rank's completions only; all ranks get the whole list.
        """
        require_usable(prompts, self.context)
        mine = prompts[self._ranks.share :: self._ranks.num_shares]
        self._begin_round(mine)
        done: list[Completion] = []
        packed = self._packed()
        with self._forward(packed):
            for row in self._run(mine, sampling, packed):
                if row.finish is not None:
                    done.append(self._completion(row, sampling))
                    progress.count(len(done), len(mine) * sampling.n, "answers")
                    if on_done is not None:
                        on_done(done[-1])
        # The completions of all ranks.
        every = [
            completion
            for some in self._ranks.of_shares(self._ranks.gather(done))
            for completion in some
        ]
        order = {prompt.id: number for number, prompt in enumerate(prompts)}
        return sorted(every, key=lambda c: (order[c.prompt_id], c.index))

    def update(self, version: int) -> None:
        """Record the version; the weights are the trainer's tensors."""
        assert self._cache is None, "the weights do not change in the middle of a conversation"
        self.version = version

    @contextmanager
    def conversation(self) -> Iterator[None]:
        """Keep keys and values from call to call inside the block, where the weights must stay as they are."""
        assert self._cache is None, "conversation does not nest"
        assert isinstance(self.config, ConversationConfig)
        self._cache = cache = PrefixCache(int(self.config.prefix_cache_gib * 2**30))
        try:
            yield
        finally:
            self._cache = None
            self._lost = self._lost[0] + cache.num_lost, max(self._lost[1], cache.wanted_bytes)

    def take_lost(self) -> tuple[int, int]:
        """Of the conversations since the last call: tokens of prompts that were computed again for want of room in the
        cache, over all ranks; and the bytes that would have been room for all of one, at most. Every rank calls it.
        """
        (num_tokens, num_bytes), self._lost = self._lost, (0, 0)
        (total,), (most,) = self._ranks.sum_of_shares([num_tokens]), self._ranks.max([num_bytes])
        return int(total), int(most)

    def tokens(self, prompt: Prompt, sampling: Sampling) -> Iterator[int]:
        """The ids of one completion as they are sampled, including the id that ends it."""
        assert sampling.n == 1 and self._ranks.size == 1
        require_usable([prompt], self.context)
        self._begin_round([prompt])
        packed = self._packed()
        rows = self._run([prompt], sampling, packed)
        while True:
            with self._forward(packed):
                row = next(rows, None)
            if row is None:
                return
            yield row.ids[-1]

    def read_logps(self, samples: Sequence[Sample]) -> Iterator[tuple[str, Tensor]]:
        """The id of each sample, and logprobs [R, V] at temperature 1 of the token after each of its ``read_at_R``. The
        samples are computed together, common prefixes once.
        """
        packed = pack(samples, SHARE)
        layout = Layout(packed.reach_T.numpy(), None, self.scorer.device)
        with self._forward(self._packed()):
            logits_RV = self.scorer.next_logits(
                packed.ids_T, packed.position_ids, layout, packed.read_R
            )
            for number, name in enumerate(packed.sample_ids):
                yield name, torch.log_softmax(logits_RV[packed.row_R == number], dim=-1)

    def _run(
        self, prompts: Sequence[Prompt], sampling: Sampling, packed: PackedWeights
    ) -> Iterator[Row]:
        """Each row after each of its tokens. One forward per round, on every rank."""
        call = _Call(sampling, deque(prompts), packed)
        while self._ranks.max([float(call.is_busy)])[0]:
            free = self.config.sequences - call.num_live
            if call.waiting and not call.begun and free > 0:
                self._prefill(call, free)
            elif call.groups:
                yield from self._decode(call)
            else:  # a forward to keep the other ranks company: collectives need all ranks
                at = torch.zeros(1, dtype=torch.long)
                layout = Layout(np.array([1]), None, self.scorer.device)
                self.scorer.next_logits(at, at, layout, at)
            while call.begun and call.num_live < self.config.sequences:
                yield from self._begin(call)

    def _packed(self) -> PackedWeights:
        """Room for the packed weights of a call; none where they are sharded, and gathered at each forward."""
        is_sharded = any(hasattr(weight, "full_tensor") for weight in self.scorer.parameters())
        return PackedWeights(0 if is_sharded else int(self.config.packed_gib * 2**30))

    @contextmanager
    def _forward(self, packed: PackedWeights) -> Iterator[None]:
        with (
            evaluating(self.scorer),
            torch.no_grad(),
            cast_once(self.scorer),
            self.compute(),
            cpu_matmul.decoding(packed),
        ):
            yield

    def _prefill(self, call: _Call, free: int) -> None:
        """Compute the next prompts, up to ``free`` completions, and keep their keys and values."""
        # The prompts that fit into one forward.
        chosen: list[Prompt] = []
        num_tokens = 0
        while call.waiting and len(chosen) * call.sampling.n < free:
            prompt = call.waiting[0]
            shared = common_prefix(_as_sample(chosen[-1]), _as_sample(prompt)) if chosen else 0
            known = sum(size for _, size in self._known(prompt))
            size = prompt.ids_T.size - max(shared, known)
            num_tokens += size
            if chosen and size and num_tokens > self.config.prefill_tokens:
                break  # one that repeats another adds nothing
            chosen.append(call.waiting.popleft())
        # Begin to read their pictures, and those of the next prefill.
        for prompt in (*chosen, *islice(call.waiting, len(chosen))):
            for medium in prompt.media:
                medium.picture.expect()
        rooms = {prompt.id: room(prompt, call.sampling, self.context) for prompt in chosen}
        call.packed.expect(max(rooms.values()))
        packed = pack([_as_sample(prompt) for prompt in chosen], SHARE)
        by_id = {prompt.id: prompt for prompt in chosen}
        ordered = [by_id[name] for name in packed.sample_ids]
        layout, logits_RV = self._next_logits(packed, ordered)
        # Their completions, which have not begun.
        begun = _stretches(layout, packed.read_R.numpy(), is_single=call.sampling.n == 1)
        for number, path, is_alone in begun:
            prompt = ordered[number]
            seeds = [
                stream_seed(call.sampling.seed, prompt.id, index)
                for index in range(call.sampling.n)
            ]
            rows = deque(
                Row(prompt, index, rooms[prompt.id], np.random.default_rng(seed))
                for index, seed in enumerate(seeds)
            )
            call.begun.append(Prefilled(rows, path, is_alone, logits_RV[number]))

    def _next_logits(self, packed: Packed, prompts: Sequence[Prompt]) -> tuple[Layout, Tensor]:
        """The layout of these prompts with all their keys and values, and the logits after each of them."""
        last_T = None if packed.last_T is None else packed.last_T.numpy()
        layout = Layout(packed.reach_T.numpy(), last_T, self.scorer.device, kept={})
        ids_T, position_ids, read_R = packed.ids_T, packed.position_ids, packed.read_R
        starts = [segment.start for segment in layout.segments]
        found: list[tuple[IntArray, Kept, int]] = []
        for prompt, last in zip(prompts, read_R.tolist(), strict=True):
            path, at = layout.paths[bisect_right(starts, last) - 1], 0
            for run, size in self._known(prompt):
                found.append((path[at : at + size], run.kept, run.key_N.size))
                at += size
        # Compute all tokens; or only those that are not kept.
        if not found or any(p.media and p.media[-1].stop == p.ids_T.size for p in prompts):
            return layout, self.scorer.next_logits(
                ids_T, position_ids, layout, read_R, packed.media
            )
        extension = extend(layout, found, read_R)
        rows = extension.layout.rows_read
        assert rows is not None
        place_T = np.searchsorted(rows, np.arange(layout.num_tokens))  # right where a token is new
        media = [
            replace(image, start=int(place_T[image.start]), stop=int(place_T[image.stop - 1]) + 1)
            for image in packed.media
            if image.start in rows
        ]
        logits_RV = self.scorer.next_logits(
            ids_T[rows],
            position_ids[..., rows],
            extension,
            torch.from_numpy(place_T[read_R.numpy()]),
            media,
        )
        return extension.layout, logits_RV

    def _begin_round(self, prompts: Sequence[Prompt]) -> None:
        """Keep the prefixes of these prompts while they are computed."""
        if self._cache is not None:
            self._cache.begin_round([key_of(prompt) for prompt in prompts])

    def _known(self, prompt: Prompt) -> list[tuple[Run, int]]:
        """The runs that a prompt begins with, and how many tokens of each."""
        if self._cache is None:
            return []
        found = self._cache.find(key_of(prompt))
        return found if num_known(found) else []

    def _remember(self, row: Row, path: Sequence[Stretch], own: tuple[Own, int] | None) -> None:
        """Keep what was computed for a finished completion: all but its last token. ``own``: what has its tokens, and
        its row there; None: it has one token.
        """
        if self._cache is None:
            return

        def pairs_of(layer: nn.Module) -> list[KeysValues]:
            pairs = [stretch.keys_values(layer) for stretch in path]
            return pairs if own is None else [*pairs, own[0].keys_values(layer, own[1])]

        def copy(first: int) -> Kept:
            copied: dict[nn.Module, KeysValues] = {}
            for layer in layers:
                left, keys, values = first, [], []
                for key, value in pairs_of(layer):
                    keys.append(key[:, left:])
                    values.append(value[:, left:])
                    left = max(0, left - key.shape[1])
                copied[layer] = torch.cat(keys, 1), torch.cat(values, 1)
            return copied

        layers = [*(path[0].stack if own is None else own[0]).kept]
        each = [x[:, :1].nbytes for layer in layers for x in pairs_of(layer)[0]]
        key_T = np.concatenate([key_of(row.prompt), np.array(row.ids[:-1], np.int64)])
        self._cache.add(key_T, sum(each), copy)

    def _begin(self, call: _Call) -> Iterator[Row]:
        """Draw the first token of the next prompt's completions, as many as have room."""
        begun = call.begun[0]
        free = self.config.sequences - call.num_live
        rows = [begun.rows.popleft() for _ in range(min(free, len(begun.rows)))]
        if not begun.rows:
            call.begun.popleft()
        self._draw(begun.logits_V.expand(len(rows), -1), rows, call.sampling)
        for row in rows:
            if row.finish is not None:
                self._remember(row, begun.path, None)
        yield from rows
        live = [row for row in rows if row.finish is None]
        if live:
            previous = call.groups[-1].own if call.groups else None
            call.groups.append(_group(begun, live, previous))
            call.rows.append(live)

    def _decode(self, call: _Call) -> Iterator[Row]:
        """Draw the next token of every live completion."""
        rows = [row for some in call.rows for row in some]
        call.packed.expect(max(row.room - len(row.ids) for row in rows), len(rows))
        decoding = Decoding(call.groups)
        position = [group.position for group in call.groups for _ in range(group.num_rows)]
        ids_B = torch.tensor([row.ids[-1] for row in rows])
        logits_BV = self.scorer.next_logits(
            ids_B, torch.tensor(position), decoding, torch.arange(len(rows))
        )
        self._draw(logits_BV, rows, call.sampling)
        paths = (group.path for group in call.groups for _ in range(group.num_rows))
        for number, (row, path) in enumerate(zip(rows, paths, strict=True)):
            if row.finish is not None:
                self._remember(row, path, decoding.place_of(number))
        decoding.advance([row.finish is None for row in rows])
        yield from rows
        if not all(group.num_rows for group in call.groups):
            call.groups = [group for group in call.groups if group.num_rows]
            # Free what none of the others sees of the stacks.
            paths_left = [*(group.path for group in call.groups), *(it.path for it in call.begun)]
            seen = {stretch for path in paths_left for stretch in path}
            for some_stack in {stretch.stack for stretch in seen}:
                some_stack.keep([stretch for stretch in seen if stretch.stack is some_stack])
        living = ([row for row in some if row.finish is None] for some in call.rows)
        call.rows = [some for some in living if some]

    def _draw(self, logits_BV: Tensor, rows: Sequence[Row], sampling: Sampling) -> None:
        """Append a token to each row, and set ``finish`` where it ends."""
        has_history = sampling.repetition_penalty != 1
        history = [[*row.prompt.ids_T.tolist(), *row.ids] for row in rows] if has_history else []
        uniform_B = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
        (uniform_B,) = to_device([uniform_B], logits_BV.device)
        drawn = to_host(draw(logits_BV, sampling, history, uniform_B))
        values = zip(*(column.tolist() for column in drawn), strict=True)
        for row, (index, logp, logp_one) in zip(rows, values, strict=True):
            if not math.isfinite(logp + logp_one):
                raise NonFiniteError(
                    f"{row.prompt.id}: after {row.prompt.ids_T.size + len(row.ids)} tokens the model gives logits that "
                    "are not finite; expected finite ones; look for NaN in its weights, or set dtype=float32"
                )
            row.ids.append(index)
            row.logp.append(logp)
            row.logp_one.append(logp_one)
            if index in self.stop_ids or self.texts.has_stop(row.ids, sampling.stop):
                row.finish = "stop"
            elif len(row.ids) == row.room:
                row.finish = "length"

    def _completion(self, row: Row, sampling: Sampling) -> Completion:
        assert row.finish is not None
        return Completion(
            prompt_id=row.prompt.id,
            index=row.index,
            ids_N=np.asarray(row.ids, dtype=np.int64),
            logp_N=np.asarray(row.logp),
            logp_one_N=np.asarray(row.logp_one),
            finish_reason=row.finish,
            text=self.texts.text(row.ids, sampling.stop),
            version=self.version,
        )


def _as_sample(prompt: Prompt) -> Sample:
    nothing_N = np.empty(0, dtype=np.int64)
    return Sample(prompt.id, prompt.ids_T, nothing_N, NOTHING, prompt.media)


def _group(begun: Prefilled, rows: Sequence[Row], previous: Own | None) -> Group:
    """The group of completions that have their first token. ``previous``: the stored tokens of the previous group,
    which this one joins if there is room.
    """
    prompt, capacity = rows[0].prompt, rows[0].room
    size, path = prompt.ids_T.size, begun.path
    offset = next_position(size, prompt.media) - size
    leaf = path[-1] if begun.is_alone else None
    own = previous if previous is not None and previous.takes(capacity, leaf) else Own(capacity)
    if leaf is None:
        own.join(len(rows))
    else:
        own.join_alone(leaf, capacity)
        path = path[:-1]
    return Group(path, size, own, len(rows), offset)


def _stretches(
    layout: Layout, read_R: IntArray, *, is_single: bool
) -> list[tuple[int, tuple[Stretch, ...], bool]]:
    """(number in ``read_R``, path, is_alone) of each prompt. A stretch is a run of tokens that the same prompts see.
    The order is that of the tree, but for prompts that share nothing: they are first, the longest before the others,
    so that similar ones are neighbors. ``is_single``: each prompt has one completion.
    """
    assert layout.kept is not None
    cuts = {segment.start for segment in layout.segments} | {int(last) + 1 for last in read_R}
    spans = list(pairwise(sorted(cuts | {layout.num_tokens})))
    paths = [
        [span for span in spans if span[0] <= last < layout.reach_T[span[0]]] for last in read_R
    ]
    num_readers = Counter(span for path in paths for span in path)

    def order(number: int) -> int:
        path = paths[number]
        (start, stop) = path[0]
        return start - stop if len(path) == 1 and num_readers[path[0]] == 1 else 0

    # Stack the keys and values of similar spans, which are attended in one call.
    numbers = sorted(range(len(paths)), key=order)
    is_alone = [is_single and num_readers[path[-1]] == 1 for path in paths]
    stretches: dict[tuple[int, int], Stretch] = {}
    for together in _similar_spans([paths[n] for n in numbers], [is_alone[n] for n in numbers]):
        depths = [int(layout.depth_T[start]) for start, _ in together]
        stretches |= zip(together, stack(layout.kept, together, depths), strict=True)
    return [(n, tuple(stretches[span] for span in paths[n]), is_alone[n]) for n in numbers]


def _similar_spans(
    paths: Sequence[Sequence[tuple[int, int]]], is_alone: Sequence[bool]
) -> Iterator[list[tuple[int, int]]]:
    """The spans that are attended in one call: neighbors of similar lengths at one place of their paths."""
    for level in range(max(map(len, paths))):
        together: list[tuple[int, int]] = []
        for path, alone in zip(paths, is_alone, strict=True):
            span = path[level] if level < len(path) else None
            if span is None or span in together[-1:]:
                continue
            if alone and level + 1 == len(path):
                yield [span]
                continue
            if together and not is_similar([stop - start for start, stop in (*together, span)]):
                yield together
                together = []
            together.append(span)
        if together:
            yield together


def conversation(engine: Engine) -> AbstractContextManager[None]:
    """``LocalEngine.conversation``; a server keeps what it keeps by itself."""
    return engine.conversation() if isinstance(engine, LocalEngine) else nullcontext()
