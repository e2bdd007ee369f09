"""reference.file: computed once, the same numbers as computed on the way; refused where it is of anything else."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from tests.helpers.chat_runs import save_model
from tests.helpers.judged_runs import keys_of, make
from tests.helpers.preference_rows import plain_pairs

from taut.errors import ConfigError, OutputError
from taut.methods.reference import Recorded, Start
from taut.methods.settings import STREAM
from taut.run import reference_cache
from taut.run.reference_cache import keep_reference
from taut.run.setup import Built
from taut.train.trainer import Role, fill_streams, plan_trees


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recorded")
    save_model(place / "model", dtype=torch.float64)
    return place


@pytest.fixture(scope="module")
def built(place: Path) -> Built:
    """A run with ``reference.file``; the reference is still the one that makes it."""
    keys = keys_of("dpo", place / "model", place / "run", reference__file=str(place / "kept"))
    return make(keys)


@pytest.fixture
def fresh(built: Built, tmp_path: Path) -> Built:
    """The same with a file of its own, and with a file that is there."""
    (role,) = built.models.roles
    roles, run = [copy.copy(role)], built.run
    models, trainer = replace(built.models, roles=roles), replace(built.trainer, roles=roles)
    run = replace(run, reference=replace(run.reference, file=str(tmp_path / "kept.safetensors")))
    return replace(built, models=models, trainer=trainer, run=run)


def file_of(built: Built) -> Path:
    reference = built.run.models().reference
    assert reference is not None
    assert reference.file is not None
    return Path(reference.file)


def streams(built: Built) -> list[torch.Tensor]:
    """What the reference says of held-out pairs and of a step, in another layout than the file was made in."""
    assert built.inputs.eval is not None
    trees = built.run.rows_of(built.inputs.eval).trees([3, 0])
    both = [*built.trainer.source.prepare(2), *trees]
    numbered = [
        replace(t, samples=tuple(replace(s, group=i) for s in t.samples))
        for i, t in enumerate(both)
    ]
    plan = plan_trees(built.trainer, numbered)
    return [packed.streams[STREAM] for packed, _ in fill_streams(built.trainer, plan, "here")]


def test_the_file_holds_what_the_reference_says(fresh: Built) -> None:
    (role,) = fresh.trainer.roles
    assert isinstance(role, Recorded)
    assert isinstance(role._live, Start)
    wanted = streams(fresh)
    keep_reference(fresh)
    assert role._live is None, "no reference is held while training"
    for found, number in zip(streams(fresh), wanted, strict=True):
        torch.testing.assert_close(found, number, rtol=1e-12, atol=0)
    with safe_open(file_of(fresh), framework="pt") as file:
        sizes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118
    train, held_out = fresh.inputs.train, fresh.inputs.eval
    assert held_out is not None
    assert sizes == {
        "train": (train.report.num_targets,),
        "eval": (held_out.report.num_targets,),
    }


def test_one_that_is_there_is_used_and_one_that_is_gone_is_made_again(
    fresh: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    (role,) = fresh.trainer.roles
    assert isinstance(role, Recorded)
    live = role._live
    keep_reference(fresh)
    first, found = file_of(fresh).read_bytes(), streams(fresh)
    role._live, role._find = live, None
    file_of(fresh).unlink()
    keep_reference(fresh)
    assert file_of(fresh).read_bytes() == first
    monkeypatch.setattr(reference_cache, "_compute", lambda *_: pytest.fail("it is there"))
    keep_reference(fresh)
    assert all(map(torch.equal, streams(fresh), found))
    told = [it.reason for it in fresh.decisions if it.name == "reference.file"]
    assert [reason.partition(";")[0] for reason in told[-3:]] == [
        "made now",
        "made now",
        "it was there, of this model, data and setting",
    ]


def other_model(built: Built) -> Built:
    save_model(file_of(built).parent / "other", seed=1, dtype=torch.float64)
    return replace(built, run=replace(built.run, model=str(file_of(built).parent / "other")))


def other_dtype(built: Built) -> Built:
    return replace(built, run=replace(built.run, dtype="float32"))


def other_reference(built: Built) -> Built:
    reference = built.run.models().reference
    assert reference is not None
    other = replace(reference, model=built.run.model)
    return replace(built, run=replace(built.run, reference=other))  # type: ignore[call-arg]


def other_data(built: Built) -> Built:
    assert built.inputs.eval is not None
    return replace(built, inputs=replace(built.inputs, train=built.inputs.eval))


def no_held_out(built: Built) -> Built:
    return replace(built, inputs=replace(built.inputs, eval=None))


def other_template(built: Built) -> Built:
    template = built.inputs.renderer.template
    changed = replace_attribute(template, template=f"{template.template} ")
    renderer = replace_attribute(built.inputs.renderer, template=changed)
    return replace(built, inputs=replace(built.inputs, renderer=renderer))


def other_pictures(built: Built) -> Built:
    """Read in another way, smaller for one: then ids and files may be what they were."""
    image_store = SimpleNamespace(identity=lambda: "a" * 64)
    renderer = replace_attribute(built.inputs.renderer, image_store=image_store)
    return replace(built, inputs=replace(built.inputs, renderer=renderer))


def replace_attribute(thing: Any, **values: Any) -> Any:
    changed = copy.copy(thing)
    vars(changed).update(values)
    return changed


CHANGES: dict[str, tuple[Callable[[Built], Built], str]] = {
    "model": (other_model, r"model model\.safetensors: other content"),
    "dtype": (other_dtype, r"dtype: 'float64' then, 'float32' now"),
    "reference": (other_reference, r"reference: none then"),
    "data": (other_data, r"data train: other content"),
    "held out": (no_held_out, r"data eval: \w{12}\.\.\. then, none now"),
    "template": (other_template, r"template: other content"),
    "pictures": (other_pictures, r"pictures: none then"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_of_another_run_it_is_refused_with_what_differs(name: str, fresh: Built) -> None:
    keep_reference(fresh)
    before = file_of(fresh).read_bytes()
    change, message = CHANGES[name]
    with pytest.raises(ConfigError, match=message) as caught:
        keep_reference(change(fresh))
    assert re.search(
        r"reference\.file=.* is of another run: .*; expected .*; name", str(caught.value)
    )
    assert len(str(caught.value)) < 600
    assert file_of(fresh).read_bytes() == before


def cut(content: bytes) -> bytes:
    return content[:-9]


def flipped(content: bytes) -> bytes:
    return content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]


def no_header(content: bytes) -> bytes:
    return b"12"


@pytest.mark.parametrize("spoil", [cut, flipped, no_header])
def test_a_damaged_one_is_refused(spoil: Callable[[bytes], bytes], fresh: Built) -> None:
    keep_reference(fresh)
    spoilt = spoil(file_of(fresh).read_bytes())
    file_of(fresh).write_bytes(spoilt)
    with pytest.raises(
        ConfigError, match=r"reference\.file=.* cannot be read: .*; expected .*; remove"
    ) as caught:
        keep_reference(fresh)
    assert "\n" not in str(caught.value)
    assert file_of(fresh).read_bytes() == spoilt


def test_a_place_that_cannot_be_written(fresh: Built, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reference = fresh.run.models().reference
    assert reference is not None
    below = replace(reference, file=str(tmp_path / "file" / "kept"))
    spoilt = replace(fresh, run=replace(fresh.run, reference=below))  # type: ignore[call-arg]
    with pytest.raises(
        OutputError, match=r"reference\.file=.* cannot be written: .*; name another"
    ):
        keep_reference(spoilt)


def test_one_name_for_two_things_is_refused(place: Path) -> None:
    """The same file, its better answers once the others."""
    keys = keys_of("dpo", place / "model", place / "run", reference__file=str(place / "two"))
    swapped = {"chosen": "rejected", "rejected": "chosen"}
    keys["data.eval"] = [{"path": keys["data.train"], "columns": swapped}]
    with pytest.raises(
        ConfigError, match=r"and data.eval read .*pairs\.jsonl in two ways; expected"
    ):
        keep_reference(make(keys))
    assert not (place / "two").exists()


def test_numbers_are_found_by_sample_in_the_order_of_rows() -> None:
    table = {"0.0": torch.tensor([3.0]), "0.1": torch.tensor([1.0, 2.0])}
    packed = plain_pairs([(2, 1)])
    assert packed.sample_ids == ("0.1", "0.0")
    role = Recorded(cast(Role, None))
    role.record(table.__getitem__)
    assert role.streams(packed)[STREAM].tolist() == [1.0, 2.0, 3.0]
