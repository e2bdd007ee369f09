"""What is shown of a prompt is what is trained: ``taut show``, the header of a run, ``taut plan``, ``taut rollouts``
and the page have the token ids that the trainer has, whatever puts tools or messages into them.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.helpers.chat_runs import events, write_rows
from tests.helpers.online_runs import keys_of, train
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import QWEN25, tiny_tokenizer

from taut.cli import main
from taut.commands.show import show
from taut.config import from_mapping
from taut.methods import METHODS
from taut.methods.online import OnlineMethod
from taut.plan.workload import workload
from taut.run.inputs import load_inputs
from taut.run.recorded import Recorded
from taut.train import distributed
from taut_tools.page.answers import Answers

TOOL = {
    "name": "look",
    "description": "looks at it",
    "parameters": {"type": "object", "properties": {}},
}
CODE = f"""
import json
from urllib.request import Request, urlopen
from taut.rl.environment import Step

TOOL = {TOOL!r}

class Named:
    tools = [TOOL]
    def step(self, text, calls):
        return Step(done=True, reward=len(text))

class Begins(Named):
    follows_prompt = True
    def reset(self, row):
        return [{{"role": "user", "content": "And " + row["answer"] + "?"}}]

def agent(row, endpoint):
    tools = [{{"type": "function", "function": TOOL}}]
    body = {{"model": endpoint.model, "messages": row["prompt"], "tools": tools}}
    head = {{"Authorization": "Bearer " + endpoint.api_key, "Content-Type": "application/json"}}
    place = endpoint.base_url + "/chat/completions"
    urlopen(Request(place, json.dumps(body).encode(), head)).read()
    return 1.0
"""
MOODY = QWEN25.replace(r"system\nYou are", r"system\n' + (mood or 'plain') + ' You are")
"""A template with a variable of its own."""
CASES: dict[str, dict[str, Any]] = {
    "tools of the row": {"row": {"tools": [TOOL]}},
    "tools of the environment": {"environment": "tools", "tools": ["calculator"]},
    "tools of a class": {"environment": "{place}/code.py:Named"},
    "tools and messages of a class": {"environment": "{place}/code.py:Begins"},
    "what an agent asks": {"environment": "agent:{place}/code.py:agent"},
    "variables of the row's source": {"source": {"chat_template_kwargs": {"mood": "glad"}}},
    "the beginning of an answer": {"begun": "it is"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shown") / "model"
    return save_tiny("qwen2", place, tiny_tokenizer("qwen2.5"), max_position_embeddings=1024)


QUICK = "tools of the environment"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES],
)
def test_every_view_of_a_prompt_has_the_ids_that_are_trained(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = CASES[case]
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "moody.jinja").write_text(MOODY)
    prompt = [{"role": "user", "content": "What is 2 plus 3?"}]
    if "begun" in given:
        prompt.append({"role": "assistant", "content": given["begun"]})
    row = {"id": "q", "prompt": prompt, "answer": "5", **given.get("row", {})}
    source = {"path": str(write_rows(tmp_path / "asked.jsonl", [row])), **given.get("source", {})}
    environment = given.get("environment", "").format(place=tmp_path) or None
    with_own = {"rewards": None} if environment and environment != "tools" else {}
    keys = keys_of(
        "grpo",
        model,
        tmp_path,
        **with_own,
        data__train=[source],
        data__template=str(tmp_path / "moody.jinja"),
        data__max_length=900,
        steps=1,
        rollout__n=2,
        rollout__stop=None,
        rollout__max_new_tokens=4,
        batch__samples_per_step=1,
        rollout__environment__name=environment,
        rollout__environment__tools=given.get("tools"),
    )
    out = train(keys).out
    recorded = Recorded(out)
    (first, _) = recorded.rollouts(1)
    trained = first["ids_T"][: first["sampled_at_N"][0]]
    text = "".join(recorded.pieces(trained))
    asks_tools = "tools" in case or "agent" in case
    assert ("look" in text or "calculator" in text) == asks_tools, text
    assert ("And 5?" in text) == ("messages" in case)
    assert ("glad You are" in text) == ("variables" in case)
    assert text.endswith("assistant\nit is") == ("beginning" in case)

    run = from_mapping(METHODS["grpo"], keys)
    assert isinstance(run, OnlineMethod)
    inputs = load_inputs(run, distributed.start("cpu"))
    rows = inputs.train.prompt_rows  # type: ignore[attr-defined]
    (shown,) = run.first_prompts(inputs, rows)
    assert not isinstance(shown, str) and shown.ids_T.tolist() == trained
    screen = io.StringIO()
    show(run, Console(file=screen, width=200))
    assert f"q: {len(trained)} tokens; '5'" in screen.getvalue()
    asks = run.rollout.environment.asks
    if not asks or "tools of a class" in case:
        assert rows[0].ids_T.tolist() == trained
        (start,) = events(out, "start")
        assert f"{len(trained)} tokens" in start["data"]
        tree = workload(run, inputs, 1).supply.trees[0]
        assert tree.samples[0].ids_T[: tree.samples[0].target_at_N[0]].tolist() == trained

    assert main(["rollouts", str(out), "json=true"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["ids_T"] == first["ids_T"]
    assert main(["rollouts", str(out)]) == 0
    assert f"q, a prompt of {len(trained)} tokens" in capsys.readouterr().out
    group = Answers({"a": out}).answer("run/a/group?step=1&group=0")
    assert "".join(group["asked"]) == text and len(group["asked"]) == len(trained)
