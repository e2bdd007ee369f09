"""Carry losses that compare answers: the DPO family, KTO, ORPO, CPO, SimPO, reward models."""

from __future__ import annotations

from collections.abc import Mapping

from taut_tools.migrate.draft import (
    Draft,
    is_number,
    is_off,
    words_of,
)


def carry_preferences(draft: Draft) -> None:
    """Carry the loss and its coefficients."""
    method, beta = draft.method, draft.value("beta")
    if method in ("dpo", "kto", "orpo", "cpo", "simpo") and not isinstance(beta, list):
        draft.set(f"{method}.beta", beta, "beta")
    if method == "dpo":
        _carry_dpo(draft)
    elif method == "kto":
        losses = {
            "kto": "kto",
            "bco": "bco",
            "apo_zero_unpaired": "apo_zero",
            "apo_zero": "apo_zero",
        }
        _carry_loss(draft, losses)
        if draft.value("calculate_KL") is False:
            draft.set("kto.loss", "apo_zero", "calculate_KL")
        draft.needless("as kto.loss has it", "calculate_KL")
        for name in ("desirable_weight", "undesirable_weight"):
            draft.set(f"kto.{name}", draft.value(name, 1.0), name)
        if draft.value("train_sampling_strategy") == "sequential":
            draft.set("batch.shuffle", False, "train_sampling_strategy")
        draft.needless("the order of rows follows from seed", "train_sampling_strategy")
        for name, default in (("min_density_ratio", 0.5), ("max_density_ratio", 10.0)):
            if draft.value(name, default) == default:
                draft.needless("off: no embedding of prompts is compared", name)
    elif method == "cpo":
        _carry_loss(draft, {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"})
        draft.set("cpo.sft_weight", draft.value("cpo_alpha"), "cpo_alpha")
        draft.needless("of loss_type=simpo", "simpo_gamma")
    elif method == "simpo":
        draft.set("simpo.gamma", draft.value("simpo_gamma"), "simpo_gamma")
        name = "rpo_alpha" if draft.framework == "llamafactory" else "cpo_alpha"
        draft.set("simpo.sft_weight", draft.value(name) or 0.0, name)
        if draft.is_on("alpha"):
            draft.set("simpo.alpha", draft.value("alpha"), "alpha")
        draft.carried(["loss_type"], ["method"])
    elif method == "orpo":
        draft.carried(["loss_type"], ["method"])
        if draft.framework in ("trl", "open-r1"):
            draft.assumed.append(
                "the likelihood that is learned is that of the chosen answers; trl adds that of the prompts"
            )
    elif method == "reward":
        _carry_reward(draft)
    if draft.framework == "llamafactory" and (method == "orpo" or draft.is_on("rpo_alpha")):
        draft.assumed.append(
            "each token of the chosen answers counts the same in their likelihood; there each answer does"
        )
    draft.off("rpo_alpha", "alpha", "label_smoothing", "reference_free")
    draft.needless("of the DPO family", *(() if method == "dpo" else ("discopop_tau",)))
    carry_reference(draft)


def _carry_loss(draft: Draft, losses: Mapping[str, str]) -> None:
    names = words_of(draft.value("loss_type"))
    if draft.is_unknown("loss_type") or (len(names) == 1 and names[0] in losses):
        draft.set(f"{draft.method}.loss", losses.get(names[0]) if names else None, "loss_type")
    else:
        draft.lacking("loss_type", f"losses are {', '.join(losses)}")
        draft.leave_open(f"{draft.method}.loss", f"{', '.join(names)} is none of taut's")


DPO_LOSSES = {
    "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "discopop": "discopop", "aot": "aot",
    "aot_unpaired": "aot_unpaired", "apo_zero": "apo_zero", "apo_down": "apo_down", "exo_pair": "exo",
    "nca_pair": "nca", "bco_pair": "bco", "sppo_hard": "sppo", "sigmoid_norm": "sigmoid",
}  # fmt: skip


def _carry_dpo(draft: Draft) -> None:
    """Carry the losses of DPO. In a sum of losses (MPO), ``sft`` becomes ``dpo.sft_weight``."""
    # The losses with their weights.
    names = ["ipo"] if draft.value("model.ipo_enable") else words_of(draft.value("loss_type"))
    if draft.value("model.ipo_enable"):
        draft.carried(["model.ipo_enable"], ["dpo.loss"])
    draft.off("model.ipo_enable")
    weights = draft.value("loss_weights")
    weights = (
        weights
        if isinstance(weights, list)
        else [1.0] * len(names)
        if weights is None
        else [weights]
    )
    sft = draft.value("rpo_alpha") or 0.0
    used = ["rpo_alpha"] if draft.is_on("rpo_alpha") else []
    if draft.framework == "llamafactory" and draft.is_unknown("rpo_alpha"):
        used = ["rpo_alpha"]
    if len(weights) != len(names):
        draft.lacking("loss_weights", f"{len(weights)} weights of {len(names)} losses")
        weights = [1.0] * len(names)
    pairs = [(name, float(weight)) for name, weight in zip(names, weights, strict=True)]
    if "sft" in names:
        sft += sum(weight for name, weight in pairs if name == "sft")
        used += ["loss_type", "loss_weights"]
    pairs = [(name, weight) for name, weight in pairs if name != "sft"]
    unknown = [name for name, _ in pairs if name not in DPO_LOSSES]
    if draft.is_unknown("loss_type"):
        draft.set("dpo.loss", None, "loss_type")
    elif unknown or not pairs:
        draft.lacking(
            "loss_type", f"{', '.join(unknown) or 'none'}: losses are {', '.join(DPO_LOSSES)}"
        )
        draft.leave_open("dpo.loss", f"{', '.join(unknown)} is none of taut's")
    else:
        losses = [DPO_LOSSES[name] for name, _ in pairs]
        draft.set("dpo.loss", losses[0] if len(losses) == 1 else losses, "loss_type")
        if any(weight != 1 for _, weight in pairs):
            draft.set("dpo.loss_weights", [weight for _, weight in pairs], "loss_weights")
        draft.carried(["loss_weights"], ["dpo.loss_weights"])
    if "sigmoid_norm" in names:
        draft.set("dpo.length_normalized", True, "loss_type")
    if sft:
        draft.set("dpo.sft_weight", sft, *used)
    # The divergence, and options of single losses.
    divergences = {
        "reverse_kl": "reverse_kl",
        "forward_kl": "forward_kl",
        "js_divergence": "js",
        "alpha_divergence": "alpha",
    }
    divergence = str(draft.value("f_divergence_type", "reverse_kl")).rpartition(".")[2].lower()
    if divergence in divergences:
        if divergence != "reverse_kl":
            draft.set("dpo.divergence", divergences[divergence], "f_divergence_type")
        draft.needless("the default", "f_divergence_type")
        if divergence == "alpha_divergence":
            name = "f_alpha_divergence_coef"
            alpha = draft.value(name, 0.5)
            draft.set("dpo.alpha", 1 - alpha if is_number(alpha) else None, name)
        draft.needless("of alpha_divergence", "f_alpha_divergence_coef")
    else:
        draft.lacking("f_divergence_type", f"divergences are {', '.join(divergences)}")
    if "discopop" in names and draft.is_on("discopop_tau"):
        draft.set("dpo.discopop_tau", draft.value("discopop_tau"), "discopop_tau")
    draft.needless("of discopop", "discopop_tau")
    if draft.value("reference_free"):
        draft.set("dpo.reference_free", True, "reference_free")


def _carry_reward(draft: Draft) -> None:
    if draft.recipe.method in ("prm", "process_reward") or draft.value("process_reward_model"):
        draft.set("reward.loss", "process")
        draft.set("data.step_separator", draft.value("step_separator", "\n"), "step_separator")
    elif draft.value("loss_type") not in (None, "sigmoid"):
        draft.lacking("loss_type", "pairs are compared by the Bradley-Terry model")
    draft.needless("the Bradley-Terry model", "loss_type", "beta")
    coefficient = draft.value("center_rewards_coefficient")
    if not is_off(coefficient, (0, 0.0)):
        draft.set("reward.centering_coef", coefficient, "center_rewards_coefficient")
    draft.off("center_rewards_coefficient")
    if draft.value("model.margin_loss_enable"):
        draft.set("reward.margin", 1.0, "model.margin_loss_enable")
    draft.needless("a reward model has one label", "num_labels", "task_type", "problem_type")


def carry_reference(draft: Draft) -> None:
    """Carry a reference that follows the policy (TR-DPO), and the file of its logprobs."""
    names = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    if draft.value("sync_ref_model"):
        draft.set("reference.update_every", draft.value(names[0]), "sync_ref_model", names[0])
        draft.set("reference.update_mix", draft.value(names[1]), names[1])
    else:
        draft.needless("of sync_ref_model", *names)
    draft.off("sync_ref_model")
    draft.needless(
        "the reference's logprobs are computed as they are needed: reference.file",
        "precompute_ref_log_probs",
    )
