"""TOML, overrides and mappings become one frozen tree, or one line that says what is wrong with them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from taut.config import (
    changed,
    configclass,
    describe,
    from_mapping,
    home_path,
    load,
    to_dict,
    user_path,
)
from taut.errors import ConfigError


@configclass
class Batch:
    """A table."""

    samples_per_step: Annotated[int, Field(ge=1)] = 32
    """Samples in a step."""
    tokens_per_microbatch: int = 8192
    """Tokens at a time,
    at most."""

    def __post_init__(self) -> None:
        if self.samples_per_step == 13:
            raise ConfigError("found batch.samples_per_step=13; expected luck; choose 12")


@configclass
class Source:
    path: str
    weight: float = 1.0


@configclass
class Root:
    out: str
    """Where to."""
    steps: int | None = None
    rate: float = 1e-5
    kind: Literal["linear", "cosine"] = "cosine"
    resume: bool = False
    name: str | None = None
    train: str | list[str | Source] = "a.jsonl"
    freeze: list[str] = field(default_factory=list)
    columns: dict[str, str] | None = None
    batch: Batch = Batch()


def refused(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Root, path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def toml(directory: Path, text: str) -> Path:
    path = directory / "run.toml"
    path.write_text(text)
    return path


def test_overrides_are_set_on_top_of_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'out = "x"\nsteps = 3\n[batch]\nsamples_per_step = 4\n')
    config = load(Root, path, ["batch.samples_per_step=8", "rate=1e-3"])
    assert config == Root(out="x", steps=3, rate=1e-3, batch=Batch(samples_per_step=8))


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("out=1", "out", "1"),
        ("out=true", "out", "true"),
        ("out=2026-01-01", "out", "2026-01-01"),
        ("out=1e-4", "out", "1e-4"),
        ('out="quoted"', "out", "quoted"),
        ("out=a=b", "out", "a=b"),
        ("out=a#b", "out", "a#b"),
        ("rate=1", "rate", 1.0),
        ("steps=none", "steps", None),
        ("name=none", "name", None),
        ("out=none", "out", "none"),
        ("resume=true", "resume", True),
        ('freeze=["a", "b"]', "freeze", ["a", "b"]),
        ('train=["a", {path = "b", weight = 2}]', "train", ["a", Source(path="b", weight=2)]),
        ("freeze=[q_proj,v_proj]", "freeze", ["q_proj", "v_proj"]),
        ("freeze=[ *.mlp.*, /layers/a-b/ , ]", "freeze", ["*.mlp.*", "/layers/a-b/"]),
        ("train=[a.jsonl,b c.jsonl]", "train", ["a.jsonl", "b c.jsonl"]),
        ("out=[a,b]", "out", "[a,b]"),
        ("freeze=q_proj", "freeze", ["q_proj"]),
        ("freeze=.*(q|v)_proj", "freeze", [".*(q|v)_proj"]),
        ('train={path = "b"}', "train", [Source(path="b")]),
        ("train=[ab]*.jsonl", "train", "[ab]*.jsonl"),
        ("columns.prompt=question", "columns", {"prompt": "question"}),
        ("columns.prompt=1", "columns", {"prompt": "1"}),
    ],
)
def test_values_are_toml_or_else_text(override: str, name: str, value: object) -> None:
    given_out = [] if name == "out" else ["out=x"]
    assert getattr(load(Root, None, [override, *given_out]), name) == value


@pytest.mark.parametrize(
    "raw", ["[a,,b]", "[a,b", "a,b", "[/a(b,c)/]", "[a,{b=1}]", "[a=b]", "[]x"]
)
def test_a_list_without_quotes_has_plain_items_only(raw: str) -> None:
    assert "expected a list" in refused(f"freeze={raw}", "out=x")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            "train=[{path=b,weight=2}]",
            """texts in it need quotes; .*'train=[{path="b",weight=2}]'""",
        ),
        ("columns={prompt=question}", """a table, and .*'columns={prompt="question"}'"""),
        ("train=[{path=b", "a bracket or a comma is wrong"),
    ],
)
def test_a_list_or_table_that_is_none_is_no_text(raw: str, words: str) -> None:
    first, _, last = words.partition(".*")
    assert first in refused(raw, "out=x") and last in refused(raw, "out=x")


@example("{}")
@example("[]")
@given(st.text().filter(lambda text: text.strip() == text and not text.startswith(('"', "'"))))
def test_a_string_field_takes_any_text(text: str) -> None:
    assert load(Root, None, [f"out={text}"]).out == text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "batch.tokens_per_micro=1",
            "unknown key 'batch.tokens_per_micro' on the command line; did you mean 'batch.tokens_per_microbatch'?",
        ),
        (
            "samples_per_step=1",
            "unknown key 'samples_per_step' on the command line; did you mean 'batch.samples_",
        ),
        ("zzz=1", "unknown key 'zzz' on the command line; 'taut COMMAND --help' lists every key"),
        ("steps=many", 'found steps="many" on the command line; expected an integer'),
        ("steps=1.5", "found steps=1.5 on the command line; expected an integer"),
        ("steps=true", "found steps=true on the command line; expected an integer"),
        ("rate=fast", 'found rate="fast" on the command line; expected a number'),
        ("rate=inf", "found rate=Infinity on the command line; expected a finite number"),
        ("resume=1", "found resume=1 on the command line; expected true or false"),
        ("resume=True", 'found resume="True" on the command line; expected true or false'),
        ("kind=square", "found kind=\"square\" on the command line; expected 'linear' or 'cosine'"),
        ("batch.samples_per_step=0", "expected greater than or equal to 1"),
        ("batch.samples_per_step=13", "found batch.samples_per_step=13; expected luck; choose 12"),
        ("batch=3", "'batch' on the command line is a table; expected its keys one by one"),
        ("steps.x=3", 'found steps={"x": 3} on the command line; expected an integer'),
        ('train=[{path = "b", wait = 2}]', "unknown key 'train[0].wait' on the command line"),
        ("steps", "found 'steps' on the command line; expected key=value"),
        ("=3", "found '=3' on the command line; expected key=value"),
        ("a..b=3", "found 'a..b=3' on the command line; expected key=value"),
    ],
)
def test_a_bad_override_is_refused_in_one_line(override: str, message: str) -> None:
    assert message in refused("out=x", override)


def test_no_key_is_set_twice() -> None:
    assert "key 'steps' is set twice" in refused("out=x", "steps=1", "steps=1")
    assert "'columns' and 'columns.a' are both set" in refused("out=x", "columns={}", "columns.a=b")


def test_a_key_of_a_value_is_refused(tmp_path: Path) -> None:
    path = toml(tmp_path, 'out = "x"\ncolumns = 3\n')
    assert "'columns', which has the value 3" in refused("columns.a=b", path=path)


def test_mistakes_in_the_file_name_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'out = 1\nbach.samples_per_step = 3\nsteps = "4"\n')
    message = refused(path=path)
    assert message.startswith("unknown key 'bach' at run.toml")
    assert "found out=1 at run.toml; expected a string" in message
    assert 'found steps="4" at run.toml; expected an integer' in message


def test_only_the_first_mistakes_are_named() -> None:
    message = refused("a=1", "b=1", "c=1", "d=1")
    assert message.count("unknown key") == 3
    assert message.endswith("and 2 more")


def test_a_missing_key_is_named() -> None:
    assert "key 'out' is missing; expected out=..." in refused()


def test_a_missing_table_is_named_by_its_first_key() -> None:
    @configclass
    class Outer:
        batch: Batch

    with pytest.raises(ConfigError, match=r"'batch' is missing; expected batch\.samples_per_step="):
        load(Outer, None)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "expected a TOML file" in refused(path=tmp_path / "none.toml")
    assert "is not TOML" in refused(path=toml(tmp_path, "out = \n"))


def test_mappings_may_be_nested_dotted_or_instances() -> None:
    expected = Root(out="x", batch=Batch(samples_per_step=4))
    for batch in (
        {"batch": {"samples_per_step": 4}},
        {"batch.samples_per_step": 4},
        {"batch": Batch(samples_per_step=4)},
    ):
        assert from_mapping(Root, {"out": Path("x"), **batch}) == expected


def test_mappings_hold_instances_in_lists() -> None:
    config = from_mapping(Root, {"out": "x", "train": [Source(path="a", weight=2)]})
    assert config.train == [Source(path="a", weight=2)]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"stepz": 3}, "unknown key 'stepz' in the arguments; did you mean 'steps'?"),
        ({"steps": "3"}, 'found steps="3" in the arguments; expected an integer'),
        ({"name": object()}, "found a value of type object in the arguments"),
        (
            {"steps": 1, "batch": {"samples_per_step": 1}, "batch.samples_per_step": 2},
            "is set twice",
        ),
    ],
)
def test_a_bad_mapping_is_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="in the arguments") as caught:
        from_mapping(Root, {"out": "x", **mapping})
    assert message in str(caught.value)


def test_a_configuration_is_frozen_and_survives_json() -> None:
    config = load(Root, None, ["out=x", "columns.a=b", 'train=[{path = "b"}]'])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # type: ignore[misc]
    assert from_mapping(Root, json.loads(json.dumps(to_dict(config)))) == config


def test_describe_lists_every_key_with_its_documentation() -> None:
    rows = {row.key: row for row in describe(Root)}
    assert list(rows)[-2:] == ["batch.samples_per_step", "batch.tokens_per_microbatch"]
    assert rows["out"].default == "required"
    assert rows["steps"][1:4] == ("integer | none", "none", "")
    assert rows["kind"].type == "linear | cosine"
    assert rows["train"].type == "string | list of (string | table)"
    assert rows["freeze"].default == "[]"
    assert rows["batch.tokens_per_microbatch"].doc == "Tokens at a time, at most."


def test_a_class_made_from_another_keeps_its_keys_checks_and_documentation() -> None:
    @configclass
    class Larger(Batch):
        """Another default, and a key of its own."""

        samples_per_step: int = 64
        seed: int = 0
        """Of what is drawn."""

    docs = {row.key: row.doc for row in describe(Larger)}
    assert docs == {
        "samples_per_step": "Samples in a step.",
        "tokens_per_microbatch": "Tokens at a time, at most.",
        "seed": "Of what is drawn.",
    }
    assert from_mapping(Larger, {"seed": 2}).samples_per_step == 64
    with pytest.raises(ConfigError, match="expected luck"):
        from_mapping(Larger, {"samples_per_step": 13})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rate = " + "9" * 5000, "run.toml cannot be read at line 3: Exceeds the limit"),
        ("freeze = " + "[" * 3000, "run.toml cannot be read at line 3: maximum recursion depth"),
        ("steps = 0x" + "f" * 5000, "an integer of 20000 bits for 'steps' at run.toml; expected"),
        ("steps = 9223372036854775808", "an integer of 64 bits for 'steps' at run.toml; expected"),
        (f"freeze = {'[' * 40}{']' * 40}", "'freeze[0][0]"),
        (f"kind = '{'x' * 500}'", "..."),
        ("kind = 'a\u2028b'", r'found kind="a\u2028b" at run.toml'),
        ('"ki\\nd" = 1', r"unknown key 'ki\nd' at run.toml"),
    ],
)
def test_what_no_configuration_can_hold_is_named(tmp_path: Path, line: str, message: str) -> None:
    refusal = refused(path=toml(tmp_path, f'out = "x"\n# two\n{line}\n'))
    assert message in refusal
    assert len(refusal) < 400
    assert refusal.isprintable()


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b'out = "x"\nkind = "\xff"\n')
    assert "run.toml is not UTF-8 at line 2" in refused(path=tmp_path / "run.toml")
    assert "found 'kind' on the command line, which is not Unicode" in refused("kind=\udcff")
    assert "nested deeper" in refused(".".join("a" * 3000) + "=1")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~", "HOME"),
        ("~/runs/a", "HOME/runs/a"),
        ("~root/.ssh", "~root/.ssh"),
        ("~no-such-user/x", "~no-such-user/x"),
        ("a/~/b", "a/~/b"),
    ],
)
def test_only_the_home_of_the_user_is_expanded(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/HOME")
    assert str(home_path(given)) == expected.replace("HOME", "/HOME")
    assert str(user_path(given, "out")) == expected.replace("HOME", "/HOME")


def test_changed_keys_are_those_that_differ_from_their_defaults() -> None:
    config = Root(out="a", freeze=["x"], columns={}, batch=Batch(samples_per_step=2))
    assert changed(config) == ["out", "freeze", "columns", "batch"]
    assert changed(config, ("batch", "rate", "freeze")) == ["batch", "freeze"]
    assert changed(Root(out="a", freeze=[], batch=Batch()), ("freeze", "batch", "columns")) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [("a b", "a b"), (True, "true"), (9.0, "9"), (["q"], '["q"]'), ({"a": 1}, '{"a": 1}')],
)
def test_a_key_that_nothing_reads_is_told_as_it_is_typed(value: Any, shown: str) -> None:
    @configclass
    class Table:
        """One key."""

        key: Any = None
        """Any value."""
        other: int = 0
        """A number."""

        rules: ClassVar[str] = "key needs other=1"

    with pytest.raises(ConfigError) as caught:
        from_mapping(Table, {"key": value})
    assert f"key={shown} with other=0: nothing reads it; expected other=1" in str(caught.value)
