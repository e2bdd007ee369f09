"""Faults of pictures: what a model, its processor or the library makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.checks.planting import Place, fault
from tests.helpers.picture_rows import chats_with_pictures, draw
from tests.helpers.vision_models import tiny_vlm
from transformers.models.qwen2_vl import modeling_qwen2_vl

from taut.checks.session import Session
from taut.models import save
from taut.vision import image_store, tower
from taut.vision.placeholders import Shape
from taut.vision.processors import qwen

KIND = "qwen2_vl"


def pictured(place: Place, **keys: Any) -> Session:
    """A session of a tiny model with pictures."""
    directory = place.directory / "model"
    model = directory if directory.exists() else tiny_vlm(KIND, directory)
    data = place.data(chats_with_pictures(place.directory))
    return place.session(model, data, dtype="float32", **keys)


def _features(place: Place, change: Callable[[Any, Any], Any]) -> None:
    """The library's model gives other features: ``change(model, output)``."""
    kind = modeling_qwen2_vl.Qwen2VLModel
    plain = kind.get_image_features

    def other(self: Any, *args: Any, **keywords: Any) -> Any:
        output = plain(self, *args, **keywords)
        output.pooler_output = change(self, output.pooler_output)
        return output

    place.patch.setattr(kind, "get_image_features", other)


@fault("vision.placeholders", says="placeholders", part="quick")
def a_tower_that_drops_a_feature(place: Place, is_faulty: bool) -> Session:
    """A version of the library leaves out the last feature of each picture."""
    if is_faulty:
        _features(place, lambda _, every: [main[:-1] for main in every])
    return pictured(place)


@fault("vision.positions", says="by the library", part="quick")
def a_grid_on_its_side(place: Place, is_faulty: bool) -> Session:
    """Height and width of a picture's grid are exchanged where its tokens are numbered."""
    shape = qwen.Qwen.shape

    def turned(self: Any, width: int, height: int, num_pictures: int) -> Shape:
        found = shape(self, width, height, num_pictures)
        assert found.grid is not None
        return found._replace(grid=(found.grid[0], found.grid[2], found.grid[1]))

    if is_faulty:
        place.patch.setattr(qwen.Qwen, "shape", turned)
    return pictured(place)


@fault("vision.swapped", says="does not reach", part="quick")
def a_projector_of_zeros(place: Place, is_faulty: bool) -> Session:
    """A checkpoint whose projector was never written: every picture has the same features."""
    directory = tiny_vlm(KIND, place.directory / "model")
    if is_faulty:
        (file,) = directory.glob("*.safetensors")
        tensors = load_file(file)
        names = [name for name in tensors if "merger.mlp.2" in name]
        assert names
        save_file(
            tensors | {name: torch.zeros_like(tensors[name]) for name in names},
            file,
            {"format": "pt"},
        )
    return pictured(place)


@fault("vision.neighbor", says="share_prefixes=false", part="quick")
def pictures_that_mix(place: Place, is_faulty: bool) -> Session:
    """A tower that normalizes over all pictures of a micro-batch."""

    def mixed(_: Any, every: list[Any]) -> list[Any]:
        mean = torch.cat(every).mean(0)
        return [main - 0.5 * mean for main in every]

    if is_faulty:
        _features(place, mixed)
    return pictured(place)


@fault("vision.neighbor", says="is taken for", part="quick")
def pictures_known_by_their_size(place: Place, is_faulty: bool) -> Session:
    """A picture is told from others by its width and height: equal grids, equal prefixes."""
    plain = image_store.ImageStore.picture

    def alike(self: Any, source: str, content: str, num_pictures: int, where: str) -> Any:
        with Image.open(source) as image:
            width, height = image.size
        digest = f"{1000 * width + height:064x}"
        return replace(plain(self, source, content, num_pictures, where), digest=digest)

    if is_faulty:
        place.patch.setattr(image_store.ImageStore, "picture", alike)
    return pictured(place)


@fault("loss.reached", says="in vision_tower", part="quick")
def features_without_a_gradient(place: Place, is_faulty: bool) -> Session:
    """What the tower says goes to the language model detached: it would never learn."""
    plain = tower.features_of

    def detached(*given: Any) -> list[tower.Features]:
        return [it._replace(main_ND=it.main_ND.detach()) for it in plain(*given)]

    if is_faulty:
        place.patch.setattr(tower, "features_of", detached)
    return pictured(place)


@fault("loss.reached", says="not to train", part="quick")
def a_tower_that_thaws(place: Place, is_faulty: bool) -> Session:
    """A frozen tower whose code lets it train again while it runs."""
    plain = tower.encode

    def thawed(backbone: Any, *given: Any) -> Any:
        backbone.visual.requires_grad_(torch.is_grad_enabled())
        return plain(backbone, *given)

    if is_faulty:
        place.patch.setattr(tower, "encode", thawed)
    return pictured(place, freeze=["vision_tower"])


@fault("run.saved", says="what describes pictures")
def a_processor_that_is_saved_otherwise(place: Place, is_faulty: bool) -> Session:
    """The saved processor scales pictures to other colors than in training."""
    copy_processor = save.copy_processor

    def other(model: Any, directory: Path, *, has_template: bool) -> None:
        copy_processor(model, directory, has_template=has_template)
        file = directory / "preprocessor_config.json"
        said = json.loads(file.read_text()) | {"image_mean": [0.1, 0.1, 0.1]}
        file.write_text(json.dumps(said))

    if is_faulty:
        place.patch.setattr(save, "copy_processor", other)
    return pictured(place)


@fault("data.images", says="one and the same", part="quick", outcome="warning")
def one_picture_for_all(place: Place, is_faulty: bool) -> Session:
    """A loop wrote the path of its last picture into every row; or there are two pictures, as in the twin."""
    for name in (1, 2):
        draw(place.directory / f"{name}.png", name)
    rows = _boxes(place, ["1" if is_faulty or number % 2 else "2" for number in range(1, 10)])
    return place.session(tiny_vlm(KIND, place.directory / "model"), rows)


@fault("data.images", says="of one color each", part="quick", outcome="warning")
def pictures_that_are_blank(place: Place, is_faulty: bool) -> Session:
    """A program drew on a canvas that it did not save: white, in every size."""
    for name in range(1, 10):
        draw(place.directory / f"{name}.png", name)
        if is_faulty:
            Image.new("RGB", (20 + 4 * name, 28), "white").save(place.directory / f"{name}.png")
    rows = _boxes(place, [str(number) for number in range(1, 10)])
    return place.session(tiny_vlm(KIND, place.directory / "model"), rows)


def _boxes(place: Place, names: list[str]) -> Path:
    """Rows that ask about these pictures."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what is picture {number}?"},
                {"role": "assistant", "content": f"it is box {number}"},
            ],
            "images": [str(place.directory / f"{name}.png")],
        }
        for number, name in enumerate(names)
    ]
    return place.data(rows)
