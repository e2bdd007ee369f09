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
from typing import Annotated

import numpy as np
from pydantic import Field

from taut.commands import generate
from taut.commands.generate import SHOWN, Generate, Generated
from taut.commands.reading import RowSettings, print_decisions, read_prompts, write_errors
from taut.config import configclass, fields_of, from_mapping, home_path, to_dict
from taut.data.prompts import PromptRow
from taut.data.sources import Source
from taut.errors import CheckFailed, ConfigError, OutputError
from taut.evals.answers import EvalSampling, judge, require_scorable
from taut.evals.report import STOPPED, Answer, Report, build_report, show_report, shown, spaced
from taut.inference.open import ModelUse, open_renderer
from taut.inference.reward_model import open_rater
from taut.io.notebook import html_table
from taut.io.temporary import TemporaryFolder
from taut.io.terminal import Terminal
from taut.rewards import RewardSpec, Score, open_panel
from taut.types import Completion

COMPLETIONS = "completions.jsonl"
LOST = "were finished and are not kept; with out=DIR they are, and resume=true goes on from them"


@configclass
class Evaluate(RowSettings, ModelUse):
    """A model's answers to questions whose right answers are known."""

    data: str | Source
    """Questions with right answers: a file or data set of rows as for ``taut generate`` and training."""
    rewards: str | list[str | RewardSpec] = "exact_match"
    """Rewards that judge an answer: names of docs/rewards.md, or FILE.py:function, a function (text, references, row)
    that returns a number, or None where it does not apply; or tables of them, with options."""
    reference: str | None = None
    """Column with the right answer, or a list of them; by default answers, answer, ..., or the last assistant
    message."""
    out: str | None = None
    """Directory for completions.jsonl, scores.jsonl and report.json; it must be empty, unless resume."""
    resume: bool = False
    """Complete the output of an earlier run with the same settings."""
    max_errors: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of a reward's scores that may be errors; above it the exit code is 1."""
    samples: Annotated[int, Field(ge=0)] = 5
    """Number of answers to print, evenly spaced."""
    sampling: EvalSampling = EvalSampling()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rewards:
            raise ConfigError(
                "rewards is empty; expected what judges the answers; set rewards=exact_match"
            )
        if self.resume and self.out is None:
            raise ConfigError(
                "resume=true and out is not set; expected the directory to go on in; set out=DIR"
            )


@dataclass(frozen=True)
class Evaluated:
    """The result."""

    report: Report
    answers: tuple[Answer, ...]
    generated: Generated

    def _repr_html_(self) -> str:
        """The metrics with their intervals, and some answers."""
        report = self.report
        metrics = [(m.name, *shown(m), m.num_scored) for m in (*report.metrics, report.stopped)]
        names = [metric.name for metric in report.metrics]
        answers = [
            (a.place, a.completion.text, *(a.scores.get(name, Score()).value for name in names))
            for a in spaced(self.answers, SHOWN)
        ]
        counts = f"{report.num_completions:,} completions of {report.num_prompts:,} prompts"
        return html_table(
            counts, ("metric", "mean", "95% interval", "scored"), metrics
        ) + html_table("some answers", ("prompt", "answer", *names), answers)


def run(config: Evaluate) -> int:
    """Evaluate and print the table; raises CheckFailed where too many scores are errors."""
    console = Terminal(soft_wrap=True)
    result = evaluate(config, console)
    report = result.report
    show_report(console, report, result.answers, config.samples)
    if config.out is not None:
        console.lines([f"written: {config.out}"])
    if report.failures:
        again = (
            "the same command with resume=true" if config.out else "the command again with out=DIR"
        )
        raise CheckFailed(
            f"{len(report.failures)} of {report.num_completions} completions failed, the first: {report.failures[0]}; "
            f"expected all to finish; run {again}"
        )
    for metric in report.metrics:
        if metric.error_share > config.max_errors:
            raise CheckFailed(
                f"{len(metric.errors)} scores of {metric.name} are errors ({metric.error_share:.1%}), the first: "
                f"{metric.errors[0]}; expected at most max_errors={config.max_errors:g}; correct the reward or the data"
            )
    return 0


def evaluate(config: Evaluate, console: Terminal | None = None) -> Evaluated:
    """Generate, judge and write. ``console``: as for ``generate.generate``."""
    opened = open_panel(config.rewards, reserved=[STOPPED], open_rater=open_rater)
    with opened as panel, _directory(config) as directory:
        rows = read_prompts(
            config,
            config.images,
            config.data,
            open_renderer(config).renderer,
            None,  # taut generate lists the rows that are left out
            reference=config.reference,
            needs_reference=any(part.verifier.needs_reference for part in panel.parts),
        )
        require_scorable(rows, panel, config.max_errors)
        print_decisions(console, panel.decisions)
        afterwards = generate.FINISH if config.out else LOST
        keys = {key: value for key, value in to_dict(config).items() if key in fields_of(Generate)}
        others = {"prompts": config.data, "out": str(directory / COMPLETIONS), "rewards": None}
        generation = from_mapping(Generate, {**keys, **others})  # the answers are judged here
        generated = generate.generate(generation, console, afterwards)
        answers = judge(rows, _read_completions(directory / COMPLETIONS, rows), panel)
        report = build_report(answers, panel.names)
        settled = {name: f"{value} ({reason})" for name, value, reason in panel.decisions}
        whole = {**report.as_dict(), "decisions": settled, "config": to_dict(config)}
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
    if out.exists() and not out.is_dir():
        raise OutputError(f"out={out} is a file; expected a directory; name another")
    if out.is_dir() and any(out.iterdir()) and not config.resume:
        raise OutputError(
            f"out={out} exists and is not empty; expected a new directory; set resume=true to finish what it lacks, "
            "or name another"
        )
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
