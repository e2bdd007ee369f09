"""Answer the tasks of lm-evaluation-harness with the engine in this process.

    tasks = load_tasks(["arc_easy", "mine.yaml"])            raises ConfigError or DataError
    results = run_tasks(tasks, opened, Asked(limit=100))     value, interval and count of each task and metric

The harness asks three kinds of questions: the logprob of a continuation after a context, the logprob of a whole text,
and an answer of the model. Nothing is padded, and common prefixes are computed once: the choices of a question share
its text, and the questions of a task their examples. Two continuations of one token after the same context are one row
of logits. Texts become ids as in the harness's own ``hf`` model, so that the numbers are the same.

A metric that is a mean over documents has Wilson's interval if each value is 0 or 1, else a bootstrap over documents
(taut/evals/statistics.py). Any other metric has the normal interval of the harness's standard error.

This is the only file that imports lm_eval.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from taut.config import home_path
from taut.data.packing import common_prefix, prefix_order
from taut.errors import ConfigError, DataError
from taut.evals.statistics import bootstrap_interval, mean, wilson_interval
from taut.inference.factory import OpenEngine
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.io import hub
from taut.types import Prompt, Sample

Tokens = tuple[Any, list[int], list[int]]
"""A request's own key, the ids of its context, and the ids of its continuation."""
MAX_NEW_TOKENS = 256
"""Maximum tokens of an answer, unless the task sets its own."""
CONTEXT = 2048
"""Context length of a model that states none, as in the harness."""
READS = 2**25
"""Maximum logits held at a time."""
RESAMPLES = 1000
"""Resamples for a standard error that the harness estimates."""
Z = 1.959964
GENERATION = {"do_sample", "until", "max_gen_toks", "temperature", "top_p", "top_k", "min_p"}
"""Settings of generation that a task may have."""
NOTHING_N = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Asked:
    """The form of questions."""

    num_fewshot: int | None = None
    """Examples before a question, or None for the task's own number."""
    limit: int | None = None
    """Maximum documents of each task, taken from its start."""
    with_template: bool = False
    """Whether questions are rendered with the chat template."""


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task, with its 95% interval."""

    task: str
    name: str
    mean: float
    low: float | None
    high: float | None
    """Bounds of the interval, or None where it is unknown."""
    interval: str | None
    """Kind of the interval: wilson, bootstrap or normal."""
    num_scored: int


@dataclass(frozen=True)
class TaskResults:
    """Results of a model on tasks."""

    metrics: tuple[TaskMetric, ...]
    versions: Mapping[str, Any]
    """Version of each task in its file."""
    num_fewshot: Mapping[str, int]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    """Documents of each task, with questions and answers."""
    harness: str
    """Version of lm_eval."""


def load_tasks(names: Sequence[str]) -> Any:
    """Load tasks by name, or from files that end in .yaml, with their data. Raises ConfigError or DataError."""
    # Look up every name before any data is loaded.
    paths = [name for name in names if name.endswith((".yaml", ".yml"))]
    for path in paths:
        if not home_path(path).is_file():
            raise ConfigError(
                f"tasks: there is no file {path}; expected the YAML of a task; correct the path"
            )
    manager = TaskManager(include_defaults=len(paths) < len(names))
    known = set(manager.all_tasks)
    for name in names:
        if name not in known and name not in paths:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "'lm-eval ls tasks' lists them"
            raise ConfigError(
                f"tasks: lm-evaluation-harness {version('lm_eval')} has no task {name}; expected one of its "
                f"{len(known):,}, or a file NAME.yaml; {hint}"
            )
    hub.settle()
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            found = manager.load([str(home_path(name)) if name in paths else name])
        except (OSError, ValueError, LookupError, ImportError, TypeError, yaml.YAMLError) as error:
            raise DataError(f"task {name} cannot be loaded: {_reason(name, error)}") from error
        for part, entries in found.items():
            loaded[part] |= entries
    return loaded


def _reason(name: str, error: Exception) -> str:
    """Explain why a task cannot be loaded."""
    why = hub.offline_reason()
    offline = (
        f"; the hub cannot be reached ({why}), and its data are not in the cache" if why else ""
    )
    found = hub.explain(f"the data of {name}", error, "dataset")
    if found is not None:
        return found
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return f"{said}{offline}; expected the task's file and its data; correct it, or run where there is a network"


def run_tasks(tasks: Any, opened: OpenEngine, asked: Asked) -> TaskResults:
    """Ask every question of the tasks, and score the answers."""
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        if asked.num_fewshot is not None and own != 0:  # 0 is a part of such a task
            task.set_config(key="num_fewshot", value=asked.num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    random.seed(DEFAULT_RANDOM_SEED)  # as the harness does, for tasks that draw
    np.random.seed(DEFAULT_OTHER_SEED)
    found: Any = evaluate(
        lm=EngineModel(opened),
        task_dict=tasks,
        limit=asked.limit,
        bootstrap_iters=RESAMPLES,
        apply_chat_template=asked.with_template,
        fewshot_as_multiturn=asked.with_template,
    )
    return TaskResults(
        metrics=tuple(_metrics(found)),
        versions=found["versions"],
        num_fewshot=found["n-shot"],
        samples=found["samples"],
        harness=version("lm_eval"),
    )


def _metrics(found: Mapping[str, Any]) -> Iterator[TaskMetric]:
    """List the metrics of tasks, then of groups, each with its interval."""
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        samples = found["samples"].get(task, [])
        for key, value in values.items():
            name, comma, kept = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            mine = [sample for sample in samples if sample.get("filter") == kept]
            each = [sample.get(name) for sample in mine]
            error = values.get(f"{name}_stderr,{kept}")
            low = high = kind = None
            is_mean = bool(each) and all(isinstance(one, int | float) for one in each)
            if is_mean and np.isclose(mean(each), value, rtol=1e-9, atol=1e-12):
                if all(one in (0, 1) for one in each):
                    kind, (low, high) = "wilson", wilson_interval(sum(each), len(each))
                elif len(each) > 1:
                    kind, (low, high) = "bootstrap", bootstrap_interval(each)
            elif isinstance(error, int | float):
                kind, low, high = "normal", value - Z * error, value + Z * error
            shown = name if kept == "none" else f"{name} ({kept})"
            yield TaskMetric(task, shown, float(value), low, high, kind, len(mine))


class EngineModel(TemplateLM):  # type: ignore[misc]  # without types where the extra is not installed
    """The local engine as a model of the harness."""

    def __init__(self, opened: OpenEngine) -> None:
        super().__init__()
        assert isinstance(opened.engine, LocalEngine)
        self.engine, self.tokenizer = opened.engine, opened.tokenizer
        self.template = opened.renderer.template.template
        self.max_length = opened.context or CONTEXT
        self._num_answered = 0

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokenize a text, with the tokenizer's bos unless the text begins with it."""
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode([self.prefix_token_id])
        ):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the chat template of the model."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Compute the logprob of each whole text, in windows of the model's context."""
        windows: list[Tokens] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                context, continuation = make_disjoint_window(pair)
                windows.append((number, context, continuation))
        totals = [0.0] * len(requests)
        for (number, _, _), (total, _) in zip(
            windows, self._loglikelihood_tokens(windows), strict=True
        ):
            totals[number] += total
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Tokens], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Compute the logprob of each continuation, and whether it is the greedy one."""
        # Requests with the same ids read the same logits.
        asked: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            ids = tuple(context + continuation)[-(self.max_length + 1) : -1]
            asked.setdefault((ids, len(continuation)), []).append(number)
        keys = list(asked)
        samples = []
        for number, (ids, count) in enumerate(keys):
            ids_T = np.asarray(ids, dtype=np.int64)
            read_at_R = np.arange(ids_T.size - count, ids_T.size)
            weight_N = np.empty(0)
            samples.append(Sample(str(number), ids_T, NOTHING_N, weight_N, read_at_R=read_at_R))
        # Score each batch, and give every request its own continuation's logprob.
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for together in self._batches(samples):
            for name, logp_RV in self.engine.read_logps(together):
                for number in asked[keys[int(name)]]:
                    target_R = torch.tensor(requests[number][2], device=logp_RV.device)
                    logp_R = logp_RV.gather(1, target_R[:, None])
                    is_greedy = bool((logp_RV.argmax(-1) == target_R).all())
                    answers[number] = float(logp_R.sum()), is_greedy
        return answers

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Batch samples for the engine, with common prefixes next to each other."""
        most_reads = max(1, READS // len(self.tokenizer))
        batch: list[Sample] = []
        num_tokens = num_reads = 0
        for index in prefix_order(samples):
            sample = samples[index]
            assert sample.read_at_R is not None
            new = sample.num_tokens - (common_prefix(batch[-1], sample) if batch else 0)
            is_full = (
                num_tokens + new > self.engine.config.prefill_tokens
                or num_reads + sample.read_at_R.size > most_reads
            )
            if batch and is_full:
                yield batch
                batch, num_tokens, num_reads, new = [], 0, 0, sample.num_tokens
            batch.append(sample)
            num_tokens, num_reads = num_tokens + new, num_reads + sample.read_at_R.size
        if batch:
            yield batch

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate an answer to each context, together for requests with the same settings."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in groups.values():
            # Read the settings, and refuse those that the engine lacks.
            given = normalize_gen_kwargs(dict(requests[numbers[0]].args[1]), MAX_NEW_TOKENS)
            if unknown := {k for k, v in given.items() if v is not None} - GENERATION:
                raise ConfigError(
                    f"task {requests[numbers[0]].task_name} asks for {', '.join(sorted(unknown))} in "
                    f"generation_kwargs; expected {', '.join(sorted(GENERATION))}; remove it from the task"
                )
            end = self.tokenizer.decode([self.eot_token_id])
            until = handle_stop_sequences(given.get("until"), eos=end)
            room = int(given["max_gen_toks"])
            if room >= self.max_length:
                raise ConfigError(
                    f"task {requests[numbers[0]].task_name} asks for {room:,} new tokens and the model's context is "
                    f"{self.max_length:,}; expected fewer; set max_gen_toks in the task"
                )
            is_drawn = bool(given.get("do_sample"))
            drawn = {k: given[k] for k in ("top_p", "top_k", "min_p") if given.get(k) is not None}
            sampling = Sampling(
                max_new_tokens=room,
                temperature=float(given.get("temperature") or 1.0) if is_drawn else 0.0,
                stop=[text for text in until if text],
                **(drawn if is_drawn else {}),
            )
            # Generate, and cut the answers as the harness does.
            prompts = []
            for number in numbers:
                ids = self.tok_encode(requests[number].args[0])[-(self.max_length - room) :]
                self._num_answered += 1  # repeats of a prompt are drawn anew
                name = f"question {self._num_answered}"
                prompts.append(Prompt(name, np.asarray(ids, dtype=np.int64)))
            completions = self.engine.generate(prompts, sampling)
            for number, completion in zip(numbers, completions, strict=True):
                text = self.tokenizer.decode(completion.ids_N.tolist(), skip_special_tokens=True)
                answers[number] = postprocess_generated_text(str(text), until, None)
        return answers
