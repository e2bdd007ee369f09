"""``taut eval tasks=lm-eval:...``: the numbers of the harness's own model, and what is refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.helpers.chat_runs import WORDS, save_model

from taut import cli
from taut.config import from_mapping
from taut.errors import ConfigError, DataError, TautError
from taut.io import hub
from taut_tools.lm_eval import evaluate as command
from taut_tools.lm_eval.settings import EvaluateTasks

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

KINDS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "num_fewshot": 2,
        "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["the", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("asked") / "llama", "llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a YAML for each kind, on the same documents."""
    place = tmp_path_factory.mktemp("tasks")
    draw = random.Random(1)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    documents = [
        {
            "question": text(3, 20),
            "choices": [text(1, 3) for _ in range(4)],
            "answer": draw.randrange(4),
            "long": text(20, 120),  # the model's context is 256 tokens
        }
        for _ in range(7)
    ]
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, settings in KINDS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}}
        whole = {"task": name, "test_split": "test", **data, **settings}
        (place / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return place


def configured(model: Path, tasks: str, **keys: Any) -> EvaluateTasks:
    fixed = {"model": str(model), "device": "cpu", "dtype": "float32"}
    return from_mapping(EvaluateTasks, {**fixed, "tasks": f"lm-eval:{tasks}", **keys})


def values_of_library(model: Path, files: list[str], *, with_template: bool) -> dict[Any, Any]:
    """(task, document) -> what was answered, and (task, metric) -> value, by the harness's own model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: Any = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32", "device": "cpu"},
        tasks=files,
        batch_size=3,
        apply_chat_template=with_template,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    return found["results"], found["samples"]


@pytest.mark.parametrize("with_template", [False, True])
def test_the_numbers_are_those_of_the_library_s_own_model(
    model: Path, tasks: Path, with_template: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import evaluator

    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # starts many programs
    kinds = ["choices", "answers"] if with_template else list(KINDS)
    files = [str(tasks / f"{kind}.yaml") for kind in kinds]
    config = configured(model, ",".join(files), apply_chat_template=with_template)
    ours, _ = command.evaluate_tasks(config)
    results, samples = values_of_library(model, files, with_template=with_template)
    for metric in ours.metrics:
        assert metric.mean == pytest.approx(results[metric.task][f"{metric.name},none"], rel=1e-5)
    assert {metric.task for metric in ours.metrics} == set(kinds)
    for kind in kinds:
        for one, other in zip(ours.samples[kind], samples[kind], strict=True):
            assert one["arguments"] == other["arguments"]
            for mine, theirs in zip(one["resps"], other["resps"], strict=True):
                if kind == "answers":
                    assert mine == theirs
                elif kind == "choices":
                    ((logp, is_greedy),), ((expected, was_greedy),) = mine, theirs
                    assert logp == pytest.approx(float(expected), rel=1e-6, abs=1e-5)
                    assert is_greedy == was_greedy
                else:
                    assert mine[0] == pytest.approx(theirs[0], rel=1e-6)


def test_what_choices_have_in_common_is_computed_once(
    model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taut.inference import local

    laid_out, asked = [], []
    genuine = local.pack

    def pack(samples: Any, policy: Any) -> Any:
        packed = genuine(samples, policy)
        laid_out.append(packed.ids_T.numel())
        asked.append(sum(sample.num_tokens for sample in samples))
        return packed

    monkeypatch.setattr(local, "pack", pack)
    command.evaluate_tasks(configured(model, str(tasks / "choices.yaml")))
    assert sum(laid_out) < sum(asked) / 2


def test_a_table_is_printed_and_all_of_it_is_written(
    model: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model), f"tasks=lm-eval:{tasks / 'choices.yaml'}", "limit=3", "device=cpu"]
    assert cli.main(["eval", *words, f"out={tmp_path / 'out'}"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    accuracy = report["metrics"][0]
    assert (accuracy["task"], accuracy["name"], accuracy["num_scored"]) == ("choices", "acc", 3)
    assert accuracy["interval"] == "wilson" and accuracy["low"] <= accuracy["mean"]
    assert report["num_fewshot"] == {"choices": 2}
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[0])["task"] == "choices"
    printed = capsys.readouterr().out
    assert (
        "choices" in printed and "95% interval" in printed and "chat template: applied" in printed
    )
    assert cli.main(["eval", *words, f"out={tmp_path / 'out'}"]) == 2


def refusal(kind: type[TautError], model: Path, tasks: str, **keys: Any) -> str:
    with pytest.raises(kind) as error:
        command.evaluate_tasks(configured(model, tasks, **keys))
    return str(error.value)


def test_what_cannot_be_asked_is_refused_in_one_line(
    model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no file nowhere.yaml" in refusal(ConfigError, model, "nowhere.yaml")
    task = yaml.safe_load((tasks / "choices.yaml").read_text())
    moved = tmp_path / "moved.yaml"
    gone = {"test": str(tmp_path / "gone.jsonl")}
    moved.write_text(yaml.safe_dump({**task, "dataset_kwargs": {"data_files": gone}}))
    assert "task " in refusal(DataError, model, str(moved))
    online = tmp_path / "online.yaml"
    online.write_text(yaml.safe_dump({**task, "dataset_path": "owner/no-such-data"}))
    monkeypatch.setattr(hub, "settle", lambda: "no network")
    monkeypatch.setattr(hub, "offline_reason", lambda: "no network")
    assert "no network" in refusal(DataError, model, str(online))
    beam = {**yaml.safe_load((tasks / "answers.yaml").read_text())}
    beam["generation_kwargs"] = {"num_beams": 4}
    (tmp_path / "beam.yaml").write_text(yaml.safe_dump(beam))
    assert "asks for num_beams" in refusal(ConfigError, model, str(tmp_path / "beam.yaml"))


def test_settings_that_do_not_fit_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="write tasks=lm-eval:arc_easy"):
        from_mapping(EvaluateTasks, {"model": str(model), "tasks": "arc_easy"})
    server = {"engine": "server", "urls": "http://x/v1"}
    with pytest.raises(ConfigError, match="expected engine=local"):
        from_mapping(EvaluateTasks, {"model": str(model), "tasks": "lm-eval:a", **server})


@pytest.mark.slow  # the harness reads the files of all its tasks
def test_a_task_that_does_not_exist_has_a_suggestion(model: Path) -> None:
    line = refusal(ConfigError, model, "arc_easi")
    assert "did you mean arc_easy?" in line
