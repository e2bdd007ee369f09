"""The settings of a loaded model, and one line for each directory that cannot be used, damaged or hostile."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.tiny_models import logits_of, save_tiny, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from taut.errors import ModelError
from taut.io import files
from taut.models import load
from taut.models.attention_backends import PREFIX

CPU = torch.device("cpu")


def load_tiny(path: Path, dtype: torch.dtype = torch.float32, attention: str = "eager"):
    return load.load_model(str(path), dtype=dtype, device=CPU, attention=attention)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_parameters_are_full_precision_masters(
    tmp_path: Path, dtype: torch.dtype, held: torch.dtype
) -> None:
    model = load_tiny(save_tiny("gemma3", tmp_path), dtype)
    assert {p.dtype for p in model.parameters()} == {held}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {held}
    assert model.training
    assert model.config.use_cache is False
    same = torch.allclose(logits_of(model), logits_of(tiny_model("gemma3", dtype=held)), atol=1e-5)
    assert same


def test_attention_is_in_force_everywhere(tmp_path: Path) -> None:
    model = load_tiny(save_tiny("qwen2", tmp_path), attention=PREFIX + "reference")
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    assert {config._attn_implementation for config in configs} == {PREFIX + "reference"}
    model.model.config = tiny_model("qwen2").config
    with pytest.raises(ModelError, match="uses the attention eager; expected taut_"):
        load.require_attention(model, PREFIX + "reference")


def test_experts_are_eager_in_float64_and_the_router_loss_is_off(tmp_path: Path) -> None:
    path = save_tiny("qwen3_moe", tmp_path, output_router_logits=True)
    model = load_tiny(path, torch.float64)
    assert model.config._experts_implementation == "eager"
    assert model.config.output_router_logits is False
    assert torch.isfinite(logits_of(model)).all()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("phi3", "resid_pdrop"),
        ("qwen2", "attention_dropout"),
        ("llama4_text", "router_jitter_noise"),
    ],
)
def test_noise_inside_a_model_is_refused(name: str, field: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path, **{field: 0.1})
    with pytest.raises(ModelError, match=rf"config\.{field} is 0\.1; expected 0"):
        load_tiny(path)


def test_dropout_that_no_config_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaMLP.__init__

    def with_dropout(self: LlamaMLP, config: LlamaConfig) -> None:
        own(self, config)
        self.noise = torch.nn.Dropout(0.2)

    monkeypatch.setattr(LlamaMLP, "__init__", with_dropout)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.noise is 0\.2"):
        load_tiny(save_tiny("llama", tmp_path))


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    cases: list[tuple[str, str]] = [
        (str(tmp_path / "missing"), "does not exist; expected a model directory"),
        (str(path / "config.json"), "is a file; expected a model directory"),
        (str(tmp_path), r"has no config.json; .* did you mean .*/model\?"),
    ]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    cases.append((str(adapter), r"is an adapter.*lora\.adapter"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    cases.append((str(broken), "config.json is not JSON"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((path / "config.json").read_text())
    cases.append((str(empty), "has no weights; expected model.safetensors"))
    unknown = save_tiny("llama", tmp_path / "unknown")
    edit_config(unknown, model_type="no_such_architecture")
    cases.append((str(unknown), "cannot be loaded as a configuration"))
    for directory, message in cases:
        with pytest.raises(ModelError, match=message) as caught:
            load_tiny(Path(directory))
        assert "\n" not in str(caught.value)


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weight\(s\), model\.layers\.1\.mlp\.up_proj"):
        load_tiny(path)
    (path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_tiny(path)


def with_more(path: Path, **more: torch.Tensor) -> None:
    weights = load_file(path / "model.safetensors")
    save_file({**weights, **more}, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_a_config_that_drops_layers_is_refused(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path)
    kinds = json.loads((path / "config.json").read_text()).get("layer_types")
    edit_config(path, num_hidden_layers=1, **({"layer_types": kinds[:1]} if kinds else {}))
    says = r"weight\(s\) that its config\.json leaves out, model\.layers\.1\."
    with pytest.raises(ModelError, match=says):
        load_tiny(path)


def test_a_config_that_drops_a_bias_is_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    with_more(path, **bias)
    with pytest.raises(
        ModelError, match=r"1 weight\(s\) that its config\.json leaves out, .*q_proj\.bias"
    ):
        load_tiny(path)


def test_weights_of_what_the_model_is_not_made_of_are_let_be(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    further = {
        "v_head.summary.weight": torch.zeros(1, 32),
        "mtp.layers.0.norm.weight": torch.zeros(32),
    }
    with_more(path, **further, **{"model.layers.2.input_layernorm.weight": torch.zeros(32)})
    edit_config(path, num_nextn_predict_layers=1)
    load_tiny(path)


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    edit_config(path, intermediate_size=56)
    with pytest.raises(ModelError):
        load_tiny(path)


def test_tokenizer_and_template(tmp_path: Path) -> None:
    path = save_tiny("qwen2", tmp_path / "with", tiny_tokenizer())
    tokenizer = load.load_tokenizer(str(path))
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    bare = save_tiny("qwen2", tmp_path / "without")
    with pytest.raises(ModelError, match="has no tokenizer; expected"):
        load.load_tokenizer(str(bare))


def test_the_checkpoints_dtype_and_context_are_read_from_its_config(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path, dtype=torch.bfloat16)
    config = load.load_config(str(path))
    assert load.checkpoint_dtype(config) == torch.bfloat16
    assert load.context_length(config) == 256


def test_freezing_by_pattern() -> None:
    model = tiny_model("llama")
    frozen = load.freeze(model, ["model.embed_tokens.*", r"/layers\.0\..*proj/"])
    assert len(frozen) == 8
    assert all(p.requires_grad == (n not in frozen) for n, p in model.named_parameters())
    with pytest.raises(ModelError, match=r"'mlp' matches no parameter; did you mean '\*mlp\*'"):
        load.freeze(model, ["mlp"])
    with pytest.raises(ModelError, match="leaves no parameter to train"):
        load.freeze(model, ["*"])


def test_freezing_goes_by_the_order_of_patterns() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    names = [name for name, _ in model.named_parameters()]
    last = [name for name in names if ".layers.2." in name or ".layers.3." in name]
    frozen = load.frozen_names(model, ["*", "!layers[-2:]"])
    assert [name for name in names if name not in frozen] == last
    frozen = load.frozen_names(model, ["*", "!layers[1::2].mlp*", "!lm_head.*"])
    trains = [name for name in names if name not in frozen]
    assert len(trains) == 7
    assert all(re.search(r"layers\.[13]\.mlp\.|lm_head", name) for name in trains)
    assert load.frozen_names(model, ["layers[:]", "*norm*"])[-1] == "model.norm.weight"
    with pytest.raises(ModelError, match=r"'!layers\[0:1\]' matches no parameter that is frozen"):
        load.frozen_names(model, ["lm_head.*", "!layers[0:1]"])
    with pytest.raises(ModelError, match=r"'layers\[9:\]' matches no parameter"):
        load.frozen_names(model, ["layers[9:]"])


def test_a_share_freezes_the_first_parameters_as_ms_swift_counts() -> None:
    """Four tensors of 4, 6, 5 and 5 numbers. Half of 20 is 10, which is what the first two have; 49% are 9.8, of which
    the first alone has no more.
    """
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (4, 6, 5, 5)])
    assert load.frozen_names(model, ["50%"]) == ["0", "1"]
    assert load.frozen_names(model, ["49%"]) == ["0"]
    assert load.frozen_names(model, ["100%", "!3"]) == ["0", "1", "2"]
    with pytest.raises(ModelError, match="'10%' matches no parameter"):
        load.frozen_names(model, ["10%"])


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
        "a file of its weights is cut or damaged; copy or fetch it again",
    ),
    "no weights": (weights(lambda raw: b""), "is cut or damaged"),
    "a header of 2**62 bytes": (
        weights(lambda raw: (2**62).to_bytes(8, "little") + raw[8:]),
        "cannot be loaded as a causal",
    ),
    "a broken zip": (broken_zip, "cannot be loaded as a causal"),
}


@pytest.mark.parametrize("path", ["./nothere", "../nothere", "nothere", "/nothere/x"])
def test_a_path_to_nothing_is_no_name_at_the_hub(path: str) -> None:
    with pytest.raises(
        ModelError, match="does not exist; expected a model directory, or a hub name"
    ):
        load.load_config(path)


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
