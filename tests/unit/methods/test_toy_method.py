"""A training method is one file: this one registers ``toy`` and finds it in all that derives from METHODS.

Toy is fine-tuning with a generalized cross-entropy (arXiv 1805.07836), sum over targets of (1 - p^q) / q, which
mislabeled tokens cannot dominate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field
from tests.docs.pages import config_page, models_page
from tests.helpers.chat_runs import QUIET, chats, column, save_model, words_of, write_rows

import taut
from taut import cli
from taut.config import configclass
from taut.errors import ConfigError
from taut.losses.loss import Loss, Unit
from taut.methods import METHODS, commands_for
from taut.methods.method import RunConfig
from taut.train.settings import DefaultRates
from taut.types import LossSum, Packed, Scores


@dataclass(frozen=True)
class GeneralizedCrossEntropy(Loss):
    q: float

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"generalized": "token"}

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        cost_N = (1 - (self.q * scores.logp_N).exp()) / self.q
        return LossSum({"generalized": (packed.weight_N.to(cost_N) * cost_N).sum()})


@configclass
class ToyConfig:
    """The generalized cross-entropy."""

    q: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Near 0: cross-entropy; 1: one minus the probability."""


@configclass
class Toy(RunConfig):
    """A run of ``taut toy``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(3e-5, 3e-4, "nobody")

    method: str = "toy"
    toy: ToyConfig = ToyConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.toy.q == 1 and self.epochs is not None:
            raise ConfigError("found toy.q=1 with epochs; expected steps; set steps")

    def loss(self) -> Loss:
        return GeneralizedCrossEntropy(self.toy.q)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    METHODS.register("toy", f"{__name__}:Toy", "fine-tune robustly")
    yield
    del METHODS.entries["toy"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a small run of three steps."""
    place = tmp_path_factory.mktemp("toy")
    return {
        **QUIET,
        "model": str(save_model(place / "model")),
        "data.train": str(write_rows(place / "train.jsonl", chats(12))),
        "out": str(place / "out"),
        "steps": 3,
        "checkpoint.every": 3,
        "toy.q": 0.7,
    }


@pytest.fixture(scope="module")
def trained(keys: dict[str, Any]) -> Path:
    train: Any = taut.toy
    return Path(train(**keys).out)


def test_it_trains_and_resumes(trained: Path) -> None:
    losses = column(trained, "loss")
    assert all(1 < loss < 1 / 0.7 for loss in losses), "at most 1 / q; cross-entropy would be more"
    resolved = json.loads((trained / "resolved.json").read_text())
    assert (resolved["method"], resolved["config"]["toy"]) == ("toy", {"q": 0.7})
    with pytest.raises(ConfigError, match=r"toy\.q: 0\.7 then, 0\.5 now"):
        taut.resume(trained, steps=5, **{"toy.q": 0.5})
    assert taut.resume(trained, steps=5).steps == 5
    assert len(column(trained, "loss")) == 5


def test_a_row_of_its_kind_names_its_command() -> None:
    assert commands_for("sft").endswith(", taut toy")


def test_it_is_a_command(
    keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "  taut toy  " in cli.usage() and "robustly" in cli.usage()
    assert cli.main(["toy", "--help", "all"]) == 0
    said = capsys.readouterr().out
    assert "toy.q  (number; 0.5)\n      Near 0: cross-entropy" in said
    assert "taut toy: 3e-05, with adapters 0.0003." in " ".join(said.split())
    assert cli.main(["toy", *words_of({**keys, "out": str(tmp_path / "out"), "steps": 1})]) == 0
    keys = {**keys, "out": str(tmp_path / "other")}
    in_epochs = {key: value for key, value in keys.items() if key != "steps"}
    assert cli.main(["toy", *words_of({**in_epochs, "toy.q": 1, "epochs": 1})]) == 2
    assert "found toy.q=1 with epochs" in capsys.readouterr().err
    assert cli.main(["sft", *words_of({**keys, "method": "toy"})]) == 2


def test_it_is_shown_checked_and_planned(
    keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {**keys, "method": "toy", "out": str(tmp_path / "out")}
    words = words_of(keys)
    assert cli.main(["show", *words]) == 0
    assert "toy.q" in capsys.readouterr().out
    assert cli.main(["check", *words]) == 0
    assert cli.main(["plan", *words, "measure=false"]) == 0
    assert "GiB" in capsys.readouterr().out


def test_it_is_in_the_library_and_the_pages() -> None:
    train: Any = taut.toy
    assert train.__name__ == "toy" and train.__doc__.startswith(
        "Fine-tune robustly. Keys: ``taut toy"
    )
    page = config_page()
    assert "\n## toy: `taut toy`\n" in page and "| `toy.q` | number | 0.5 |" in page
    assert "| `taut toy` | 3e-05 | 0.0003 | nobody |" in models_page()
