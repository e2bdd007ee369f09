"""Answers appear whole character by whole character, and the conversation holds what was said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import save_model
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.scripted_engines import FakeEngine
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.cli import main
from taut.config import from_mapping, load
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.inference.engine import Engine, Texts
from taut.inference.factory import OpenEngine
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.train.signals import Interrupt
from taut.types import Prompt
from taut_tools.chat.chat import Stream, chat
from taut_tools.chat.settings import Chat


class Speaks(LocalEngine):
    """A local engine that says given ids."""

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        *,
        interrupt_after: int | None = None,
        interrupt: type[KeyboardInterrupt] = KeyboardInterrupt,
    ) -> None:
        self.interrupt = interrupt
        self.answers, self.interrupt_after = iter(answers), interrupt_after
        self.asked: list[Prompt] = []
        self.is_conversation = False

    @contextmanager
    def conversation(self) -> Iterator[None]:
        self.is_conversation = True
        yield
        self.is_conversation = False

    def tokens(self, prompt: Prompt, sampling: Sampling) -> Iterator[int]:
        assert self.is_conversation, "what is kept of earlier turns would be lost"
        self.asked.append(prompt)
        for number, index in enumerate(next(self.answers)[: sampling.max_new_tokens]):
            if number == self.interrupt_after:
                raise self.interrupt
            yield index


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer())


def ids(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def talk(renderer: Renderer, engine: Engine, *lines: str, **keys: Any) -> str:
    """What is written, the greeting left out."""
    written: list[str] = []
    opened = OpenEngine(engine, renderer, derive_stop_set(renderer), 128, [])
    chat(from_mapping(Chat, {"model": "m", **keys}), opened, iter(lines), written.append)
    return "".join(written[1:])


def prompts(renderer: Renderer, engine: Speaks) -> list[str]:
    return [renderer.template.decode(prompt.ids_T.tolist()) for prompt in engine.asked]


def test_the_conversation_goes_on(renderer: Renderer) -> None:
    engine = Speaks([ids(renderer, "Paris.<|im_end|>"), ids(renderer, "Rome.<|im_end|>")])
    assert talk(renderer, engine, "France?", "", "Italy?", system="be brief") == "Paris.\nRome.\n"
    assert prompts(renderer, engine)[1] == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nFrance?<|im_end|>\n"
        "<|im_start|>assistant\nParis.<|im_end|>\n<|im_start|>user\nItaly?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len({prompt.id for prompt in engine.asked}) == 2


def test_commands_change_the_conversation(renderer: Renderer) -> None:
    engine = Speaks([ids(renderer, "a<|im_end|>")] * 3)
    text = talk(
        renderer, engine, "one", "/system be kind", "/reset", "two", "/what", "/exit", "three"
    )
    assert "[system: be kind]" in text
    assert "[a new conversation]" in text
    assert "[/what is no command; /reset" in text
    assert prompts(renderer, engine)[1:] == [
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_a_cut_answer_is_said_to_be_cut(renderer: Renderer) -> None:
    engine = Speaks([ids(renderer, "the cat sat on the mat")])
    text = talk(renderer, engine, "go", **{"sampling.max_new_tokens": 2})
    assert "[cut after 2 tokens (sampling.max_new_tokens)]" in text
    engine = Speaks([ids(renderer, "the cat sat")])
    assert "[cut: the model's context of 128 tokens is full" in talk(renderer, engine, "go")


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(renderer: Renderer) -> None:
    said = ids(renderer, "the cat sat on the mat")
    engine = Speaks([said, said], interrupt_after=2)
    start = renderer.template.decode(said[:2])
    assert talk(renderer, engine, "go", "on") == f"{start}\n[stopped]\n" * 2
    assert f"<|im_start|>assistant\n{start}<|im_end|>" in prompts(renderer, engine)[1]


def test_a_signal_that_ends_the_program_is_no_ctrl_c(renderer: Renderer) -> None:
    engine = Speaks([ids(renderer, "the cat sat")], interrupt_after=2, interrupt=Interrupt)
    with pytest.raises(Interrupt):
        talk(renderer, engine, "go", "on")


def test_a_server_answers_at_once_and_its_errors_leave_no_trace(renderer: Renderer) -> None:
    engine = FakeEngine(lambda name, _: name, lambda text: "error" if "1" in text else "stop")
    text = talk(renderer, engine, "one", "two")
    assert "[failed: the server went away]" in text
    assert "message 2\n" in text
    assert "one" not in renderer.template.decode(engine.asked[1].ids_T.tolist())


def test_a_mistake_is_a_line_and_the_chat_goes_on() -> None:
    renderer = Renderer(tiny_tokenizer("gemma"))
    engine = Speaks([ids(renderer, "a<end_of_turn>")])
    text = talk(renderer, engine, "one", "/system", "two", system="be brief")
    assert "System role not supported" in text
    assert "[system: none]\na\n" in text


def test_no_half_character_and_nothing_past_a_stop_string_is_shown(renderer: Renderer) -> None:
    said = ids(renderer, "naïve 東京 🎉 the END of it")
    written: list[str] = []
    stream = Stream(Texts(renderer.tokenizer, ()), ["END"], written.append)
    for index in said:
        stream.add(index)
        assert "\ufffd" not in "".join(written)
        assert not "".join(written).endswith(("E", "EN"))
    assert stream.finish() == "".join(written) == "naïve 東京 🎉 the "
    assert len(written) > 5


def test_a_model_does_not_drive_the_terminal(renderer: Renderer) -> None:
    engine = Speaks([ids(renderer, "a\x1b[2Jb\tc\nd<|im_end|>")])
    assert talk(renderer, engine, "go") == "a\ufffd[2Jb\tc\nd\n"


def test_an_answer_is_one_and_defaults_are_for_talk() -> None:
    config = load(Chat, None, ["model=m", "sampling.seed=3"])
    assert (config.sampling.max_new_tokens, config.sampling.temperature) == (1024, 0.7)
    with refused(ErrorCode("sampling.n")):
        load(Chat, None, ["model=m", "sampling.n=2"])


def test_piped_lines_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    model = save_model(tmp_path / "m")
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nthe dog\n"))
    assert main(["chat", str(model), "sampling.max_new_tokens=3", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "attention: reference\n" in out
    assert out.count("[cut after 3 tokens") == 2
