"""``taut --help``, ``taut COMMAND --help [GROUP]``: commands and keys in groups, in 80 columns.

    taut sft --help              the keys that most runs set, and the groups of the others
    taut sft --help optim        the keys of one group, or one key
    taut sft --help all          every key

A group is the table of a run's file; the keys outside of tables are ``general``. Imports no torch.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from taut.errors import ConfigError

if TYPE_CHECKING:  # it loads pydantic, which the overview does not need
    from taut.config import Row

WIDTH = 80
WHOLE = 24
"""Maximum number of keys of a command whose help lists all of them."""
GENERAL, ALL = "general", "all"
MOST_SET = (
    *("model", "data.train", "data.eval", "data.max_length", "prompts", "data", "rewards", "out"),
    *("steps", "epochs", "batch.samples_per_step", "optim.learning_rate", "lora.rank", "rollout.n"),
    *("rollout.max_new_tokens", "sampling.max_new_tokens", "engine", "urls", "port", "resume"),
)
"""Keys that the help of a command shows first, if it has them."""
ITEM = " " * 2
TEXT = " " * 6
REST = " " * 10
"""Indent of the continuation of a long line; no other line begins with as many spaces."""
EXAMPLES = {
    "sft": ("model=DIR data.train=a.jsonl out=runs/a", "run.toml lora.rank=16 resume=true"),
    "grpo": ("model=DIR data.train=a.jsonl rewards=math out=runs/a", "run.toml rollout.n=16"),
    "check": ("--model DIR --data a.jsonl", "run.toml --full", "--recipe trl:recipe.yaml"),
    "show": ("run.toml", "--step 120 runs/a"),
    "plan": ("run.toml --gpus 8 --gpu-memory 80GiB",),
    "generate": ("DIR prompts=a.jsonl out=b.jsonl sampling.n=4",),
    "eval": ("DIR data=a.jsonl rewards=exact_match limit=100",),
    "data filter": (
        "a.jsonl out=b.jsonl max_tokens=4096 model=DIR",
        "a.jsonl out=b/ where='score > 3'",
    ),
    "score": ("DIR data=a.jsonl out=b.jsonl",),
}
"""Examples of commands whose usage does not say enough; the other training methods share the examples of sft."""
TRAINING_EXAMPLES = ("model=DIR data.train=a.jsonl out=runs/a", "run.toml optim.learning_rate=1e-5")


def overview(groups: Mapping[str, Mapping[str, str]], example: str) -> str:
    """The commands: title of a group -> command -> purpose."""
    width = max(len(name) for commands in groups.values() for name in commands) + len("taut ") + 2
    lines = ["usage: taut COMMAND [RUN.toml | RUN.yaml] [key=value | --key value ...]"]
    for title, commands in groups.items():
        lines += ["", f"{title}:"]
        for name, about in commands.items():
            lines += filled(about, f"{ITEM}{f'taut {name}'.ljust(width)}", ITEM + " " * width)
    lines += ["", *filled("taut COMMAND --help: its keys, in groups; taut --version", "")]
    return "\n".join([*lines, *filled(f"example: {example}", "", REST)])


def family(name: str, commands: Mapping[str, str]) -> str:
    """Commands that begin with the same word: name -> purpose."""
    width = max(map(len, commands)) + len("taut ") + 2
    lines = [f"usage: taut {name} TOOL [key=value | --key value ...]", ""]
    for command, about in commands.items():
        lines += filled(about, f"{ITEM}{f'taut {command}'.ljust(width)}", ITEM + " " * width)
    return "\n".join([*lines, "", *filled(f"taut {name} TOOL --help: its keys", "")])


def usage(name: str, words: str) -> list[str]:
    """The lines of a command's usage."""
    more = "" if "key=value" in words else " [key=value | --key value ...]"
    return filled(f"usage: taut {name} {words}{more}", "", REST)


def command_help(
    name: str, about: str, rows: Sequence[Row], topic: str | None, is_training: bool
) -> list[str]:
    """The part after the usage: keys, or groups of keys. Raises ConfigError if ``topic`` is no group, no key and not
    all.
    """
    if topic is not None:
        return _keys(f"keys of {topic}", _of_topic(name, rows, topic))
    lines = filled(f"{about[0].upper()}{about[1:]}.", "")
    given = EXAMPLES.get(name, TRAINING_EXAMPLES if is_training else ())
    examples = [line for words in given for line in filled(f"taut {name} {words}", ITEM, REST)]
    if len(rows) <= WHOLE:
        lines += ["", *_keys("keys", rows)]
    else:
        chosen = sorted(
            (row for row in rows if row.key in MOST_SET), key=lambda row: MOST_SET.index(row.key)
        )
        lines += ["", *_keys("keys that most set", chosen), "", f"groups of all {len(rows)} keys:"]
        lines += _groups(rows)
        lines += [
            "",
            *filled(f"taut {name} --help GROUP: the keys of a group; --help all: every key", ""),
        ]
    return [*lines, *(["", "examples:", *examples] if examples else [])]


def rows_of(cls: type[Any]) -> list[Row]:
    """Every key of a configuration class, with the defaults of its method."""
    from taut.config import describe

    notes = cls.defaults_by_method() if hasattr(cls, "defaults_by_method") else {}
    return [
        row._replace(doc=f"{row.doc} {notes.get(row.key, '')}".rstrip()) for row in describe(cls)
    ]


def group_of(key: str) -> str:
    """The group of a key."""
    return key.partition(".")[0] if "." in key else GENERAL


def groups_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The keys by group, in the order in which the groups first occur."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group_of(row.key), []).append(row)
    return groups


def filled(text: str, first: str, rest: str | None = None) -> list[str]:
    """A text in lines of at most WIDTH columns."""
    rest = first if rest is None else rest
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )


def filled_page(text: str) -> str:
    """A docstring in lines of at most WIDTH columns: paragraphs are filled anew, indented lines one by one."""
    lines: list[str] = []
    for block in re.split(r"\n(?=\s)|\n\n", text):
        for part in [block] if not block[:1].isspace() else block.splitlines():
            indent = part[: len(part) - len(part.lstrip())]
            if indent:
                more = [] if len(part) <= WIDTH else filled(part.strip(), indent, f"{indent}    ")
                lines += more or [part]
            else:
                lines += filled(" ".join(part.split()), "") or [""]
    return "\n".join(lines)


def _keys(title: str, rows: Sequence[Row]) -> list[str]:
    lines = [f"{title} (type; default):"]
    for row in rows:
        lines += filled(f"{row.key}  ({row.type}; {row.default})", ITEM, REST)
        lines += filled(row.text, TEXT)
    return lines


def _groups(rows: Sequence[Row]) -> list[str]:
    lines = []
    for group, members in groups_of(rows).items():
        names = list(dict.fromkeys(row.key.removeprefix(f"{group}.") for row in members))
        head = f"{ITEM}{group:<18}{len(members):>3}  "
        shown = textwrap.shorten(", ".join(names), WIDTH - len(head), placeholder=" ...")
        lines.append(f"{head}{shown}")
    return lines


def _of_topic(name: str, rows: Sequence[Row], topic: str) -> Sequence[Row]:
    if topic == ALL:
        return rows
    topic = topic.removesuffix(".")
    found = [
        row
        for row in rows
        if row.key == topic
        or row.key.startswith(f"{topic}.")
        or (topic == GENERAL and "." not in row.key)
    ]
    if not found:
        from taut.config import foreign_keys

        groups = [*groups_of(rows), ALL]
        keys = [row.key for row in rows]
        foreign = [
            key for key in foreign_keys()[0].get(topic.rpartition(".")[2], ()) if key in keys
        ]
        near = foreign or difflib.get_close_matches(topic, [*groups, *keys], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"taut {name} --help {topic}: no such group; expected one of {', '.join(groups)}, or a key{hint}"
        )
    return found
