"""Before a model is saved, taut asks it a few held-out prompts and sees whether it ends its answers by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.chat_runs import QUIET, events, save_model, sft, words_of, write_rows
from tests.helpers.tiny_models import STATEFUL

from taut import cli
from taut.data.dataset import Dataset, load_dataset
from taut.data.render.render import Renderer
from taut.data.settings import DataConfig
from taut.errors import CheckFailed, ConfigError
from taut.evals.settings import StopCheckConfig
from taut.evals.stopping import Stops, choose
from taut.losses.settings import DpoConfig
from taut.methods.dpo import Dpo
from taut.methods.method import RunConfig
from taut.methods.orpo import Orpo
from taut.models.load import load_tokenizer
from taut.train.log import Event

ASK: dict[str, Any] = {
    "dtype": "float32",
    "stop_check__prompts": 8,
    "stop_check__max_new_tokens": 12,
}
DATA = DataConfig(train="rows.jsonl")
LEARNED: dict[str, Any] = {
    "steps": 120,
    "optim__learning_rate": 3e-3,
    "batch__samples_per_step": 16,
}


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """Chats that all have the same short answer, quickly learned."""
    asked = [f"{left} {right}" for left in ("cat", "dog", "red", "big") for right in range(4)]
    return write_rows(tmp_path / "short.jsonl", [chat(text, "the end") for text in asked])


def chat(ask: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    }


def stop_check(out: Path) -> Event:
    (found,) = [event for event in events(out, "check") if event["name"] == "stop"]
    return found


def test_the_share_itself_is_enough() -> None:
    """0.55 * 20 is a little more than 11 in floating point."""
    assert Stops(20, 11, 0, wanted=0.55, end_probability=1.0, examples=()).is_enough
    assert not Stops(20, 10, 0, wanted=0.55, end_probability=1.0, examples=()).is_enough


def test_a_model_that_has_learned_to_stop_passes(model: Path, short: Path, tmp_path: Path) -> None:
    result = sft(model, short, tmp_path / "out", **ASK, **LEARNED, stop_check__min_share=0.85)
    assert result.stops is not None
    assert result.stops.num_asked == 8
    assert result.stops.num_ended >= 7  # drawn, by streams that the path of the data has a part in
    assert result.stops.end_probability > 0.9
    assert result.warning is None
    assert stop_check(result.out)["outcome"] == "passed"
    (end,) = events(result.out, "end")
    assert end["stop"]["ended"] == result.stops.num_ended
    assert end["stop"]["cause"] is None


def test_one_that_has_not_is_told_loudly_and_saved(
    model: Path, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    keys = {
        **QUIET,
        "stop_check.prompts": 8,
        "stop_check.max_new_tokens": 12,
        "steps": 1,
        "out": str(out),
    }
    code = cli.main(["sft", f"model={model}", f"data.train={short}", *words_of(keys)])
    assert code == 0
    assert (out / "model" / "model.safetensors").is_file()
    told = capsys.readouterr().err
    assert "may not stop" in told
    assert "the end has a probability of" in told
    assert "short.jsonl:" in told  # an example
    check = stop_check(out)
    assert check["outcome"] == "warning"  # the exit code is 0
    assert check["value"] < 0.9
    (end,) = events(out, "end")
    assert end["outcome"] == "finished"
    assert end["stop"]["ended"] < 8
    assert len(end["stop"]["examples"]) == 3
    assert "has not learned to end" in end["stop"]["cause"]


def test_the_cause_is_one_that_the_method_can_have() -> None:
    compared = Stops(4, 0, 0, wanted=0.9, end_probability=0.01, examples=(), is_taught=False)
    assert "begin with one that does" in compared.cause
    assert "train longer" not in compared.cause
    assert "train longer" not in replace(compared, end_probability=0.9).cause
    assert RunConfig(model="m", data=DATA).teaches_ends
    assert not Dpo(model="m", data=DATA).teaches_ends
    assert Dpo(model="m", data=DATA, dpo=DpoConfig(sft_weight=0.5)).teaches_ends
    assert Orpo(model="m", data=DATA).teaches_ends


def test_required_and_not_there_fails_the_run_and_keeps_its_state(
    model: Path, short: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckFailed, match=r"stop_check\.required=true, so no model is written"):
        sft(model, short, out, **ASK, steps=1, stop_check__required=True)
    assert stop_check(out)["outcome"] == "failed"
    assert not (out / "model").exists()
    assert (out / "checkpoints" / "step-000001" / "meta.json").is_file()
    (end,) = events(out, "end")
    assert end["outcome"] == "stopped"


def test_layers_with_state_skip_it_or_are_refused_before_training(
    short: Path, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "stateful", STATEFUL[0])
    out = sft(model, short, tmp_path / "out", **ASK, steps=1).out
    assert stop_check(out)["outcome"] == "skipped"
    assert "layers with state" in stop_check(out)["detail"]
    with pytest.raises(ConfigError, match=r"stop_check.required=true.*layers with state"):
        sft(model, short, tmp_path / "refused", **ASK, steps=1, stop_check__required=True)
    assert not (tmp_path / "refused").exists()


def dataset_of(model: Path, rows: list[dict[str, Any]], place: Path, **keys: Any) -> Dataset:
    tokenizer = load_tokenizer(str(model))
    config = DataConfig(train=str(write_rows(place / "rows.jsonl", rows)), **keys)
    return load_dataset(config, "train", Renderer(tokenizer), keys.get("max_length", 500), place)


def test_long_answers_are_begun_and_cut_ones_left_out(model: Path, tmp_path: Path) -> None:
    stop = Renderer(load_tokenizer(str(model))).stop_ids
    rows = [chat("cat", "red " * 40 + "house"), chat("dog", "blue"), chat("dog", "red")]
    data = dataset_of(model, rows, tmp_path)
    asked = choose(data, stop, StopCheckConfig(prompts=5, max_new_tokens=16), None, seed=0)
    assert len(asked) == 2  # two rows have one prompt
    for one in asked:
        size = one.prompt.ids_T.size
        whole = one.reference.ids_T
        assert np.array_equal(whole[:size], one.prompt.ids_T)
        assert whole[-1] in stop
        assert one.reference.target_at_N.tolist() == [whole.size - 1]
        assert one.is_begun == (whole.size > 60)
        assert not one.is_begun or whole.size - size == 8
    cut = dataset_of(model, rows, tmp_path, max_length=30, too_long="truncate")
    ids = {one.prompt.id for one in choose(cut, stop, StopCheckConfig(), None, seed=0)}
    assert len(cut) == 3
    assert len(ids) == 1


def test_the_choice_is_a_function_of_the_seed(model: Path, tmp_path: Path) -> None:
    stop = Renderer(load_tokenizer(str(model))).stop_ids
    data = dataset_of(model, [chat(f"cat {n}", "red") for n in range(40)], tmp_path)
    first, again, other = (
        [one.prompt.id for one in choose(data, stop, StopCheckConfig(prompts=6), None, seed)]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 6
