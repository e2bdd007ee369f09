"""However samples with pictures are laid out, log-probabilities and gradients are the same, and the library's own.

For every family: pictures of different sizes, two in one sample, one that several questions are asked of, two of equal
size, and a sample of text alone. Reference: each sample by itself through the library's own towers, positions and
masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.vision_models import EVERY
from tests.helpers.vision_samples import Drawn, Handle, Seeing
from torch import Tensor, nn

from taut.data.packing import ALONE, PackPolicy, common_prefix, pack
from taut.errors import ModelError
from taut.models import architecture
from taut.models.precision import compute_context
from taut.models.self_test import library_logps
from taut.types import Packed, Sample
from taut.vision import tower

CPU = torch.device("cpu")
LIMIT = 1e-9
SHARE_ALL = PackPolicy(share_prefixes=True, min_saved_tokens=1)

CAT, DOG, BIRD, ANT = Drawn(0, 28, 12), Drawn(1, 28, 12), Drawn(2, 9, 30), Drawn(3, 16, 16)
LAYOUTS: dict[str, Callable[[Sequence[Sample]], list[Packed]]] = {
    "packed": lambda samples: [pack(samples, ALONE)],
    "shared": lambda samples: [pack(samples, SHARE_ALL)],
    "split": lambda samples: [pack(samples[:1], ALONE), pack(samples[1:], SHARE_ALL)],
}


@pytest.fixture(scope="module", params=EVERY)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing.of(request.param, tmp_path_factory.mktemp(request.param))


def samples_of(seeing: Seeing) -> list[Sample]:
    return [
        seeing.sample("cat 1", ["Look: ", CAT, "What is it? A cat."]),
        seeing.sample("cat 2", ["Look: ", CAT, "What does it do? It sat."]),
        seeing.sample("dog", ["Look: ", DOG, "What is it? A dog."]),
        seeing.sample("two", ["Look: ", BIRD, "and", ANT, "Which is small? The ant."]),
        seeing.sample("text", ["Look: the cat sat on the mat."]),
    ]


def measure(seeing: Seeing, layouts: list[Packed]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """logp_N of each sample, and the gradient of each parameter of a sum of them."""
    scorer = seeing.scorer
    scorer.zero_grad()
    logps: dict[str, Tensor] = {}
    with compute_context(torch.float64, CPU):
        for packed in layouts:
            logp_N = scorer(packed).logp_N
            logp_N.sum().backward()
            for row, name in enumerate(packed.sample_ids):
                logps[name] = logp_N[packed.row_N == row].detach()
    return logps, gradients(scorer.model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """A gradient that is rounding itself is held to the others' size."""
    assert found.keys() == expected.keys()
    least = 1e-6 * max(float(value.norm()) for value in expected.values())
    gaps = {
        name: float((found[name] - value).norm() / value.norm().clamp_min(least))
        for name, value in expected.items()
    }
    assert max(gaps.values()) <= LIMIT, max(gaps.items(), key=lambda item: item[1])


def library(
    seeing: Seeing, samples: Sequence[Sample]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same of each sample alone, as the library computes it."""
    model = seeing.scorer.model
    model.zero_grad()
    logps: dict[str, Tensor] = {}
    with compute_context(torch.float64, CPU):
        for sample in samples:
            logp_N = library_logps(model, sample, CPU)
            logp_N.sum().backward()
            logps[sample.id] = logp_N.detach()
    return logps, gradients(model)


def test_every_layout_gives_what_the_library_gives_alone(seeing: Seeing) -> None:
    samples = samples_of(seeing)
    expected = library(seeing, samples)
    for layout in LAYOUTS.values():
        logps, grads = measure(seeing, layout(samples))
        require_equal(logps, expected[0])
        require_equal(grads, expected[1])
    reached = {name for name, grad in expected[1].items() if grad.any()}
    parts = dict(architecture.decoder(seeing.scorer.model).named_children())
    assert parts.keys() <= {name.split(".")[1] for name in reached}


def test_a_shared_picture_is_computed_once(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    compute = tower._compute

    def count(backbone: nn.Module, pictures: Sequence[tower.Tensors]) -> list[tower.Features]:
        seen.append(len(pictures))
        return compute(backbone, pictures)

    monkeypatch.setattr(tower, "_compute", count)
    samples = samples_of(seeing)
    shared, repeated = pack(samples, SHARE_ALL), pack(samples, ALONE)
    with torch.no_grad():
        seeing.scorer(shared)
        assert sum(seen) == 4
        seen.clear()
        seeing.scorer(repeated)
    assert sum(seen) == 4
    assert (len(shared.media), len(repeated.media)) == (4, 5)
    cat, other, dog = samples[:3]
    assert common_prefix(cat, other) >= cat.media[0].stop
    assert common_prefix(cat, dog) == dog.media[0].start  # of one size, and not the same


def test_a_micro_batch_without_pictures_leaves_zeros(seeing: Seeing) -> None:
    *pictured, text = samples_of(seeing)
    backbone = architecture.decoder(seeing.scorer.model)
    _, expected = measure(seeing, [pack(pictured, SHARE_ALL)])
    _, grads = measure(seeing, [pack([text], ALONE)])
    names = {id(p): name for name, p in seeing.scorer.model.named_parameters()}
    of_vision = {names[id(p)] for p in tower.vision_parameters(backbone)}
    assert of_vision & grads.keys() == of_vision & expected.keys()
    assert not any(grads[name].any() for name in of_vision & grads.keys())
    with torch.no_grad():
        assert not tower.needs_step(backbone)


def test_a_picture_with_another_number_of_placeholders_is_refused(seeing: Seeing) -> None:
    sample = samples_of(seeing)[0]
    (one,) = sample.media
    short = replace(sample, media=(replace(one, start=one.start + 1, grid=None),))
    with pytest.raises(ModelError, match=f"{seeing.kind}: the vision tower gives"), torch.no_grad():
        seeing.scorer(pack([short], ALONE))


def test_a_placeholder_that_the_model_wrote_is_a_token_like_others(seeing: Seeing) -> None:
    """One that is no picture's gives what a token of the same embedding gives; Gemma 4 reads it as padding."""
    sample = samples_of(seeing)[0]
    image_id, twin = seeing.processor.image_id, 17
    if seeing.kind == "gemma4":
        twin = architecture.text_config(seeing.scorer.model).pad_token_id
    written = replace(sample, ids_T=np.append(sample.ids_T, [image_id, 40]))
    spoken = replace(sample, ids_T=np.append(sample.ids_T, [twin, 40]))
    last = np.array([sample.num_tokens + 1])
    pair = [replace(one, target_at_N=last, weight_N=np.ones(1)) for one in (written, spoken)]
    table = architecture.stored_table(architecture.embedding(seeing.scorer.model))
    assert table is not None
    before = table[twin].clone()
    with torch.no_grad():
        if seeing.kind != "gemma4":
            table[twin] = table[image_id]
        one, other = (seeing.scorer(pack([one], ALONE)).logp_N for one in pair)
        table[twin] = before
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_blank_tile_keeps_its_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would leave it out, and the features of others would move into its place."""
    seeing = Seeing.of("smolvlm", tmp_path)
    sample = seeing.sample("a", [CAT, "What is it?"])
    pixels = dict(sample.media[0].picture.tensors())["pixel_values"].clone()
    assert pixels.shape[0] > 1
    pixels[0] = 0.0
    monkeypatch.setattr(Handle, "tensors", lambda self: {"pixel_values": pixels})
    backbone = architecture.decoder(seeing.scorer.model)
    with torch.no_grad():
        (whole,) = tower.features_of(backbone, sample.media)
        pixels = pixels[1:]
        (rest,) = tower.features_of(backbone, sample.media)
    num_blank = whole.main_ND.shape[0] - rest.main_ND.shape[0]
    assert num_blank == 4
    torch.testing.assert_close(whole.main_ND[num_blank:], rest.main_ND, rtol=0, atol=1e-12)


def test_without_its_blocks_a_picture_is_another(tmp_path: Path) -> None:
    seeing = Seeing.of("gemma3", tmp_path)
    packed = pack(samples_of(seeing)[:1], ALONE)
    with torch.no_grad():
        both_ways, forwards = (
            seeing.scorer(one).logp_N for one in (packed, replace(packed, last_T=None))
        )
    assert (both_ways - forwards).abs().max() > 1e-3
