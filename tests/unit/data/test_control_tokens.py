"""Control tokens in what a row says: read as control tokens, or encoded as the text that they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers.tiny_tokenizers import CHATML, QWEN3, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from taut.data.render.render import Renderer
from taut.data.rows.schema import Columns, read_any
from taut.data.settings import TokenWeight
from taut.errors import ConfigError, RenderError
from taut.types import Sample

TEXT = "What is <|im_end|>, and <|im_start|>system?"


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, **more},
    ]
    return {"messages": messages}


def rendered(renderer: Renderer, row: dict[str, Any]) -> Sample:
    (sample,) = renderer.render(read_any(row, "rows.jsonl:1", Columns()))  # type: ignore[arg-type]
    return sample


def as_text(template: str = CHATML, **options: Any) -> Renderer:
    return Renderer(tiny_tokenizer(), template, control_tokens="as_text", **options)


def test_what_a_row_says_is_text_and_what_the_template_writes_is_not() -> None:
    renderer = as_text()
    row = chat(TEXT, "It ends a turn: <|im_end|>.")
    sample = rendered(renderer, row)
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    start = renderer.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert (sample.ids_T == end).sum() == 2 and (sample.ids_T == start).sum() == 2
    assert sample.target_at_N[-1] == (sample.ids_T == end).nonzero()[0][-1]
    text = renderer.tokenizer.decode(sample.ids_T)
    assert text == (
        f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\nIt ends a turn: <|im_end|>.<|im_end|>\n"
    )
    targets = renderer.tokenizer.decode(sample.ids_T[sample.target_at_N])
    assert targets == "It ends a turn: <|im_end|>.<|im_end|>"


def test_by_default_they_are_control_tokens() -> None:
    renderer = Renderer(tiny_tokenizer(), CHATML)
    sample = rendered(renderer, chat(TEXT, "A turn."))
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (sample.ids_T == end).sum() == 3
    with pytest.raises(RenderError, match="ends an answer"):
        rendered(renderer, chat("Which?", "<|im_end|> does"))


@pytest.mark.parametrize("question", ["Hi 12345 you.\n\n  Ok?", " <b>é世</b> ", "<|im_sep|> <x|>"])
def test_other_text_has_the_ids_that_it_has(question: str) -> None:
    row = chat(question, "Two lines\n\nof text")
    for template in (CHATML, QWEN3):
        plain = rendered(Renderer(tiny_tokenizer(), template), row)
        own = as_text(template)
        assert rendered(own, row).ids_T.tolist() == plain.ids_T.tolist()
        text = own.template.apply(row["messages"], (), "x").text
        assert own.template.control_tokens.encode([text]) == [plain.ids_T.tolist()]


def test_prompts_tools_calls_thoughts_and_variables_are_what_a_row_says() -> None:
    renderer = as_text(QWEN3)
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    tool = {"type": "function", "function": {"name": "find", "description": "Ends <|im_end|>"}}
    ids = renderer.prompt_ids([{"role": "user", "content": TEXT}], [tool])
    assert (ids == end).sum() == 2 and renderer.tokenizer.decode(ids).count("<|im_end|>") == 4
    call = {"function": {"name": "find", "arguments": {"what": "<|im_end|>"}}}
    row = chat("Find it", "Ok", tool_calls=[call], reasoning_content="is it <|im_end|>?")
    sample = rendered(renderer, {**row, "tools": [tool]})
    assert (sample.ids_T == end).sum() == 3  # of the system message, the question, the turn
    targets = renderer.tokenizer.decode(sample.ids_T[sample.target_at_N])
    assert targets.count("<|im_end|>") == 3
    reading = CHATML.replace("{% for", "{{ note if note else '' }}{% for", 1)
    noted = as_text(reading).prompt_ids(PROMPT, variables={"note": "<|im_end|>"})
    assert (noted == end).sum() == 1


PROMPT = [{"role": "user", "content": "Hello"}]


def test_tags_of_a_thought_stay_tokens_in_an_answer() -> None:
    tokenizer = tiny_tokenizer("qwen3")
    renderer = Renderer(tokenizer, control_tokens="as_text")
    tag = tokenizer.convert_tokens_to_ids("<think>")
    row = chat("What is <think>?", "<think>\na tag\n</think>\n\nA tag.")
    plain = rendered(Renderer(tokenizer), chat("What is that?", row["messages"][1]["content"]))
    sample = rendered(renderer, row)
    assert sample.ids_T[sample.target_at_N].tolist() == plain.ids_T[plain.target_at_N].tolist()
    assert (sample.ids_T == tag).sum() == (plain.ids_T == tag).sum()


def test_weights_are_found_where_the_words_are() -> None:
    rules = (TokenWeight(pattern="turn", weight=3.0),)
    sample = rendered(as_text(token_weights=rules), chat(TEXT, "<|im_end|> ends a turn!"))
    ids = sample.ids_T[sample.target_at_N][sample.weight_N == 3]
    assert "turn" in tiny_tokenizer().decode(ids) and len(ids) < 6


def test_a_template_that_looks_at_the_token_is_refused() -> None:
    looking = CHATML.replace(
        "message['content']", "message['content'].replace('<|im_end|>?', 'nothing')", 1
    )
    with pytest.raises(RenderError, match=r"does not write a control token.*data.control_tokens"):
        rendered(as_text(looking), chat("Is it <|im_end|>?", "No"))


def test_private_characters_beside_control_tokens_are_refused() -> None:
    with pytest.raises(RenderError, match="private character"):
        rendered(as_text(), chat("<|im_end|> \U00100000", "No"))


def test_a_model_whose_vocabulary_has_the_token_as_a_word() -> None:
    """A Unigram or SentencePiece model would make the token of its letters."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("▁", -1.0)]
    pieces += [(letter, -2.0) for letter in "<>/s:abcdehilo"]
    backend = Tokenizer(models.Unigram(pieces, 0, False))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken(it, special=True) for it in ("<unk>", "<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    sample = rendered(
        Renderer(tokenizer, template, control_tokens="as_text"), chat("a </s> b:", "ah </s>")
    )
    assert sample.ids_T.tolist().count(1) == 1 and sample.ids_T.tolist().count(2) == 1
    assert tokenizer.decode(sample.ids_T).count("< / s >") == 2


def test_a_tokenizer_with_code_of_its_own_is_refused() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(*args, **kwargs)

    tokenizer = Own(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(ConfigError, match=r"data.control_tokens=as_text, and Own"):
        Renderer(tokenizer, CHATML, control_tokens="as_text")


def test_the_key_is_part_of_what_caches_are_named_by() -> None:
    default = Renderer(tiny_tokenizer(), CHATML)
    assert default.identity() != as_text().identity()
    assert (
        json.loads(json.dumps(default.identity())) == Renderer(tiny_tokenizer(), CHATML).identity()
    )
