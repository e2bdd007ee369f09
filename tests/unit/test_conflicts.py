"""Keys that exclude or need each other: each rule of every table is broken, has its code, and is mended as it says."""

from __future__ import annotations

import pickle
import re
import typing
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

import pytest
from tests.helpers import all_rewards
from tests.helpers.all_commands import ALL

from taut.cli import config_class
from taut.config import configclass, describe, from_mapping
from taut.conflicts import (
    Condition,
    Conflict,
    Rule,
    annotation_of,
    choices_of,
    conflict,
    default_of,
    fields_of,
    is_table,
    rules_of,
)
from taut.errors import ConfigError, OutOfMemory, TautError
from taut.methods import METHODS
from taut.rewards.settings import RewardSpec

# -- the sentences, one of each kind


@configclass
class Engine:
    """A table in a table."""

    kind: Literal["local", "server"] = "local"
    """Which."""
    urls: list[str] = field(default_factory=list)
    """Where."""

    rules: ClassVar[str] = """
        urls needs kind=server: urls are where servers answer
        kind=server needs urls=http://HOST/v1[urls]
    """


@configclass
class Base:
    """What both have."""

    lag: int = 0
    """Steps."""
    rate: float | None = None
    """A number."""
    share: float | None = None
    """Another."""
    engine: Engine = Engine()

    rules: ClassVar[str] = """
        lag>0 excludes engine.kind=local: its weights train; use `engine.kind`=server
        at most one of rate share: each says how much
    """


@configclass
class Table(Base):
    """A table of its own and its base's rules."""

    groups: list[Engine] = field(default_factory=list)
    """Several."""
    named: dict[str, Engine] = field(default_factory=dict)
    """Several, by name."""
    out: str | None = None
    """Where."""
    old: int = 1
    """Of no use."""
    reads: Literal["a", "b", "c"] = "a"
    """What."""

    rules: ClassVar[str] = """
        required out=DIR[out] where reads=b: there is nowhere to write
        old unread
        lag excludes rate
            where reads!=a: it has a rate
    """

    def __post_init__(self) -> None:
        if self.lag % 2:
            raise conflict(self, "lag", "it is odd", f"set `lag`={self.lag + 1}")


SENTENCES = [
    (
        {"lag": 2},
        "lag/engine.kind",
        "lag=2 with engine.kind=local: its weights train; use engine.kind=server",
    ),
    (
        {"rate": 0.5, "share": 1e-5},
        "rate/share",
        "rate=0.5 with share=1e-05: each says how much; expected one of the two; leave rate or share out",
    ),
    (
        {"engine.urls": ["u"]},
        "engine.urls/engine.kind",
        'engine.urls=["u"] with engine.kind=local: urls are where servers answer; expected engine.kind=server; set it, '
        "or leave engine.urls out",
    ),
    (
        {"engine.kind": "server"},
        "engine.kind/engine.urls",
        "engine.kind=server: nothing reads it; expected engine.urls=http://HOST/v1; set it, or leave engine.kind out",
    ),
    (
        {"groups": [{}, {"urls": ["u"]}]},
        "groups.*.urls/groups.*.kind",
        'groups[1].urls=["u"] with groups[1].kind=local: urls are where servers answer; expected '
        "groups[1].kind=server; set it, or leave groups[1].urls out",
    ),
    (
        {"named": {"mine": {"kind": "server"}}},
        "named.*.kind/named.*.urls",
        "named.mine.kind=server: nothing reads it; expected named.mine.urls=http://HOST/v1; set it, or leave "
        "named.mine.kind out",
    ),
    (
        {"reads": "b"},
        "out",
        "no out with reads=b: there is nowhere to write; expected it; set out=DIR",
    ),
    ({"old": 2}, "old", "old=2: nothing reads it; leave old out"),
    (
        {"lag": 2, "rate": 1.0, "reads": "c", "engine": {"kind": "server", "urls": ["u"]}},
        "lag/rate",
        "lag=2 with rate=1 and reads=c: it has a rate; leave lag or rate or reads out",
    ),
    (
        {"lag": 3, "engine": {"kind": "server", "urls": ["u"]}},
        "lag",
        "lag=3: it is odd; set lag=4",
    ),
]


@pytest.mark.parametrize(("keys", "code", "sentence"), SENTENCES)
def test_each_kind_of_rule_has_one_sentence(keys: dict[str, Any], code: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_mapping(Table, keys)
    assert (refused.value.code, str(refused.value)) == (code, sentence)


def test_a_table_that_names_what_there_is_not_is_an_error_of_its_class() -> None:
    for wrong, reason in (
        ("kinds needs urls", "kinds is no key"),
        ("kind=remote needs urls", "kind is never 'remote'"),
        ("urls needs kind[is_on]", "kind is in no table with a property is_on"),
        ("urls wants kind", "'urls wants kind' is no rule"),
        ("urls needs kind>", "'kind>' is no condition"),
    ):
        with pytest.raises(AssertionError, match=re.escape(reason)):
            configclass(type("Wrong", (Engine,), {"rules": wrong, "__annotations__": {}}))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a b", "a b"),
        ("run `date`", "run `date`"),
        (True, "true"),
        (9.0, "9"),
        (["q"], '["q"]'),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_a_value_is_told_as_it_is_typed(value: Any, shown: str) -> None:
    @configclass
    class One:
        """One key."""

        key: Any = None
        """Any value."""

        rules: ClassVar[str] = "key unread"

    with pytest.raises(
        ConfigError, match=rf"^key={re.escape(shown)}: nothing reads it; leave key out$"
    ):
        from_mapping(One, {"key": value})


def test_what_a_key_excludes_and_needs_is_documented() -> None:
    rows = {row.key: row for row in describe(Table)}
    assert rows["engine.urls"].text == "Where. Needs engine.kind=server."
    assert rows["rate"].text == "A number. Where reads other than a, excludes lag; excludes share."
    assert rows["lag"].rules == (
        "where reads other than a, excludes rate",
        "lag above 0 excludes engine.kind=local",
    )
    assert rows["out"].text == "Where. Where reads=b, required."
    assert rows["old"].text == "Of no use. Is refused."


def test_every_error_has_a_code() -> None:
    assert TautError("a").code == "taut-error" and OutOfMemory("a").code == "out-of-memory"
    assert ConfigError("a", code="b").code == "b"
    for keys, code in (
        ({"lagg": 1}, "unknown-key"),
        ({"lag": "x"}, "invalid-value"),
        ({"lag": 1, "lagg": 1}, "unknown-key"),
    ):
        with pytest.raises(ConfigError) as refused:
            from_mapping(Table, keys)
        assert refused.value.code == code
    found = pickle.loads(pickle.dumps(Conflict("`a`=1", keys=("a", "b"))))
    assert (found.code, str(found), str(found.at("x.", "x."))) == ("a/b", "a=1", "x.a=1")


# -- every rule of every table

WORDS = {
    "DIR": "there",
    "DIR/": "there/",
    "FILE": "a.jsonl",
    "FILE.py:Class": "own.py:Own",
    "http://HOST:PORT/v1": "http://127.0.0.1:1/v1",
    "gym:ENV_ID": "gym:CartPole-v1",
    "verifiers:ENV_ID": "verifiers:it",
    "agent:COMMAND": "agent:true",
    "lm-eval:NAME": "lm-eval:it",
}
"""Examples in tables -> values."""
CHARGES = RewardSpec(
    name="reward_model", options={"model": "m", "steps": {"separator": ";", "charge": True}}
)
SERVER = {"rollout.engine": "server", "rollout.urls": "http://127.0.0.1:1/v1"}
VALUES: dict[str, Any] = {
    "tasks": "lm-eval:it",
    "language": "en",
    "LoraConfig.targets": ["q_proj"],
    "local": {"sequences": 2},
    "server": {"timeout": 5.0},
    "rollout.local": {"sequences": 2},
    "rollout.server": {"timeout": 5.0},
    "server.sync": {"mode": "full"},
    "remote": {"service": "piston"},
    "addresses[are_several]": ["http://a", "http://b"],
    "reference": {"model": "m2"},
    "grading": {"workers": 2},
    "dual_clip": 3.0,
    "label_smoothing": 0.1,
    "rollout_correction_cap": 3.0,
    "grpo.rollout_correction_cap": 3.0,
    "ppo.rollout_correction_cap": 3.0,
    "advantage not": "tree",
    "GrpoConfig.loss not": "reinforce",
    "rewards[charges_steps]": [CHARGES],
    "rewards[is_judged]": "exact_match",
    "grpo.advantage[compares_answers]": "mean",
    "distill.url[is_served]": "http://127.0.0.1:1/v1",
    "rollout.environment.name[is_on]": "own.py:Own",
    "environment.name[is_on]": "own.py:Own",
    "name[is_on]": "own.py:Own",
    "lora.rank[is_on]": 4,
    "distill.teacher[is_on]": "t",
    "urls": "http://127.0.0.1:1/v1",
    "distill.url": "http://127.0.0.1:1/v1",
    "url": "http://127.0.0.1:1/v1",
    "distill.teachers": {"a": {"teacher": "t"}},
    "teachers": {"a": {"teacher": "t"}},
    "rollout.fork.turns": [1],
    "fork.turns": [1],
    "turns": [1],
    "distill.privileged_template": "{prompt} {privileged}!",
    "privileged_template": "{prompt} {privileged}!",
    "schema": {"type": "string"},
    "data.token_weights": [{"pattern": "a", "weight": 2}],
    "token_weights": [{"pattern": "a", "weight": 2}],
    "tokens": ["+", "-"],
    "steps.tokens": ["+", "-"],
    "by_row": {"a": "own.py:Own"},
    "pass_k": 2,
    "DataConfig.train": "rows",
    "data.eval": "b.jsonl",
    "share": [0.0, 0.5],
    "add": ["<a>"],
    "hosts": ["a"],
    "time": "01:00:00",
}
"""Of conditions and keys, where the type of a key does not say enough."""
REQUIRED: dict[str, Any] = {
    "model": "m",
    "data": "a.jsonl",
    "data.train": "a.jsonl",
    "prompts": "a.jsonl",
}
SETUPS: dict[str, dict[str, Any]] = {
    "rollout.dynamic_sampling_rounds/rewards": {"distill.teacher": "t"},
    "rollout.replay_groups/rewards": {"distill.teacher": "t"},
    "rollout.difficulty_filter/rewards": {"distill.teacher": "t"},
    "rewards": {"rewards": []},
    "streaming/workers": {"train": "rows"},
    "data": {"data": []},
    "tasks": {"tasks": []},
}
"""Codes of rules -> further settings with which they are broken."""
FIXES: dict[str, dict[str, Any]] = {
    "rewards/rollout.environment.name/rollout.replay_from": {"rewards": "exact_match"},
    "distill.teacher/distill.url/distill.teachers/distill.privileged": {"distill.teacher": "t"},
    "distill.teacher/distill.top_logprobs": {"distill.teacher": "t"},
    "rollout.lag/rollout.minibatches/rollout.epochs": {"rollout.minibatches": 1},
    "rollout.difficulty_filter/rollout.n": {"rollout.n": 2},
}
"""Codes of rules that the settings of another one break -> what mends that."""


def tables() -> Iterator[type[Any]]:
    """Every class of settings: of commands, methods and rewards, and the tables in them."""
    seen: dict[type[Any], None] = {}

    def visit(annotation: Any) -> None:
        if not is_table(annotation):
            for part in typing.get_args(annotation):
                visit(part)
        elif annotation not in seen and hasattr(annotation, "__pydantic_fields__"):
            seen[annotation] = None
            for info in fields_of(annotation).values():
                visit(info.annotation)

    for command in ALL.values():
        if command.config is not None:
            visit(config_class(command))
    for cls in (*METHODS.values(), *all_rewards.ALL.values()):
        visit(cls)
    yield from seen


TABLES = [cls for cls in tables() if rules_of(cls)]
RULES: dict[tuple[tuple[str, ...], Rule], list[type[Any]]] = {}
for _cls in TABLES:
    for _rule in dict.fromkeys(rules_of(_cls)):
        RULES.setdefault((_rule.code_keys, _rule), []).append(_cls)


def value_for(cls: type[Any], one: Condition, *, is_met: bool) -> Any:
    """A value of the key with which a condition holds, or does not."""
    default, annotation = default_of(cls, one.key), annotation_of(cls, one.key.split("."))
    text = one.key + (f"[{one.judge}]" if one.judge else "") + ("" if is_met else " not")
    for known in (f"{cls.__name__}.{text}", text):
        if known in VALUES and (one.judge or not one.operator or not is_met):
            return VALUES[known]
    first = one.values[0] if one.values else None
    parts = typing.get_args(annotation)
    plain = annotation if not parts else next(it for it in parts if it is not type(None))
    plain = typing.get_args(plain)[0] if typing.get_origin(plain) is Annotated else plain
    if one.operator in (">", ">=", "<", "<="):
        above = first + (1 if plain is int or isinstance(default, int) else 0.5)
        return above if (one.operator[0] == ">") == is_met else first / 2
    if (one.operator == "=" and is_met) or (one.operator == "!=" and not is_met):
        value = WORDS.get(first, first) if isinstance(first, str) else first
        is_list = isinstance(default, list) or typing.get_origin(annotation) is list
        return {"a": value} if isinstance(default, dict) else [value] if is_list else value
    for choice in choices_of(annotation):
        if choice is not None and choice != default and choice not in one.values:
            return choice
    if is_table(annotation):
        name = next(
            it for it, info in fields_of(annotation).items() if not is_table(info.annotation)
        )
        return {name: value_for(annotation, Condition(name), is_met=True)}
    if isinstance(default, bool):
        return not default
    if isinstance(default, int) or plain is int:
        return (default or 0) + 1
    if isinstance(default, float) or plain is float:
        return (default or 0) / 2 or 0.5
    if isinstance(default, list | tuple):
        return ["x"]
    if isinstance(default, dict) or typing.get_origin(plain) is dict:
        return {"x": "y"}
    return "x"


def assign(
    keys: dict[str, Any], cls: type[Any], one: Condition, prefix: str = "", *, is_met: bool = True
) -> None:
    """Set a key so that a condition holds, or does not; a table by its keys."""
    value = value_for(cls, one, is_met=is_met)
    is_whole = not is_table(annotation_of(cls, one.key.split(".")))
    found = {"": value} if is_whole else {f".{name}": item for name, item in value.items()}
    keys.update({f"{prefix}{one.key}{name}": item for name, item in found.items()})


def broken_keys(cls: type[Any], rule: Rule) -> dict[str, Any]:
    """Settings that break a rule."""
    keys: dict[str, Any] = {}
    for key, value in REQUIRED.items():
        annotation = annotation_of(cls, key.split("."))
        is_needed = (
            key.split(".")[0] in fields_of(cls) and fields_of(cls)[key.split(".")[0]].is_required()
        )
        if is_needed and annotation is not None and not is_table(annotation):
            keys[key] = [value] if typing.get_origin(annotation) is list else value
    if "method" in fields_of(cls):
        keys["method"] = cls.method
    keys |= SETUPS.get("/".join(rule.code_keys), {})
    for one in (*rule.keys, *rule.when):
        if one.key != "method" and not one.is_unset:
            assign(keys, cls, one)
    for one in rule.wanted:
        is_kept = one.operator == "=" and not one.judge and one.key != "method"
        if is_kept and default_of(cls, one.key) in one.values:
            assign(keys, cls, one, is_met=False)
    return keys


def refusal_of(cls: type[Any], rule: Rule) -> tuple[dict[str, Any], ConfigError] | None:
    """The settings and the error of a rule that is broken alone; None where this class cannot break it."""
    keys = broken_keys(cls, rule)
    for _ in range(8):
        try:
            from_mapping(cls, keys)
        except ConfigError as error:
            if error.code == "/".join(rule.code_keys):
                return keys, error
            if not mend(cls, rule, keys, error):
                return None
        else:
            return None
    return None


def mend(cls: type[Any], rule: Rule, keys: dict[str, Any], error: ConfigError) -> bool:
    """Change the settings so that another rule is kept; whether there is a way."""
    if error.code == "missing-key":
        key = re.search(r"expected (\S+)=", str(error))
        assert key is not None
        keys[key[1]] = "there"
        return True
    if error.code in FIXES and not FIXES[error.code].items() <= keys.items():
        keys.update(FIXES[error.code])
        return True
    mine = {one.key for one in rule.conditions}
    for code, prefix, table, broken in all_rules(cls):
        if code != error.code:
            continue
        for one in broken.wanted:
            if f"{prefix}{one.key}" not in mine:
                assign(keys, table, one, prefix)
                return True
        for one in broken.keys:
            if f"{prefix}{one.key}" not in mine:
                if keys.pop(f"{prefix}{one.key}", None) is None:
                    assign(keys, table, one, prefix, is_met=False)
                return True
    return False


def all_rules(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, str, type[Any], Rule]]:
    for rule in rules_of(cls):
        yield "/".join(f"{prefix}{key}" for key in rule.code_keys), prefix, cls, rule
    for name, info in fields_of(cls).items():
        if is_table(info.annotation):
            yield from all_rules(typing.cast(type, info.annotation), f"{prefix}{name}.")


@pytest.mark.parametrize(
    "case", list(RULES), ids=lambda case: f"{RULES[case][0].__name__}:{'/'.join(case[0])}"
)
def test_each_rule_is_told_by_its_code_and_mended_as_it_says(case: tuple[Any, Rule]) -> None:
    _, rule = case
    found = None
    for cls in RULES[case]:
        if cls.__name__ not in ("RunConfig", "CheckRun", "Plan") and found is None:
            found = refusal_of(cls, rule)
            kind = cls
    assert found is not None, f"no class of {RULES[case]} breaks it"
    keys, error = found
    said = str(error)
    named = [one.key for one in rule.keys] if rule.keys else [one.key for one in rule.wanted]
    for key in named:
        parent = key.rpartition(".")[0]
        assert key in said or (parent and parent in said), said
    remedy = re.search(
        r"; (?:.*; )?(?:set|leave|raise|lower|use|name|give|expected|train)\b.*", said
    )
    assert remedy is not None, said
    assert len(rule.why) + len(rule.remedy) <= 160, "beside the keys"
    leave = re.search(r"leave ([\w.]+(?: or [\w.]+)*) out", said)
    for key in leave[1].split(" or ") if leave is not None else ():
        left = {name: value for name, value in keys.items() if f"{name}.".find(f"{key}.") != 0}
        assert left != keys or rule.remedy, key
        other = remaining(kind, left) if left != keys and key not in REQUIRED else None
        is_other = other is None or other.code != error.code or rule.why not in str(other)
        assert is_other, str(other)


def remaining(cls: type[Any], keys: dict[str, Any]) -> ConfigError | None:
    """What is still refused of the settings."""
    try:
        from_mapping(cls, keys)
    except ConfigError as error:
        return error
    return None
