"""Rows, templates and tokenizers as other people make them, through the commands of taut: each file reads as a report.

What is expected is in the names of the tests. The innocent twins stand beside the faults: what is right stays accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from taut.cli import main

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LISTED = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
"""The tools, before the messages."""
CALLING = LISTED + (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + ((m.tool_calls | tojson) if "
    "m.tool_calls else '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = [
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<s>",
        "</s>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
    ),
    *(
        "<|observation|>",
        "<|end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<bos>",
    ),
    *("<start_of_turn>", "<end_of_turn>"),
]
THOUGHTS = ["<think>", "</think>", "\n\n"]
CORPUS = (
    "Where is the lamp? In the attic. The weather in Bonn is three degrees. "
    "Call a tool, think and answer in two lines."
)


class Ran(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    text: str

    @property
    def stop(self) -> str:
        """The line of the stop set."""
        lines = [line.strip() for line in self.text.splitlines()]
        return next((line for line in lines if line.startswith("stop ")), self.text[-300:])


Run = Callable[..., Ran]


@pytest.fixture
def taut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """A command in this process and its output."""
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Ran:
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return Ran(code, printed.out + printed.err)

    return run


def bpe(
    template: str = CHATML,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    added: Sequence[str] = (),
    rstrip: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Byte-level BPE. ``added``: tokens that are added and not special; ``rstrip``: special ones that take the white
    space after them along.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [CORPUS], trainers.BpeTrainer(vocab_size=500, initial_alphabet=letters, show_progress=False)
    )
    tokenizer.add_special_tokens(
        [AddedToken(s, special=True, normalized=False, rstrip=s in rstrip) for s in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, pad_token="<|endoftext|>"
    )
    fast.chat_template = template
    return fast


def model(folder: Path, tokenizer: Any, *ends: str) -> Path:
    """The directory of a tiny Llama with this tokenizer; ``ends``: what its generation_config names."""
    torch.manual_seed(0)
    size = len(tokenizer) + 5
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    made = LlamaForCausalLM(config)
    if ends:
        made.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    made.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def jsonl(folder: Path, rows: Sequence[Any], name: str = "train.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return file


def chat(question: str, answer: str, system: str | None = None, **more: Any) -> dict[str, Any]:
    head = [{"role": "system", "content": system}] if system else []
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [*head, *turns], **more}


def plain(number: int = 40) -> list[dict[str, Any]]:
    return [chat(f"Where is the lamp {i}, my friend?", f"In the attic {i}.") for i in range(number)]


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, **more, "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# -- an answer that is only a call

WEATHER = function("weather", {"city": {"type": "string"}})
ONLY_CALLS = [
    {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": f"Weather in {city} on day {day}?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", city=city)]},
        ],
    }
    for day in range(8)
    for city in ("Bonn", "Ulm", "Jena", "Kiel")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [ONLY_CALLS, plain(99) + ONLY_CALLS[:1]], ids=["all", "one_of_a_hundred"]
)
def test_an_answer_that_is_only_a_call_passes_the_checks(
    taut: Run, tmp_path: Path, rows: list[Any]
) -> None:
    made = model(tmp_path, bpe(CALLING))
    ran = taut("check", "--model", made, "--data", jsonl(tmp_path, rows))
    assert ran.code == 0, ran.text


@pytest.mark.slow
def test_an_answer_that_is_only_a_call_is_trained(taut: Run, tmp_path: Path) -> None:
    made, rows = model(tmp_path, bpe(CALLING)), jsonl(tmp_path, ONLY_CALLS)
    ran = taut("sft", f"model={made}", f"data.train={rows}", "out=run", "steps=1", "device=cpu")
    assert ran.code == 0, ran.text


# -- what a template leaves out

CALLED = [
    {
        "tools": [
            function("weather", {"city": {"type": "string"}}, description="Weather of a city")
        ],
        "messages": [
            {"role": "user", "content": f"Weather in Bonn on day {i}?"},
            {"role": "assistant", "content": "", "tool_calls": [call("weather", city="Bonn")]},
            {"role": "tool", "content": f"{i} degrees"},
            {"role": "assistant", "content": f"It is {i} degrees."},
        ],
    }
    for i in range(30)
]
NO_SYSTEM = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
).replace("{% endfor %}", "{% endif %}{% endfor %}")
PIRATES = [
    chat(f"Where is the coin {i}?", f"In the barn {i}.", system="You answer as a pirate would.")
    for i in range(30)
]


def test_a_call_that_is_not_written_is_refused_though_the_tools_name_it(
    taut: Run, tmp_path: Path
) -> None:
    made = model(tmp_path, bpe(LISTED + CHATML))
    ran = taut("show", f"model={made}", f"data.train={jsonl(tmp_path, CALLED)}")
    assert ran.code != 0, ran.text


@pytest.mark.slow
def test_a_call_that_is_not_written_is_refused_in_row_71(taut: Run, tmp_path: Path) -> None:
    made = model(tmp_path, bpe(LISTED + CHATML))
    ran = taut("check", "--model", made, "--data", jsonl(tmp_path, plain(70) + CALLED))
    assert ran.code != 0, ran.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [PIRATES + plain(70), plain(70) + PIRATES], ids=["first_rows", "from_row_71"]
)
def test_a_system_message_that_is_not_written_is_told(
    taut: Run, tmp_path: Path, rows: list[Any]
) -> None:
    made = model(tmp_path, bpe(NO_SYSTEM))
    ran = taut("check", "--model", made, "--data", jsonl(tmp_path, rows))
    assert ran.code != 0 or "system" in ran.text.lower(), ran.text


# -- where a turn ends

GLM = (
    "{% for m in messages %}{{ ('<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\n' + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + "
    "'\n' + m.content + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3_FIRST = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def test_a_turn_that_ends_with_the_next_header_is_taken(taut: Run, tmp_path: Path) -> None:
    made = model(
        tmp_path, bpe(GLM, "<|endoftext|>"), "<|endoftext|>", "<|user|>", "<|observation|>"
    )
    ran = taut("show", f"model={made}", f"data.train={jsonl(tmp_path, plain())}")
    assert ran.code == 0, ran.text


@pytest.mark.slow
def test_tokens_that_take_white_space_along_are_no_fault(taut: Run, tmp_path: Path) -> None:
    swallow = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
    made = model(tmp_path, bpe(PHI, "<|end|>", rstrip=swallow))
    ran = taut("check", "--model", made, "--data", jsonl(tmp_path, plain()))
    assert ran.code == 0, ran.text


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """A tokenizer with line breaks among its added tokens."""
    tokenizer = bpe(GEMMA, "<end_of_turn>", "<bos>", added=["\n", "\n\n"])
    return model(tmp_path, tokenizer, "<end_of_turn>", "<|endoftext|>")


def test_a_line_break_that_is_an_added_token_ends_no_turn(
    taut: Run, tmp_path: Path, gemma: Path
) -> None:
    ran = taut("show", f"model={gemma}", f"data.train={jsonl(tmp_path, plain())}")
    assert "<end_of_turn> ends an assistant turn" in ran.text, ran.stop


def test_an_answer_of_two_lines_is_taken(taut: Run, tmp_path: Path, gemma: Path) -> None:
    rows = jsonl(tmp_path, [chat(f"Write {i}.", f"One {i}.\nTwo.") for i in range(8)])
    ran = taut("show", f"model={gemma}", f"data.train={rows}")
    assert ran.code == 0, ran.text


@pytest.mark.slow
def test_the_checks_tell_a_wrong_end(taut: Run, tmp_path: Path, gemma: Path) -> None:
    ran = taut("check", "--model", gemma, "--data", jsonl(tmp_path, plain()))
    assert ran.code != 0 or "<end_of_turn>" in ran.text, ran.text


@pytest.fixture
def llama3(tmp_path: Path) -> Path:
    """A template that writes the next header whether or not it is asked to."""
    return model(tmp_path, bpe(LLAMA3_FIRST, "<|eot_id|>"))


def test_a_header_that_is_always_written_ends_no_turn(
    taut: Run, tmp_path: Path, llama3: Path
) -> None:
    ran = taut("show", f"model={llama3}", f"data.train={jsonl(tmp_path, plain())}")
    assert ran.code != 0 or "<|eot_id|> ends an assistant turn" in ran.text, ran.stop


def test_a_header_that_is_always_written_is_no_target(
    taut: Run, tmp_path: Path, llama3: Path
) -> None:
    ran = taut("show", f"model={llama3}", f"data.train={jsonl(tmp_path, plain())}")
    marked = "<|start_header_id|>assistant<|end_header_id|>■"
    assert ran.code != 0 or marked not in ran.text, ran.text[-400:]


# -- thoughts

HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last and 'thinking' in m %}"
    "{{ '<|assistant|>analysis ' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|assistant|>final ' + m.content + ('<|im_end|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|user|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OPENS_A_THOUGHT = (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not "
    "enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
QWEN35 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    + OPENS_A_THOUGHT
)
SOME_TURNS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + OPENS_A_THOUGHT
)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_an_empty_thought_is_no_thought(taut: Run, tmp_path: Path, key: str) -> None:
    rows = [{"messages": [row["messages"][0], {**row["messages"][1], key: ""}]} for row in plain(8)]
    made = model(tmp_path, bpe(HARMONY))
    ran = taut("show", f"model={made}", f"data.train={jsonl(tmp_path, rows)}")
    assert ran.code == 0 and "analysis" not in ran.text, ran.text


@pytest.fixture
def thinks(tmp_path: Path) -> Path:
    """A template whose prompt opens a thought unless it is told not to."""
    return model(tmp_path, bpe(QWEN35, added=THOUGHTS))


@pytest.mark.parametrize(
    "command",
    [
        "show",
        pytest.param("sft", marks=pytest.mark.slow),
        pytest.param("check", marks=pytest.mark.slow),
    ],
)
def test_plain_rows_under_a_template_that_thinks_are_told_what_helps(
    taut: Run, tmp_path: Path, thinks: Path, command: str
) -> None:
    more = ["out=run", "steps=1", "device=cpu"] if command == "sft" else []
    ran = taut(command, f"model={thinks}", f"data.train={jsonl(tmp_path, plain())}", *more)
    assert ran.code != 0 and "chat_template_kwargs" in ran.text, ran.text


def test_plain_rows_under_a_template_that_is_told_not_to_think(
    taut: Run, tmp_path: Path, thinks: Path
) -> None:
    setting = "data.chat_template_kwargs={enable_thinking=false}"
    ran = taut("show", f"model={thinks}", f"data.train={jsonl(tmp_path, plain())}", setting)
    assert ran.code == 0, ran.text


def test_thoughts_in_some_turns_can_be_trained(taut: Run, tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"How many oars have {i} boats?"},
                {
                    "role": "assistant",
                    "content": f"{4 * i} oars.",
                    "reasoning_content": f"{i} times 4.",
                },
                {"role": "user", "content": "Thanks."},
                {"role": "assistant", "content": "Gladly."},
            ]
        }
        for i in range(8)
    ]
    made, file = model(tmp_path, bpe(SOME_TURNS, added=THOUGHTS)), jsonl(tmp_path, rows)
    settings = [f"data.chat_template_kwargs={{enable_thinking={v}}}" for v in ("true", "false")]
    words = ["show", f"model={made}", f"data.train={file}"]
    seen = [taut(*words), *(taut(*words, setting) for setting in settings)]
    assert any(ran.code == 0 for ran in seen), [ran.text[:200] for ran in seen]


# -- what a library wrote

SCHEMAS = [
    chat(
        "Weather in Bonn?", "Let me see.", tools=[function("weather", {"city": {"type": "string"}})]
    ),
    chat(
        "Add 2 and 3.",
        "It is 5.",
        tools=[
            function(
                "add",
                {"a": {"type": ["integer", "null"]}, "b": {"type": "integer", "enum": [1, 2]}},
            )
        ],
    ),
] * 8


@pytest.mark.parametrize("form", ["tools.jsonl", "tools.parquet", "saved"])
def test_schemas_that_differ_from_row_to_row_are_read_as_they_were(
    taut: Run, tmp_path: Path, form: str
) -> None:
    """datasets gives such a column the feature Json, which is text in its files."""
    import datasets

    file = jsonl(tmp_path, SCHEMAS, "tools.jsonl")
    if form != file.name:
        cache = str(tmp_path / "cache")
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        if form == "saved":
            rows.save_to_disk(str(tmp_path / form))
        else:
            rows.to_parquet(str(tmp_path / form))
    made = model(tmp_path, bpe(LISTED + CHATML))
    ran = taut("show", f"model={made}", f"data.train={tmp_path / form}")
    assert ran.code == 0, ran.text
    assert '"properties": {"city": {"type": "string"}}' in ran.text, ran.text


def padded(name: str, arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    """A row as datasets.Dataset.to_json and pandas write it: null for each key that another row has."""
    return {
        "messages": [
            {"role": "user", "content": f"Please use {name}."},
            {"role": "assistant", "content": "", "tool_calls": [call(name, **arguments)]},
        ],
        "tools": [function(name, properties)],
    }


PADDED = [
    padded(
        "weather",
        {"city": "Bonn", "a": None, "b": None},
        {"city": {"type": "string"}, "a": None, "b": None},
    ),
    padded(
        "add",
        {"city": None, "a": 1, "b": 2},
        {"city": None, "a": {"type": "integer"}, "b": {"type": "integer"}},
    ),
] * 8


def test_nulls_of_other_rows_keys_are_not_taught(taut: Run, tmp_path: Path) -> None:
    made = model(tmp_path, bpe(CALLING))
    ran = taut("show", f"model={made}", f"data.train={jsonl(tmp_path, PADDED)}")
    assert ran.code == 0, ran.text
    assert '"a": null' not in ran.text.split("samples")[-1], ran.text


@pytest.mark.slow
def test_the_checks_tell_nulls_of_other_rows_keys(taut: Run, tmp_path: Path) -> None:
    made = model(tmp_path, bpe(CALLING))
    ran = taut("check", "--model", made, "--data", jsonl(tmp_path, PADDED))
    assert ran.code != 0 or "null" in ran.text, ran.text
