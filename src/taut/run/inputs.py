"""Load the inputs of a run from its configuration: tokenizer, template and data.

Each choice that is made for the user is a ``Decision`` with its reason. Models and trainer: ``taut.run.setup``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import partial

from taut.config import Decision
from taut.data.dataset import Dataset, build_renderer
from taut.data.read.json_io import shown
from taut.data.render.stop_tokens import StopSet, derive_stop_set, described
from taut.data.render.template_files import template_decision
from taut.data.rows.messages import RowForm
from taut.data.rows.schema import OtherKindError
from taut.data.store.cache import directory_of
from taut.errors import DataError
from taut.io import hub
from taut.io.console import counted
from taut.methods import commands_for
from taut.methods.inputs import Inputs, Language
from taut.methods.method import RunConfig
from taut.models.load import load_config, load_tokenizer, stop_ids_in_files
from taut.models.tokens import add_tokens_to_tokenizer
from taut.train.distributed import Ranks, thread_decisions
from taut.vision.image_store import open_image_store


def load_language(run: RunConfig, day: date | None = None) -> Language:
    """Load configuration, tokenizer and template. ``day``: the date on which the run began, for templates that print
    it; None: today.
    """
    path, trust, cached = run.model, run.trust_remote_code, directory_of(run.data.cache)
    config = load_config(path, trust, needs_weights=run.needs_weights)
    tokenizer = load_tokenizer(path, trust)
    new_ids = add_tokens_to_tokenizer(tokenizer, run.tokens)
    image_store = open_image_store(path, config, tokenizer, run.data.images, cached, trust)
    renderer = build_renderer(run.data, tokenizer, image_store)
    renderer.template.day = day or date.today()
    return Language(config, tokenizer, new_ids, renderer)


def load_stops(run: RunConfig, language: Language) -> StopSet:
    """The tokens that end an answer."""
    return derive_stop_set(language.renderer, stop_ids_in_files(run.model, language.config))


def load_inputs(
    run: RunConfig,
    ranks: Ranks,
    day: date | None = None,
    *,
    trains: bool = False,
    first_rows: int | None = None,
    tell: Callable[[list[Decision]], object] = list,
) -> Inputs:
    """Load tokenizer, template and tokenized data. The writer tokenizes first; the other ranks read its cache.
    ``trains``: whether the run is about to train, and so records the rows that it takes from a stream. ``first_rows``:
    of large sources that were never read, for a look. ``tell``: called with the decisions that are known before that.
    """
    # tokenizer and template
    language = load_language(run, day)
    stops = load_stops(run, language)
    renderer = language.renderer.stopping_at(stops.ids)
    tell(decisions_of(run, language, stops))

    # data: the writer fills the cache, then the others read it
    if not ranks.is_writer:
        ranks.barrier()
    load = partial(
        run.load_data,
        renderer=renderer,
        language=language,
        looks_again=ranks.is_writer,
        ranks=ranks if trains else None,
        first_rows=first_rows,
    )
    try:
        train = load("train")
        held_out = load("eval") if run.data.eval else None
    except OtherKindError as error:
        raise DataError(f"{error}, for {commands_for(error.kind)}") from None
    if ranks.is_writer:
        ranks.barrier()
    if len(set(ranks.gather(train.fingerprint))) > 1:
        raise DataError(
            "data.train: the ranks read different content; expected files that all of them see alike and that no "
            "process changes now; begin again"
        )

    # what would fail later is refused now
    inputs = inputs_of(run, language, stops, train, held_out)
    inputs.decisions.extend(thread_decisions(ranks.device))
    inputs.decisions.extend([train.tokenized] if train.tokenized else [])
    size = language.num_rows
    for data in (train, held_out):
        beyond = None if data is None else data.first_id_over(size)
        if beyond is not None:
            place, index = beyond
            raise DataError(
                f"{place}: has token {index} ({inputs.token(index)}), and the model has {size:,} rows; expected the "
                "model's own tokenizer; take added tokens out and name them in tokens.add"
            )
    key = f"{run.method}.margin"
    if "margin" in run.loss().needs_values and not train.has_value("margin"):
        raise DataError(
            f"data.train: no answer has a margin, and {key} is set; expected a column margin, or scores; name it in "
            f"data.columns, or take {key} out"
        )
    if not run.has_scalar_head and not run.generates:
        inputs.decisions.extend(_taught_ends(train))
    return inputs


def decisions_of(run: RunConfig, language: Language, stops: StopSet) -> list[Decision]:
    """The decisions that do not depend on the data."""
    config, template, decisions = language.config, language.renderer.template, run.decisions
    if reason := hub.offline_reason():
        decisions.append(Decision("hub", "cached files only", reason))
    if commit := getattr(config, "_commit_hash", None):
        decisions.append(
            Decision("model.commit", commit, f"of {run.model}; a resume needs the same")
        )
    if run.data.max_length is None:
        longest = str(run.longest_sample(config))
        decisions.append(Decision("data.max_length", longest, "the model's context"))
    decisions += template_decision(run.data.template)
    return [*decisions, Decision("stop", *described(stops, template))]


def inputs_of(
    run: RunConfig, language: Language, stops: StopSet, train: Dataset, held_out: Dataset | None
) -> Inputs:
    """Join the loaded parts, with the decision behind each."""
    config, tokenizer, new_ids, renderer = language
    template, decisions = renderer.template, decisions_of(run, language, stops)
    # rows without messages
    key, is_templated = "data.apply_chat_template", run.data.apply_chat_template
    num_plain = sum(data.forms["completion"] for data in (train, held_out) if data is not None)
    if is_templated:
        reason = "set; plain text becomes a user and an assistant message"
        decisions.append(Decision(key, "true", reason))
    elif num_plain and template.template is not None:
        rows = f"plain text in {counted(num_plain, 'rows')} is used as it is"
        other = "set" if is_templated is not None else f"{key}=true renders it as messages"
        decisions.append(Decision(key, "false", f"{rows}, without the chat template; {other}"))
    # rows that are read as others, and what every row gets
    read_as = sum((data.read_as for data in (train, held_out) if data), Counter[RowForm]())
    forms: tuple[tuple[RowForm, str, str], ...] = (
        ("developer", "system", "developer messages are read as system messages"),
        ("opening", "context", "an assistant's message that begins a conversation answers nothing"),
        ("nulls", "absent", "nulls that a table wrote for keys of other rows are left out"),
    )
    decisions += [
        Decision(f"data.{form}", value, f"{reason}, in {counted(read_as[form], 'rows')}")
        for form, value, reason in forms
        if read_as[form]
    ]
    if run.data.chat_template_kwargs:
        values = json.dumps(run.data.chat_template_kwargs, ensure_ascii=False)
        reason = "set; they are the defaults of the template that is saved, and a server needs no setting"
        decisions.append(Decision("data.chat_template_kwargs", values, reason))
    if template.is_as_text:
        reason = "set; control tokens in what a row says are text; a server that tokenizes a rendering reads them"
        decisions.append(Decision("data.control_tokens", "as_text", reason))
    if texts := run.data.system_messages:
        value = " or ".join(sorted(map(shown, texts)))
        reason = (
            "set; in front of conversations without a system message; a server has to send it too"
        )
        decisions.append(Decision("data.system", value, reason))
    if template.asks_for_the_day:
        reason = "the chat template asks for the day; the one on which the run began"
        decisions.append(Decision("day", str(template.day), reason))
    return Inputs(
        config=config,
        tokenizer=tokenizer,
        renderer=renderer.stopping_at(stops.ids),
        train=train,
        eval=held_out,
        max_length=run.longest_sample(config),
        new_ids=new_ids,
        stops=stops,
        decisions=decisions,
        grows=run.grows,
    )


def _taught_ends(train: Dataset) -> list[Decision]:
    """Report how many samples teach the model to stop, unless all do. Raises DataError where none does."""
    num_ends, num_samples = train.num_ended, train.num_read
    cut = f"{len(train.report.cut):,} were cut before their end"
    if not num_ends:
        raise DataError(
            f"data.train: none of {num_samples:,} samples has a token that ends an answer among its targets ({cut}); "
            "expected the model to learn to stop; raise data.max_length or set data.too_long=drop"
        )
    if num_ends == num_samples:
        return []
    return [Decision("stop.taught", f"{num_ends:,} of {num_samples:,} samples", cut)]
