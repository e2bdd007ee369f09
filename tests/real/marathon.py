"""Templates x conversations: what taut makes of each, against the library's ``apply_chat_template``.

    python -m tests.real.marathon [--templates trl axolotl] [--only NAME] [--case NAME] [--show] [--json FILE]

Each pair has one outcome:

    right      taut takes the row, and for each assistant turn
               - the ids before the targets are those of the library's prompt (messages before the turn, with generation
                 prompt; under the template's own switches for thinking where the row decides that),
               - the ids up to the end of the turn are those of the library's rendering of the row up to it, wherever
                 that begins with the prompt; of its rest alone, where a token would reach over the end of the prompt;
                 of the row with a thought between tags in its content under a key, where the template does not look
                 for tags,
               - the targets' text is the assistant's words, thought and calls with nothing but the template's markup
                 between them, and one token of the stop set, which is the last, and which eos or generation_config of
                 the template's family names
    wrong      taut takes the row, and one of these does not hold
    refused    taut does not take a row that the template can write
    no row     the template refuses the row, or leaves a part of it out; taut refuses it too
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tests.real import artifacts, standins
from tests.real.conversations import CASES, Case

from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import StopSet, derive_stop_set
from taut.data.rows.schema import Columns, read_any
from taut.errors import TautError

SWITCHES: list[dict[str, Any]] = [
    {},
    *({"enable_thinking": value} for value in (False, True)),
    *({"thinking": value} for value in (False, True)),
]
"""Settings of the generation prompt, of which the first is the one that a server uses unasked."""
THINK = ("<think>", "</think>")
"""Tags of a thought inside the content."""
NEAREST = {"gptoss": "trl/gptoss", "llama2": "axolotl/mistral_v1"}
"""Templates for the tokenizers that come without one."""
VERDICTS = ("right", "wrong", "refused", "no row")
BASICS = {
    "plain": ["one turn", "two turns", "answers of several lines"],
    "thinking": ["thought in the only turn"],
}
"""The conversations of which a template that takes plain, or thinking, rows has to take every one that it can write."""


@dataclass(frozen=True)
class Outcome:
    template: str
    case: str
    kind: str
    verdict: str
    """right, wrong, refused or no row."""
    reason: str = ""


class Wrong(Exception):
    """What taut rendered is not what it should be."""


class Subject:
    """A template with its tokenizer, as the library and as taut have it."""

    def __init__(self, name: str, tokenizer: Any, generation: Mapping[int, str]) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.ends = {int(tokenizer.eos_token_id), *generation}
        self._rendered: dict[str, str | None] = {}
        self._ids: dict[str, list[int]] = {}
        self.stops: StopSet | None = None
        self.fault = ""
        try:
            renderer = Renderer(tokenizer)
            self.stops = derive_stop_set(renderer, generation)
            self.renderer = renderer.stopping_at(self.stops.ids)
        except TautError as error:
            self.fault = str(error)

    # -- the library

    @cached_property
    def takes_strings(self) -> bool:
        probe = [{"role": "user", "content": "vicuna"}, {"role": "assistant", "content": "guanaco"}]
        as_text = self._library(probe, (), False, {}) or ""
        as_parts = self._library(in_parts(probe), (), False, {}) or ""
        return ("vicuna" in as_text and "guanaco" in as_text) or "guanaco" not in as_parts

    @cached_property
    def takes_thought_parts(self) -> bool:
        """Whether a thought is written as a part of the content alone, and not a part of any type as it is."""
        question, keyed = {"role": "user", "content": "vicuna"}, {"reasoning_content": "alpaca"}
        answer = {"role": "assistant", "content": "guanaco", **keyed}
        part = with_thought_parts([question, answer])
        other = [*part[:1], {**part[1], "content": [{"type": "alpaca", "alpaca": "alpaca"}]}]
        as_key, as_part, as_other = (
            self._library(messages, (), False, {}) or ""
            for messages in ([question, answer], part, other)
        )
        return "alpaca" in as_part and "alpaca" not in as_key + as_other

    def text(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any],
        *,
        is_prompt: bool = False,
        **switches: Any,
    ) -> str | None:
        """The library's rendering; None: the template refuses."""
        key = json.dumps([messages, bool(tools), is_prompt, switches])
        if key not in self._rendered:
            adapted = messages if self.takes_strings else in_parts(messages)
            adapted = with_thought_parts(adapted) if self.takes_thought_parts else adapted
            self._rendered[key] = self._library(adapted, tools, is_prompt, switches)
        return self._rendered[key]

    def _library(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any],
        is_prompt: bool,
        switches: Mapping[str, Any],
    ) -> str | None:
        """What the library makes of messages as taut reads them: developer is system, and an empty thought is none."""
        said = [
            {key: value for key, value in message.items() if value or key != "reasoning_content"}
            for message in messages
        ]
        for message in said:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    said,
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=is_prompt,
                    **switches,
                )
            )
        except Exception:  # noqa: BLE001 - templates raise what they like
            return None

    def ids(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._ids[text]

    # -- taut

    def run(self, case: Case) -> Outcome:
        lost = self.left_out(case)
        if self.fault:
            verdict = "no row" if lost else "refused"
            return Outcome(
                self.name, case.name, case.kind, verdict, lost or f"template: {self.fault}"
            )
        try:
            row = read_any(case.row, "row", Columns())
            samples = self.renderer.render(row)  # type: ignore[arg-type]
        except TautError as error:
            verdict = "no row" if lost else "refused"
            return Outcome(self.name, case.name, case.kind, verdict, lost or str(error))
        try:
            if lost and "of the assistant" not in lost:
                raise Wrong(lost)
            self.compare(case, samples, is_lost=bool(lost))
        except Wrong as wrong:
            return Outcome(self.name, case.name, case.kind, "wrong", str(wrong))
        return Outcome(self.name, case.name, case.kind, "right")

    def takes_setting(self, case: Case) -> bool:
        """Whether taut takes the row with thinking off, the setting that its refusal names."""
        assert self.stops is not None
        try:
            renderer = Renderer(self.tokenizer, variables={"enable_thinking": False})
            renderer.stopping_at(self.stops.ids).render(read_any(case.row, "row", Columns()))  # type: ignore[arg-type]
        except TautError:
            return False
        return True

    def left_out(self, case: Case) -> str:
        """What the template does not write of this row, under any of its switches; "": all is written."""
        turns = [i for i, message in enumerate(case.messages) if message["role"] == "assistant"]
        if self.text(case.messages, case.tools) is None:
            return "the template refuses the row"
        for index in turns:
            before, after = case.messages[:index], case.messages[: index + 1]
            prompt = self.text(before, case.tools, is_prompt=True)
            if prompt is None:
                return f"the template refuses the prompt of messages[{index}]"
            for message in before:
                if message["role"] == "assistant":
                    continue
                if not self._writes(prompt, message["content"]):
                    return f"the template leaves out what {message['role']} said"
            for tool in case.tools:
                if tool["function"]["description"] not in prompt:
                    return "the template leaves out the tools"
            whole = self.text(after, case.tools)
            if whole is None:
                return f"the template refuses the row up to messages[{index}]"
            message = case.messages[index]
            if not self._writes(whole, message["content"], prompt):
                return "the template leaves out the words of the assistant"
            if not self._writes(whole, message.get("reasoning_content", "")):
                return "the template leaves out the thought of the assistant"
            for call in message.get("tool_calls", ()):
                values = [
                    call["function"]["name"],
                    *map(str, call["function"]["arguments"].values()),
                ]
                start = common(prompt, whole)
                if any(value not in whole[start:] for value in values):
                    return "the template leaves out the call of the assistant"
        return ""

    @staticmethod
    def _writes(text: str, words: str, prompt: str = "") -> bool:
        """Whether each line of the words is in the text: some templates take white space away."""
        lines = [line.strip() for line in words.splitlines() if line.strip() not in ("", *THINK)]
        return all(line in text for line in lines)

    def compare(self, case: Case, samples: Sequence[Any], *, is_lost: bool = False) -> None:
        """Raise Wrong where samples are not what they should be. ``is_lost``: the template's row leaves out what the
        assistant thought, said or called, so that only the prompt and the words decide.
        """
        assert self.stops is not None
        turns = [i for i, message in enumerate(case.messages) if message["role"] == "assistant"]
        learned = [(sample, *span) for sample in samples for span in spans(sample.target_at_N)]
        if len(learned) != len(turns):
            raise Wrong(f"{len(learned)} stretches of targets for {len(turns)} turns")
        for index, (sample, start, stop) in zip(turns, learned, strict=True):
            self._compare_turn(case, index, sample.ids_T.tolist(), start, stop, is_lost)
        for sample in samples:
            last = max(spans(sample.target_at_N))[1]
            ids = sample.ids_T.tolist()
            wholes = [self.text(case.messages[: i + 1], case.tools) for i in turns]
            # a token that the template writes only before the next message may stand at the end
            exact = [self.ids(whole) for whole in wholes if whole is not None]
            if any(ids == one for one in exact):
                continue
            self.inexact = True
            rest = self.tokenizer.decode(ids[last - 1 :])
            if any(whole is not None and whole.endswith(rest) for whole in wholes):
                continue  # a token was divided between prompt and answer
            rest = self.tokenizer.decode(ids[last:])
            if rest.strip():
                raise Wrong(f"after the last target stands {rest[:60]!r}")

    def _compare_turn(
        self, case: Case, index: int, ids: list[int], start: int, stop: int, is_lost: bool
    ) -> None:
        assert self.stops is not None
        message, place = case.messages[index], f"messages[{index}]"
        before, after = case.messages[:index], case.messages[: index + 1]
        end, inside = ids[stop - 1], ids[start : stop - 1]
        if end not in self.stops.ids or end not in self.ends:
            raise Wrong(
                f"{place} ends with {self.tokenizer.decode([end])!r}, at which the model does not stop"
            )
        if set(inside) & set(self.stops.ids):
            raise Wrong(f"{place} has a stop token inside")
        for switches in SWITCHES:
            prompt = self.text(before, case.tools, is_prompt=True, **switches)
            if prompt is not None and self.ids(prompt) == ids[:start]:
                break
        else:
            usual = self.ids(self.text(before, case.tools, is_prompt=True) or "")
            found = self.difference(usual, ids[:start])
            raise Wrong(f"{place}: the context is no prompt of the template's: {found}")
        row = self.text(after, case.tools, **switches)
        if row is None:
            raise Wrong(f"{place}: the template refuses the row")
        if row.startswith(prompt) and not is_lost:
            keyed = self.text([*before, _with_keyed_thought(message)], case.tools, **switches)
            rows = dict.fromkeys([row, *([keyed] if keyed and keyed.startswith(prompt) else [])])
            written = [self._after(prompt, it, ids[:start]) for it in rows]
            same = [it for it in written if ids[:stop] in (it[:stop], [*it[: stop - 1], end])]
            if not same:
                found = self.difference(written[0], ids[:stop])
                raise Wrong(f"{place}: the ids are not the library's: {found}")
            exact = same[0]
            rest = self.tokenizer.decode(exact[stop - (exact[:stop] != ids[:stop]) :])
            if rest.strip():
                self._only_header(rest, before, case, place)
        self._compare_words(message, self.tokenizer.decode(inside), prompt, row, place)

    def _after(self, prompt: str, row: str, ids: list[int]) -> list[int]:
        """The ids of a row that begins with a prompt. ``ids``: of the prompt, which decides where a token of the row
        reaches over its end.
        """
        exact = self.ids(row)
        return exact if exact[: len(ids)] == ids else [*ids, *self.ids(row[len(prompt) :])]

    def difference(self, theirs: Sequence[int], ours: Sequence[int]) -> str:
        """Where taut's ids begin to differ from the library's."""
        at, decode = common(theirs, ours), self.tokenizer.decode
        before, mine, their = (
            decode(ours[:at])[-30:],
            decode(ours[at:])[:60],
            decode(theirs[at:])[:60],
        )
        return f"after {before!r} stands {mine!r} and not {their!r}"

    def _only_header(self, rest: str, before: Sequence[Any], case: Case, place: str) -> None:
        """What the template writes after the end of a turn may be what it always appends."""
        for marker in case.messages[len(before)]["content"].split():
            if len(marker) > 3 and marker in rest:
                raise Wrong(f"{place} ends before {rest[:60]!r}")

    def _compare_words(
        self, message: Mapping[str, Any], learned: str, prompt: str, row: str, place: str
    ) -> None:
        """The targets are the thought, the words and the calls, and the template's markup."""
        rest = learned
        thought, words = message.get("reasoning_content", "").strip(), message["content"].strip()
        if words.startswith(THINK[0]):
            keyed = _with_keyed_thought(message)
            thought, words = keyed["reasoning_content"], keyed["content"]
        for name, part in (("thought", thought), ("answer", words)):
            if not part:
                continue
            if part not in rest:
                raise Wrong(f"{place}: the {name} is not learned: {learned[:100]!r}")
            head, _, tail = rest.rpartition(part) if name == "answer" else rest.partition(part)
            rest = f"{head}\0{tail}"
        calls = message.get("tool_calls", ())
        if not calls and not thought:
            # nothing but white space, or what the template writes for a turn without a thought
            for piece in rest.split("\0"):
                if piece.strip() and len(piece) > 60:
                    raise Wrong(f"{place}: learned beside the answer: {piece[:100]!r}")
        for call in calls:
            function = call["function"]
            for value in (function["name"], *map(str, function["arguments"].values())):
                if value not in rest:
                    raise Wrong(f"{place}: {value!r} of a call is not learned: {learned[:100]!r}")
        source = prompt + row + str(self.tokenizer.chat_template)
        for piece in rest.split("\0"):
            if piece.strip() and not calls and piece.strip() not in source:
                raise Wrong(
                    f"{place}: {piece[:60]!r} is learned, which the template does not write"
                )


def in_parts(messages: Sequence[Any]) -> list[Any]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _with_keyed_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the thought that its content begins with, if any, under a key of its own."""
    content = message["content"].strip()
    if not content.startswith(THINK[0]):
        return {**message}
    thought, _, words = content.removeprefix(THINK[0]).partition(THINK[1])
    return {**message, "content": words.strip(), "reasoning_content": thought.strip()}


def with_thought_parts(messages: Sequence[Any]) -> list[Any]:
    """The messages with thoughts as Ministral 3 has them."""
    adapted = []
    for message in messages:
        if thought := message.get("reasoning_content"):
            parts = [{"type": "text", "text": message["content"]}] if message["content"] else []
            parts = [{"type": "thinking", "thinking": thought}, *parts]
            message = {**message, "content": parts}
        adapted.append(message)
    return adapted


def common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Number of leading items that are equal."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


def spans(at_N: Any) -> list[tuple[int, int]]:
    """The runs [start, stop) of consecutive positions."""
    found: list[tuple[int, int]] = []
    for position in map(int, at_N):
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


# -- all of them


def names_of(collections: Sequence[str]) -> dict[str, Callable[[], Subject]]:
    """Templates by collection/name, each made when it is needed."""
    found: dict[str, Callable[[], Subject]] = {}
    for collection in collections:
        if collection == "own":
            found |= {f"own/{name}": partial(own, name) for name in standins.OWN}
            continue
        for name, template in artifacts.templates(collection).items():
            full = f"{collection}/{name}"
            found[full] = partial(stood_in, full, template)
    return found


def stood_in(name: str, template: str) -> Subject:
    """A template with its stand-in."""
    return Subject(name, *standins.stand_in(name, template))


def own(name: str) -> Subject:
    """A real tokenizer, whole, with its own template, or where npm's has none, the nearest one."""
    tokenizer = standins.real(name)
    if name in NEAREST:
        collection, _, template = NEAREST[name].partition("/")
        tokenizer.chat_template = artifacts.templates(collection)[template]
    return Subject(f"own/{name}", tokenizer, standins.inherited(tokenizer, standins.OWN[name]))


def run(
    subjects: Mapping[str, Callable[[], Subject]], cases: Sequence[Case]
) -> Iterator[list[Outcome]]:
    for make in subjects.values():
        subject = make()
        yield [subject.run(case) for case in cases]


def takes(outcomes: Sequence[Outcome], kind: str) -> bool | None:
    """Whether every basic conversation of this kind that the template writes is right; None: it writes none."""
    basic = [o for o in outcomes if o.case in BASICS[kind] and o.verdict != "no row"]
    return all(o.verdict == "right" for o in basic) if basic else None


def brief(reason: str) -> str:
    """A reason without what differs from row to row."""
    short = re.sub(r"^row(#\d+)?: ", "", reason)
    short = re.sub(r"messages\[\d+\]", "messages[i]", short)
    short = re.sub(r"\b\d+\b", "n", short)
    short = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", short)
    return short[:150]


def table(results: Mapping[str, Sequence[Outcome]]) -> str:
    lines = []
    for name, outcomes in results.items():
        count = Counter(o.verdict for o in outcomes)
        does = {True: "yes", False: "NO", None: "-"}
        lines.append(
            f"{name:58} plain {does[takes(outcomes, 'plain')]:4} thinking {does[takes(outcomes, 'thinking')]:4}"
            f" {'  '.join(f'{verdict} {count[verdict]:3}' for verdict in VERDICTS)}"
        )
    return "\n".join(lines)


def totals(results: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Of each collection, and of TRL's and axolotl's together: how many templates take plain or thinking rows."""
    groups: dict[str, list[Sequence[Outcome]]] = defaultdict(list)
    for name, outcomes in results.items():
        collection = name.partition("/")[0]
        groups[collection].append(outcomes)
        if collection in ("trl", "axolotl"):
            groups["trl+axolotl"].append(outcomes)
    found = {}
    for group, members in groups.items():
        plain = [takes(outcomes, "plain") for outcomes in members]
        thinking = [takes(outcomes, "thinking") for outcomes in members]
        either = sum(p is True or t is True for p, t in zip(plain, thinking, strict=True))
        count = Counter(o.verdict for outcomes in members for o in outcomes)
        found[group] = {
            "templates": len(members),
            "plain or thinking": either,
            "share": round(either / len(members), 3),
            "plain": plain.count(True),
            "write plain": sum(p is not None for p in plain),
            "thinking": thinking.count(True),
            "write thoughts": sum(t is not None for t in thinking),
            **count,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--templates", nargs="+", default=["own", *artifacts.TEMPLATES])
    parser.add_argument("--only", help="templates whose collection/name has this in it")
    parser.add_argument("--case", help="the conversations whose name has this in it")
    parser.add_argument("--show", action="store_true", help="print every refusal and fault")
    parser.add_argument("--json", type=Path, help="write every outcome into this file")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.case or options.case in case.name]
    subjects = {
        name: make
        for name, make in names_of(options.templates).items()
        if not options.only or re.search(options.only, name)
    }
    began, results = time.process_time(), {}
    for outcomes in run(subjects, cases):
        results[outcomes[0].template] = outcomes
        print(table({outcomes[0].template: outcomes}), flush=True)
        if options.show:
            for o in outcomes:
                if o.verdict in ("wrong", "refused"):
                    print(f"    {o.verdict:8} {o.case}: {o.reason}")
    for verdict in ("wrong", "refused", "no row"):
        reasons: dict[str, list[Outcome]] = defaultdict(list)
        for outcomes in results.values():
            for o in outcomes:
                if o.verdict == verdict:
                    reasons[brief(o.reason)].append(o)
        print(f"\n{verdict}, by reason")
        for reason, members in sorted(reasons.items(), key=lambda item: -len(item[1]))[:40]:
            where = Counter(o.template for o in members)
            example = f"{members[0].template}: {members[0].case}"
            print(f"{len(members):5} rows, {len(where):3} templates: {reason}   [{example}]")
    print()
    for group, found in totals(results).items():
        print(f"{group:12} {found}")
    print(f"{time.process_time() - began:.0f} s of processor time")
    if options.json:
        rows = [o.__dict__ for outcomes in results.values() for o in outcomes]
        options.json.write_text(json.dumps({"outcomes": rows, "totals": totals(results)}, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
