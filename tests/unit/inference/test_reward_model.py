"""A reward model in this process as a reward: the library's numbers, in the answers' order, beside other rewards."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file
from tests.helpers.chat_runs import save_model
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.tools.score.test_score import chat, messages, save_reward, theirs
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from taut.config import fields_of, from_mapping
from taut.errors import ConfigError, ModelError
from taut.inference.http_server import listen
from taut.inference.reward_model import open_judge, open_rater
from taut.inference.settings import JudgeUse
from taut.models.settings import NewHead
from taut.rewards import RewardInput
from taut.rewards.judge import RewardModel, RewardServer
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import RewardSpec
from taut_tools.serve.batcher import Batcher
from taut_tools.serve.reward import build_app
from taut_tools.serve.settings import ServeReward


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward(tmp_path_factory.mktemp("sequence"), NewHead(seed=3))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward(tmp_path_factory.mktemp("process"), NewHead("process", seed=3))


def test_answers_get_the_library_s_numbers_and_those_that_cannot_be_read_are_errors(
    model: Path,
) -> None:
    question = tuple(messages("Who sat?", "")[:1])
    spec = RewardSpec(
        name="reward_model", weight=2.0, options={"model": str(model), "dtype": "float64"}
    )
    answers = [
        RewardInput(text="the cat", prompt=question, references=("the cat",)),
        RewardInput(text="a dog " * 1000, prompt=question, references=("the cat",)),
        RewardInput(text="a dog", prompt=question, references=("the cat",)),
        RewardInput(
            text="", prompt=question, messages=({"role": "assistant", "content": "a dog"},)
        ),
    ]
    with open_rewards([spec, "exact_match"], open_rater=open_rater) as reward_set:
        reward_results = reward_set.grade(answers)
        assert reward_set.grade([]) == []
    scores = [reward_result.parts["reward_model"] for reward_result in reward_results]
    cat, dog = theirs(model, [chat("Who sat?", "the cat"), chat("Who sat?", "a dog")])
    assert [scores[k].value for k in (0, 2, 3)] == pytest.approx(
        [float(cat), float(dog), float(dog)], abs=1e-9
    )
    assert "expected at most" in str(scores[1].error)
    assert reward_results[0].total == pytest.approx(2 * float(cat) + 1)
    assert reward_results[1].total is None


def test_its_options_are_those_of_a_model_that_scores() -> None:
    mine, theirs = fields_of(RewardModel), fields_of(JudgeUse)
    assert list(mine) == [*theirs, "steps"]
    for name in theirs:
        assert (mine[name].annotation, mine[name].default) == (
            theirs[name].annotation,
            theirs[name].default,
        )


def at_ends(model: Path, text: str, answer: str, ends: list[int]) -> list[float]:
    """The library's numbers at the tokens that hold these characters of the answer, as probabilities."""
    (logits,) = theirs(model, [text], AutoModelForTokenClassification)
    offsets = tiny_tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
    start = text.rindex(answer)
    tokens = [
        next(k for k, (_, stop) in enumerate(offsets["offset_mapping"]) if stop >= start + end)
        for end in ends
    ]
    return [1 / (1 + math.exp(-float(logits[k]))) for k in tokens]


def test_each_step_gets_the_library_s_number_at_its_last_token(steps: Path) -> None:
    options: dict[str, Any] = {"model": str(steps), "dtype": "float64"}
    options["steps"] = {"separator": "\n\n", "aggregate": "product", "charge": True}
    spec = RewardSpec(name="reward_model", weight=2.0, options=options)
    question = tuple(messages("Who sat?", "")[:1])
    text = "the cat sat\n\non the mat\n\n"
    answers = [
        RewardInput(text=text, prompt=question),
        RewardInput(text=" the cat sat\n\non the mat", prompt="Who sat?"),
        RewardInput(text="\n\n", prompt=question),
    ]
    with open_rewards([spec], open_rater=open_rater) as reward_set:
        chatted, plain, nothing = reward_set.grade(answers)
    first, second = at_ends(steps, chat("Who sat?", text), text.strip(), [11, 23])
    assert chatted.total == pytest.approx(2 * first * second, abs=1e-9)
    assert [end for end, _ in chatted.steps] == [11, 23]
    charges = [2 * first, 2 * first * second - 2 * first]
    assert [charge for _, charge in chatted.steps] == pytest.approx(charges, abs=1e-9)
    assert chatted.parts["reward_model"].reply == f"steps {first:.3f} {second:.3f}"
    whole = f"Who sat? the cat sat\n\non the mat{tiny_tokenizer().eos_token}"
    product = math.prod(at_ends(steps, whole, "the cat sat\n\non the mat", [11, 23]))
    assert plain.total == pytest.approx(2 * product, abs=1e-9)
    assert (nothing.total, nothing.steps) == (0.0, ())


def with_two_labels(steps: Path, place: Path, right: int) -> Path:
    """The process model with two labels: the one at ``right`` has the head's number more than the other."""
    shutil.copytree(steps, place)
    weights = load_file(place / "model.safetensors")
    one = weights["score.weight"]
    rows = [one, 2 * one] if right else [2 * one, one]
    save_file(
        weights | {"score.weight": torch.cat(rows)}, place / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((place / "config.json").read_text())
    names = ["bad", "good"] if right else ["good", "bad"]
    config["id2label"] = dict(enumerate(names))
    config["label2id"] = {name: number for number, name in enumerate(names)}
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("right", [0, 1])
def test_of_two_labels_the_right_one_s_probability_is_the_step_s(
    steps: Path, tmp_path: Path, right: int
) -> None:
    """By hand: softmax([w h, 2 w h]) gives the second label 1 / (1 + exp(-w h)), what the model of one label says. And
    from the library: the softmax of its two logits at each step's end.
    """
    two, text = with_two_labels(steps, tmp_path / "two", right), "the cat sat\n\non the mat"
    question = tuple(messages("Who sat?", "")[:1])
    values = []
    for model in (steps, two):
        options = {"model": str(model), "dtype": "float64", "steps": {"separator": "\n\n"}}
        spec = RewardSpec(name="reward_model", options=options)
        with open_rewards([spec], open_rater=open_rater) as reward_set:
            (reward_result,) = reward_set.grade([RewardInput(text=text, prompt=question)])
        values.append(reward_result.total)
    assert values[1] == pytest.approx(values[0], abs=1e-9)
    (logits,) = theirs(two, [chat("Who sat?", text)], AutoModelForTokenClassification)
    p_T = logits.softmax(-1)[:, right]
    assert min(abs(p_T - values[1]).tolist()) < 1e-9
    config = json.loads((two / "config.json").read_text())
    config["id2label"] = {"0": "x", "1": "y"}
    (two / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has the labels x, y; expected one that says"):
        open_judge(JudgeUse(model=str(two)))


def test_with_a_mark_a_step_is_read_at_the_mark(steps: Path) -> None:
    question = tuple(messages("Who sat?", "")[:1])
    options: dict[str, Any] = {"model": str(steps), "dtype": "float64"}
    options["steps"] = {"separator": "\n\n", "aggregate": "product", "mark": " dog"}
    spec = RewardSpec(name="reward_model", options=options)
    with open_rewards([spec], open_rater=open_rater) as reward_set:
        (reward_result,) = reward_set.grade(
            [RewardInput(text="the cat\n\n\n\non the mat\n\n", prompt=question)]
        )
    read = "the cat dog\n\non the mat dog"
    first, second = at_ends(steps, chat("Who sat?", read), read, [11, 27])
    assert reward_result.total == pytest.approx(first * second, abs=1e-9)
    with refused(ErrorCode("steps.mark")):
        from_mapping(
            RewardServer,
            {"url": "http://127.0.0.1:5000", "steps": {"separator": ";", "mark": " dog"}},
        )


def test_of_a_language_model_two_tokens_are_compared_after_each_step(tmp_path: Path) -> None:
    """As Math-Shepherd is read: the softmax of the library's two logits at the mark."""
    model = save_model(tmp_path, "llama", dtype=torch.float64)
    tokens = tiny_tokenizer().convert_ids_to_tokens([40, 41])
    options: dict[str, Any] = {"model": str(model), "dtype": "float64"}
    options["steps"] = {"separator": "\n", "mark": " dog", "tokens": tokens}
    spec = RewardSpec(name="reward_model", options=options)
    question = tuple(messages("Who sat?", "")[:1])
    with open_rewards([spec], open_rater=open_rater) as reward_set:
        (reward_result,) = reward_set.grade([RewardInput(text="the cat", prompt=question)])
    (logits,) = theirs(model, [chat("Who sat?", "the cat dog")], AutoModelForCausalLM)
    p_T = logits[:, [40, 41]].softmax(-1)[:, 0]
    assert min(abs(p_T - reward_result.total).tolist()) < 1e-9
    options["steps"]["tokens"] = ["the cat sat", tokens[1]]
    spec = RewardSpec(name="reward_model", options=options)
    with (
        pytest.raises(ConfigError, match=r"steps\.tokens: 'the cat sat' is \d+ tokens"),
        open_rewards([spec], open_rater=open_rater),
    ):
        pass


def test_steps_ask_for_a_process_model(model: Path) -> None:
    options = {"model": str(model), "steps": {"separator": ";"}}
    with pytest.raises(ConfigError, match=r"steps.separator is set, and .* gives one number for a"):
        open_rewards([RewardSpec(name="reward_model", options=options)], open_rater=open_rater)


def test_a_server_gives_the_steps_the_same_numbers(steps: Path, model: Path) -> None:
    options = {"separator": "\n\n", "aggregate": "mean", "charge": True}
    text, question = "the cat sat\n\non the mat", tuple(messages("Who sat?", "")[:1])
    answers = [
        RewardInput(text=text, prompt=question),
        RewardInput(text="", prompt=question),
        RewardInput(text=f" {text}", prompt="Who sat?"),
    ]
    here = RewardSpec(
        name="reward_model", options={"model": str(steps), "dtype": "float64", "steps": options}
    )
    with open_rewards([here], open_rater=open_rater) as reward_set:
        wanted = reward_set.grade(answers)
    with served(steps) as url:
        there = RewardSpec(name="reward_server", options={"url": url, "steps": options})
        with open_rewards([there]) as reward_set:
            found = reward_set.grade(answers)
    for mine, theirs_ in zip(found, wanted, strict=True):
        assert mine.total == pytest.approx(theirs_.total, abs=1e-9)
        assert [end for end, _ in mine.steps] == [end for end, _ in theirs_.steps]
        charges = [charge for _, charge in theirs_.steps]
        assert [charge for _, charge in mine.steps] == pytest.approx(charges, abs=1e-9)
    with served(model) as url:
        there = RewardSpec(name="reward_server", options={"url": url, "steps": options})
        with open_rewards([there]) as reward_set:
            (reward_result,) = reward_set.grade(answers[:1])
    assert "step_separator: " in str(reward_result.error)
    assert "gives one number for a whole answer; expected a process model" in str(
        reward_result.error
    )


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """The URL of a reward server of this model."""
    config = from_mapping(ServeReward, {"model": str(model), "dtype": "float64", "port": 0})
    batcher = Batcher(open_judge(config))
    server = uvicorn.Server(uvicorn.Config(build_app(batcher, config), log_level="error"))
    with contextlib.closing(listen("127.0.0.1", 0, backlog=8)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
    batcher.close()


def test_several_threads_may_ask_at_a_time(model: Path) -> None:
    """A model judges for one after another; each gets its own numbers."""
    question = tuple(messages("Who sat?", "")[:1])
    spec = RewardSpec(name="reward_model", options={"model": str(model), "dtype": "float64"})
    groups = [[RewardInput(text="the cat " * k, prompt=question)] * 2 for k in range(1, 9)]
    with open_rewards([spec, "stop"], open_rater=open_rater) as reward_set:
        alone = [reward_set.grade(group) for group in groups]
        with ThreadPoolExecutor(8) as threads:
            together = list(threads.map(reward_set.grade, groups))
    assert [[v.total for v in group] for group in together] == [
        pytest.approx([v.total for v in group], abs=1e-9) for group in alone
    ]
