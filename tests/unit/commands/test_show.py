"""``taut show`` tells what a run would do, and does none of it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import TEMPLATES, tiny_tokenizer

import taut
from taut.cli import main
from taut.commands import show as show_command
from taut.commands import train
from taut.commands.show import Marks, marks_for, show, view_of
from taut.commands.tokenize import tokenize
from taut.config import from_mapping
from taut.data import dataset
from taut.data.render.render import Renderer
from taut.data.rows.messages import Conversation
from taut.errors import ConfigError, RenderError
from taut.methods.dpo import Dpo
from taut.methods.method import RunConfig
from taut.methods.reward import Reward
from taut.train.log import read_events
from taut.types import Sample

MARKS = Marks("⟦", "⟧", "■", "\n")
SYSTEM = {"role": "system", "content": "you are a helpful cat and you answer well, every time"}


def rows(*answers: str) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": answer},
            ]
        }
        for number, answer in enumerate(answers)
    ]


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model() -> Path:
    return save_tiny("qwen2", Path("tiny"), tiny_tokenizer())


def shown(model: Path, data: Path, **keys: Any) -> str:
    """What show prints on 100 columns."""
    out = io.StringIO()
    run = from_mapping(
        RunConfig, {"model": str(model), "data.train": str(data), "device": "cpu"} | keys
    )
    show(run, Console(file=out, width=100, highlight=False))
    return out.getvalue()


def section(text: str, title: str) -> str:
    return re.split(r"^\w+$", text.split(f"\n{title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_it_reads_no_weight_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    data = write(Path("rows.jsonl"), rows("the cat", "the dog"))
    (model / "model.safetensors").write_bytes(b"not weights")
    before = sorted(tmp_path.rglob("*"))
    text = shown(model, data, **{"data.cache": str(tmp_path / "cache")})
    after = [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "cache" not in path.parents]
    assert [path for path in after if path.name != "cache"] == before
    titles = re.findall(r"^(\w+)$", text, re.MULTILINE)
    assert titles == ["configuration", "decisions", "data", "plan", "samples", "defaults"]
    assert max(map(len, text.splitlines())) <= 100


def test_what_was_set_stands_apart_from_the_defaults(model: Path) -> None:
    data = write(Path("rows.jsonl"), rows("the cat"))
    text = shown(model, data, **{"batch.samples_per_step": 8})
    given, defaults = section(text, "configuration"), section(text, "defaults")
    assert re.search(r"batch\.samples_per_step +8 +default 32", given)
    assert re.search(r"model +tiny *\n +data\.train +rows\.jsonl +default none", given)
    assert "learning_rate" not in given
    assert "step_separator" not in given
    assert "samples_per_step" not in defaults
    assert re.search(r"optim +name=adamw +learning_rate=none", defaults)


def test_what_was_decided_has_its_reason(model: Path) -> None:
    data = write(Path("rows.jsonl"), rows("the cat"))
    text = section(shown(model, data, dtype="float32"), "decisions")
    assert re.search(r"stop +<\|im_end\|> +<\|im_end\|> ends an +assistant", text)
    assert re.search(r"data\.max_length +256 +the model's context", text)
    assert re.search(r"dtype +float32 +asked for by name", text)
    assert re.search(
        r"optim\.learning_rate +2e-05 +the default of taut sft where all weights", text
    )
    assert "share_prefixes" not in text
    text = shown(model, data, lora={"rank": 4, "dropout": 0.1})
    assert re.search(r"share_prefixes +false +noise", section(text, "decisions"))
    assert re.search(
        r"optim\.learning_rate +0\.0002 +the default of taut sft where +adapters", text
    )
    assert "prefixes are not shared" in section(text, "plan")


def test_a_model_with_state_across_tokens_is_known_by_its_skeleton() -> None:
    model = save_tiny("bamba", Path("tiny"), tiny_tokenizer())
    data = write(Path("rows.jsonl"), rows("the cat", "the dog"))
    text = shown(model, data)
    assert "one sample at a time" in section(text, "decisions")
    assert re.search(r"^ +1 +2 .* 2 *$", section(text, "plan"), re.MULTILINE), "two micro-batches"


def test_what_was_dropped_or_cut_is_listed_by_line(model: Path) -> None:
    long = " ".join(["cat"] * 60)
    records = rows("the cat", long)
    records[0]["messages"][1]["content"] = f"{long} {long}"
    data = write(Path("rows.jsonl"), [*records, *rows("the dog")])
    keys = {"data.max_length": 100, "data.too_long": "truncate"}
    text = section(shown(model, data, **keys), "data")
    one_line = " ".join(text.split())
    assert "3 rows, 2 samples" in one_line
    assert re.search(r"1 dropped: .*rows\.jsonl:1: \d+ tokens, max_length 100, no target", one_line)
    assert re.search(r"1 cut: .*rows\.jsonl:2: \d+ tokens, max_length 100", one_line)
    assert "nothing dropped, nothing cut" in shown(model, data)


def test_the_plan_is_what_a_run_does(model: Path) -> None:
    data = write(Path("rows.jsonl"), rows(*(" ".join(["cat"] * n) for n in range(1, 12))))
    keys: dict[str, Any] = {"steps": 3, "batch": {"samples_per_step": 4}, "seed": 5}
    plan = section(shown(model, data, **keys), "plan")
    out = Path("out")
    taut.sft(
        model=str(model),
        data={"train": str(data)},
        out=str(out),
        device="cpu",
        dtype="float32",
        **keys,
    )
    steps = [event for event in read_events(out / "events.jsonl") if event["kind"] == "step"]
    table = [
        list(map(int, line.split())) for line in plan.splitlines() if re.match(r"^[ \d]+$", line)
    ]
    found = [[row[0], row[1], row[2], row[4], row[5]] for row in table if row]
    names = ("step", "num_targets", "num_tokens_unshared", "num_tokens")
    assert found == [[s[names[0]], 4, *(s[name] for name in names[1:])] for s in steps]
    assert all(row[5] < row[4] < row[3] for row in table if row), "computed < packed < if padded"


def test_of_a_large_file_the_first_rows_are_shown_until_it_is_tokenized(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = rows(*(" ".join(["cat"] * n) for n in range(1, 12)))
    data = write(Path("rows.jsonl"), records)
    monkeypatch.setattr(dataset, "LARGE", data.stat().st_size - 1)
    monkeypatch.setattr(show_command, "FIRST_ROWS", 3)
    text = shown(model, data)
    assert "3 rows, 3 samples" in " ".join(section(text, "data").split())
    assert "\nplan, of the first rows alone\n" in text
    tokenize(
        from_mapping(RunConfig, {"model": str(model), "data.train": str(data), "device": "cpu"})
    )
    for path in (data, write(Path("small.jsonl"), records[:3])):
        text = shown(model, path)
        num = 11 if path is data else 3
        assert f"{num} rows, {num} samples" in " ".join(section(text, "data").split())
        assert "\nplan\n" in text


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name is not None])
def test_targets_are_in_brackets_exactly(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    messages = [
        {"role": "user", "content": "Wie heißt der Fluß?"},
        {"role": "assistant", "content": "Die Elbe 🙂\nund [b]mehr[/b]"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Ja."},
    ]
    renderer = Renderer(tokenizer)
    for sample in renderer.render(Conversation("rows:1", tuple(messages), learned=(1, 3))):
        text = view_of(sample, tokenizer, frozenset(renderer.stop_ids), MARKS).plain
        found = re.findall("⟦(.*?)⟧", text, re.DOTALL)
        stretches = np.split(
            sample.target_at_N, np.flatnonzero(np.diff(sample.target_at_N) > 1) + 1
        )
        expected = [tokenizer.decode(sample.ids_T[at]).strip() for at in stretches]
        assert [stretch.replace("■", "").strip() for stretch in found] == expected
        assert all(stretch.rstrip().endswith("■") for stretch in found)
        assert re.sub("[⟦⟧■]", "", text).strip() == tokenizer.decode(sample.ids_T).strip()


def test_colors_say_the_same() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("<|im_start|>the cat<|im_end|>").input_ids)
    at = np.arange(ids.size - 2, ids.size)
    sample = Sample("rows:1", ids, at, np.ones(2))
    view = view_of(sample, tokenizer, frozenset({int(ids[-1])}), MARKS)
    styles = {view.plain[span.start : span.end]: span.style for span in view.spans}
    assert styles["<|im_start|>"] == "cyan"
    assert styles["<|im_end|>"] == styles["■"] == "bold green"
    assert {style for text, style in styles.items() if "the" in text} == {"dim"}


def test_long_text_is_shown_without_its_middle() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("the cat " * 1_000 + "end").input_ids)
    sample = Sample("rows:1", ids, np.array([ids.size - 1]), np.ones(1))
    text = view_of(sample, tokenizer, frozenset(), MARKS).plain
    assert re.search(r"\[\.\.\. [\d,]+ characters \.\.\.\]", text)
    assert len(text) < 1_000


def test_what_is_said_of_an_answer_stands_beside_it(model: Path) -> None:
    pair = {"prompt": "the cat\n", "chosen": "ran", "rejected": "sat", "margin": 2}
    keys = {"model": str(model), "data.train": str(write(Path("pairs.jsonl"), [pair]))}
    out = io.StringIO()
    show(from_mapping(Dpo, keys | {"device": "cpu"}), Console(file=out, width=100))
    text = " ".join(out.getvalue().split())
    assert "an end of turn, margin 2, preference 1" in text
    assert "an end of turn, margin 0, preference 0" in text


def test_a_reward_model_is_shown_by_its_own_skeleton(model: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    pair = {"prompt": "the cat\n", "chosen": "ran", "rejected": "sat"}
    keys = {"model": str(model), "data.train": str(write(Path("pairs.jsonl"), [pair]))}
    out = io.StringIO()
    show(from_mapping(Reward, keys | {"device": "cpu"}), Console(file=out, width=100))
    text = " ".join(out.getvalue().split())
    assert "pairs.jsonl:1#2" in text
    assert text.count("no targets; the head is read at the last, in brackets") == 2


def test_a_stream_that_lacks_the_marks_gets_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(Path("rows.jsonl"), rows("naïve 🙂"))
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["show", f"model={model}", f"data.train={data}", "device=cpu"]) == 0
    stream.flush()
    assert stream.errors == "strict"
    assert r"[[na\xefve \U0001f642<|im_end|>(END)]]" in raw.getvalue().decode("ascii")
    assert marks_for(Console(file=io.StringIO())).end == "■"


def test_from_python_it_can_be_called_twice(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(Path("rows.jsonl"), rows("the cat"))
    for _ in range(2):
        taut.show(model=str(model), data={"train": str(data)}, device="cpu")
        assert "end of turn" in capsys.readouterr().out


def test_only_training_needs_an_out(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(Path("rows.jsonl"), rows("the cat"))
    words = [f"model={model}", f"data.train={data}", "device=cpu"]
    assert main(["show", *words]) == 0
    assert "end of turn" in capsys.readouterr().out
    assert main(["sft", *words]) == 2
    message = "taut: error: out is not set; expected a directory; set out=DIR\n"
    assert capsys.readouterr().err == message
    with pytest.raises(ConfigError, match="out is not set"):
        train.train(from_mapping(RunConfig, {"model": str(model), "data.train": str(data)}))


def test_a_template_that_never_ends_a_turn_is_refused_before_training() -> None:
    """On plain text, which the template does not render: only the saved model would need its end."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    )
    model = save_tiny("qwen2", Path("tiny"), tokenizer)
    data = write(Path("rows.jsonl"), [{"text": "the cat sat on the mat"}])
    for command in (taut.show, taut.sft):
        with pytest.raises(RenderError, match="ends an assistant turn with no special token"):
            command(model=str(model), data={"train": str(data)}, out="out", device="cpu", steps=1)
    assert not Path("out").exists()
