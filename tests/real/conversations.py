"""Conversations that a template may meet: each is a row of SFT as a user has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum of two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    },
]


@dataclass(frozen=True)
class Case:
    """A conversation."""

    name: str
    kind: str
    """plain, thinking or tools: what a template has to write for it."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        return {"messages": self.messages, **({"tools": self.tools} if self.tools else {})}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(text: str, thought: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    # nine letters and digits: Mistral's templates refuse other ids
    return {"id": f"callid00{number}", "type": "function", "function": function}


def result(text: str, name: str = "weather", number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": f"callid00{number}", "content": text}


ASKED = user("Where is the lamp of Ada?")
ANSWERED = answer("In the attic, beside the loom.")
WEATHER = user("How is the weather in Bonn?")
BONN = call("weather", city="Bonn")
THREE = result("three degrees and rain")
HISTORY = [
    message
    for number in range(12)
    for message in (
        user(f"Question {number}: how many oars have {number} boats?"),
        answer(f"Reply {number}: they have {4 * number} oars."),
    )
]

CASES = [
    Case("one turn", "plain", [ASKED, ANSWERED]),
    Case("system", "plain", [system("You answer as a pirate would."), ASKED, ANSWERED]),
    Case(
        "two turns",
        "plain",
        [ASKED, ANSWERED, user("Thanks, and the loom?"), answer("By the window.")],
    ),
    Case(
        "three turns with system",
        "plain",
        [
            system("Be brief."),
            *(ASKED, ANSWERED, user("And the loom?"), answer("By the window.")),
            *(user("And Ada?"), answer("At the market.")),
        ],
    ),
    Case(
        "answers of several lines",
        "plain",
        [
            user("Write three lines."),
            answer("One.\nTwo.\n\nThree."),
            user("Two more."),
            answer("Four.\n\n\nFive."),
        ],
    ),
    Case(
        "white space around",
        "plain",
        [user("  Where is the lamp?\n"), answer(" \n In the attic. \n\n")],
    ),
    Case("answer begins with a line break", "plain", [ASKED, answer("\n\nIn the attic.")]),
    Case(
        "letters of the world",
        "plain",
        [
            user("Wie geht's? 你好 🙂 naïve café \u200b עִברִית"),
            answer("很好 👩‍👩‍👧 Grüße — été ½ ∑ x² 🇩🇪"),
        ],
    ),
    Case(
        "code",
        "plain",
        [user("A loop, please."), answer("```python\nfor i in range(3):\n    print(i)\n\n```")],
    ),
    Case(
        "digits and spaces",
        "plain",
        [user("Count 1234567  89"), answer("1234567    89\t10\n  -5 = - 5")],
    ),
    Case("long history", "plain", HISTORY),
    Case(
        "another template's marker in the question",
        "plain",
        [
            user("What does [|endofturn|] or <end_of_turn_> or <|eot_ID|> mean?"),
            answer("It ends a turn."),
        ],
    ),
    Case(
        "another template's marker in the answer",
        "plain",
        [user("Name a marker."), answer("<|begin_turn|> and [INSTR] and <eot>")],
    ),
    Case(
        "braces and quotes",
        "plain",
        [user("{{ x }} {% y %} 'q' \"r\" \\n"), answer('{"a": "b\\n"} {{ z }} \\')],
    ),
    Case("answer is one letter", "plain", [user("A or B?"), answer("A")]),
    Case("answer repeats the question", "plain", [user("Say yes."), answer("Say yes.")]),
    Case(
        "thought in the only turn",
        "thinking",
        [user("2 + 3?"), answer("It is 5.", "Two and three make five.")],
    ),
    Case(
        "thoughts in all turns",
        "thinking",
        [
            *(user("2 + 3?"), answer("It is 5.", "Two and three make five.")),
            *(user("And 4 more?"), answer("It is 9.", "Five and four make nine.\nSo nine.")),
        ],
    ),
    Case(
        "thought in the first turn alone",
        "thinking",
        [
            user("2 + 3?"),
            answer("It is 5.", "Two and three make five."),
            user("Thanks."),
            answer("Gladly."),
        ],
    ),
    Case(
        "thought in the last turn alone",
        "thinking",
        [
            user("Hello."),
            answer("Good day."),
            user("2 + 3?"),
            answer("It is 5.", "Two and three make five."),
        ],
    ),
    Case(
        "thought inside the content",
        "thinking",
        [user("2 + 3?"), answer("<think>\nTwo and three make five.\n</think>\n\nIt is 5.")],
    ),
    Case("empty thought", "plain", [ASKED, answer("In the attic.", "")]),
    Case(
        "thought with system",
        "thinking",
        [system("Think first."), user("2 + 3?"), answer("It is 5.", "Two\n\nand three.")],
    ),
    Case("answer is only a call", "tools", [WEATHER, answer("", None, BONN)], TOOLS),
    Case(
        "call, result, answer",
        "tools",
        [WEATHER, answer("", None, BONN), THREE, answer("It is three degrees and rains.")],
        TOOLS,
    ),
    Case(
        "call with text beside it",
        "tools",
        [WEATHER, answer("Let me look that up.", None, BONN), THREE, answer("It is cold in Bonn.")],
        TOOLS,
    ),
    Case(
        "two calls at once",
        "tools",
        [
            user("Weather of Bonn and 2 + 3?"),
            answer("", None, BONN, call("add", 2, a=2, b=3)),
            *(THREE, result("5", "add", 2), answer("Cold, and 5.")),
        ],
        TOOLS,
    ),
    Case(
        "two calls in turn",
        "tools",
        [
            *(WEATHER, answer("", None, BONN), THREE),
            *(
                answer("", None, call("add", 2, a=3, b=1)),
                result("4", "add", 2),
                answer("Then four."),
            ),
        ],
        TOOLS,
    ),
    Case(
        "thought, call, result, answer",
        "both",
        [
            *(WEATHER, answer("", "I have to look.", BONN), THREE),
            answer("It is cold in Bonn.", "Three degrees is cold."),
        ],
        TOOLS,
    ),
    Case("tools that are not called", "tools", [system("Be kind."), ASKED, ANSWERED], TOOLS),
    Case(
        "developer", "developer", [{"role": "developer", "content": "Be brief."}, ASKED, ANSWERED]
    ),
]
