"""What a teacher behind a server says of completions, and which servers are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.fake_vllm import Body, Fault
from tests.helpers.fake_weight_sync import tiny
from tests.helpers.teacher_models import PROBED, TeacherModelServer
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.errors import EngineError
from taut.inference.settings import EndpointConfig
from taut.inference.teacher_server import TeacherServer
from taut.types import TEACHER_LOGP, TOP_IDS, TOP_LOGP, Sample

CONFIG = EndpointConfig(timeout=5.0, retries=1, backoff=0.001, concurrency=3)
NUM_IDS = len(tiny_tokenizer())


@contextmanager
def opened(
    server: TeacherModelServer, top: int = 3, config: EndpointConfig = CONFIG, longest: int = 60
) -> Iterator[TeacherServer]:
    with server:
        teacher = TeacherServer.open(
            server.url,
            config,
            tiny_tokenizer(),
            top=top,
            num_rows=NUM_IDS,
            longest=longest,
            section="distill.",
        )
        try:
            yield teacher
        finally:
            teacher.close()


def samples(num: int = 5) -> list[Sample]:
    draw = np.random.default_rng(0)
    made = []
    for number in range(num):
        at_N = np.array([2, 3, 5 + number])
        ids_T = draw.integers(0, NUM_IDS, 6 + number)
        made.append(Sample(f"s{number}", ids_T, at_N, np.ones(3)))
    return made


def test_the_logprobs_are_the_models_own() -> None:
    slowly = Fault(slow=0.05)
    server = TeacherModelServer(model=tiny(seed=3).double(), faults=lambda body, count: slowly)
    with opened(server) as teacher:
        scores = teacher.score(samples())
    assert list(scores) == [f"s{i}" for i in range(5)]
    for sample in samples():
        with torch.no_grad():
            logits = server.model(torch.from_numpy(sample.ids_T)[None]).logits[0]
        logp = logits.log_softmax(-1)[sample.target_at_N - 1]
        own = scores[sample.id]
        wanted = logp[range(3), sample.ids_T[sample.target_at_N]]
        assert own[TEACHER_LOGP].tolist() == wanted.tolist()
        top = logp.topk(3)
        assert own[TOP_IDS].tolist() == top.indices.tolist()
        assert own[TOP_LOGP].tolist() == top.values.tolist()
    assert 1 < server.most <= CONFIG.concurrency


def test_without_likeliest_tokens_there_is_the_logprob_alone() -> None:
    with opened(TeacherModelServer(), top=0) as teacher:
        assert set(teacher.score(samples(1))["s0"]) == {TEACHER_LOGP}
        assert teacher.decision.reason.startswith("model, asked for its logprob at")


def test_a_busy_server_is_asked_again() -> None:
    server = TeacherModelServer(
        faults=lambda body, count: Fault(503, "busy") if count == PROBED + 1 else None
    )
    with opened(server) as teacher:
        assert len(teacher.score(samples(2))) == 2
    assert len(server.requests) == PROBED + 3


def other_special() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|more|>"], special_tokens=True)
    return tokenizer


def swapped() -> Any:
    """The ids of two plain words stand for each other."""
    tokenizer = tiny_tokenizer()
    real = tokenizer.decode

    def decode(ids: list[int], **keys: Any) -> Any:
        return real([index ^ 1 for index in ids], **keys)

    tokenizer.decode = decode
    return tokenizer


class OtherWords:
    """Tokenizes by another table."""

    def __init__(self) -> None:
        self.inner = tiny_tokenizer()

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(self, text: str, **keys: Any) -> dict[str, list[int]]:
        return {"input_ids": [index ^ 1 for index in self.inner(text, **keys)["input_ids"]]}

    def decode(self, ids: list[int]) -> Any:
        return self.inner.decode(ids)


@pytest.mark.parametrize(
    ("server", "keys", "says"),
    [
        ({"tokenizer": OtherWords()}, {}, r"the server makes \[.*\] of .The 3 cats"),
        ({"tokenizer": swapped()}, {}, r"the server reads '.*' for the id \d+, and the student's"),
        (
            {"max_logprobs": 2},
            {},
            r"greater than max allowed: 2.*--max-logprobs 3, lower distill",
        ),
        ({"max_model_len": 60}, {}, "max_model_len is 60 and the longest sample has 60 tokens"),
        ({"names": ("a", "b")}, {}, "serves 2 models .*set distill.server.name"),
        ({"key": "secret"}, {}, "set distill.server.api_key_env"),
    ],
)
def test_servers_that_cannot_teach_this_student(
    server: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineError, match=says), opened(TeacherModelServer(**server), **keys):
        pytest.fail("it was opened")


def test_a_student_with_more_tokens_is_refused() -> None:
    with TeacherModelServer() as server, pytest.raises(EngineError, match=r"\[.*\] of '.*more"):
        TeacherServer.open(
            server.url,
            CONFIG,
            other_special(),
            top=3,
            num_rows=NUM_IDS + 1,
            longest=60,
            section="distill.",
        )


def wrong(**values: Any) -> Any:
    return lambda choice: choice.update(values)


def places(change: Any) -> Any:
    """Changes what is said of the sample's first target."""
    return lambda choice: change(choice["prompt_logprobs"][2])


def beyond(listed: Body) -> None:
    listed[f"{NUM_IDS}"] = {"logprob": -0.001}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wrong(prompt_token_ids=None), "an answer without prompt_token_ids"),
        (wrong(prompt_token_ids=[1, 2]), "prompt_logprobs of 2 ids, which are not the 6 sent"),
        (wrong(prompt_logprobs=None), "answered 0 prompt_logprobs"),
        (places(lambda listed: listed.clear()), "of token 2 lack the id"),
        (places(lambda li: [li.popitem(), li.popitem()]), "or 3 tokens with a logprob"),
        (places(beyond), f"lists the token {NUM_IDS}, and the student has {NUM_IDS}"),
        (places(lambda li: [e.update(logprob=-0.1) for e in li.values()]), "sum to 2.71"),
        (places(lambda li: [e.update(logprob=-9999.0) for e in li.values()]), "rules a token out"),
        (places(lambda li: [e.update(logprob=2.0) for e in li.values()]), "of at most 0"),
    ],
)
def test_answers_about_something_else_are_refused(change: Any, says: str) -> None:
    """Those about the sample; opening got right ones."""
    server = TeacherModelServer(
        faults=lambda body, count: Fault(changes=change) if count >= PROBED else None
    )
    with opened(server) as teacher, pytest.raises(EngineError, match=says):
        teacher.score(samples(1))


def test_a_failure_ends_the_requests_under_way() -> None:
    server = TeacherModelServer(
        faults=lambda body, count: Fault(404, "gone") if count == PROBED else Fault(slow=0.05)
    )
    with opened(server) as teacher:
        with pytest.raises(EngineError, match="HTTP 404"):
            teacher.score(samples(5))
        assert len(server.requests) <= PROBED + CONFIG.concurrency
