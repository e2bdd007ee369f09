"""``taut push`` to a hub on the loopback: what arrives, what its card says, what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tests.helpers.chat_runs import chats, save_model, sft, write_rows
from tests.helpers.fake_hub import TOKEN, FakeHub, Repository
from transformers import AutoModelForCausalLM, AutoTokenizer

from taut import cli
from taut.commands.merge import merge
from taut.commands.settings import Merge
from taut.evals.contract import read_contract
from taut.evals.settings import ContractConfig
from taut.io import hub as hub_state

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's
KEY = "sk-secret-of-the-run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with held-out answers and LoRA, whose base model's card names a license."""
    place = tmp_path_factory.mktemp("pushed")
    model = save_model(place / "qwen2")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    train = write_rows(place / "few.jsonl", chats(8, seed=5))
    held_out = write_rows(place / "held.jsonl", chats(4, seed=6))
    keys: dict[str, Any] = {
        "data__eval": str(held_out),
        "eval__answers__rewards": "exact_match",
        "eval__answers__every": 4,
        "eval__answers__sampling__max_new_tokens": 4,
        "contract__max_new_tokens": 4,
        "check": "off",
        "lora__rank": 2,
    }
    return sft(model, train, place / "out", dtype="float32", steps=4, **keys).out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another protocol, in Rust
        monkeypatch.setattr(hub_state, "_asked", None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def push(*words: object) -> int:
    return cli.main(["push", *map(str, words), "device=cpu"])


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a push that is refused."""
    assert push(*words) in (1, 2)
    line = capsys.readouterr().err.splitlines()[-1]  # after the library's progress
    assert line.startswith("taut: error: ")
    return line


def metadata(card: str) -> dict[str, Any]:
    found = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def test_the_model_that_arrives_is_the_run_s(
    run: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(run, "tiny") == 0
    there = hub.repositories["me/tiny"]
    assert there.is_private and len(there.messages) == 1
    sent = {path.name for path in (run / "model").iterdir()}
    assert there.files["main"].keys() == {*sent, "README.md"}
    assert {"contract.json", "generation_config.json", "tokenizer.json"} <= sent
    copy = there.write(tmp_path / "copy")
    contract = read_contract(copy)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    golden = contract.goldens[0]
    ids = tokenizer.apply_chat_template(
        golden.prompt.messages, add_generation_prompt=True, return_dict=False
    )
    assert ids == golden.prompt.ids
    answer = model.generate(torch.tensor([ids]), max_new_tokens=len(golden.ids), do_sample=False)
    assert answer[0, len(ids) :].tolist() == golden.ids
    printed = capsys.readouterr().out
    assert "uploaded me/tiny (private)" in printed and f"{hub.url}/me/tiny/commit/" in printed


def test_the_card_says_what_the_run_was(run: Path, hub: FakeHub) -> None:
    assert push(run, "me/tiny", "base=org/base", "private=false") == 0
    there = hub.repositories["me/tiny"]
    assert not there.is_private
    card = there.files["main"]["README.md"].decode()
    found = metadata(card)
    assert found["base_model"] == "org/base" and found["base_model_relation"] == "finetune"
    assert found["license"] == "apache-2.0"
    assert found["tags"] == ["taut", "sft"] and found["library_name"] == "transformers"
    (index,) = found["model-index"]
    metrics = {m["type"]: m for result in index["results"] for m in result["metrics"]}
    assert index["results"][0]["dataset"]["name"] == "held.jsonl"
    assert metrics.keys() == {"loss", "exact_match", "stopped"}
    assert "95% interval" in metrics["exact_match"]["name"]
    digests = json.loads((run / "resolved.json").read_text())["identity"]["data"]
    ((_, digest),) = digests.items()
    for expected in (
        *("few.jsonl", digest["content"], "| `lora.rank` | `2` |", "`optim.learning_rate`"),
        *(
            "taut sft",
            "data.train=few.jsonl",
            "lora.rank=2",
            "<\\|im_end\\|>",
            "vllm serve me/tiny",
        ),
        *("transformers 5", "held.jsonl | exact_match"),
    ):
        assert expected in card, expected


def test_no_secret_and_no_place_of_this_machine_is_sent(run: Path, hub: FakeHub) -> None:
    resolved = json.loads((run / "resolved.json").read_text())
    resolved["config"]["rewards_api_key"] = KEY
    resolved["config"]["eval"]["answers"]["rewards"] = [
        {"use": "judge", "api_key": KEY, "url": f"http://u:{KEY}@inside.example/v1"}
    ]
    (run / "resolved.json").write_text(json.dumps(resolved))
    home = str(Path(resolved["config"]["out"]).parent)
    assert push(run, "tiny") == 0
    assert push(run / "adapter", "tiny-lora") == 0
    for there in hub.repositories.values():
        for name, content in there.files["main"].items():
            for secret in (KEY, home, "inside.example", TOKEN):
                assert secret.encode() not in content, (name, secret)
    assert "events.jsonl" not in hub.repositories["me/tiny"].files["main"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_an_adapter_names_its_base_and_is_read_by_the_library(
    run: Path, hub: FakeHub, tmp_path: Path
) -> None:
    assert push(run / "adapter", "lora", "base=org/base") == 0
    files = hub.repositories["me/lora"].files["main"]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    found = metadata(files["README.md"].decode())
    assert (found["base_model_relation"], found["library_name"]) == ("adapter", "peft")
    from peft import PeftModel

    base = json.loads((run / "resolved.json").read_text())["config"]["model"]
    copy = hub.repositories["me/lora"].write(tmp_path / "copy")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), copy)
    merged = model.merge_and_unload().state_dict()
    trained = load_file(run / "model" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(merged[name].float(), trained[name].float(), atol=1e-6)


def test_a_model_that_changed_since_is_refused_and_can_be_forced(
    run: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    line = refusal(capsys, run, "tiny")
    assert "does not behave as its contract says" in line and "unverified=true" in line
    assert not hub.repositories
    assert push(run, "tiny", "unverified=true") == 0
    assert "verified and not as it was" in capsys.readouterr().out


def test_a_card_of_somebody_else_s_stays_unless_asked(
    run: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(run, "tiny") == 0
    files = hub.repositories["me/tiny"].files
    ours = files["main"]["README.md"]
    assert push(run, "tiny") == 0  # ours is replaced
    files["main"]["README.md"] = b"# Mine\n"
    capsys.readouterr()
    assert push(run, "tiny", "revision=second") == 0
    assert files["second"]["README.md"] == b"# Mine\n" and "model.safetensors" in files["second"]
    printed = capsys.readouterr().out
    assert "replace_card=true" in printed and "(private, as it was)" in printed
    assert push(run, "tiny", "replace_card=true") == 0
    assert files["main"]["README.md"] == ours
    by_hand = tmp_path / "card.md"
    by_hand.write_text("# By hand\n")
    assert push(run, "tiny", f"card={by_hand}") == 0
    assert files["main"]["README.md"] == b"# By hand\n"


def test_a_folder_is_written_and_nothing_is_sent(
    run: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert push(run, "tiny", f"out={tmp_path / 'folder'}") == 0
    names = {path.name for path in (tmp_path / "folder").iterdir()}
    assert names == {*(path.name for path in (run / "model").iterdir()), "README.md"}
    assert not any("me/tiny" in line for line in hub.requests)
    assert push(run, "tiny", f"out={tmp_path / 'folder'}") == 2  # it exists


def test_results_of_taut_eval_are_on_the_card(
    run: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "quiz.jsonl", chats(3, seed=9))
    words = [f"data={data}", "sampling.max_new_tokens=3", "rewards=contains", "device=cpu"]
    assert cli.main(["eval", str(run / "model"), *words, f"out={run / 'evals' / 'quiz'}"]) == 0
    assert cli.main(["eval", str(run / "model"), *words, f"out={run / 'evals' / 'moved'}"]) == 0
    report = run / "evals" / "moved" / "report.json"
    moved = json.loads(report.read_text())
    moved["config"]["model"] = "elsewhere"
    report.write_text(json.dumps(moved))
    capsys.readouterr()
    assert push(run, "tiny") == 0
    card = hub.repositories["me/tiny"].files["main"]["README.md"].decode()
    assert card.count("quiz.jsonl | contains") == 1
    assert "moved/report.json: it is about" in capsys.readouterr().out


def test_a_merged_model_has_a_card_of_what_is_known(
    finished: Path, tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    base = finished.parent / "qwen2"
    settings = Merge(
        model=str(base),
        adapter=str(finished / "adapter"),
        out=str(tmp_path / "merged"),
        device="cpu",
        contract=ContractConfig(prompts=2, max_new_tokens=4),
    )
    merge(settings)
    capsys.readouterr()
    assert push(tmp_path / "merged", "tiny", f"out={tmp_path / 'folder'}") == 0
    output = capsys.readouterr().out
    assert "questions of its contract" in output
    assert "left out base_model: not known; base=OWNER/NAME says which" in output
    assert "left out training: " in output and "has no record of a run" in output
    card = (tmp_path / "folder" / "README.md").read_text()
    assert metadata(card)["tags"] == ["taut"] and "base_model" not in metadata(card)
    assert "How it was trained is not said here." in card and "vllm serve tiny" in card
    assert (tmp_path / "folder" / "model.safetensors").read_bytes() == (
        tmp_path / "merged" / "model.safetensors"
    ).read_bytes()
    assert str(tmp_path) not in card
    shutil.rmtree(tmp_path / "folder")
    assert push(tmp_path / "merged", "tiny", "base=org/base", f"out={tmp_path / 'folder'}") == 0
    assert metadata((tmp_path / "folder" / "README.md").read_text())["base_model"] == "org/base"
    (tmp_path / "merged" / "contract.json").unlink()
    assert "no model (no contract.json" in refusal(capsys, tmp_path / "merged", "x")


def test_gguf_files_have_a_card_of_what_is_known(
    finished: Path, tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf" / "tiny.gguf"
    assert cli.main(["export", str(finished / "model"), f"out={file}"]) == 0
    assert push(tmp_path / "gguf", "org/tiny-gguf") == 0
    assert "verified nothing: gguf/ has no contract" in capsys.readouterr().out
    arrived = hub.repositories["org/tiny-gguf"]
    assert arrived.kind == "model"
    assert arrived.files["main"]["tiny.gguf"] == file.read_bytes()
    card = arrived.files["main"]["README.md"].decode()
    assert metadata(card)["tags"] == ["taut", "gguf"] and "vllm" not in card
    assert hashlib.sha256(file.read_bytes()).hexdigest() in card


def test_a_data_set_is_uploaded_as_it_is(tmp_path: Path, hub: FakeHub) -> None:
    folder = tmp_path / "rows"
    (folder / "data").mkdir(parents=True)
    (folder / ".lock").touch()
    write_rows(folder / "data" / "train.jsonl", chats(3))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Rows\n")
    assert push(folder, "org/rows") == 0
    there = hub.repositories["org/rows"]
    assert there.kind == "dataset" and there.is_private
    assert there.files["main"].keys() == {"README.md", "data/train.jsonl"}


@pytest.mark.parametrize("name", ["model/notes.txt", "model/extra", "events.jsonl", "model"])
def test_what_a_link_leads_to_is_not_uploaded(
    name: str, run: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    shutil.move(run / name, secret) if (run / name).exists() else secret.write_text("mine")
    (run / name).symlink_to(secret)
    assert "is a link" in refusal(capsys, run, "tiny")
    assert not hub.repositories


def test_a_data_set_with_a_link_is_refused(
    tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows" / "data").mkdir(parents=True)
    (tmp_path / "rows" / "README.md").write_text("# Rows\n")
    (tmp_path / "rows" / "data" / "a.jsonl").symlink_to("/etc/passwd")
    assert "a.jsonl is a link to /etc/passwd" in refusal(capsys, tmp_path / "rows", "org/rows")
    assert not hub.repositories


REFUSED = {
    "GET /api/whoami-v2": (401, "token", "does not accept the token"),
    "POST /api/repos/create": (403, "no rights in org", "may not write to org/tiny"),
    "POST /api/models/org/tiny/preupload": (403, "read-only token", "may not write to org/tiny"),
    "POST /api/models/org/tiny/commit": (400, "too large", "nothing was committed"),
}


@pytest.mark.parametrize("request_line", REFUSED)
def test_a_refusal_of_the_hub_is_one_line(
    run: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str], request_line: str
) -> None:
    status, message, expected = REFUSED[request_line]
    hub.refuses[request_line] = status, message
    line = refusal(capsys, run, "org/tiny")
    assert expected in line and message in line


def test_a_name_that_is_taken_or_wrong_is_one_line(
    run: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/tiny"] = Repository(is_private=True)
    hub.refuses["GET /api/models/me/tiny"] = 404, "not for you"
    assert "name=me/tiny is taken" in refusal(capsys, run, "tiny")
    assert "is no name of a repository" in refusal(capsys, run, "a/b/c")


def test_nothing_is_sent_without_token_network_or_model(
    run: Path,
    hub: FakeHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "is no directory" in refusal(capsys, tmp_path / "nowhere", "tiny")
    assert "is no run" in refusal(capsys, tmp_path, "tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(capsys, run, "tiny")
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in refusal(capsys, run, "tiny")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "adapter")
    assert "has no model yet" in refusal(capsys, run, "tiny")
    assert not any(line.startswith("POST") for line in hub.requests)
