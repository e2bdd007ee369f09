"""Models that take pictures: loaded, refused, and with a scalar head, read by the library as the same number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.vision_models import tiny_vlm, vision_config
from tests.helpers.vision_samples import Drawn, Handle, Seeing
from transformers import AutoModelForSequenceClassification

from taut.data.packing import pack
from taut.errors import ModelError
from taut.evals.contract import facts_of
from taut.models import architecture, load
from taut.models.attention_backends import PREFIX, select
from taut.models.load import (
    checkpoint_dtype,
    load_config,
    load_model,
    load_skeleton,
    load_tokenizer,
    quiet_library,
)
from taut.models.precision import compute_context
from taut.models.reward_model import load_reward_model
from taut.models.save import saving
from taut.models.scorer import Scorer
from taut.models.self_test import library_scalars, run_self_test
from taut.models.settings import NewHead
from taut.types import Wants
from taut.vision import tower

CPU = torch.device("cpu")
REFERENCE = PREFIX + "reference"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


def open_model(path: Path, dtype: torch.dtype = torch.float64, **options: Any):
    return load_model(str(path), dtype=dtype, device=CPU, attention=REFERENCE, **options)


def test_the_language_model_has_taut_attention_and_the_tower_its_own(qwen: Path) -> None:
    model = open_model(qwen)
    assert model.model.language_model.config._attn_implementation == REFERENCE
    assert model.model.visual.config._attn_implementation == "sdpa"
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    load.set_attention(model, "eager")
    assert model.model.visual.config._attn_implementation == "sdpa"
    with pytest.raises(ModelError, match="uses the attention eager"):
        load.require_attention(model, REFERENCE)


def test_its_parts_are_found(qwen: Path) -> None:
    model = open_model(qwen)
    assert architecture.decoder(model) is model.model
    assert architecture.language_model(model) is model.model.language_model
    assert list(architecture.layers(model)) == list(model.model.language_model.layers)
    assert architecture.table_names(model) == ["model.language_model.embed_tokens"]
    skeleton = load_skeleton(str(qwen), load_config(str(qwen)))
    assert architecture.flops(skeleton).per_token == 6 * sum(
        p.numel() for p in architecture.layers(model).parameters() if p.ndim > 1
    )


def test_the_proofs_hold(qwen: Path) -> None:
    found = run_self_test(
        Scorer(open_model(qwen)), compute_context(torch.float64, CPU), torch.float64, 64
    )
    assert max(found.neighbor, found.future, found.head) < 1e-12
    assert (found.num_attention_layers, found.one_sample) == (2, None)


def test_each_part_is_said_to_have_the_dtype_it_is_saved_in(qwen: Path, tmp_path: Path) -> None:
    """Trained in float32, saved in the 16 bits of its weights: a run that goes on from it saves the same."""
    said = {"dtype": "float16", "text_config": {"dtype": "bfloat16"}}  # of its first language model
    base = change(qwen, tmp_path, **said)
    dtype = checkpoint_dtype(load_config(str(base)))
    assert dtype == torch.float16
    model, tokenizer = open_model(base, torch.float32), load_tokenizer(str(base))
    place = tmp_path / "saved"
    options: dict[str, Any] = {"stop_ids": [tokenizer.eos_token_id], "template": None}
    with saving(model, tokenizer, place, dtype=dtype, **options):
        pass
    config = json.loads((place / "config.json").read_text())
    parts = (config, config["text_config"], config["vision_config"])
    assert {part["dtype"] for part in parts} == {"float16"}
    assert facts_of(place, load_tokenizer(str(place))).dtype == "float16"
    assert model.config.text_config.dtype == torch.float32


def change(path: Path, directory: Path, **changes: Any) -> Path:
    """A copy whose config says something else."""
    for file in path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_family_that_is_not_known_is_refused(qwen: Path, tmp_path: Path) -> None:
    path = change(qwen, tmp_path, model_type="mistral3", vision_config={"model_type": "pixtral"})
    with pytest.raises(ModelError, match=r"mistral3 is no family .* expected one of qwen2_vl, "):
        open_model(path)
    with pytest.raises(ModelError, match="mistral3 is no family"):
        load_reward_model(str(path), NewHead(), dtype=torch.float32, device=CPU, attention="eager")


def test_all_pictures_are_expected_before_the_first_is_waited_for(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing, asked = Seeing.of("qwen2_5_vl", qwen), []
    sample = seeing.sample(
        "a", [Drawn(0, 28, 12), "and", Drawn(1, 16, 16), "and", Drawn(0, 28, 12)]
    )
    made = Handle.tensors
    monkeypatch.setattr(Handle, "expect", lambda self: asked.append(f"expect {self.drawn.seed}"))
    monkeypatch.setattr(
        Handle, "tensors", lambda self: (asked.append(f"tensors {self.drawn.seed}"), made(self))[1]
    )
    with torch.no_grad():
        tower.features_of(architecture.decoder(seeing.scorer.model), sample.media)
    assert asked == ["expect 0", "expect 1", "tensors 0", "tensors 1"]


def test_noise_in_a_tower_is_refused(tmp_path: Path) -> None:
    (tmp_path / "changed").mkdir()
    path = tiny_vlm("idefics3", tmp_path / "model")
    noisy = change(path, tmp_path / "changed", vision_config={"attention_dropout": 0.1})
    with pytest.raises(ModelError, match=r"config.vision_config.attention_dropout is 0.1"):
        open_model(noisy)


def test_blocks_that_see_both_ways_are_not_for_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    gemma = vision_config("gemma3")
    gemma.text_config.head_dim = 32  # the compiled flex kernel takes none below 16
    assert select("auto", gpu, torch.bfloat16, gemma).name == "flex"
    assert select("auto", gpu, torch.bfloat16, vision_config("internvl")).name == "varlen"


@pytest.mark.parametrize("kind", ["qwen2_vl", "internvl", "gemma3"])
def test_a_scalar_head_sees_pictures_and_is_saved_for_the_library(
    kind: str, tmp_path: Path
) -> None:
    path = tiny_vlm(kind, tmp_path / "model")
    options: dict[str, Any] = {"dtype": torch.float64, "device": CPU, "attention": REFERENCE}
    model = load_reward_model(str(path), NewHead(), **options)
    base = open_model(path)
    ours, theirs = architecture.decoder(model).state_dict(), architecture.decoder(base).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    seeing = Seeing.of(kind, path)
    rows = [seeing.sample("a", [Drawn(0, 28, 12), "A cat."]), seeing.sample("b", ["A cat."])]
    packed = pack([row.without_targets() for row in rows])
    with torch.no_grad(), compute_context(torch.float64, CPU):
        scalar_R = Scorer(model)(packed, wants=Wants(logp=False, scalar=True)).scalar_R
        alone = torch.cat([library_scalars(model, row, CPU) for row in rows])
    assert scalar_R is not None
    order = [packed.sample_ids.index(row.id) for row in rows]
    torch.testing.assert_close(scalar_R[order], alone, rtol=0, atol=1e-9)

    with quiet_library():
        model.save_pretrained(tmp_path / "saved")
        found, report = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "saved", dtype=torch.float64, output_loading_info=True
        )
    assert not any(report.values()), report
    assert torch.equal(found.score.weight, model.score.weight)
    assert found.config.architectures == [type(model).__name__]
