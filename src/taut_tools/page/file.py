"""Write the page as one HTML file that opens anywhere without a network: the page's own files, and some answers.

Its content policy allows the script and the style in the file, by their hashes, and nothing else: no request can leave.
Answers are JSON in which no character can end the element that holds them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from importlib.resources import files as resources
from typing import Any
from urllib.parse import quote

from taut.errors import TautError
from taut_tools.page.answers import Answer, Answers

PAGE = "page.html"
POINTS = 400
"""Maximum points of a curve in the file."""
SPREAD = 8
"""Maximum steps, spread over the run, with samples and rollouts in the file; the newest and alarms come on top."""
GROUPS = 8
"""Maximum groups of a step whose answers are in the file."""
ALARMS = 20
"""Maximum alarms whose samples are in the file, newest first."""
COMPARED = 6
"""Maximum runs of which every pair is compared in the file."""
MIB = 2**20
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_LINK = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
_SCRIPT = re.compile(r'<script src="([\w.-]+)"></script>')


def static_files() -> dict[str, bytes]:
    """Read the files of the page, by name."""
    folder = resources("taut_tools.page") / "static"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def safe_json(value: Any) -> str:
    """Write JSON for an HTML element: characters with a meaning in HTML, or none in UTF-8, are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def encoded(text: str) -> str:
    """Encode a text as JavaScript's encodeURIComponent does."""
    return quote(text, safe="-_.!~*'()", errors="replace")


def html(answers: Answers, max_bytes: int) -> str:
    """Write the file, of about ``max_bytes`` at most."""
    # Put style and script into the page, and their hashes into its policy.
    static = static_files()
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inlined(kind: str, name: str) -> str:
        text = static[name].decode("utf-8")
        assert f"</{kind}" not in text.lower() and "<!--" not in text, f"{name} cannot be inlined"
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    page = static[PAGE].decode("utf-8").replace("\r\n", "\n")
    page = _LINK.sub(lambda found: inlined("style", found[1]), page)
    begin = _SCRIPT.search(page)
    assert begin is not None, f"{PAGE} has a script"
    before, scripts = page[: begin.start()], page[begin.start() :]
    scripts = _SCRIPT.sub(lambda found: inlined("script", found[1]), scripts)
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    before = before.replace('<meta charset="utf-8">', meta, 1)
    # Answers get the bytes that are left.
    left = max_bytes - len(before.encode()) - len(scripts.encode())
    return f'{before}<script type="application/json" id="answers">{selected(answers, left)}</script>\n{scripts}'


def selected(answers: Answers, max_bytes: int) -> str:
    """Select the answers in the file, as JSON: the overview of every run, then others while there is room."""
    texts: dict[str, str] = {}
    size, num_left = 0, 0

    def take(question: str, key: str | None = None, *, is_needed: bool = False) -> Answer | None:
        nonlocal size, num_left
        name = key or question
        try:
            answer = answers.answer(question)
        except TautError as error:
            answer = {"error": {"message": str(error)}}
        text = safe_json(answer)
        num_bytes = len(text.encode()) + len(name.encode()) + 8
        if size + num_bytes > max_bytes and not is_needed:
            num_left += 1
            return None
        if name not in texts:
            texts[name] = text
            size += num_bytes
        return answer

    # The overview of every run, then curves, checks, data, model and comparisons.
    runs = [encoded(name) for name in answers.runs]
    take("runs", is_needed=True)
    for run in runs:
        for topic in ("overview", "steps"):
            take(f"run/{run}/{topic}", is_needed=True)
    for run in runs:
        take(f"run/{run}/curves?points={POINTS}", f"run/{run}/curves")
        for topic in ("checks", "data", "model"):
            take(f"run/{run}/{topic}")
    if len(runs) > 1:
        pairs = [(a, b) for a in runs for b in runs if a != b] if len(runs) <= COMPARED else []
        for pair in pairs:
            take(f"compare?runs={','.join(pair)}")
        if len(runs) > 2:
            take(f"compare?runs={','.join(runs)}")
    # Samples and rollouts, a step of each run in turn.
    waiting = [_samples(answers, run, take) for run in runs] + [
        _rollouts(run, take) for run in runs
    ]
    while waiting:
        waiting = [one for one in waiting if next(one, None)]
    note = {
        "points": POINTS,
        "num_left": num_left,
        "text": (
            f"In this file: overview, checks, data, model and curves at {POINTS} points of every run; recorded tokens "
            f"and rollouts of the newest step, of steps with alarms, and of up to {SPREAD} steps spread over the run, "
            f"{GROUPS} groups of each, while there was room for them."
        ),
        "command": "taut page DIR",
    }
    texts["file"] = safe_json(note)
    return "{" + ",\n".join(f"{safe_json(name)}:{text}" for name, text in texts.items()) + "}"


def _chosen(recorded: list[int], alarms: list[int]) -> list[int]:
    """Choose steps, the most useful first: the newest, those with alarms, others spread over the run."""
    if not recorded:
        return []
    count = min(SPREAD, len(recorded))
    spread = [recorded[index * (len(recorded) - 1) // max(1, count - 1)] for index in range(count)]
    of_alarms = [step for step in reversed(alarms) if step in set(recorded)][:ALARMS]
    return list(dict.fromkeys([recorded[-1], *of_alarms, *spread]))


def _samples(answers: Answers, run: str, take: Any) -> Iterator[bool]:
    """Take the samples of one step at a time."""
    steps = take(f"run/{run}/steps", is_needed=True) or {}
    found = answers.answer(f"run/{run}/overview")["alarms"]
    alarms = [alarm["step"] for alarm in found if alarm["step"] is not None]
    for step in _chosen(steps.get("steps", []), alarms):
        listed = take(f"run/{run}/samples?step={step}")
        for sample in (listed or {}).get("samples", []):
            if sample["is_recorded"]:
                take(f"run/{run}/sample?step={step}&id={encoded(sample['id'])}")
        yield True


def _rollouts(run: str, take: Any) -> Iterator[bool]:
    """Take the rollouts of one step at a time."""
    steps = take(f"run/{run}/steps", is_needed=True) or {}
    for step in _chosen(steps.get("rollouts", []), []):
        listed = take(f"run/{run}/rollouts?step={step}")
        for group in (listed or {}).get("groups", [])[:GROUPS]:
            take(f"run/{run}/group?step={step}&group={group['group']}")
            take(f"run/{run}/prompt?id={encoded(group['prompt_id'])}")
        yield True
