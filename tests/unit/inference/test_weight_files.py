"""Files of weights, the checksums of what became of them, and the folder they lie in."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.fake_weight_sync import change, tiny
from tests.helpers.tiny_models import tiny_model
from torch import Tensor

from taut.errors import EngineError, OutputError
from taut.inference import weight_sync
from taut.inference.vllm_client import ParameterReport
from taut.inference.weight_sync import Files, Folder, checkpoint_tensors, require_arrived, write
from taut.inference.worker.taut_worker import TautWorker, checksum
from taut.models.lora.adapters import apply_lora
from taut.models.settings import LoraConfig

FLOAT = torch.float32


def report(
    name: str, value: Tensor, *parts: str, columns: list[int] | None = None
) -> ParameterReport:
    return ParameterReport(
        name=name, parts=list(parts), columns=columns, checksum=f"{checksum(value):016x}"
    )


# Tensors


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_names_are_those_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, dtype=FLOAT)
    tensors = dict(checkpoint_tensors(model))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[key], saved[key]) for key in saved)


def test_an_adapter_is_merged() -> None:
    plain = tiny().state_dict()
    model = apply_lora(tiny(), LoraConfig(rank=2, targets=["q_proj"], train_token_rows="never"))
    change(model)
    tensors = dict(checkpoint_tensors(model))
    changed = {name for name in plain if not torch.equal(plain[name], tensors[name])}
    assert tensors.keys() == plain.keys()
    assert changed == {name for name in plain if "q_proj" in name}


def test_files_hold_them_in_the_server_s_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "FILE_BYTES", 4096)
    tensors = dict(checkpoint_tensors(tiny()))
    num_bytes = write(tensors.items(), torch.bfloat16, tmp_path)
    files = sorted(tmp_path.iterdir())
    read = {name: value for file in files for name, value in load_file(file).items()}
    assert len(files) > 1 and read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name].bfloat16()) for name in tensors)
    assert num_bytes == sum(value.nbytes for value in read.values())


# Checksums


def test_what_is_fused_or_sharded_adds_up() -> None:
    q, k = torch.randn(4, 6), torch.randn(2, 6)
    whole = torch.cat([q, k])
    tensors = {"q": q, "k": k, "o": whole.T.contiguous()}
    left = [report("qk", whole[:3], "q", "k"), report("o", whole.T[:, :2], "o")]
    right = [report("qk", whole[3:], "q", "k"), report("o", whole.T[:, 2:], "o")]
    assert require_arrived(Files(tensors), [left, right]) == (3, [])
    both = [report("qk", whole, "q", "k"), report("o", whole.T, "o")]
    assert require_arrived(Files(tensors), [both, both]) == (3, [])


def test_columns_are_compared_with_columns() -> None:
    q = torch.randn(4, 6)
    reports = [[report("q", q[:, [0, 3]].T, "q", columns=[0, 3])]]
    assert require_arrived(Files({"q": q}), reports) == (1, [])
    with pytest.raises(EngineError, match=r"q \(q\) has checksum"):
        require_arrived(Files({"q": q + 1}), reports)


def test_one_bit_is_enough_and_its_tensor_is_named() -> None:
    q, k = torch.randn(4, 6), torch.randn(2, 6)
    changed = q.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(-9.0))
    reports = [[report("a.qk", torch.cat([changed, k]), "a.q", "a.k")]]
    with pytest.raises(
        EngineError, match=r"server: a\.qk \(a\.q, a\.k\) has checksum [0-9a-f]{16}; expected"
    ):
        require_arrived(Files({"a.q": q, "a.k": k}), reports)


def test_what_cannot_be_read_is_said_to_be_unread() -> None:
    q, k = torch.randn(4, 6), torch.randn(2, 6)
    unread = ParameterReport(name="k", parts=["k"], columns=None, checksum=None)
    assert require_arrived(Files({"q": q, "k": k}), [[report("q", q, "q"), unread]]) == (1, ["k"])


# The folder


def modes(folder: Path) -> set[str]:
    return {f"{stat.S_IMODE(path.stat().st_mode):o}" for path in folder.rglob("*")}


def pushed(folder: Folder) -> Path:
    version = folder.new("1")
    write(checkpoint_tensors(tiny()), FLOAT, version)
    folder.share(version)
    return version


@pytest.mark.parametrize("is_named", [False, True])
def test_weights_where_every_user_may_write_are_for_their_owner_alone(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(weight_sync, "MEMORY", tmp_path)
    folder = Folder(str(tmp_path) if is_named else None)
    pushed(folder)
    assert modes(tmp_path) == {"700", "600"}
    folder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another group")
def test_weights_in_a_prepared_folder_are_for_those_who_may_read_the_folder(tmp_path: Path) -> None:
    place = tmp_path / "prepared"
    place.mkdir()
    os.chown(place, -1, 12345)
    place.chmod(0o750)
    folder = Folder(str(place))
    version = pushed(folder)
    shared = [folder.path, version, *version.iterdir()]
    assert {path.stat().st_gid for path in shared} == {12345}
    assert [stat.S_IMODE(path.stat().st_mode) for path in shared] == [0o750, 0o750, 0o640]
    folder.close()
    assert list(place.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_a_server_of_another_user_says_that_it_may_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a place that every user may enter, as /dev/shm is."""
    with TemporaryDirectory() as place:
        Path(place).chmod(0o1777)
        monkeypatch.setattr(weight_sync, "MEMORY", Path(place))
        folder = Folder(None)
        version = pushed(folder)
        os.seteuid(65534)
        try:
            answer = TautWorker().taut_load(str(version), 1)
        finally:
            os.seteuid(0)
        assert answer == {"error": f"cannot read {version}: Permission denied"}
        folder.close()


def test_a_folder_that_is_made_for_the_weights_is_private(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "deep" / "er"))
    pushed(folder)
    assert folder.path.parent == tmp_path / "deep" / "er"
    assert modes(tmp_path / "deep" / "er") == {"700", "600"}
    folder.close()


def test_only_the_newest_version_is_kept(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    first, second = folder.new("1"), folder.new("2")
    folder.keep_only({second})
    assert not first.exists() and second.exists()
    folder.close()


@pytest.mark.parametrize("planted", ["link to a folder", "lock is a link", "lock is a FIFO"])
def test_what_another_user_plants_in_a_shared_place_is_not_touched(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    home.mkdir(mode=0o700)
    (home / "lock").write_text("precious")
    trap = shared / "taut-weights-aaaaaaaa"
    if planted == "link to a folder":
        trap.symlink_to(home)
    else:
        trap.mkdir(mode=0o755)
        if planted == "lock is a link":
            (trap / "lock").symlink_to(home / "lock")
        else:
            os.mkfifo(trap / "lock")
    monkeypatch.setattr(weight_sync, "MEMORY", shared)
    Folder(None).close()  # returns: a FIFO that is opened for writing would wait for its reader
    assert (home / "lock").read_text() == "precious"
    assert list(shared.iterdir()) == [trap]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OutputError, match=r"^rollout\.server\.sync\.folder: .*file.* cannot be written"
    ):
        Folder(str(tmp_path / "file"))
