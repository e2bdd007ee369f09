"""``taut verify MODEL``: compare the behavior of a model, or of the server that serves it, with its contract.

    files          dtype, template, tokenizer, image processor, stop set, pad and generation_config are unchanged
    prompts        the golden prompts, rendered again, give the same ids
    server prompts the server renders the same messages to the same ids (engine=server)
    continuations  the greedy continuation of each golden prompt has the same ids
    logprobs       the logprobs of these ids agree within a tolerance
    stops          continuations that ended with a stop token end there

Prints one line per question; exit code 1 if one failed, 2 for a directory without a contract. Continuations start from
the golden prompts' ids, so a changed template fails its own question only. A token that differs although the margin
over the runner-up was within the tolerance is a near-tie: it is reported, is no failure, and the tokens after it are
not compared. The local engine computes in float32 by default, as for the golden prompts.

A model that another tool has quantized (bitsandbytes, compressed-tensors, or a GGUF file) has no contract of its own:
``contract=DIR`` names the original model. Its weights are dequantized, and each golden answer is scored unchanged,
because rounding makes greedy answers diverge. Compared are the mean difference of the logprobs, the share of the
answer's tokens that are still the likeliest, and the ends among them, within limits for the number of bits; in a GGUF
file also the keys that llama.cpp reads (taut_tools/export/verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from taut.commands.settings import Verify
from taut.config import home_path, replace
from taut.data.render.render import Renderer
from taut.errors import ConfigError
from taut.evals.contract import (
    Contract,
    Golden,
    facts_of,
    greedy,
    logps_of,
    prompts_of,
    read_contract,
    rendered,
    rewrite_stops,
    template_digest,
)
from taut.inference.factory import OpenEngine, Rendering, open_engine, open_renderer
from taut.inference.local import LocalEngine
from taut.inference.vllm import ServerEngine
from taut.io import plugins
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.models.quantized.quantized_layers import bits_of, format_of
from taut.models.scorer import Scorer
from taut.types import Completion

FILES = "taut.verify"
"""Entry points: functions that open a model in one file, by the suffix of its name."""
SERVER_TOLERANCE = 0.3
"""Tolerance for a server, most of which compute in bfloat16 (vLLM in bfloat16: 0.12; in float32: below 1e-3)."""
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.5}
"""Maximum difference of a logprob (nats) that counts as rounding, by the local engine's dtype; golden answers are
float32."""


class Limits(NamedTuple):
    """Limits on the change of a model's golden answers by rounded weights."""

    difference: float
    """Mean difference of a logprob, in nats."""
    share: float
    """Minimum share of tokens that stay the likeliest; for ends, which are few, half of it."""


LIMITS = {
    16: Limits(0.02, 0.95),
    8: Limits(0.2, 0.85),
    5: Limits(0.6, 0.7),
    4: Limits(1.5, 0.5),
}
"""Limits by the minimum bits of a weight: two to three times the loss of SmolLM2-135M, a small model
(docs/contract.md)."""
AROUND = 4
"""Number of tokens shown before a difference."""

Outcome = Literal["passed", "failed", "skipped"]


class Finding(NamedTuple):
    """A question and its answer."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Replay:
    """A golden prompt and its new completion."""

    golden: Golden
    completion: Completion
    tolerance: float

    @property
    def num_common(self) -> int:
        """Number of equal leading ids."""
        pairs = zip(self.golden.ids, self.completion.ids_N.tolist(), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def parts(self) -> bool:
        """Whether a token differs; a different length alone is the topic of ``stops``."""
        return self.num_common < min(len(self.golden.ids), self.completion.ids_N.size)

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may explain the first different token."""
        return self.parts and self.golden.margin[self.num_common] <= self.tolerance


def run(config: Verify) -> int:
    """Print one line per question; 1 if one failed."""
    console = Terminal(soft_wrap=True)
    findings = verify(config)
    console.lines(f"{outcome:7} {name}: {detail}" for name, outcome, detail in findings)
    return 1 if any(finding.outcome == "failed" for finding in findings) else 0


def verify(config: Verify) -> list[Finding]:
    """Every question and its answer. Raises ModelError if there is no contract."""
    suffix = Path(config.model).suffix.removeprefix(".")
    if suffix in plugins.names(FILES):
        found: list[Finding] = plugins.load(FILES, suffix)(config)
        return found
    contract = read_contract(home_path(config.contract or config.model))
    if config.engine == "local" and config.dtype is None:
        config = replace(config, {"dtype": "float32"})
    rendering = open_renderer(config)
    # mend the stop set, and read it again
    if config.rewrite_stops:
        tokenizer = rendering.renderer.tokenizer
        rewrite_stops(Path(home_path(config.model)), tokenizer, rendering.stops)
        contract, rendering = read_contract(home_path(config.model)), open_renderer(config)
    prompts = [(golden, rendered(golden.prompt, rendering.renderer)) for golden in contract.goldens]
    findings = [
        *_files(contract, config, rendering),
        _same_ids("prompts", prompts, rendering.renderer),
    ]
    if not contract.goldens:
        why = f"the contract has no golden prompts ({contract.note})"
        return [*findings, Finding("continuations", "skipped", why)]
    # rounded weights: each golden answer is scored instead of drawn again
    if config.engine == "local" and format_of(rendering.config) is not None:
        limits = limits_of(bits_of(rendering.config), config)
        with open_engine(config, rendering) as opened:
            assert isinstance(opened.engine, LocalEngine)
            return findings + rounded(contract, opened.engine.scorer, rendering, limits)
    # else completions of the engine
    tolerance = config.tolerance
    if tolerance is None:
        is_server = config.engine == "server"
        tolerance = SERVER_TOLERANCE if is_server else TOLERANCE[config.dtype or "float32"]
    with open_engine(config, rendering) as opened:
        findings += _answers(contract, opened, tolerance)
    return findings


def _files(contract: Contract, config: Verify, rendering: Rendering) -> Iterator[Finding]:
    """The facts in the files now, compared with the contract."""
    directory, tokenizer = home_path(config.model), rendering.renderer.tokenizer
    was, now = contract.facts, facts_of(directory, tokenizer, config.trust_remote_code)
    quoted = rendering.renderer.template.quoted
    template = template_digest(rendering.renderer.template.template)
    stops, stops_now = sorted(stop.id for stop in contract.stops), sorted(rendering.stops.ids)
    found = format_of(rendering.config)
    if found is None:
        yield _same("dtype", {"weights": was.dtype}, {"weights": now.dtype})
    else:
        said = f"{bits_of(rendering.config)} bits by {found}, were {was.dtype}"
        yield Finding("dtype", "skipped", said)
    yield _same("template", {"sha256": was.template}, {"sha256": template})
    yield _same("tokenizer", {"sha256": was.tokenizer}, {"sha256": now.tokenizer})
    if was.processor or now.processor:
        yield _same("processor", {"sha256": was.processor}, {"sha256": now.processor})
    # a changed stop set has a remedy of its own
    found_stops = _same(
        "stop set",
        {"stop set": quoted(stops), **{f"eos of {file}": ids for file, ids in was.eos.items()}},
        {"stop set": quoted(stops_now), **{f"eos of {file}": ids for file, ids in now.eos.items()}},
    )
    if stops != stops_now:
        hint = "; rewrite_stops=true writes the set that the template gives, if the model was taught it"
        found_stops = found_stops._replace(detail=found_stops.detail + hint)
    yield found_stops
    yield _same("pad", was.pad, now.pad)
    yield _same("generation_config", was.generation_config, now.generation_config)


def _same(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Finding:
    """Find whether every entry is unchanged."""
    changed = [
        f"{key} is {now.get(key)}, was {was.get(key)}"
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key)
    ]
    if changed:
        return Finding(name, "failed", "; ".join(changed))
    return Finding(name, "passed", ", ".join(f"{key} {value}" for key, value in now.items()))


def _same_ids(
    name: str, prompts: Sequence[tuple[Golden, list[int]]], renderer: Renderer
) -> Finding:
    """Find whether prompts are rendered to the ids of the contract, and show the first that differs."""
    wrong = [(golden, ids) for golden, ids in prompts if ids != golden.prompt.ids]
    if not wrong:
        num_tokens = sum(len(ids) for _, ids in prompts)
        sizes = f"{counted(len(prompts), 'prompts')}, {counted(num_tokens, 'ids')}"
        return Finding(name, "passed", f"{sizes}, all as they were")
    golden, ids = wrong[0]
    was = golden.prompt.ids
    at = next((i for i, (a, b) in enumerate(zip(was, ids, strict=False)) if a != b), len(was))
    at = min(at, len(ids), len(was))
    quoted = renderer.template.quoted
    detail = (
        f"{len(wrong)} of {len(prompts)} prompts have other ids; {golden.prompt.id} at token {at}, after "
        f"{quoted(was[max(0, at - AROUND) : at])}: {quoted(ids[at : at + AROUND])}, "
        f"was {quoted(was[at : at + AROUND])}"
    )
    return Finding(name, "failed", detail)


def _answers(contract: Contract, opened: OpenEngine, tolerance: float) -> Iterator[Finding]:
    """Continuations, logprobs and stops. A server gets no stop token: it must stop by itself."""
    engine, goldens = opened.engine, contract.goldens
    # a server renders the chats itself
    if isinstance(engine, ServerEngine):
        goldens = [golden for golden in goldens if not golden.prompt.pictures]
        if len(goldens) < len(contract.goldens):
            why = "a server uses its own image processor; not compared: "
            yield Finding("pictures", "skipped", why + str(len(contract.goldens) - len(goldens)))
        chats = [golden for golden in goldens if golden.prompt.messages and not golden.prompt.tools]
        rendered_there = [(golden, engine.render(golden.prompt.messages or ())) for golden in chats]
        if chats:
            yield _same_ids("server prompts", rendered_there, opened.renderer)
        else:
            yield Finding("server prompts", "skipped", "no golden prompt is a chat without tools")
        engine = engine.unaided()
    prompts = prompts_of([golden.prompt for golden in goldens], opened.renderer)
    completions = engine.generate(prompts, greedy(contract.tokens))
    replays = [
        Replay(golden, completion, tolerance)
        for golden, completion in zip(goldens, completions, strict=True)
    ]
    yield _continuations(replays, opened.renderer)
    yield _logps(replays, tolerance)
    yield _stops(replays)


def _continuations(replays: Sequence[Replay], renderer: Renderer) -> Finding:
    ties = [replay for replay in replays if replay.is_near_tie]
    wrong = [replay for replay in replays if replay.parts and not replay.is_near_tie]
    num_common = sum(replay.num_common for replay in replays)
    counted = f"{len(replays)} prompts, {num_common} of {sum(len(r.golden.ids) for r in replays)} ids compared"
    if ties:
        margins = ", ".join(f"{r.golden.margin[r.num_common]:.2g}" for r in ties)
        counted += f"; {len(ties)} part at a near-tie (margin {margins} nats)"
    if not wrong:
        return Finding("continuations", "passed", counted)
    # show the first place where they part
    first = wrong[0]
    at, was, now = first.num_common, first.golden.ids, first.completion.ids_N.tolist()
    quoted = renderer.template.quoted
    detail = (
        f"{len(wrong)} of {len(replays)} differ; {first.golden.prompt.id} at token {at}, after "
        f"{quoted(was[max(0, at - AROUND) : at])}: {quoted(now[at : at + AROUND])}, was "
        f"{quoted(was[at : at + AROUND])} (margin {first.golden.margin[at]:.3g} nats); {counted}"
    )
    return Finding("continuations", "failed", detail)


def _logps(replays: Sequence[Replay], tolerance: float) -> Finding:
    """Logprobs of the common ids."""
    gaps = []
    for replay in replays:
        logp_N = replay.completion.logp_one_N
        if logp_N is None and replay.num_common:
            why = "the engine gives none of the model's own (at temperature 1)"
            return Finding("logprobs", "skipped", why)
        now = [] if logp_N is None else logp_N[: replay.num_common].tolist()
        pairs = zip(replay.golden.logp, now, strict=False)
        gaps += [
            (abs(was - value) if math.isfinite(value) else math.inf, replay.golden.prompt.id)
            for was, value in pairs
        ]
    if not gaps:
        return Finding("logprobs", "skipped", "no id in common")
    worst, where = max(gaps)
    detail = f"largest difference {worst:.3g} nats over {len(gaps)} ids, at {where} (at most {tolerance:g} is rounding)"
    return Finding("logprobs", "passed" if worst <= tolerance else "failed", detail)


def limits_of(bits: int, config: Verify) -> Limits:
    """Limits for a number of bits. Raises ConfigError if there are none for so few bits, and none is set."""
    known = [number for number in LIMITS if number <= bits]
    if config.tolerance is not None:
        return Limits(config.tolerance, LIMITS[max(known)].share if known else 0.0)
    if not known:
        raise ConfigError(
            f"model={config.model} has weights of {bits} bits, for which no limit is known; expected at least "
            f"{min(LIMITS)} bits; set tolerance (3 bits moved a small model's logprobs by 3 nats)"
        )
    return LIMITS[max(known)]


def rounded(
    contract: Contract, scorer: Scorer, rendering: Rendering, limits: Limits
) -> list[Finding]:
    """Continuations, logprobs and stops of a model with rounded weights, scored on each golden answer unchanged."""
    goldens, stops = contract.goldens, set(rendering.stops.ids)
    gaps: list[float] = []
    num_first = num_ends = num_kept = 0
    for golden, prompt in zip(
        goldens, prompts_of([golden.prompt for golden in goldens], rendering.renderer), strict=True
    ):
        ids = torch.tensor(golden.ids)
        # one forward over prompt and golden answer
        logp_NV = logps_of(scorer, prompt, ids.numpy()).cpu()
        now = logp_NV.gather(1, ids[:, None])[:, 0].tolist()
        gaps += [
            abs(was - value) if math.isfinite(value) else math.inf
            for was, value in zip(golden.logp, now, strict=True)
        ]
        first = logp_NV.argmax(1)
        num_first += int((first == ids).sum())
        if golden.finish_reason == "stop":
            num_ends += 1
            num_kept += int(first[-1]) in stops
    mean, count, share = sum(gaps) / len(gaps), len(gaps), limits.share

    def finding(name: str, is_right: bool, detail: str) -> Finding:
        return Finding(name, "passed" if is_right else "failed", detail)

    return [
        finding(
            "continuations",
            num_first >= share * count,
            f"{num_first} of {counted(count, 'ids')} are still the likeliest (at least {share:.0%})",
        ),
        finding(
            "logprobs",
            mean <= limits.difference,
            f"mean difference {mean:.3g} nats over {counted(count, 'ids')}, largest {max(gaps):.3g} (a mean of "
            f"{limits.difference:g} is rounding)",
        ),
        finding(
            "stops",
            num_kept >= share / 2 * num_ends,
            f"{num_kept} of {num_ends} answers that end by themselves still do (at least {share / 2:.0%})",
        )
        if num_ends
        else Finding("stops", "skipped", "no golden answer ends by itself"),
    ]


def _stops(replays: Sequence[Replay]) -> Finding:
    """Check whether continuations end, or are cut, at the same places as before."""
    # only those with the same ids so far
    compared = [replay for replay in replays if not replay.parts]
    wrong = [
        replay
        for replay in compared
        if replay.completion.ids_N.size != len(replay.golden.ids)
        or replay.completion.finish_reason != replay.golden.finish_reason
    ]
    if not compared:
        return Finding("stops", "skipped", "every continuation differs")
    if not wrong:
        ended = sum(replay.golden.finish_reason == "stop" for replay in compared)
        cut = len(compared) - ended
        return Finding("stops", "passed", f"{ended} end by themselves, {cut} are cut, as they were")
    golden, now = wrong[0].golden, wrong[0].completion
    detail = (
        f"{len(wrong)} of {len(compared)} differ; {golden.prompt.id}: {now.error or now.finish_reason} after "
        f"{now.ids_N.size} tokens, was {golden.finish_reason} after {len(golden.ids)}"
    )
    return Finding("stops", "failed", detail)
