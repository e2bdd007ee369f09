"""``taut eval MODEL data=FILE``: a model answers questions, rewards judge the answers, and a table has the results.

Answers are greedy unless ``sampling.temperature`` is set. With ``out`` the directory holds

    completions.jsonl   as ``taut generate`` writes them, each as it finishes; resume=true finishes the rest
    scores.jsonl        each reward's score of each completion: a value, null where it does not apply, or an error
    report.json         the numbers of the table, and the configuration

The exit code is 1, with the first reason, where more of a reward's scores are errors than ``max_errors`` allows, or
where the engine could not finish a completion; the table is printed all the same.

Sampling is in generate.py, statistics in evals/report.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from taut.commands import generate
from taut.commands.generate import MAX_EXAMPLES, Generated
from taut.commands.reading import print_decisions, read_prompts, write_errors
from taut.commands.settings import Evaluate, Generate
from taut.config import fields_of, from_mapping, home_path, to_dict
from taut.data.rows.prompts import PromptRow
from taut.errors import CheckFailed, OutputError
from taut.evals.answers import judge, require_scorable
from taut.evals.report import STOPPED, Answer, Report, build_report, show_report, shown, spaced
from taut.inference.factory import open_renderer
from taut.inference.reward_model import open_rater
from taut.io.notebook import html_table
from taut.io.temporary import TemporaryFolder
from taut.io.terminal import Terminal
from taut.rewards.reward_set import open_rewards
from taut.rewards.verifier import Score
from taut.types import Completion

COMPLETIONS = "completions.jsonl"
LOST = "were finished and are not kept; with out=DIR they are, and resume=true goes on from them"


@dataclass(frozen=True)
class Evaluated:
    """The result."""

    report: Report
    answers: tuple[Answer, ...]
    generated: Generated

    def __repr__(self) -> str:
        metrics = (*self.report.metrics, self.report.stopped)
        means = ", ".join(f"{it.name} {shown(it)[0]}" for it in metrics)
        return f"Evaluated({self.report.num_completions:,} completions: {means})"

    def _repr_html_(self) -> str:
        """The metrics with their intervals, and some answers."""
        report = self.report
        metrics = [(m.name, *shown(m), m.num_scored) for m in (*report.metrics, report.stopped)]
        names = [metric.name for metric in report.metrics]
        answers = [
            (a.place, a.completion.text, *(a.scores.get(name, Score()).value for name in names))
            for a in spaced(self.answers, MAX_EXAMPLES)
        ]
        counts = f"{report.num_completions:,} completions of {report.num_prompts:,} prompts"
        summary = html_table(counts, ("metric", "mean", "95% interval", "scored"), metrics)
        return summary + html_table("some answers", ("prompt", "answer", *names), answers)


def run(config: Evaluate) -> int:
    """Evaluate and print the table; raises CheckFailed where too many scores are errors."""
    console = Terminal(soft_wrap=True)
    result = evaluate(config, console)
    report = result.report
    show_report(console, report, result.answers, config.samples)
    if config.out is not None:
        console.lines([f"written: {config.out}"])
    fault = ""
    if report.failures:
        again = "the same command with resume=true"
        again = again if config.out else "the command again with out=DIR"
        fault = (
            f"{len(report.failures)} of {report.num_completions} completions failed, the first: {report.failures[0]}; "
            f"expected all to finish; run {again}"
        )
    elif wrong := [one for one in report.metrics if one.error_share > config.max_errors]:
        metric = wrong[0]
        fault = (
            f"{len(metric.errors)} scores of {metric.name} are errors ({metric.error_share:.1%}), the first: "
            f"{metric.errors[0]}; expected at most max_errors={config.max_errors:g}; correct the reward or the data"
        )
    if fault:
        raise CheckFailed(fault)
    return 0


def evaluate(config: Evaluate, console: Terminal | None = None) -> Evaluated:
    """Generate, judge and write. ``console``: as for ``generate.generate``."""
    opened = open_rewards(config.rewards, reserved=[STOPPED], open_rater=open_rater)
    with opened as reward_set, _directory(config) as directory:
        rows = read_prompts(
            config,
            config.images,
            config.data,
            open_renderer(config).renderer,
            None,  # taut generate lists the rows that are left out
            reference=config.reference,
            needs_reference=any(part.verifier.needs_reference for part in reward_set.parts),
        )
        require_scorable(rows, reward_set, config.max_errors)
        print_decisions(console, reward_set.decisions)
        # answers, drawn as taut generate draws them
        afterwards = generate.FINISH if config.out else LOST
        keys = {key: value for key, value in to_dict(config).items() if key in fields_of(Generate)}
        others = {"prompts": config.data, "out": str(directory / COMPLETIONS), "rewards": None}
        generation = from_mapping(Generate, {**keys, **others})  # the answers are judged here
        generated = generate.generate(generation, console, afterwards)
        # their scores
        answers = judge(rows, _read_completions(directory / COMPLETIONS, rows), reward_set)
        report = build_report(answers, reward_set.names)
        decisions = {name: f"{value} ({reason})" for name, value, reason in reward_set.decisions}
        whole = {**report.as_dict(), "decisions": decisions, "config": to_dict(config)}
        lines = []
        for answer in answers:
            scores = answer.scores.items()
            line = {
                "id": answer.row.id,
                "index": answer.completion.index,
                "finish_reason": answer.completion.finish_reason,
                "text": answer.completion.text,
                "references": list(answer.row.references),
                "scores": {name: score.value for name, score in scores},
            }
            if errors := {name: score.error for name, score in scores if score.error is not None}:
                line["errors"] = errors
            if any(score.unjudged is not None for _, score in scores):
                line["unjudged"] = {
                    name: score.unjudged for name, score in scores if score.unjudged is not None
                }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        with write_errors(directory, "; free it and set resume=true"):
            (directory / "scores.jsonl").write_text("".join(lines), encoding="utf-8")
            text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
            (directory / "report.json").write_text(text, encoding="utf-8")
    return Evaluated(report, tuple(answers), generated)


@contextmanager
def _directory(config: Evaluate) -> Iterator[Path]:
    """``out``, or a temporary directory."""
    if config.out is None:
        with TemporaryFolder("evaluate") as folder:
            yield folder
        return
    out = home_path(config.out)
    fault = ""
    if out.exists() and not out.is_dir():
        fault = "is a file; expected a directory; name another"
    elif out.is_dir() and any(out.iterdir()) and not config.resume:
        fault = "exists and is not empty; expected a new directory; set resume=true to finish it, or name another"
    if fault:
        raise OutputError(f"out={out} {fault}")
    yield out


def _read_completions(path: Path, rows: Sequence[PromptRow]) -> list[Completion]:
    """The output of ``taut generate``, in the order of rows and samples."""
    texts = path.read_text(encoding="utf-8").split("\n")  # texts may contain other line ends
    lines = [json.loads(text) for text in texts if text]
    order = {row.id: number for number, row in enumerate(rows)}
    lines.sort(key=lambda line: (order[line["id"]], line["index"]))
    return [
        Completion(
            prompt_id=line["id"],
            index=line["index"],
            ids_N=np.asarray(line["ids"], dtype=np.int64),
            logp_N=None,
            logp_one_N=None,
            finish_reason=line["finish_reason"],
            text=line["text"],
            error=line.get("error"),
        )
        for line in lines
    ]
