"""Model directories that are damaged or hostile: each is refused in one line that names the file, before anything is
allocated and without waiting.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import save_tiny
from tests.tokenizers import tiny_tokenizer

from taut.errors import ModelError
from taut.io import files
from taut.models import load

SECONDS = 10
MEGABYTES = 500
"""That a refusal may take more than the process has already taken."""
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2", tmp_path_factory.mktemp("model") / "m", tiny_tokenizer())


def config(**changes: Any) -> Change:
    """Other values in config.json; ... takes a key away."""

    def change(directory: Path) -> None:
        found = json.loads((directory / "config.json").read_text()) | changes
        kept = {key: value for key, value in found.items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(kept))

    return change


def text(name: str, content: str) -> Change:
    return lambda directory: (directory / name).write_text(content)


def fifo(name: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return change


def device(name: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to("/dev/zero")

    return change


def shards(weight_map: Any, *, is_fifo: bool = False) -> Change:
    """The weights in one shard, under an index; the shard itself may be a FIFO."""

    def change(directory: Path) -> None:
        shard = directory / "model-00001-of-00001.safetensors"
        (directory / "model.safetensors").rename(shard)
        if is_fifo:
            shard.unlink()
            os.mkfifo(shard)
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(index)

    return change


def weights(change: Callable[[bytes], bytes]) -> Change:
    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def broken_zip(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + b"x" * 999)


NO_TYPES: Any = ...
DAMAGES: dict[str, tuple[Change, str]] = {
    "1e9 layers": (
        config(num_hidden_layers=10**9, layer_types=NO_TYPES),
        r"config\.json: found num_hidden_layers=1000000000; expected at most 2,000 layers",
    ),
    "20,000 layers": (
        config(num_hidden_layers=20_000, layer_types=NO_TYPES),
        "at most 2,000 layers",
    ),
    "layers of a part": (config(text_config={"n_layer": 10**9}), "found n_layer=1000000000"),
    "layers below 0": (config(num_hidden_layers=-1), "found num_hidden_layers=-1"),
    "layers of text": (config(num_hidden_layers="x"), "Field 'num_hidden_layers' expected int"),
    "1e9 labels": (config(num_labels=10**9), "found num_labels=1000000000"),
    "a vocabulary of 1e12": (
        config(vocab_size=10**12),
        "expected a size of weights that have at m",
    ),
    "a width of 1e9": (config(hidden_size=10**9), "found hidden_size=1000000000"),
    "a width of 1e18": (config(hidden_size=10**18), "found hidden_size=1000000000000000000"),
    "1e9 heads": (config(num_attention_heads=10**9), "found num_attention_heads=1000000000"),
    "no heads": (config(num_attention_heads=0), "cannot be loaded as a causal language model"),
    "a context of 1e15": (config(max_position_embeddings=10**15), "found max_position_embeddings="),
    "a context of 0": (config(max_position_embeddings=0), "found max_position_embeddings=0"),
    "NaN": (config(rms_norm_eps=float("nan")), "found rms_norm_eps=nan; expected a number"),
    "NaN in a table": (
        config(rope_parameters={"rope_theta": float("nan")}),
        "found rope_theta=nan",
    ),
    "a list": (text("config.json", "[1]"), r"config\.json: found a list; expected a JSON object"),
    "nothing": (text("config.json", ""), r"config\.json is not JSON"),
    "nested deeply": (
        text("config.json", '{"a":' + "[" * 100_000),
        r"config\.json is not JSON .*nested",
    ),
    "nested, and closed": (
        text("config.json", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        r"config\.json is not JSON .*nested",
    ),
    "an unknown family": (config(model_type="nosuch"), "nosuch"),
    "a family of a list": (config(model_type=[1]), "cannot be loaded as a configuration"),
    "architectures of a number": (config(architectures=5), "found architectures=5"),
    "a part of a number": (config(text_config=5), "found text_config=5; expected a table"),
    "RoPE of a number": (config(rope_parameters=5), "found rope_parameters=5; expected a table"),
    "an end of text": (config(eos_token_id="x"), "found eos_token_id=x; expected a token id"),
    "an end of 1e12": (config(eos_token_id=10**12), "found eos_token_id=1000000000000"),
    "ends of lists": (config(eos_token_id=[[1]]), "cannot be loaded as a configuration"),
    "padding outside": (config(pad_token_id=10**6), "cannot be loaded as a causal language model"),
    "an activation of a list": (config(hidden_act=[1]), "cannot be loaded as a configuration"),
    "code": (
        config(model_type="nosuch", auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Y"}),
        "cannot be loaded as a configuration",
    ),
    "ends of generation": (
        text("generation_config.json", '{"eos_token_id": "x"}'),
        r"generation_config\.json: found eos_token_id=x",
    ),
    "a FIFO as configuration": (fifo("config.json"), "config.json"),
    "a FIFO as weights": (
        fifo("model.safetensors"),
        r"model\.safetensors cannot be read: it is a FIFO",
    ),
    "a FIFO as tokenizer": (
        fifo("tokenizer.json"),
        r"tokenizer\.json cannot be read: it is a FIFO",
    ),
    "a FIFO as template": (fifo("chat_template.jinja"), "it is a FIFO"),
    "a FIFO as any file": (fifo("added_tokens.json"), "it is a FIFO; expected a regular file"),
    "a device as weights": (device("model.safetensors"), "it is a character device"),
    "a FIFO as shard": (
        shards({"a": "model-00001-of-00001.safetensors"}, is_fifo=True),
        "it is a FIFO; expected a regular file",
    ),
    "a shard elsewhere": (shards({"a": "../../x.safetensors"}), "it names the weights '../../x"),
    "a shard of a number": (shards({"a": 5}), "weight_map is no table of file names"),
    "an index of a number": (shards(5), "weight_map is no table of file names"),
    "half of the weights": (
        weights(lambda raw: raw[: len(raw) // 2]),
        "cannot be loaded as a causal",
    ),
    "no weights": (weights(lambda raw: b""), "cannot be loaded as a causal"),
    "a header of 2**62 bytes": (
        weights(lambda raw: (2**62).to_bytes(8, "little") + raw[8:]),
        "cannot be loaded as a causal",
    ),
    "a broken zip": (broken_zip, "cannot be loaded as a causal"),
}


def load_all(directory: Path) -> None:
    load.stop_ids_in_files(str(directory), load.load_config(str(directory)))
    load.load_tokenizer(str(directory))
    load.load_model(
        str(directory), dtype=torch.float32, device=torch.device("cpu"), attention="eager"
    )


def test_files_of_other_programs_are_left_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the manner of a cache of the hub: every file is a link."""
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "search.index.json").write_text("[]")
    (tmp_path / "training.log").write_text("")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nothing")
    opened = files.open_regular

    def forbidden(path: str | os.PathLike[str]) -> io.BufferedReader:
        if str(path).endswith("training.log"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(files, "open_regular", forbidden)
    load_all(tmp_path)


def memory() -> float:
    """Megabytes that the process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("kind", DAMAGES)
def test_it_is_refused_in_one_line(kind: str, model: Path, tmp_path: Path) -> None:
    change, message = DAMAGES[kind]
    directory = tmp_path / "m"
    shutil.copytree(model, directory)
    change(directory)
    load.load_config(str(model))  # what the library imports on its first use is not counted
    began, before = time.perf_counter(), memory()
    with pytest.raises(ModelError, match=message) as caught:
        load_all(directory)
    assert time.perf_counter() - began < SECONDS
    assert memory() - before < MEGABYTES
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and len(line) < 700
    assert str(directory) in line


def test_one_that_is_not_damaged_is_loaded(model: Path) -> None:
    load_all(model)


def test_a_link_to_nothing_is_no_obstacle(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "m" / "training_args.bin").symlink_to("gone")
    load_all(tmp_path / "m")
