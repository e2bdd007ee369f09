"""The tokens that end an answer: derived from the template, trained as targets, saved, and obeyed by servers.

A server takes the class that config.json implies and the template that is saved, in which eos and pad may be others
than in training.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from taut.checks.registry import Finding, check, failed, passed, skip_if, skipped
from taut.checks.session import GENERATED, Session
from taut.data.packing import ALONE, pack
from taut.data.render.chat_template import Ids, Text, common_length
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import described
from taut.data.rows.messages import Completion, Conversation, Row
from taut.errors import ModelError, TautError
from taut.evals.settings import StopCheckConfig
from taut.evals.stopping import StopPrompt, prepare
from taut.inference.settings import Sampling
from taut.io.temporary import TemporaryFolder
from taut.methods.inputs import engine_of
from taut.models.load import load_tokenizer, quiet_library
from taut.models.save import generation_to_save
from taut.models.tokens import require_trained, untrained_rows
from taut.run.setup import rows_to_train

NO_GENERATION = "a reward model generates nothing"


@check("stop.set", after=["template.takes"])
def answers_end_at_a_token(session: Session) -> Finding:
    """Does the template end an answer with a token at which a server can stop?

    The stop set as it was derived, with what taut does about the tokenizer's eos and pad.
    """
    stops, tokenizer, saved = session.stops, session.tokenizer, session.served_tokenizer
    tokens, reasons = described(stops, session.language.renderer.template)
    notes = reasons.split("; ")
    if tokenizer.eos_token != saved.eos_token:
        notes.append(f"the tokenizer's eos is {tokenizer.eos_token}; saved as {saved.eos_token}")
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        notes.append(
            f"pad is eos ({tokenizer.pad_token}): taut neither pads nor masks by id; saved with pad {saved.pad_token}"
        )
    return passed(f"an answer ends at {tokens}", len(stops.ids), "tokens", notes)


@check("stop.targets", after=["data.truncation"])
def the_end_of_answers_is_a_target(session: Session) -> Finding:
    """Is the end of the answer a target, so that the model learns to stop?

    Samples with a token of the stop set among their targets. A document that is split ends in its last part alone.
    """
    skip_if(session.is_generated, GENERATED)
    skip_if(session.is_scalar, "a reward model is not taught to stop")
    train, stops = session.train, session.stops
    report, number, total = train.report, train.num_ended, train.num_read
    unit = f"of {total:,} samples"
    num_whole = min(total, report.num_rows - len(report.dropped) - len(report.cut))
    if session.run.row_kind != "sft":  # each answer of a row is a sample of its own
        num_whole = total - len(report.cut)
    if not number or 2 * number < num_whole:
        evidence = [f"{row.place}: cut, {row.reason}" for row in report.cut]
        remedy = "raise data.max_length, or set data.too_long to drop or split"
        if not report.cut:
            names = described(stops, session.renderer.template)[0]
            evidence = [f"{train.sample_id(0)}: {names} is not among its targets"]
            remedy = "see which tokens are targets with `taut show`, and please report this"
        return failed(
            f"{total - number:,} of {total:,} samples do not teach the model to stop",
            measured=(number, unit),
            evidence=evidence,
            remedy=remedy,
        )
    # not every sample has an end: where it was cut, or split, that is right
    if number == total:
        return passed("every sample teaches the model to stop", number, unit)
    if session.run.data.too_long == "split":
        notes = [f"{len(report.cut):,} rows are split"]
        return passed("the last part of each document does", number, unit, notes)
    says = "every whole sample does" if number >= num_whole else "most samples do"
    return passed(says, number, unit, [f"{len(report.cut):,} were cut before their end"])


@check("stop.saved", after=["data.rows"])
def a_server_renders_the_same_tokens(session: Session) -> Finding:
    """Does a server that loads the saved tokenizer and template feed the model the same tokens?

    The tokenizer is saved as it will be, next to the model's config, in a temporary directory, and read as a server
    does. The first rows' prompts are rendered with it.
    """
    prompts: list[tuple[Row, Ids]] = []
    room = 100_000  # characters of all prompts together, but for the first
    for row in session.rows[:16]:
        try:
            ids = _prompt_ids(row, session.renderer)
        except TautError:
            continue  # the template's checks, or data.rows
        prompts.append((row, ids))
        room -= 4 * len(ids)
        if room < 0:
            break
    skip_if(not prompts, "no row could be rendered")
    try:
        with TemporaryFolder("check") as place:
            with quiet_library():
                copy.deepcopy(session.language.config).save_pretrained(place)
                session.served_tokenizer.save_pretrained(place)
            tokenizer = load_tokenizer(str(place), session.run.trust_remote_code)
            reader, image_store = Renderer(tokenizer), session.renderer.image_store
            if image_store is not None:  # run.saved looks at the files of the processor
                reader = Renderer(tokenizer, str(tokenizer.chat_template), image_store=image_store)
    except TautError as error:
        return failed(
            "the saved tokenizer cannot be loaded",
            evidence=[str(error)],
            remedy="load the base model's tokenizer with AutoTokenizer and save it again",
        )
    # what may differ by intention
    reader.template.day = session.renderer.template.day
    reader.template.is_as_text = session.renderer.template.is_as_text  # template.markup is about it
    for number, (row, ids) in enumerate(prompts):
        try:
            served = _prompt_ids(row, reader)
        except TautError as error:
            evidence = [str(error)]
        else:
            if served == ids:
                continue
            quoted, at = reader.template.quoted, common_length(served, ids)
            evidence = [
                f"{row.place}: after {quoted(ids[max(0, at - 4) : at])} trained on "
                f"{quoted(ids[at : at + 4])}, served {quoted(served[at : at + 4])}",
                f"it reads back as {type(tokenizer).__name__}, eos {tokenizer.eos_token}",
            ]
        return failed(
            "the saved tokenizer and template give a server other tokens than training",
            measured=(number, f"of {len(prompts)} prompts the same"),
            evidence=evidence,
            remedy="name the token itself where the template writes eos_token or pad_token inside answers "
            "(data.template=FILE); else load the tokenizer with AutoTokenizer and save it again",
        )
    return passed("the same tokens", len(prompts), "prompts")


def _prompt_ids(row: Row, renderer: Renderer) -> Ids:
    """Ids of a row's prompt, as a server gets it."""
    if isinstance(row, Conversation):
        before = row.messages[: row.learned[-1]] if row.learned else row.messages
        ids: Ids = renderer.prompt_ids(before, row.tools, row.template_variables).tolist()
        return ids
    text = Text(row.prompt if isinstance(row, Completion) else row.text, is_rendering=False)
    return renderer.template.encode([text])[text]


GENERATION_FILE = "the model's generation_config.json"


@check("stop.generation", after=["model.loads"], follows="model.head")
def the_saved_generation_config_lets_answers_end(session: Session) -> Finding:
    """Will the saved generation_config let a server stop?

    It can be saved, and nothing in it keeps an answer from ending.
    """
    skip_if(session.is_scalar, NO_GENERATION)
    stops, before = session.stops, session.model.generation_config
    generation = generation_to_save(copy.deepcopy(before), session.served_tokenizer, stops.ids)
    with TemporaryFolder("check") as place, quiet_library():
        try:
            generation.save_pretrained(place)
        except ValueError as error:
            lines = [line.strip("- ") for line in str(error).splitlines()]
            return failed(
                "the library refuses to save generation_config, so no model could be written at the end",
                evidence=[next((line for line in lines[1:] if line), lines[0])[:200]],
                remedy=f"take these settings out of {GENERATION_FILE}",
            )
    names = described(stops, session.renderer.template)[0]
    suppressed = generation.suppress_tokens or []
    bad_words = generation.bad_words_ids or []
    most = generation.max_new_tokens or 0
    hindrances = {
        "suppress_tokens": set(stops.ids) <= set(suppressed),
        "bad_words_ids": {(index,) for index in stops.ids} <= {tuple(word) for word in bad_words},
    }
    for setting in ("min_new_tokens", "min_length"):
        least = getattr(generation, setting, None) or 0
        hindrances[setting] = least >= most > 0 or least >= 256  # no answer needs so many tokens
    for setting, keeps_on in hindrances.items():
        if keeps_on:
            value = getattr(generation, setting)
            return failed(
                f"{setting} in generation_config keeps answers from ending",
                evidence=[f"{setting} = {value}; an answer ends at {names} {list(stops.ids)}"],
                remedy=f"take {setting} out of {GENERATION_FILE}",
            )
    # what the model's own file says now
    written = [] if before is None or before.eos_token_id is None else before.eos_token_id
    written = [written] if isinstance(written, int) else list(written)
    notes = []
    if any(index not in written for index in stops.turn_ends):
        notes.append(f"it names {written or 'no end'} now; {list(stops.ids)} is written")
    added, special = session.tokenizer.added_tokens_decoder, set(session.tokenizer.all_special_ids)
    plain = [
        index
        for index in stops.turn_ends
        if index not in special and not (index in added and added[index].special)
    ]
    for token in session.tokenizer.convert_ids_to_tokens(plain):
        notes.append(f"{token} is not marked special: servers may show it as text")
    return passed(f"it will name {names}", len(stops.ids), "ends", notes)


@check("stop.rows", after=["model.finite"])
def untrained_turn_ends_train(session: Session) -> Finding:
    """Can the model learn its ends: do rows that were never trained train?

    Rows of the embedding and the head of turn ends that were never trained must not stay as they are.
    """
    skip_if(session.is_scalar, NO_GENERATION)
    skip_if(session.ranks.is_sharded, "weights are sharded; it was asked before they were")
    run, inputs, model = session.run, session.inputs, session.scorer.model
    ends = {index: inputs.token(index) for index in inputs.stops.turn_ends}
    untrained = untrained_rows(model, ends)
    try:
        require_trained(model, rows_to_train(run, inputs, model))
    except ModelError as error:
        says, _, remedy = str(error).partition("; ")
        return failed(
            "a row that was never trained is frozen, so the model could not learn its end",
            measured=(len(untrained), "untrained ends"),
            evidence=[says],
            remedy=remedy,
        )
    says = "they train" if untrained else "every end has been trained before"
    return passed(says, len(untrained), "untrained ends", list(untrained.values()))


UNLIKELY = 0.05
"""Maximum mean probability of another end inside answers, and of the stop set where answers end."""


@check(
    "stop.baseline",
    part="full",
    after=["attention.shared", "loss.dtype", "loss.tied", "loss.adapter_start"],
    follows="run.saved",
)
def the_untrained_model_has_no_other_end(session: Session) -> Finding:
    """Before training, does the model end with no other token than those of the stop set?

    A model that was taught another end puts that token where the rows' answers end, and not inside them: then no server
    would stop at it. The number is how many answers it ends by itself; whether it ends at all is no fault: that is what
    training is for.
    """
    skip_if(session.is_scalar, NO_GENERATION)
    data = session.train if session.eval is None else session.eval
    config = StopCheckConfig(prompts=8, max_new_tokens=32)
    make_engine = engine_of(session.inputs, session.built.models, session.ranks)
    check = prepare(config, data, session.stops.ids, make_engine, session.trainer, session.run.seed)
    if check.engine is None:
        return skipped(check.obstacle.partition(";")[0])
    # what the model ends by itself, and what it would end with
    sampling = Sampling(max_new_tokens=config.max_new_tokens, seed=session.run.seed)
    answers = check.engine.generate([question.prompt for question in check.prompts], sampling)
    number = sum(answer.finish_reason == "stop" for answer in answers)
    other = _other_end(session, check.prompts)
    if other is not None:
        index, probability = other
        token = session.inputs.token(index)
        return failed(
            f"the model ends answers with {token}, which is not in the stop set",
            measured=(number, f"of {len(answers)} end"),
            evidence=f"where answers end, {token} (id {index}) has a probability of {probability:.2g}; inside them, "
            f"and those of the stop set, at most {UNLIKELY:g}",
            remedy=f"add {index} to eos_token_id in the model's generation_config.json, or use the model's own chat "
            "template",
        )
    return passed("answers that end before training", number, f"of {len(answers)}")


def _other_end(session: Session, asked: Sequence[StopPrompt]) -> tuple[int, float] | None:
    """The special token that the model puts where answers end, and only there, and its mean probability there."""
    tokenizer, stops = session.tokenizer, session.stops.ids
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    specials = sorted((added | set(tokenizer.all_special_ids)) - set(stops))
    if not specials:
        return None
    # probabilities of special tokens where answers end, and inside them
    at_ends, inside = [], []
    for question in asked:
        if question.reference is None:  # a prompt without a known answer
            return None
        begin = int(question.prompt.ids_T.size)
        at_N = np.arange(max(1, begin), question.reference.num_tokens)
        weight_N = np.ones(at_N.size)
        packed = pack([replace(question.reference, target_at_N=at_N, weight_N=weight_N)], ALONE)
        with session.inference():
            logits = session.scorer.target_logits(packed).float()
        probability_NS = logits.softmax(-1)[:, [*specials, *stops]].cpu()
        at_ends.append(probability_NS[-1])
        inside.append(probability_NS[:-1])
    end_S, inside_S = torch.stack(at_ends).mean(0), torch.cat(inside)
    if not inside_S.numel() or float(end_S[len(specials) :].sum()) > UNLIKELY:
        return None
    # an end is likely where answers end, and nowhere else
    best = int(end_S[: len(specials)].argmax())
    if float(end_S[best]) < 0.5 or float(inside_S[:, best].mean()) > UNLIKELY:
        return None
    return specials[best], float(end_S[best])
