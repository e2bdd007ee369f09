"""``taut eval MODEL tasks=lm-eval:NAME,...``: evaluate on tasks of lm-evaluation-harness with the local engine.

With ``out`` the directory holds

    report.json     the numbers of the table, with the settings
    samples.jsonl   each document of each task: question, answer and scores

The directory appears with both files at the end, or not at all. harness.py answers the questions.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from taut.commands.reading import write_errors
from taut.config import Decision, home_path, to_dict
from taut.errors import ConfigError, OutputError
from taut.inference.factory import open_engine, open_renderer
from taut.io import files
from taut.io.terminal import Terminal
from taut_tools.lm_eval.settings import EvaluateTasks

if TYPE_CHECKING:
    from taut_tools.lm_eval.harness import TaskResults


def run(config: EvaluateTasks) -> int:
    """Evaluate, print the table, and write ``out`` if it is set."""
    console = Terminal(soft_wrap=True)
    out = None if config.out is None else home_path(config.out)
    if out is not None and out.exists():
        raise OutputError(f"out={out} exists; expected a new directory; name another, or remove it")
    results, decisions = evaluate_tasks(config)
    console.lines(f"{name}: {value} ({reason})" for name, value, reason in decisions)
    console.print(_table(results))
    if out is not None:
        report = {
            "harness": f"lm_eval {results.harness}",
            "versions": results.versions,
            "num_fewshot": results.num_fewshot,
            "metrics": [asdict(metric) for metric in results.metrics],
            "decisions": {name: f"{value} ({reason})" for name, value, reason in decisions},
            "config": to_dict(config),
        }
        samples = [
            json.dumps({"task": task, **sample}, ensure_ascii=False, default=str) + "\n"
            for task, of_task in results.samples.items()
            for sample in of_task
        ]
        with write_errors(out, "; name another"), files.replacing_directory(out) as partial:
            text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
            (partial / "report.json").write_text(text, encoding="utf-8")
            (partial / "samples.jsonl").write_text("".join(samples), encoding="utf-8")
        console.lines([f"written: {out}"])
    return 0


def evaluate_tasks(config: EvaluateTasks) -> tuple[TaskResults, list[Decision]]:
    """Evaluate the model; the results and the recorded decisions."""
    from taut_tools.lm_eval import harness

    tasks = harness.load_tasks(config.names)  # before the weights
    rendering = open_renderer(config)
    has_template = rendering.renderer.template.template is not None
    with_template, why = config.apply_chat_template, "asked for by name"
    if with_template is None:
        with_template = has_template
        why = "the model has a template" if has_template else "the model has no template"
    if with_template and not has_template:
        raise ConfigError(
            f"apply_chat_template=true and {config.model} has no chat template; expected one; remove the key, or set "
            "template=FILE"
        )
    template = Decision("chat template", "applied" if with_template else "not applied", why)
    with open_engine(config, rendering) as opened:
        asked = harness.Asked(config.num_fewshot, config.limit, with_template)
        return harness.run_tasks(tasks, opened, asked), [*opened.decisions, template]


def _table(results: TaskResults) -> Table:
    title = f"lm-evaluation-harness {results.harness}"
    table = Table("task", "metric", "value", "95% interval", "few-shot", "documents", title=title)
    for metric in results.metrics:
        form = ".1%" if metric.interval == "wilson" else ".4g"
        known = metric.low is not None and metric.high is not None
        cells: list[Any] = [
            metric.task,
            metric.name,
            format(metric.mean, form),
            f"[{metric.low:{form}}, {metric.high:{form}}]" if known else "",
            str(results.num_fewshot.get(metric.task, "")),
            f"{metric.num_scored:,}",
        ]
        table.add_row(*map(escape, cells))
    return table
