"""Tokenizers and chat templates that other people made: stop sets, and what the marathon finds.

The part without ``slow`` takes two minutes, the rest is all templates. Skipped where npm or the package index cannot be
had.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.real import marathon, standins
from tests.real.conversations import CASES
from tests.real.marathon import Outcome, Subject

from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set

pytestmark = pytest.mark.real

EOT, IM_END = "<|eot_id|>", "<|im_end|>"
ENDS = {
    "own/qwen3": [IM_END],
    "own/gemma3": ["<end_of_turn>"],
    "own/gptoss": ["<|return|>", "<|call|>"],
    "own/deepseek_v3": ["<｜end▁of▁sentence｜>"],
    "own/llama3": [EOT],
    "own/llama3_1": [EOT],
    "own/llama2": ["</s>"],
    "axolotl/mistral_v2v3": ["</s>"],
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407": ["</s>"],
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct": [EOT],
    "axolotl/command_a": ["<|END_OF_TURN_TOKEN|>"],
    "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use": ["<|END_OF_TURN_TOKEN|>"],
    "trl/phi3": ["<|end|>"],
    "trl/gemma4": ["<turn|>", "<|tool_response>"],
    "trl/lfm2": [IM_END],
    "trl/qwen3_5_think": [IM_END],
}
"""Templates, and the tokens with which they end an assistant's turn."""
QUICK = [
    *("trl/deepseek_r1_distill", "trl/gemma4_v5", "trl/glm4moe", "trl/gptoss", "trl/lfm2_2_5"),
    *("trl/llama3_1", "trl/nemotron_3_nano", "trl/phi3", "trl/qwen3", "trl/qwen3_5_think"),
    *(
        "trl/qwen3_6_training",
        "trl/smolvlm",
        "axolotl/command_a",
        "axolotl/deepseek_v3",
        "axolotl/mistral_v2v3",
    ),
]
"""One template of each shape."""


Subjects = dict[str, Callable[[], Subject]]


def run(subjects: Subjects, names: list[str]) -> dict[str, list[Outcome]]:
    chosen = {name: subjects[name] for name in names}
    found = marathon.run(chosen, CASES)
    return {outcomes[0].template: outcomes for outcomes in found}


KNOWN = {
    # the template writes an empty thought before one in the content; taut puts it into the one that the prompt opens
    ("trl/qwen3_8", "thought inside the content"),
    ("trl/qwen3_8_training", "thought inside the content"),
}
"""Where taut differs from the library on purpose."""


def refusals(results: dict[str, list[Outcome]], verdict: str) -> list[str]:
    every = [outcome for outcomes in results.values() for outcome in outcomes]
    return [
        f"{o.template}, {o.case}: {o.reason}"
        for o in every
        if o.verdict == verdict and (o.template, o.case) not in KNOWN
    ]


@pytest.mark.parametrize("name", ENDS)
def test_turns_end_where_the_model_stops(subjects: Subjects, name: str) -> None:
    subject = subjects[name]()
    assert subject.stops is not None, subject.fault
    tokens = subject.tokenizer.convert_ids_to_tokens(list(subject.stops.turn_ends))
    assert tokens == ENDS[name]
    # Phi-3's generation_config also names the header with which the template opens answers
    found = {*subject.stops.ids, *subject.stops.left_out}
    assert found >= set(subject.ends), (
        "what generation_config names is in the set, or left out by a reason"
    )


@pytest.mark.parametrize("name", standins.OWN)
def test_the_set_without_generation_config_is_the_end_and_the_eos(
    subjects: Subjects, name: str
) -> None:
    tokenizer = subjects[f"own/{name}"]().tokenizer
    stops = derive_stop_set(Renderer(tokenizer), {})
    named = tokenizer.convert_ids_to_tokens(list(stops.ids))
    assert set(named) == {*ENDS[f"own/{name}"], tokenizer.eos_token}


def test_real_tokenizers_with_their_own_templates(subjects: Subjects) -> None:
    results = run(subjects, [f"own/{name}" for name in standins.OWN])
    assert not refusals(results, "wrong")
    assert {name for name in results if not marathon.takes(results[name], "plain")} == set()


def test_one_template_of_each_shape(subjects: Subjects) -> None:
    results = run(subjects, QUICK)
    assert not refusals(results, "wrong")
    untaken = [
        name
        for name, outcomes in results.items()
        if not (marathon.takes(outcomes, "plain") or marathon.takes(outcomes, "thinking"))
    ]
    assert not untaken


@pytest.mark.slow
def test_templates_of_trl_and_axolotl_are_taken(subjects: Subjects) -> None:
    names = [name for name in subjects if name.startswith(("trl/", "axolotl/"))]
    results = run(subjects, names)
    print(marathon.table(results))
    found = marathon.totals(results)["trl+axolotl"]
    assert not refusals(results, "wrong")
    assert found["share"] >= 0.85, found


@pytest.mark.slow
def test_templates_of_oumi_and_llama_cpp_are_right_where_they_are_taken(
    subjects: Subjects,
) -> None:
    names = [name for name in subjects if name.startswith(("oumi/", "llama.cpp/"))]
    results = run(subjects, names)
    print(marathon.table(results))
    assert not refusals(results, "wrong")
