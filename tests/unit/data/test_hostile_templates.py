"""Chat templates that would run for ever or take all memory: each is an error that names the template and the limit."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_tokenizers import CHATML, tiny_tokenizer
from tokenizers import Regex, pre_tokenizers

from taut.data.render.chat_template import Template
from taut.data.render.render import Renderer
from taut.data.rows.messages import Conversation
from taut.errors import ModelError, RenderError
from taut.io import limited_call

ROW = Conversation(
    "rows.jsonl:7",
    ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}),
    (1,),
)
TIME, MEMORY, LENGTH = "processor time", "of memory", "characters of messages"
HOSTILE = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        TIME,
    ),
    "loops that write": (
        "{% for a in range(99999) %}{% for b in range(9999) %}a{% endfor %}{% endfor %}",
        f"{TIME}|{MEMORY}",
    ),
    "a constant": ("{{ 'a' * 10**10 }}", MEMORY),
    "a product": ("{{ messages[0].role * 10**10 }}", MEMORY),
    "a power": ("{{ (7 + messages|length) ** (10**9) }}", TIME),
    "powers of powers": ("{{ 9 ** (9 ** 9) }}", TIME),
    "doubling a list": (
        "{% set n = namespace(x=[messages]) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
        f"{TIME}|{MEMORY}",
    ),
    "doubling a text": (
        "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        f"{TIME}|{MEMORY}",
    ),
    "a width of %": ("{{ '%9999999999d' % 1 }}", MEMORY),
    "a width of format": (
        "{{ '{:>9999999999}'.format(1) }}",
        "does not take these messages|of memory",
    ),
    "center": ("{{ 'a'|center(10**10) }}", MEMORY),
    "indent": ("{{ 'a\n'*1000|int|indent(10**10) }}", MEMORY),
    "batch": ("{{ [1]|batch(10**10, 0)|list }}", MEMORY),
    "slice": ("{{ [1]|slice(10**10)|list }}", f"{TIME}|{MEMORY}"),
    "join": ("{{ (range(99999)|list)|join('a' * 10**5) }}", MEMORY),
    "replace": ("{{ ('a' * 10**5)|replace('a', 'b' * 10**6) }}", MEMORY),
    "a recursive macro": (
        "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}{{ f(99) }}",
        TIME,
    ),
    "lipsum": ("{{ lipsum(n=99999, max=99999) }}", f"{TIME}|{MEMORY}"),
    "urlize": ("{{ ('www.' * 10**5)|urlize }}", f"{TIME}|{MEMORY}|{LENGTH}"),
    "more than the row": ("{{ messages[0].content * 10**6 }}", LENGTH),
}

QUICK = ("nested loops", "a constant", "a power", "a width of format", "join", "more than the row")
"""One for each limit and each way to reach it."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of these tests: half a second, 200 MB."""
    limited = partial(limited_call.call_each, seconds=0.5, memory_mb=200)
    monkeypatch.setattr(
        limited_call, "call_each", lambda function, given, **_: limited(function, given)
    )


@pytest.mark.parametrize("name", slow_except(QUICK, HOSTILE))
def test_a_hostile_template_is_an_error(name: str) -> None:
    source, limit = HOSTILE[name]
    limited_call.start()
    started = time.monotonic()
    with pytest.raises((ModelError, RenderError), match=limit) as raised:
        Renderer(tiny_tokenizer(), CHATML + source).render(ROW)
    assert time.monotonic() - started < 60, "one call ended by a limit, not one after another"
    assert "\n" not in str(raised.value)


def test_only_some_rows_make_it_run_for_ever(tmp_path: Path) -> None:
    """What no trial on the first rows would find. The error names the row, the file, the limit and the remedy."""
    tokenizer = tiny_tokenizer()
    source = "{% if 'sesame' in messages[0].content %}" + HOSTILE["nested loops"][0] + "{% endif %}"
    tokenizer.chat_template = CHATML + source
    tokenizer.save_pretrained(tmp_path)
    tokenizer.name_or_path = str(tmp_path)
    renderer = Renderer(tokenizer)
    before = renderer.render(ROW)[0]
    messages = ({"role": "user", "content": "sesame"}, ROW.messages[1])
    with pytest.raises(ModelError) as raised:
        renderer.render(Conversation("rows.jsonl:8", messages, (1,)))
    file = str(tmp_path / "chat_template.jinja")
    for part in ("rows.jsonl:8", file, "0.5 s of processor time", "data.template=FILE"):
        assert part in str(raised.value)
    assert renderer.render(ROW)[0].ids_T.tolist() == before.ids_T.tolist()


def test_a_long_row_is_no_attack() -> None:
    """Two million characters through an ordinary template."""
    content = "word " * 400_000
    messages = ({"role": "user", "content": content}, ROW.messages[1])
    text = Renderer(tiny_tokenizer(), CHATML).template.apply(messages, (), "rows.jsonl:9")
    assert content in text.text


def test_a_tokenizer_that_renders_in_its_own_way_is_asked() -> None:
    """As tokenizers whose code comes with the model may, whatever template they have beside it."""
    tokenizer = tiny_tokenizer()

    class Own(type(tokenizer)):  # type: ignore[misc]  # of the backend at hand
        def apply_chat_template(self, conversation: list[dict[str, str]], **options: object) -> str:
            assert options["tokenize"] is False
            return "".join(f"<{it['role'][0]}>{it['content'].upper()}" for it in conversation)

    tokenizer.__class__ = Own
    template = Template(tokenizer, None)
    assert template.write(ROW.messages, (), is_prompt=False, place="d:1") == "<u>HI<a>HELLO"
    with pytest.raises(limited_call.FunctionFailed, match=r"^'content'$"):
        template.write([{"role": "user"}], (), is_prompt=False, place="d:1")


def test_a_regular_expression_of_the_tokenizer_that_backtracks_is_an_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The library gives up after ten million steps, and panics; its trace is on stderr."""
    tokenizer = tiny_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    renderer = Renderer(tokenizer, CHATML)
    messages = ({"role": "user", "content": "a" * 64 + "!"}, ROW.messages[1])
    with pytest.raises(ModelError, match=r"tokenizer\.json: .* retry-limit-in-match"):
        renderer.render(Conversation("rows.jsonl:8", messages, (1,)))
    assert "panicked" in capfd.readouterr().err
