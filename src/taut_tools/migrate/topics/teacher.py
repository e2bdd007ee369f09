"""Carry online DPO and distillation."""

from __future__ import annotations

from taut_tools.migrate.draft import (
    Draft,
    is_count,
    is_number,
    is_off,
    words_of,
)


def carry_online_pairs(draft: Draft) -> None:
    """Carry online DPO: two answers, compared by a reward."""
    beta = draft.value("beta")
    if isinstance(beta, list):
        beta = beta[0] if len(beta) == 1 else None
    if beta is None:
        draft.lacking("beta", "one beta for all epochs")
    draft.set("dpo.beta", beta if beta is not None else 0.1, "beta")
    names = words_of(draft.value("loss_type"))
    loss = (names or ["sigmoid"])[0]
    if draft.is_unknown("loss_type") or loss in ("sigmoid", "ipo"):
        draft.set("dpo.loss", loss, "loss_type")
    else:
        draft.lacking("loss_type", "losses of pairs that are generated are sigmoid and ipo")


def carry_teacher(draft: Draft) -> None:
    """Carry distillation: the teacher, the divergence, the share of the student's own answers."""
    # The teacher.
    teacher, server = draft.value("teacher_model"), draft.value("teacher_model_server")
    revision = draft.value("teacher_model_revision")
    if draft.method == "gkd" and draft.value("lmbda") == 0:
        draft.method = "distill"
    is_swift = draft.framework in ("swift", "megatron")
    if isinstance(server, str) and server.startswith("http"):
        url = f"{server.removesuffix('/').removesuffix('/v1')}/v1"
        draft.set("distill.url", url, "teacher_model_server")
        if is_count(top := draft.value("gkd_logits_topk")):
            draft.set("distill.top", top, "gkd_logits_topk")
    elif not is_off(server):
        draft.lacking("teacher_model_server", "several servers: distill.teachers")
        draft.leave_open("distill.teachers", "a table of teachers")
    elif is_swift and draft.method == "gkd" and teacher in (None, draft.value("model")):
        _carry_privileged(draft, is_fixed=teacher is not None)
    elif isinstance(teacher, str):
        name = teacher if revision in (None, "main", "master") else f"{teacher}@{revision}"
        draft.set("distill.teacher", name, "teacher_model", "teacher_model_revision")
    elif draft.method != "grpo":
        why = "the recipe names no teacher"
        draft.lacking("teacher_model", why)
        draft.leave_open("distill.teacher", why)
    if draft.method == "grpo":
        return
    draft.off("teacher_model_revision", "seq_kd", "use_uld_loss")
    # The divergence, and its temperature.
    beta = draft.value("beta")
    divergence = {0: "forward", 1: "reverse"}.get(beta, "js")
    draft.set("distill.divergence", divergence, "beta")
    if divergence == "js":
        draft.set("distill.beta", beta, "beta")
    temperature = draft.value("temperature")
    names: tuple[str, ...] = ("temperature",)
    if draft.framework in ("trl", "open-r1") and draft.recipe.method == "gkd":
        temperature, names = 1.0, ()  # theirs is for sampling only
    is_listed = "distill.teacher" not in draft.settings and "distill.teacher" not in draft.unfilled
    if is_listed and divergence == "forward":
        draft.set("distill.tail", "renormalize")
    elif is_listed:
        why = "of a teacher's likeliest tokens the rest counts as one more, at temperature 1"
        draft.lacking(
            "beta", f"{why}; there it counts not at all: distill.tail, distill.temperature"
        )
        temperature = 1.0
    if is_number(temperature):
        draft.set("distill.temperature", temperature, *names)
        if temperature != 1:
            draft.assumed.append(
                f"the divergence is multiplied by {temperature:g}^2 here: a factor that AdamW does not see and "
                "clipping does"
            )
    # The share of the student's own answers, and the loss of the data's.
    if draft.method == "gkd":
        lmbda = draft.value("lmbda")
        if lmbda != 1 and "distill.teacher" not in draft.settings and not draft.is_unknown("lmbda"):
            draft.lacking(
                "lmbda",
                "a teacher that lists its likeliest tokens scores the student's answers alone",
            )
            lmbda = 1.0
        draft.set("distill.lmbda", lmbda, "lmbda")
    draft.carried(["lmbda"], ["method"])
    sft = draft.value("sft_alpha")
    if sft and draft.method == "distill":
        draft.set("distill.sft_weight", sft, "sft_alpha")
    elif sft:
        draft.lacking("sft_alpha", "the data's answers are weighed by taut distill alone (lmbda=0)")
    draft.off("sft_alpha")
    if draft.is_on("gkd_logits_topk"):
        draft.lacking("gkd_logits_topk", "a teacher in this process gives its whole distribution")
    if draft.method == "distill":
        sampling = (
            "max_completion_length temperature use_vllm vllm_mode num_generations top_p top_k"
        )
        draft.needless("nothing is generated: lmbda is 0", *sampling.split())


def _carry_privileged(draft: Draft, is_fixed: bool) -> None:
    """Carry the model as its own teacher, with the prompt in the column teacher_prompt."""
    draft.set("distill.privileged", "teacher_prompt", "teacher_model")
    draft.set("distill.weights", "start" if is_fixed else "now", "teacher_model")
    why = (
        "the model as its own teacher lists its likeliest tokens (distill.top) and sees the prompt before the column; "
        "there all tokens count, and it sees the column alone"
    )
    draft.lacking("teacher_model", why)


def carry_grpo_teacher(draft: Draft) -> None:
    """Carry a teacher's logprobs in the advantage of GRPO (OPD-RL)."""
    if draft.is_on("teacher_model") or draft.is_on("teacher_model_server"):
        carry_teacher(draft)
        draft.set("distill.coef", draft.value("teacher_kl_coef", 1.0), "teacher_kl_coef")
    draft.needless("no teacher is named", "teacher_kl_coef")
