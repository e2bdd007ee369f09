"""Attention: every layer calls the chosen kernel, which is causal, keeps packed samples apart, and computes the same as
the library's own attention on a sample alone; and a reward model has the scores of the transformers class with which
people load it.

Changes are measured up to rounding. The mean over a sample's targets (``drift``) is compared if two computations differ
by rounding anyway.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from taut.checks import measure
from taut.checks.registry import Finding, check, failed, passed, skip_if
from taut.checks.session import Session, is_text, num_tokens
from taut.data.packing import ALONE, PackPolicy, pack
from taut.models import architecture
from taut.models.attention_backends import observe
from taut.models.heads import scalar, scalar_head
from taut.models.load import set_attention
from taut.models.self_test import library_attention, library_logps, library_scalars
from taut.types import Sample
from taut.vision import tower

KERNEL = re.compile(r"_(?:flash|efficient|cudnn)_attention|flash|fmha|flex|aten::_softmax")


@check("attention.calls", after=["model.noise", "model.head", "model.compiled"])
def every_layer_calls_the_attention(session: Session) -> Finding:
    """Does every attention layer call the attention that was chosen, once?

    A mask of the library's that says more than its layers ask for would be dropped.
    """
    observed, chosen = session.observed, session.loaded.attention
    expected = architecture.attention_layer_count(session.scorer.model)
    names = {module: name for name, module in session.scorer.named_modules()}
    called = [names.get(module, type(module).__name__) for module in observed.layers]
    if len(called) != expected or len(set(called)) != expected:
        twice = sorted({f"more than once: {it}" for it in called if called.count(it) > 1})
        return failed(
            f"{len(set(called))} of {expected} attention layers called {chosen.name}, in {len(called)} calls",
            measured=(len(set(called)), f"of {expected} layers"),
            evidence=[f"called: {', '.join(called) or 'none'}", *twice],
            remedy="the model does not use the library's attention interface throughout; train another model, and "
            "please report this one",
        )
    # windows that the library would mask, and that no layer asks for by keyword
    windows = sorted(window for window in observed.windows_called if window is not None)
    not_called = observed.windows_masked - observed.windows_called - {None}
    if expected and not_called:
        widest = max(window for window in not_called if window is not None)
        return failed(
            f"the model masks a sliding window of {widest} that no layer asks for by keyword",
            measured=(widest, "tokens"),
            evidence=[f"windows that layers ask for: {sorted(map(str, observed.windows_called))}"],
            remedy="the window would be dropped; train another model, and please report this one",
        )
    notes = [f"windows of {', '.join(map(str, windows))} tokens in some layers"] if windows else []
    return passed(f"all {expected} layers call {chosen.name}", expected, "layers", notes)


@check("attention.future", after=["attention.calls"])
def later_tokens_change_nothing_before(session: Session) -> Finding:
    """Does a later token leave everything before it as it is?"""
    sample, quantity = session.pair[0], session.quantity
    at = measure.first_text_token(sample, sample.num_tokens // 2)
    changed = measure.replace_tokens(session, sample, [at])
    is_before = sample.target_at_N < at  # the changed token itself is not among its predictions
    left, right = session.alone[sample.id], session.numbers([changed])[sample.id]
    moved = measure.gap(left[is_before], right[is_before])
    if moved > session.exact:
        packs = pack([sample], ALONE), pack([changed], ALONE)
        return failed(
            f"changing token {at} of {sample.id} changes {quantity.one} before it by {moved:.3g} {quantity.unit}",
            measured=(moved, quantity.unit),
            evidence=[measure.first_layer_that_moves(session, *packs, range(at))],
            remedy="the model looks ahead, and taut trains causal language models; train another model",
        )
    return passed("nothing before a changed token moves", moved, quantity.unit)


@check("attention.state", after=["attention.future"])
def layers_with_state_are_known(session: Session) -> Finding:
    """Are all layers with state across tokens known, so that nothing is packed with them?

    Attention is switched off: what still passes from one token to the next goes through a layer with state.
    """
    sample, unit = session.short_sample, session.quantity.unit
    left, right = (
        pack([probe], ALONE) for probe in (sample, measure.replace_tokens(session, sample, [0]))
    )
    with session.inference(), observe(is_deaf=True):
        moved = measure.gap(session.forward(left)[1:], session.forward(right)[1:])
    if known := architecture.stateful_layers(session.scorer.model):
        is_alone = session.loaded.one_sample is not None
        runs = "samples run one at a time" if is_alone else "it follows each sample"
        says = f"{len(known)} layers carry state ({', '.join(known[:3])}); {runs}"
        return passed(says, moved, unit)
    if moved > session.exact:
        with observe(is_deaf=True):
            where = measure.first_layer_that_moves(session, left, right, range(1, left.num_tokens))
        return failed(
            f"a token changes what follows it by {moved:.3g} {unit} with attention taken out",
            measured=(moved, unit),
            evidence=[where],
            remedy="the model has layers with state across tokens that taut does not know, so packed samples would "
            "leak; train another model, and please report this one",
        )
    return passed("tokens know of each other through attention alone", moved, unit)


@check("attention.neighbor", after=["attention.state"])
def packed_samples_do_not_see_each_other(session: Session) -> Finding:
    """Do packed samples not see each other?

    A neighbor in the pack is replaced by another text of the same length.
    """
    skip_if(session.loaded.one_sample, f"nothing is packed: {session.loaded.one_sample}")
    (first, second), quantity = session.pair, session.quantity
    changed = measure.replace_tokens(session, first, range(first.num_tokens))
    moved = measure.gap(session.packed[second.id], session.numbers([changed, second])[second.id])
    if moved > session.exact:
        packs = pack([first, second], ALONE), pack([changed, second], ALONE)
        inside = range(first.num_tokens, first.num_tokens + second.num_tokens)
        return failed(
            f"other words in {first.id} change {quantity.one} of {second.id} by {moved:.3g} {quantity.unit}",
            measured=(moved, quantity.unit),
            evidence=[measure.first_layer_that_moves(session, *packs, inside)],
            remedy=f"{session.loaded.attention.name} does not keep samples apart in this model; set "
            "attention=reference, and please report the model",
        )
    return passed("other words in a neighbor change nothing", moved, quantity.unit)


@check("attention.positions", after=["vision.positions", "vision.neighbor"])
def positions_begin_with_each_sample(session: Session) -> Finding:
    """Do positions restart with each packed sample?

    Two samples packed are compared with each alone. Neighbors are known not to matter when this is asked.
    """
    skip_if(session.loaded.one_sample, f"nothing is packed: {session.loaded.one_sample}")
    first, second = session.pair
    name, moved = measure.most_different(session.packed, session.alone)
    unit = session.unit_per_token
    if moved > session.tolerance:
        return failed(
            f"the {session.quantity.many} of {name} change by {moved:.3g} {unit} with its place in the pack",
            measured=(moved, unit),
            evidence=[f"packed as ({first.id}, {second.id}), and alone"],
            remedy="the model counts positions through the pack instead of from each sample's beginning; train "
            "another model, and please report this one",
        )
    return passed("a sample's place in the pack changes nothing", moved, unit)


@check("attention.library", part="full", after=["attention.future"])
def kernels_of_the_library_agree(session: Session) -> Finding:
    """Do the library's own attention kernels agree about this model?

    It fails if the kernels differ about a sample alone: then ``attention.packed`` would compare with something that may
    be wrong, and a server would compute something else than the trainer.

    The notes are for stacks other than ours: the pair packed as plain transformers would be given it, each common
    setting (use_cache, a mask of ones, position_ids that restart) compared with the second sample alone. What differs
    by more than rounding leaks. That is no failure, since taut uses none of it.
    """
    unit, many = session.unit_per_token, session.quantity.many
    kernels = ["eager", *(["sdpa"] if session.model._supports_sdpa else [])]
    first, second = session.pair
    alone = {kernel: _library_numbers(session, kernel, [second]) for kernel in kernels}
    apart = measure.drift(alone[kernels[0]], alone[kernels[-1]])
    if apart > session.tolerance:
        return failed(
            f"the {many} of {second.id} alone differ by {apart:.3g} {unit} between {' and '.join(kernels)}",
            measured=(apart, unit),
            evidence=[f"at most {session.tolerance:g} is rounding in {session.dtype}"],
            remedy="one of them drops a softcap, a scale or a window of this model; compare the kernel you serve with "
            "to the model's paper, and please report the model to transformers",
        )
    is_cuda = session.ranks.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces itself on stderr
    with profile(activities=[activity], acc_events=True) as profiled:
        session.numbers([first])
    counts = {event.key: event.count for event in profiled.key_averages()}
    ran = [f"{name} ({times}x)" for name, times in counts.items() if KERNEL.search(name)]
    used = kernels[-1]
    notes = [
        f"{session.loaded.attention.name} runs "
        + (", ".join(ran[:3]) or "no kernel with a name of attention"),
        f"two samples packed by plain transformers ({used}), the second against itself alone:",
    ]
    for has_positions, has_mask, uses_cache in product((True, False), (False, True), (False, True)):
        numbers = _library_numbers(
            session, used, [first, second], has_positions, has_mask, uses_cache
        )
        moved = measure.drift(alone[used], numbers)
        verdict = "right" if moved <= session.tolerance else "LEAKS"
        positions = "position_ids" if has_positions else "no position_ids"
        mask = "mask of ones" if has_mask else "no mask"
        cache = "True (the default)" if uses_cache else "False"
        notes.append(f"{verdict:5}  {positions}, {mask}, use_cache={cache} ({moved:.2g} {unit})")
    return passed(f"{' and '.join(kernels)} agree", apart, unit, notes)


@torch.no_grad()
def _library_numbers(
    session: Session,
    kernel: str,
    samples: list[Sample],
    has_positions: bool = False,
    has_mask: bool = False,
    uses_cache: bool = False,
) -> Tensor:
    """Logprobs of the last sample's targets, or scores at their predictors, as the library computes them."""
    packed = pack(samples, ALONE).to(session.ranks.device)
    ids, backbone = packed.ids_T, architecture.decoder(session.model)
    keywords: dict[str, Any] = {"use_cache": uses_cache}
    keywords |= tower.library_arguments(backbone, packed.media, ids)
    if has_positions:
        keywords["position_ids"] = packed.position_ids.unsqueeze(-2)
    if has_mask:
        keywords["attention_mask"] = torch.ones_like(ids)[None]
    # the predictors of the last sample's targets
    last = samples[-1]
    at = torch.from_numpy(last.target_at_N - 1).to(ids.device) + (ids.numel() - last.num_tokens)
    with session.inference(), library_kernel(session, kernel):
        if session.is_scalar:
            hidden_TD = backbone(input_ids=ids[None], **keywords)[0][0]
            head = scalar_head(session.scorer.model)
            return scalar(hidden_TD.index_select(0, at), head).cpu()
        logits = session.model(input_ids=ids[None], logits_to_keep=at, **keywords).logits[0]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_N = torch.from_numpy(last.ids_T[last.target_at_N]).to(ids.device)
    return torch.log_softmax(wide, -1).gather(1, target_N[:, None]).squeeze(1).cpu()


@contextmanager
def library_kernel(session: Session, kernel: str) -> Iterator[None]:
    """Give the model one of the library's own attention kernels."""
    ours = architecture.text_config(session.model)._attn_implementation
    set_attention(session.model, kernel)
    try:
        yield
    finally:
        set_attention(session.model, ours)


def library_numbers(session: Session, sample: Sample) -> Tensor:
    """Compute a sample alone by the library's own path: logprobs, or scores at its reads."""
    compute = library_scalars if session.is_scalar else library_logps
    return compute(session.scorer.model, sample, session.ranks.device)


@check("attention.packed", after=["attention.positions", "attention.library"])
def packed_agrees_with_alone_by_the_library(session: Session) -> Finding:
    """Does a packed sample have the logprobs it has alone, by the library's own attention?

    What training computes (taut's attention, packed), for a sample that follows another.
    """
    is_packed = session.loaded.one_sample is None
    sample = session.pair[1 if is_packed else 0]
    ours = (session.packed if is_packed else session.alone)[sample.id]
    with session.inference():
        theirs = library_numbers(session, sample)
    moved, unit = measure.drift(ours, theirs), session.unit_per_token
    library, limit = library_attention(session.model), session.tolerance
    if not moved <= limit:
        _, at = measure.largest_gap(ours, theirs)
        token = session.inputs.token(int(sample.ids_T[sample.target_at_N[at]]))
        return failed(
            f"the {session.quantity.many} of {sample.id} differ by {moved:.3g} {unit} (at most {limit:g} is rounding) "
            f"from the same sample alone by the library's {library} attention",
            measured=(moved, unit),
            evidence=f"{sample.id}, target {token!r}: {float(ours[at]):.4g}, by the library {float(theirs[at]):.4g}",
            remedy=f"{session.loaded.attention.name} does not compute this model; set attention=reference, and please "
            "report the model",
        )
    how = "packed" if is_packed else "one at a time"
    return passed(f"{how} as alone by the library's {library} attention", moved, unit)


@check("attention.shared", after=["attention.packed"])
def a_shared_prefix_changes_nothing(session: Session) -> Finding:
    """Does a prefix computed once for two samples give what it gives computed twice?

    One sample with two different ends.
    """
    skip_if(not session.trainer.policy.share_prefixes, "prefixes are not shared in this run")
    sample = max(session.pair, key=lambda sample: sample.num_tokens)
    half = measure.first_text_token(sample, max(1, sample.num_tokens // 2))
    after = range(half, sample.num_tokens)
    other = measure.replace_tokens(session, sample, after, f"{sample.id} with another end")
    with session.inference():  # once around all: autocast keeps its casts
        shared = session.numbers([sample, other], PackPolicy(min_saved_tokens=1))
        alone = {sample.id: session.alone[sample.id], **session.numbers([other])}
    name, moved = measure.most_different(alone, shared)
    unit = session.unit_per_token
    if moved > session.tolerance:
        return failed(
            f"with its first {half} tokens shared, the {session.quantity.many} of {name} are {moved:.3g} {unit} off",
            measured=(moved, unit),
            evidence=[f"{name}: {measure.drift(shared[name], alone[name]):.3g}" for name in alone],
            remedy="set batch.share_prefixes=false, and please report the model",
        )
    return passed(f"{half} shared tokens change nothing", moved, unit)


# -- scores of a reward model


def _scored_samples(session: Session) -> list[Sample]:
    """A few samples of the batch, scored as in training: at the end, or at the end of each step."""
    chosen: list[Sample] = []
    for sample in session.tree_samples:
        fits = num_tokens([*chosen, sample]) <= 192 and len(chosen) < 4
        if fits or len(chosen) < 2:
            chosen.append(sample)
    return chosen


@check("reward.batch", after=["attention.shared"])
def a_score_does_not_depend_on_the_batch(session: Session) -> Finding:
    """Is a score the same whatever else is in the batch?

    Alone, with others in either order, with a longer sample, and with its beginning shared.
    """
    skip_if(not session.is_scalar, "the model gives no scores")
    skip_if(session.loaded.one_sample, f"nothing is packed: {session.loaded.one_sample}")
    samples = _scored_samples(session)
    longest = max(samples, key=lambda sample: sample.num_tokens)
    ids_T = np.concatenate([longest.ids_T, longest.ids_T[is_text(longest)]])
    longer = replace(longest, id=f"{longest.id} twice", ids_T=ids_T, group=-1)
    batches: list[tuple[str, list[Sample], PackPolicy]] = [
        ("with others", samples, ALONE),
        ("with the same in reverse order", samples[::-1], ALONE),
        ("with a longer one", [longer, *samples], ALONE),
    ]
    if session.trainer.policy.share_prefixes:
        sharing = PackPolicy(min_saved_tokens=1)
        batches.append(("with its beginning shared", [*samples, longer], sharing))
    worst, where = 0.0, ""
    with session.inference():  # once around all: autocast keeps its casts
        alone = {sample.id: session.numbers([sample])[sample.id] for sample in samples}
        for how, batch, policy in batches:
            scores = session.numbers(batch, policy)
            for name, score in alone.items():
                says = f"{name}: {float(score[-1]):.4g} alone, {float(scores[name][-1]):.4g} {how}"
                worst, where = max((worst, where), (measure.gap(scores[name], score), says))
    if worst > session.tolerance:
        return failed(
            f"a score changes by {worst:.3g} with the rest of the batch",
            measured=(worst, "points"),
            evidence=[where, f"at most {session.tolerance:g} is rounding in {session.dtype}"],
            remedy="scores are read at another sample's token; set batch.share_prefixes=false, and please report this",
        )
    return passed(f"alone as in {len(batches)} other batches", worst, "points")


@check("reward.library", after=["reward.batch"])
def the_library_gives_the_same_score(session: Session) -> Finding:
    """Does transformers' own class give a sample the same score, at its last token?

    Given a sample alone, that class looks for the last token that is not the pad. The pad is the one that the tokenizer
    is saved with.
    """
    skip_if(not session.is_scalar, "the model gives no scores")
    skip_if(session.ranks.is_sharded, "the library's own path runs on one rank")
    pad = session.served_tokenizer.pad_token_id
    worst, where, number = 0.0, "", 0
    for sample in _scored_samples(session):
        ours = session.numbers([sample])[sample.id]
        config = architecture.text_config(session.model)
        pad_before, config.pad_token_id = config.pad_token_id, pad
        ids_T = torch.from_numpy(sample.ids_T).to(session.ranks.device)
        decoder, library = architecture.decoder(session.model), library_attention(session.model)
        pictures = tower.library_arguments(decoder, sample.media, ids_T)
        try:
            with session.inference(), library_kernel(session, library):
                output = session.model(input_ids=ids_T[None], use_cache=False, **pictures)
                theirs: Tensor = output.logits.float().cpu()[0]
        finally:
            config.pad_token_id = pad_before
        if theirs.ndim == 2:  # a number for each token, not one for the sequence
            reads = sample.read_at_R
            theirs = theirs[[sample.num_tokens - 1] if reads is None else reads.tolist(), 0]
        number += len(ours)
        token = session.inputs.token(int(sample.ids_T[-1]))
        scores = f"{float(ours[-1]):.4g}, by the library {float(theirs[-1]):.4g}"
        says = f"{sample.id}, which ends with {token!r}: {scores}"
        worst, where = max((worst, where), (measure.gap(ours, theirs), says))
    name, limit = type(session.model).__name__, session.tolerance
    if not worst <= limit:
        pad_name = "none" if pad is None else session.inputs.token(pad)
        return failed(
            f"{name} gives another score: {worst:.3g} apart (at most {limit:g} is rounding)",
            measured=(worst, "points"),
            evidence=[where, f"the pad is {pad_name}"],
            remedy="what is served would not be what was trained: scores are read at another token; give the tokenizer "
            "a pad that ends no answer, or please report this",
        )
    return passed(f"as {name} gives {number} scores, pad {pad}", worst, "points")
