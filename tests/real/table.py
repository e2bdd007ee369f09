"""The tables of docs/models.md about chat templates, from what the marathon and the oracles found.

python -m tests.real.marathon --json templates.json
python -m tests.real.oracles --json turns.json
python -m tests.real.table templates.json [more.json ...] turns.json      rewrites the section of the page
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.real import marathon, oracles
from tests.real.conversations import CASES
from tests.real.marathon import Outcome
from tests.real.oracles import Turn

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = (
    "<!-- chat templates: written by tests/real/table.py -->\n",
    "<!-- end of chat templates -->\n",
)
ORIGIN = {
    "own": "the tokenizers of Qwen 3, Gemma 3, gpt-oss, DeepSeek V3, Llama 2, 3 and 3.1, whole",
    "trl": "TRL 1.16",
    "axolotl": "Axolotl 0.21",
    "llama.cpp": "llama.cpp (llama-cpp-python 0.3.36)",
    "oumi": "Oumi 0.9",
}
COLLECTIONS = (
    "| templates | number | take plain rows | take thoughts | right | refused | wrong | no row |"
)
REFUSED = "| refused | templates | rows |"
ORACLES = (
    "| renderer | template | turns | same | differ, taut as the template | taut wrong | taut alone refuses | "
    "with the setting it names | not written | what differs |"
)


TAKEN = """\
{} conversations (plain, of several turns and lines, with thoughts in all, some or no turns, with tools, calls and
results) were rendered with templates that other people made and held to the library's `apply_chat_template`: the ids
before an answer are those of the generation prompt, the ids up to its end those of the conversation, and the targets
are the answer's words, thought and calls, and one token at which the model stops. A thought between tags in the
content is held to the same thought under a key too, since some templates write the tags as words.
`python -m tests.real.marathon` repeats it.

"""
BEYOND = """
The first row has real tokenizers; the others have the nearest one with the template's markers added. *No row*: the
template refuses the conversation or leaves a part of it out, and taut says which. What is refused beyond that:

"""
OFFICIAL = """
The official renderers that have loss masks teach the same conversations, turn by turn. Where ids or targets differ, the
model's own template decides for taut, since transformers and servers render with it. *With the setting it names*: plain
rows under a template whose prompt opens a thought, which taut takes with
`data.chat_template_kwargs = { enable_thinking = false }`, as its refusal says. *Not written*: turns of rows that the
template cannot write, which taut refuses. `python -m tests.real.oracles` repeats it.

"""
KINDS = {
    "prompt": "the context",
    "target": "the answer",
    "boundary": "where the answer begins",
    "turns": "the number of turns",
}


def tables(outcomes: Sequence[Outcome], turns: Sequence[Turn]) -> str:
    """The section without its heading."""
    return (
        TAKEN.format(len(CASES))
        + _rows(COLLECTIONS, _collections(outcomes))
        + BEYOND
        + _rows(REFUSED, _refused(outcomes))
        + OFFICIAL
        + _rows(ORACLES, _oracles(turns))
    )


def _rows(head: str, lines: Iterable[Sequence[object]]) -> str:
    cells = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([head, "| --- " * (head.count("|") - 1) + "|", *cells]) + "\n"


def _collections(outcomes: Sequence[Outcome]) -> Iterable[Sequence[object]]:
    by_template: Mapping[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_template[outcome.template].append(outcome)
    found = marathon.totals(by_template)
    for name, origin in ORIGIN.items():
        if name not in found:
            continue
        group, number = found[name], found[name]["templates"]
        verdicts = [group.get(verdict, 0) for verdict in ("right", "refused", "wrong", "no row")]
        thinking = f"{group['thinking']} of {group['write thoughts']}"
        yield [origin, number, f"{group['plain']} of {group['write plain']}", thinking, *verdicts]


def _refused(outcomes: Sequence[Outcome]) -> Iterable[Sequence[object]]:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.verdict == "refused":
            groups[_short(outcome.reason)].append(outcome)
    for reason, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = list(dict.fromkeys(o.template for o in members))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield reason, ", ".join(f"`{name}`" for name in names[:3]) + more, len(members)


def _short(reason: str) -> str:
    """The first clause, without values."""
    text = (
        re.sub(r"^template: ", "", marathon.brief(reason)).partition(";")[0].partition(": after")[0]
    )
    return text.replace("messages[i]: ", "").replace("|", "\\|")


def _oracles(turns: Sequence[Turn]) -> Iterable[Sequence[object]]:
    subjects = {f"{p.oracle}:{p.renderer}": p.subject for p in oracles.PAIRS}
    for name, subject in subjects.items():
        mine = [t for t in turns if t.pair == name and t.outcome != "not theirs"]
        if not mine or mine[0].outcome == "no oracle":
            continue
        count = Counter(t.outcome for t in mine)
        right = sum(t.template == "right" for t in mine)
        wrong = sum(t.template not in ("", "right") for t in mine)
        oracle, _, renderer = name.partition(":")
        parts = ", ".join(f"{KINDS[kind]} {count[kind]}" for kind in KINDS if count[kind])
        numbers = [
            len(mine),
            count["same"],
            right,
            wrong,
            count["refused"],
            count["setting"],
            count["cannot"],
        ]
        yield [f"{oracle} `{renderer}`", f"`{subject}`", *numbers, parts]


def main() -> None:
    outcomes: list[Outcome] = []
    turns: list[Turn] = []
    for file in sys.argv[1:]:
        content = json.loads(Path(file).read_text())
        if isinstance(content, list):
            turns += [Turn(**turn) for turn in content]
        else:
            outcomes += [Outcome(**outcome) for outcome in content["outcomes"]]
    page = PAGE.read_text("utf-8")
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:begin] + tables(outcomes, turns) + page[end:], "utf-8")


if __name__ == "__main__":
    main()
