"""The table ``picture/renames.toml``, and the pinned picture under the names that it gives.

Old names are those in the picture. Each method gives the present name of an old one, "" where it is gone, and notes
which entries were used: one that is never used matches nothing in the picture.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("picture") / "renames.toml"
TABLES = (
    *("keys", "options", "values", "events", "fields", "resolved", "decisions", "files"),
    *("checks", "questions", "api", "texts"),
)
ADDED = (
    *("keys", "options", "commands", "events", "fields", "resolved", "decisions", "files"),
    *("checks", "api"),
)

Json = Any


def load_renames(path: Path = TABLE) -> Renames:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    added = tables.pop("added", {})
    wrong = [*(set(tables) - set(TABLES)), *(set(added) - set(ADDED))]
    assert not wrong, f"{path.name} has {wrong}, which the picture has no names for"
    return Renames(tables, added)


class Renames:
    """What is called otherwise than in the picture."""

    def __init__(
        self, tables: Mapping[str, Mapping[str, str]], added: Mapping[str, Collection[str]]
    ) -> None:
        self.tables = {name: dict(tables.get(name, {})) for name in TABLES}
        self.added = {name: set(added.get(name, ())) for name in ADDED}
        self.used: set[tuple[str, str]] = set()

    def entries(self) -> set[tuple[str, str]]:
        """(table, old name) of every line."""
        return {(table, old) for table, lines in self.tables.items() for old in lines}

    def find(self, table: str, *names: str) -> str | None:
        """The entry of the first of these names that has one."""
        for name in names:
            if name in self.tables[table]:
                self.used.add((table, name))
                return self.tables[table][name]
        return None

    def dotted(self, table: str, name: str) -> str:
        """A dotted name, by its own entry or that of the longest prefix."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            new = self.find(table, ".".join(parts[:length]))
            if new is not None:
                return ".".join([new, *parts[length:]]) if new else ""
        return name

    def key(self, name: str) -> str:
        return self.dotted("keys", name)

    def plain(self, table: str, name: str) -> str:
        new = self.find(table, name)
        return name if new is None else new

    def field(self, path: str) -> str:
        """The last part of ``KIND.FIELD`` or ``KIND.FIELD.FIELD``."""
        name = path.rpartition(".")[2]
        new = self.find("fields", path, name)
        return name if new is None else new

    def fields_now(self, names: Collection[str]) -> set[str]:
        """What these fields are called in any event."""
        entries = self.tables["fields"].items()
        return {*names, *(new for old, new in entries if old.rpartition(".")[2] in names)}

    def value(self, name: str, value: Json) -> Json:
        """A choice of a key, of a decision or of a field, or a list of choices."""
        if isinstance(value, list):
            return [self.value(name, item) for item in value]
        if not isinstance(value, str):
            return value
        new = self.find("values", f"{name}={value}")
        return self.text(value) if new is None else new

    def text(self, text: str) -> str:
        """Any other text that is not prose."""
        for old, new in self.tables["texts"].items():
            if old in text:
                self.used.add(("texts", old))
                text = text.replace(old, new)
        return text

    def run_keys(self, keys: Mapping[str, Json]) -> dict[str, Json]:
        """What a run is given."""
        return {self.key(key): self.value(key, value) for key, value in keys.items()}

    def run(self, pinned: Mapping[str, Json]) -> dict[str, Json]:
        """A pinned run."""
        files = [self.file(name) for name in pinned["files"]]
        events = [self.event(event) for event in pinned["events"]]
        return {
            "resolved": self.resolved_tree(pinned["resolved"]),
            "events": [event for event in events if event["kind"]],
            "files": sorted(name for name in files if name),
        }

    def resolved(self, name: str) -> str:
        """A dotted name in resolved.json."""
        for prefix in ("config.", "identity.config."):
            if name.startswith(prefix):
                key = self.key(name.removeprefix(prefix))
                parent = self.dotted("resolved", prefix[:-1])
                return f"{parent}.{key}" if key and parent else ""
        return self.dotted("resolved", name)

    def resolved_tree(self, pinned: Mapping[str, Json]) -> dict[str, Json]:
        renamed = {}
        for name, value in pinned.items():
            key = name.removeprefix("identity.").removeprefix("config.")
            new = self.decisions(value) if name == "decisions" else self.value(key, value)
            renamed[self.resolved(name)] = new
        renamed.pop("", None)
        return renamed

    def decisions(self, pinned: Json) -> list[list[str]]:
        renamed = [
            [self.plain("decisions", n), self.value(n, v), reason] for n, v, reason in pinned
        ]
        return [decision for decision in renamed if decision[0]]

    def event(self, pinned: Mapping[str, Json], kind: str | None = None) -> dict[str, Json]:
        """An event, or what is said in one under ``kind``."""
        is_nested = kind is not None
        kind = kind or pinned.get("kind", "report")
        renamed = {}
        for name, value in pinned.items():
            path = f"{kind}.{name}"
            if name == "kind" and not is_nested:
                new = self.plain("events", value)
            elif path in ("check.name", "report.checks.name"):
                new = self.plain("checks", value)
            elif name == "decisions" and not is_nested:
                new = self.decisions(value)
            else:
                new = self._field_value(path, value)
            renamed[self.field(path)] = new
        renamed.pop("", None)
        return renamed

    def _field_value(self, path: str, value: Json) -> Json:
        if isinstance(value, dict):
            return self.event(value, path)
        if isinstance(value, list):
            return [self._field_value(path, item) for item in value]
        return self.value(path, value)

    def file(self, name: str) -> str:
        """A path below ``out``; an entry is one of its names, or several in a row."""
        for old, new in self.tables["files"].items():
            if f"/{old}/" in f"/{name}/":
                self.used.add(("files", old))
                name = f"/{name}/".replace(f"/{old}/", f"/{new}/").strip("/") if new else ""
        return name

    def surface(self, pinned: Mapping[str, Json]) -> dict[str, Json]:
        """What is seen without a run."""
        keys = {self.key(key): self._choices(key, row) for key, row in pinned["keys"].items()}
        checks = {
            self.plain("checks", name): [self.find("questions", name) or question, part]
            for name, (question, part) in pinned["checks"].items()
        }
        commands = {name: self._command(told) for name, told in pinned["commands"].items()}
        api = {self._words(name): self._api(value) for name, value in pinned["api"].items()}
        surface = {"commands": commands, "keys": keys, "checks": checks, "api": api}
        for names in surface.values():
            names.pop("", None)
        return surface

    def _command(self, pinned: Mapping[str, Json]) -> dict[str, Json]:
        table = "keys" if "method" in pinned["options"] else "options"
        options = {
            self.dotted(table, name): self._choices(name, row)
            for name, row in pinned["options"].items()
        }
        options.pop("", None)

        usage = re.sub(r"[a-z_.]+(?==)", lambda word: self.dotted(table, word[0]), pinned["usage"])
        return {"usage": self.text(usage), "options": options}

    def _choices(self, key: str, row: list[str]) -> list[str]:
        """Type and default of a key, where choices have other names."""
        for entry, new in self.tables["values"].items():
            name, _, old = entry.partition("=")
            word = rf"(?<![\w-]){re.escape(old)}(?![\w-])"
            if name == key and any(re.search(word, text) for text in row):
                self.used.add(("values", entry))
                row = [re.sub(word, new, text) for text in row]
        return row

    def _api(self, pinned: Json) -> Json:
        if isinstance(pinned, dict):
            renamed = {self._words(name): self._api(value) for name, value in pinned.items()}
            renamed.pop("", None)
            return renamed
        if isinstance(pinned, list):
            return [word for item in pinned if (word := self._words(item))]
        return self._words(pinned) if isinstance(pinned, str) else pinned

    def _words(self, text: str) -> str:
        for old, new in self.tables["api"].items():
            word = rf"(?<!\w){re.escape(old)}(?!\w)"
            if re.search(word, text):
                self.used.add(("api", old))
                text = re.sub(word, new, text)
        return text
