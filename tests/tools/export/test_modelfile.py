"""Ollama's Modelfile: a template in Go's language says what the Jinja one says, or there is none and a reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.helpers.chat_runs import QUIET, chats, save_model, write_rows
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

import taut
from taut.config import from_mapping
from taut.errors import ModelError, OutputError
from taut.io.limited_call import FunctionFailed
from taut_tools.export.export import run
from taut_tools.export.modelfile import Chat, Translation, modelfile, translate
from taut_tools.export.settings import Export

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    + CHATML
)
WITH_BOS = "<s>" + CHATML
ALTERNATING = (
    "{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content }}[/SYS]"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
THINKING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}",
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
DATED = "{{ strftime_now('%Y') }}" + CHATML

CONVERSATIONS: tuple[Chat, ...] = (
    (("user", "Who?"),),
    (("system", "Be brief."), ("user", "Who?")),
    (("user", "Who?"), ("assistant", "I."), ("user", "And\nwho? {{ .Role }}")),
    (
        ("system", "Be brief."),
        ("user", "1"),
        ("assistant", "2"),
        ("user", "3"),
        ("assistant", "4"),
        ("user", "5"),
    ),
)


def jinja(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message: str) -> None:
        raise FunctionFailed(message)

    environment.globals["raise_exception"] = refuse
    compiled = environment.from_string(template)

    def render(chat: Chat) -> str:
        messages = [{"role": role, "content": content} for role, content in chat]
        return compiled.render(messages=messages, add_generation_prompt=True)

    return render


def go(template: str, chat: Chat) -> str:
    """Go's text/template, as far as it is used: if, else if, end, range, not, eq and fields."""
    tokens = re.split(r"(\{\{.*?\}\})", template, flags=re.DOTALL)
    data: dict[str, Any] = {
        "System": "\n\n".join(content for role, content in chat if role == "system"),
        "Messages": [{"Role": role, "Content": content} for role, content in chat],
    }

    def truth(words: list[str], dot: dict[str, Any]) -> bool:
        match words:
            case ["not", field]:
                return not dot[field.removeprefix(".")]
            case ["eq", field, quoted]:
                return bool(dot[field.removeprefix(".")] == quoted.strip('"'))
        raise AssertionError(words)

    def block(at: int) -> tuple[int, int]:
        """The index of the block's own else, or of its end; and of its end."""
        depth, first = 0, 0
        for index in range(at, len(tokens)):
            words = tokens[index][2:-2].split() if tokens[index].startswith("{{") else []
            depth += words[:1] in (["if"], ["range"])
            depth -= words == ["end"]
            if words[:1] == ["else"] and depth == 1 and not first:
                first = index
            if depth == 0:
                return first or index, index
        raise AssertionError("no end")

    def execute(start: int, stop: int, dot: dict[str, Any]) -> Iterator[str]:
        at = start
        while at < stop:
            if not tokens[at].startswith("{{"):
                yield tokens[at]
                at += 1
                continue
            words = tokens[at][2:-2].split()
            if words[0] == "range":
                _, end = block(at)
                for item in dot[words[1].removeprefix(".")]:
                    yield from execute(at + 1, end, item)
                at = end + 1
            elif words[0] == "if":
                _, end = block(at)
                condition, body = words[1:], at + 1
                while True:
                    tokens_left = [
                        index for index in range(body, end) if tokens[index].startswith("{{ else ")
                    ]
                    following = tokens_left[0] if tokens_left else end
                    if truth(condition, dot):
                        yield from execute(body, following, dot)
                        break
                    if following == end:
                        break
                    condition, body = tokens[following][2:-2].split()[2:], following + 1
                at = end + 1
            else:
                yield str(dot[words[0].removeprefix(".")])
                at += 1

    return "".join(execute(0, len(tokens), data))


@pytest.mark.parametrize("template", [CHATML, WITH_DEFAULT, WITH_BOS, ALTERNATING])
def test_a_translated_template_renders_conversations_alike(template: str) -> None:
    render = jinja(template)
    found = translate(template, render, None)
    assert found.go is not None, found.why_not
    for chat in CONVERSATIONS:
        assert go(found.go, chat) == render(chat)


def test_chatml_is_written_as_people_write_it() -> None:
    found = translate(CHATML, jinja(CHATML), None)
    assert found.go == (
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    )


def test_a_bos_that_llama_cpp_writes_itself_is_left_out() -> None:
    found = translate(WITH_BOS, jinja(WITH_BOS), "<s>")
    assert found.go == translate(CHATML, jinja(CHATML), None).go


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "has no chat template"),
        (TRIMMED, r"changes a message such as '  spaces around\\n'"),
        (THINKING, "changes a message such as '<think>"),
        (NO_SYSTEM, "no system"),
        (DATED, "depends on the day"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "written twice"),
        ("Always the same.", "written otherwise"),
    ],
)
def test_what_is_not_proven_is_not_translated(template: str | None, why: str) -> None:
    found = translate(template, jinja(template or ""), None)
    assert found.go is None
    assert re.search(why, found.why_not), found.why_not


def test_the_text() -> None:
    text = modelfile("m.gguf", Translation("{{ .Prompt }}\n"), ["<|im_end|>", "</s>"], "Be brief.")
    assert text == (
        'FROM ./m.gguf\nTEMPLATE """{{ .Prompt }}\n"""\nPARAMETER stop "<|im_end|>"\nPARAMETER stop "</s>"\n'
        'SYSTEM """Be brief."""\n'
    )
    text = modelfile("m.gguf", Translation(None, "a\nreason"), [], None)
    assert text == "# no TEMPLATE: a reason\nFROM ./m.gguf\n"
    with pytest.raises(ModelError, match="three quotes"):
        modelfile("m.gguf", Translation(None, ""), [], 'a """ b')
    for stop in ('"', "a\rb", "a\nb", "a\x85b", "a\u2028b", "a\0"):
        with pytest.raises(ModelError, match="which PARAMETER stop cannot have"):
            modelfile("m.gguf", Translation(None, ""), [stop], None)
    for name in ("m\nSYSTEM x.gguf", "m\r.gguf", "m\u2028.gguf"):
        with pytest.raises(ModelError, match="which FROM cannot have"):
            modelfile(name, Translation(None, ""), [], None)
    with pytest.raises(ModelError, match="a carriage return"):
        modelfile("m.gguf", Translation(None, ""), [], "a\rb")


def test_export_writes_it_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny("llama", tmp_path / "m", tiny_tokenizer())
    out = tmp_path / "small.gguf"
    with refused(ErrorCode("system/modelfile")):
        from_mapping(Export, {"model": str(model), "out": str(out), "system": "S"})
    assert run(Export(model=str(model), out=str(out), modelfile=True, system="Be brief.")) == 0
    beside = tmp_path / "small.Modelfile"
    text = beside.read_text()
    assert text.startswith("FROM ./small.gguf\n")
    assert 'PARAMETER stop "<|im_end|>"\n' in text
    assert text.endswith('SYSTEM """Be brief."""\n')
    assert f"written {beside}" in capsys.readouterr().out
    out.unlink()
    with pytest.raises(OutputError, match=r"small.Modelfile exists"):
        run(Export(model=str(model), out=str(out), modelfile=True))
    assert not out.exists()


@pytest.mark.slow
def test_the_system_message_of_the_run_is_the_models(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        **QUIET,
        "model": str(save_model(tmp_path / "qwen2")),
        "data.train": str(write_rows(tmp_path / "rows.jsonl", chats(4))),
        "data.system": "You are taut.",
        "out": str(tmp_path / "out"),
        "steps": 1,
        "dtype": "float32",
        "check": "off",
        "contract.prompts": 0,
    }
    taut.sft(**keys)
    export = Export(model=str(tmp_path / "out/model"), out=str(tmp_path / "a.gguf"), modelfile=True)
    assert run(export) == 0
    assert (tmp_path / "a.Modelfile").read_text().endswith('SYSTEM """You are taut."""\n')
