"""Official renderers, in an environment of their own: conversations in, ids and targets out. Nothing of taut is here.

    python oracle_worker.py < jobs.json > turns.json

A job is ``{"oracle", "renderer", "tokenizer", "rows": [{"messages", "tools"}]}``. Its answer has for each row, for each
assistant turn, ``{"prompt": ids, "target": ids}``: the turn as the oracle teaches it after the messages before it; or
``{"error": text}`` where the oracle does not take it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

Turn = Callable[[list[dict[str, Any]], list[dict[str, Any]]], tuple[list[int], list[bool]]]
"""Messages up to an assistant turn, and tools -> ids, and which of them are targets."""


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def renderers(name: str, path: str) -> Turn:
    from renderers import build_training_sample, create_renderer
    from renderers.configs import config_from_name

    renderer = create_renderer(load_tokenizer(path), config_from_name(name))

    def turn(messages: list[Any], tools: list[Any]) -> tuple[list[int], list[bool]]:
        only = [0] * (len(messages) - 1) + [1]
        specs = [tool["function"] for tool in tools] or None
        sample = build_training_sample(
            renderer, messages, tools=specs, ensure_final_stop=True, message_loss_mask=only
        )
        return sample.token_ids, sample.loss_mask

    return turn


def tinker(name: str, path: str) -> Turn:
    from tinker_cookbook.renderers import ToolCall, TrainOnWhat, get_renderer

    renderer = get_renderer(name, load_tokenizer(path), model_name="model")

    def adapted(message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        thought = message.pop("reasoning_content", None)
        if thought:
            message["content"] = [
                {"type": "thinking", "thinking": thought},
                {"type": "text", "text": message["content"]},
            ]
        if "tool_calls" in message:
            message["tool_calls"] = [
                ToolCall(
                    id=call["id"],
                    function=ToolCall.FunctionBody(
                        name=call["function"]["name"],
                        arguments=json.dumps(call["function"]["arguments"]),
                    ),
                )
                for call in message["tool_calls"]
            ]
        return message

    def turn(messages: list[Any], tools: list[Any]) -> tuple[list[int], list[bool]]:
        messages = [adapted(message) for message in messages]
        if tools:
            system = ""
            if messages[0]["role"] == "system":
                system, messages = messages[0]["content"], messages[1:]
            specs = [tool["function"] for tool in tools]
            messages = [*renderer.create_conversation_prefix_with_tools(specs, system), *messages]
        given, weights = renderer.build_supervised_example(
            messages, train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE
        )
        return given.to_ints(), [bool(weight) for weight in weights.tolist()]

    return turn


def harmony(name: str, path: str) -> Turn:
    from openai_harmony import (
        Author,
        Conversation,
        DeveloperContent,
        HarmonyEncodingName,
        Message,
        Role,
        SystemContent,
        ToolDescription,
        load_harmony_encoding,
    )

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def turn(messages: list[Any], tools: list[Any]) -> tuple[list[int], list[bool]]:
        said = [Message.from_role_and_content(Role.SYSTEM, SystemContent.new())]
        instructions = DeveloperContent.new()
        if messages[0]["role"] in ("system", "developer"):
            instructions = instructions.with_instructions(messages[0]["content"])
            messages = messages[1:]
        if tools:
            instructions = instructions.with_function_tools(
                [
                    ToolDescription.new(
                        t["function"]["name"],
                        t["function"]["description"],
                        parameters=t["function"]["parameters"],
                    )
                    for t in tools
                ]
            )
        if instructions.instructions or tools:
            said.append(Message.from_role_and_content(Role.DEVELOPER, instructions))

        def add(message: dict[str, Any]) -> None:
            if message["role"] == "user":
                said.append(Message.from_role_and_content(Role.USER, message["content"]))
            elif message["role"] == "tool":
                author = Author.new(Role.TOOL, f"functions.{message['name']}")
                result = Message.from_author_and_content(author, message["content"])
                said.append(result.with_recipient("assistant").with_channel("commentary"))
            else:
                assert message["role"] == "assistant", message["role"]
                parts = [
                    ("analysis", message.get("reasoning_content")),
                    ("final", message["content"]),
                ]
                if message.get("tool_calls"):
                    parts[1] = ("commentary", message["content"])
                for channel, text in parts:
                    if text:
                        part = Message.from_role_and_content(Role.ASSISTANT, text)
                        said.append(part.with_channel(channel))
                for call in message.get("tool_calls", ()):
                    text = json.dumps(call["function"]["arguments"])
                    part = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(
                        "commentary"
                    )
                    part = part.with_recipient(f"functions.{call['function']['name']}")
                    said.append(part.with_content_type("<|constrain|>json"))

        for message in messages[:-1]:
            add(message)
        prompt = encoding.render_conversation_for_completion(
            Conversation.from_messages(said), Role.ASSISTANT
        )
        add(messages[-1])
        whole = encoding.render_conversation_for_training(Conversation.from_messages(said))
        assert whole[: len(prompt)] == prompt, "the prompt is a beginning of the row"
        return whole, [False] * len(prompt) + [True] * (len(whole) - len(prompt))

    return turn


def mistral(name: str, path: str) -> Turn:
    """``name``: a tokenizer of mistral-common's data."""
    from pathlib import Path

    import mistral_common
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    file = Path(mistral_common.__file__).parent / "data" / name
    encoder = MistralTokenizer.from_file(str(file))

    def adapted(message: dict[str, Any]) -> dict[str, Any]:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        if "tool_calls" in message:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        return message

    def turn(messages: list[Any], tools: list[Any]) -> tuple[list[int], list[bool]]:
        assert not messages[-1].get("reasoning_content"), "these versions have no thoughts"
        messages = [adapted(message) for message in messages]

        def ids(said: list[Any]) -> list[int]:
            request = ChatCompletionRequest.model_validate(
                {"messages": said, "tools": tools or None}
            )
            return list(encoder.encode_chat_completion(request).tokens)

        prompt = ids(messages[:-1])
        # finetuning requests end with an assistant message
        from mistral_common.protocol.instruct.validator import ValidationMode

        trainer = MistralTokenizer.from_file(str(file), mode=ValidationMode.finetuning)
        request = ChatCompletionRequest.model_validate(
            {"messages": messages, "tools": tools or None}
        )
        whole = list(trainer.encode_chat_completion(request).tokens)
        assert whole[: len(prompt)] == prompt, "the prompt is a beginning of the row"
        return whole, [False] * len(prompt) + [True] * (len(whole) - len(prompt))

    return turn


def convert(name: str, path: str) -> Turn:
    """Write a tokenizer of mistral-common's data as tokenizer.json into the folder ``path``; there are no turns."""
    import shutil
    from pathlib import Path

    import mistral_common
    from transformers import AutoTokenizer
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    file, folder = Path(mistral_common.__file__).parent / "data" / name, Path(path)
    if file.suffix == ".json":
        convert_tekken_tokenizer(str(file)).save_pretrained(folder)
        return answer_nothing
    folder.mkdir(exist_ok=True)
    shutil.copy(file, folder / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made = AutoTokenizer.from_pretrained(folder)
    controls = [token for token in made.convert_ids_to_tokens(list(range(20))) if token[0] == "["]
    made.add_special_tokens({"additional_special_tokens": controls})
    made.save_pretrained(folder)
    return answer_nothing


def answer_nothing(messages: list[Any], tools: list[Any]) -> tuple[list[int], list[bool]]:
    return [], []


ORACLES = {
    "convert": convert,
    "renderers": renderers,
    "tinker": tinker,
    "harmony": harmony,
    "mistral": mistral,
}


def answer(turn: Turn, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
    try:
        ids, is_target = turn(messages, tools)
    except Exception as error:  # noqa: BLE001 - whatever an oracle raises is its refusal
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    if not any(is_target):
        return {"error": "no targets"}
    start, stop = is_target.index(True), len(is_target) - is_target[::-1].index(True)
    if not all(is_target[start:stop]):
        return {"error": "the targets are not one stretch"}
    return {"prompt": list(map(int, ids[:start])), "target": list(map(int, ids[start:stop]))}


def main() -> None:
    jobs, done = json.load(sys.stdin), []
    for job in jobs:
        with redirect_stdout(sys.stderr):
            try:
                turn = ORACLES[job["oracle"]](job["renderer"], job["tokenizer"])
            except Exception as error:  # noqa: BLE001
                done.append({"error": f"{type(error).__name__}: {str(error)[:300]}"})
                continue
            rows = [
                [
                    answer(turn, row["messages"][: index + 1], row["tools"])
                    for index, message in enumerate(row["messages"])
                    if message["role"] == "assistant"
                ]
                for row in job["rows"]
            ]
        done.append({"rows": rows})
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
