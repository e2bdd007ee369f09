"""What broke on a GPU once, or would have."""

from __future__ import annotations

import pytest
from tests.cuda_stand_in.cases import Case, Found
from tests.cuda_stand_in.processes import Server

pytestmark = pytest.mark.cuda_stand_in


def test_a_run_in_bfloat16_ends_without_a_compiler(stand_in: Server) -> None:
    """The proofs of the saved model are in float32, for which a GPU's attention is flex: Triton and a C compiler."""
    case = Case("sft", before="tests.cuda_stand_in.planted:no_compiler", beside_cpu=False)
    found: Found = stand_in.call("tests.cuda_stand_in.runs:run", case)
    assert len(found.losses) == 3


def test_what_generates_can_be_deterministic(stand_in: Server) -> None:
    """CUDA has no deterministic cumulative sum of floats: of the draw of a token, and of top_p."""
    case = Case("grpo", keys={"deterministic": True}, beside_cpu=False, is_saved=False)
    found: Found = stand_in.call("tests.cuda_stand_in.runs:run", case)
    assert len(found.losses) == 3
    sampling = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 4}
    keys = {f"eval.answers.sampling.{key}": value for key, value in sampling.items()}
    keys |= {
        "eval.answers.every": 2,
        "eval.answers.rewards": ["exact_match"],
        "deterministic": True,
    }
    case = Case("sft", keys=keys, beside_cpu=False, is_saved=False)
    found = stand_in.call("tests.cuda_stand_in.runs:run", case)
    assert len(found.losses) == 3


def test_linear_attention_can_be_deterministic(stand_in: Server) -> None:
    case = Case("sft", "qwen3_next", {"deterministic": True}, beside_cpu=False, is_saved=False)
    found: Found = stand_in.call("tests.cuda_stand_in.runs:run", case)
    assert len(found.losses) == 3


def test_experts_can_be_deterministic(stand_in: Server) -> None:
    """The library's grouped product counts tokens by ``histc``: experts are computed one by one."""
    case = Case("sft", "qwen3_moe", {"deterministic": True}, beside_cpu=False, is_saved=False)
    found: Found = stand_in.call("tests.cuda_stand_in.runs:run", case)
    assert len(found.losses) == 3
    assert not any(mark.kernels["histc"] for mark in found.steps)
