"""Carry the sampling of answers, and the engine."""

from __future__ import annotations

from taut_tools.migrate.draft import (
    Draft,
    is_count,
    is_number,
    is_off,
    words_of,
)


def carry_rollouts(draft: Draft) -> None:
    """Carry the sampling of answers, and the engine."""
    # Number, length and distribution of answers.
    method = draft.method
    if method == "grpo" or (method == "gkd" and (draft.value("num_generations") or 1) > 1):
        draft.set("rollout.n", draft.value("num_generations"), "num_generations")
    elif method == "ppo":
        n = draft.value("num_generations") or 1
        draft.set("rollout.n", n, "num_generations")
    else:
        draft.needless("one answer, or two that are compared", "num_generations")
    length = draft.value("max_completion_length")
    if length is None and draft.framework == "openrlhf" and is_number(draft.value("max_length")):
        length = draft.value("max_length")
        draft.assumed.append(
            "an answer may have as many tokens as prompt and answer together (data.max_len)"
        )
    draft.set("rollout.max_new_tokens", length, "max_completion_length")
    draft.set("rollout.temperature", draft.value("temperature"), "temperature")
    for name, off in (
        ("top_p", (1, 1.0)),
        ("top_k", (0, -1)),
        ("min_p", (0,)),
        ("repetition_penalty", (1, 1.0)),
    ):
        if name not in draft.given and not is_off(draft.value(name), off):
            why = "tokens are sampled from the whole distribution: the ratios would be biased"
            draft.lacking(name, f"not set, which is {draft.value(name)}: {why}")
    _carry_engine(draft)
    if (iterations := draft.value("num_iterations")) is not None and method == "grpo":
        draft.set("rollout.epochs", iterations, "num_iterations")
    # Groups that are sampled again.
    if draft.value("dynamic_sample"):
        draft.set(
            "rollout.dynamic_sampling_rounds",
            draft.value("max_resample_times"),
            "dynamic_sample",
            "max_resample_times",
        )
    elif draft.value("algo.dynamic_filtering_enable"):
        draft.set("rollout.dynamic_sampling_rounds", 8, "algo.dynamic_filtering_enable")
        draft.assumed.append(
            "8 rounds of other prompts fill a rollout, where OpenRLHF goes on without end"
        )
        bounds = draft.value("algo.dynamic_filtering_range")
        if bounds in (None, [0, 1], [0.0, 1.0]):
            draft.needless(
                "rewards are 0 or 1: groups whose rewards are all equal",
                "algo.dynamic_filtering_range",
            )
        else:
            draft.lacking(
                "algo.dynamic_filtering_range",
                "groups whose rewards are all equal are replaced, no others",
            )
    draft.off("dynamic_sample", "algo.dynamic_filtering_enable")
    draft.needless("of dynamic_sample", "max_resample_times")
    # Answers without an end, and long ones.
    if draft.value("mask_truncated_completions"):
        draft.set("shaping.overlong", "drop", "mask_truncated_completions")
    draft.off("mask_truncated_completions")
    if draft.is_on("missing_eos_penalty") and method in ("ppo", "grpo"):
        draft.set(
            "shaping.missing_eos_penalty", draft.value("missing_eos_penalty"), "missing_eos_penalty"
        )
    if is_count(buffer := draft.value("soft_overlong")):
        draft.set("shaping.soft_overlong", buffer, "soft_overlong")
        if draft.value("reward.overlong_penalty_factor") == 1:
            draft.needless("the penalty ends at -1", "reward.overlong_penalty_factor")
        else:
            draft.lacking("reward.overlong_penalty_factor", "the penalty ends at -1")
    penalty = draft.value("reward.stop_properly_penalty_coef")
    if is_number(penalty):
        draft.lacking(
            "reward.stop_properly_penalty_coef",
            "shaping.missing_eos_penalty takes an amount off, not a factor",
        )


def _carry_engine(draft: Draft) -> None:
    """Carry the engine in this process, or servers, and the lag."""
    ports = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
    lag = 0
    used: tuple[str, ...] = ()
    if draft.value("async_generate"):
        lag, used = 1, ("async_generate",)
    elif draft.value("train.async_enable"):
        lag, used = (
            draft.value("train.async_queue_size") or 1,
            ("train.async_enable", "train.async_queue_size"),
        )
    elif draft.recipe.method == "async_grpo":
        lag, used = draft.value("max_staleness"), ("max_staleness",)
    is_server = bool(draft.value("use_vllm")) and draft.value("vllm_mode") == "server"
    if is_server or lag:
        urls = _urls(draft)
        draft.set("rollout.engine", "server", "use_vllm", "vllm_mode")
        draft.set("rollout.urls", urls, *ports)
        draft.assumed.append(f"the model is served at {urls}: vllm serve MODEL (docs/serving.md)")
    else:
        draft.set("rollout.engine", "local", "use_vllm", "vllm_mode")
        draft.needless("no server is used", *ports)
    if lag:
        times = draft.settings.get("rollout.minibatches", 1) * (draft.value("num_iterations") or 1)
        draft.set("rollout.lag", lag * times, *used, why="rollout.lag: updates of so many rollouts")
    if draft.value("train.partial_rollout_enable"):
        draft.carried(
            ["train.partial_rollout_enable"],
            ["rollout.lag"],
            "weights change while answers are sampled",
        )
    draft.off("async_generate", "train.async_enable", "train.partial_rollout_enable")
    draft.needless("of train.async_enable", "train.async_queue_size")


def _urls(draft: Draft) -> str | list[str]:
    bases = words_of(draft.value("vllm_server_base_url"))
    if not bases:
        hosts = words_of(draft.value("vllm_server_host")) or ["127.0.0.1"]
        ports = [str(port) for port in words_of(draft.value("vllm_server_port"))] or ["8000"]
        ports = ports * len(hosts) if len(ports) == 1 else ports
        bases = [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    urls = [f"{base.rstrip('/').replace('//0.0.0.0', '//127.0.0.1')}/v1" for base in bases]
    return urls[0] if len(urls) == 1 else urls
