"""Carry the policy gradient of GRPO, RLOO, REINFORCE++ and PPO: loss, advantage, divergence, critic."""

from __future__ import annotations

from typing import Any

from taut_tools.migrate.draft import (
    Draft,
    is_count,
    is_number,
    is_off,
)
from taut_tools.migrate.topics.preferences import carry_reference

POLICY_LOSSES = {
    "dapo": ("clip", "token"),
    "bnpo": ("clip", "token"),
    "grpo": ("clip", "sequence"),
    "dr_grpo": ("clip", "constant"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
    "ppo": ("clip", "token"),
    "gspo": ("gspo", "sequence"),
}


def symmetric(bounds: Any) -> float | None:
    """The upper bound of a pair whose lower bound is its opposite, else None."""
    is_pair = isinstance(bounds, list) and len(bounds) == 2 and all(map(is_number, bounds))
    return float(bounds[1]) if is_pair and bounds[0] == -bounds[1] and bounds[1] > 0 else None


def carry_policy(draft: Draft) -> None:
    """Carry the loss, the advantage, and the divergence from the reference."""
    if draft.framework == "openrlhf":
        _carry_openrlhf_policy(draft)
    elif draft.method == "grpo":
        _carry_policy_loss(draft)
        _carry_advantage(draft)
        _carry_divergence(draft)
        _carry_correction(draft)
    carry_reference(draft)
    entropy = draft.value("entropy_coef")
    if not is_off(entropy, (0, 0.0)):
        draft.set(f"{draft.method}.entropy_coef", entropy, "entropy_coef")
    draft.off("entropy_coef")
    if draft.value("use_adaptive_entropy"):
        draft.set(
            "grpo.entropy_target",
            draft.value("entropy_target", 0.2),
            "entropy_target",
            "use_adaptive_entropy",
        )
        draft.set(
            "grpo.entropy_step", draft.value("entropy_coef_delta", 0.005), "entropy_coef_delta"
        )
        for name, default in (("entropy_coef_min", 0.0), ("entropy_coef_max", 1.0)):
            if draft.value(name, default) != default:
                draft.lacking(name, "the coefficient adapts without other bounds than 0")
            draft.needless("the coefficient is at least 0", name)
    else:
        names = ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
        draft.needless("of use_adaptive_entropy", *names)
    draft.off("use_adaptive_entropy")
    if draft.is_on("delta"):
        draft.set(f"{draft.method}.dual_clip", draft.value("delta"), "delta")


def _carry_policy_loss(draft: Draft) -> None:
    loss, key = str(draft.value("loss_type")), draft.method
    level = str(draft.value("importance_sampling_level") or "token")
    by_level = {"token": "", "sequence": "gspo", "sequence_token": "gspo_token"}
    low, high = draft.value("epsilon"), draft.value("epsilon_high")
    if loss == "rloo":
        draft.set(f"{key}.loss", "reinforce")
        draft.set(f"{key}.loss_aggregation", "constant")
        draft.set(f"{key}.constant_length", 1)
        if (draft.value("num_iterations") or 1) == 1 and draft.settings.get(
            "rollout.minibatches", 1
        ) == 1:
            draft.needless(
                "each answer is trained on once, so that its ratio is 1", "epsilon", "epsilon_high"
            )
        else:
            draft.lacking(
                "epsilon", "the ratio of a whole answer, clipped: grpo.loss=reinforce has none"
            )
        bounds = draft.value("reward_clip_range")
        if (bound := symmetric(bounds)) is not None:
            draft.set("shaping.clip", bound, "reward_clip_range")
        elif not is_off(bounds):
            draft.lacking("reward_clip_range", "shaping.clip is the same on both sides")
        return
    if draft.is_unknown("loss_type") or loss not in POLICY_LOSSES:
        kinds = ", ".join(POLICY_LOSSES)
        draft.lacking(
            "loss_type", f"losses are {kinds}, or a class of your own: grpo.loss=FILE.py:Class"
        )
        draft.leave_open(f"{key}.loss", f"{loss} is none of taut's")
        return
    name, aggregation = POLICY_LOSSES[loss]
    if by_level.get(level) and name == "clip":
        name = by_level[level]
        draft.carried(["importance_sampling_level"], [f"{key}.loss"])
    elif level != "token":
        draft.lacking("importance_sampling_level", f"ratios of whole answers with loss_type={loss}")
    draft.needless("a ratio for each token", "importance_sampling_level")
    draft.set(f"{key}.loss", name, "loss_type")
    draft.set(f"{key}.loss_aggregation", aggregation, "loss_type")
    high = low if high is None else high
    if name == "cispo":
        if is_number(high) and high > 1:
            draft.set(f"{key}.clip_high", float(f"{high - 1:.6g}"), "epsilon_high")
            draft.needless("cispo has no lower bound", "epsilon")
        else:
            draft.lacking(
                "epsilon_high", f"cispo with epsilon_high={high} bounds every ratio below 1"
            )
    elif name == "sapo":
        for side in ("pos", "neg"):
            ours = {"pos": "positive", "neg": "negative"}[side]
            default = {"pos": 1.0, "neg": 1.05}[side]
            names = [f"tau_{side}", f"sapo_temperature_{side}"]
            given = next((option for option in names if option in draft.given), names[0])
            draft.set(f"{key}.sapo_tau_{ours}", draft.value(given, default), given)
        draft.needless("sapo does not clip", "epsilon", "epsilon_high")
    else:
        draft.set(f"{key}.clip_low", low, "epsilon")
        draft.set(
            f"{key}.clip_high", high, "epsilon_high" if "epsilon_high" in draft.given else "epsilon"
        )
    others = ("tau_pos", "tau_neg", "sapo_temperature_pos", "sapo_temperature_neg")
    draft.needless("of sapo", *others)
    draft.needless("of vespo", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")


def _carry_advantage(draft: Draft) -> None:
    estimator, scale = draft.value("advantage_estimator", "grpo"), draft.value("scale_rewards")
    if estimator == "rloo":
        draft.set("grpo.advantage", "rloo", "advantage_estimator", "scale_rewards")
        return
    if estimator == "reinforce_plus_plus":
        draft.set("grpo.advantage", "reinforce_pp_baseline", "advantage_estimator", "scale_rewards")
        return
    is_gdpo = scale == "gdpo" or draft.value("multi_objective_aggregation") == "normalize_then_sum"
    scale = "group" if scale is None else scale
    kinds = {
        "group": "group",
        "True": "group",
        "none": "mean",
        "False": "mean",
        "batch": "reinforce_pp_baseline",
        "gdpo": "gdpo",
    }
    if is_gdpo:
        draft.set("grpo.advantage", "gdpo", "scale_rewards", "multi_objective_aggregation")
        return
    if str(scale) == "batch":
        draft.lacking(
            "scale_rewards",
            "the deviation of the batch's rewards: grpo.advantage=reinforce_pp_baseline divides "
            "by that of the differences to the groups' means",
        )
        draft.settings["grpo.advantage"] = "reinforce_pp_baseline"
        return
    if str(scale) not in kinds:
        draft.lacking("scale_rewards", f"expected one of {', '.join(kinds)}")
        return
    draft.set("grpo.advantage", kinds[str(scale)], "scale_rewards", "advantage_estimator")
    draft.needless("rewards are added up", "multi_objective_aggregation")


def _carry_divergence(draft: Draft) -> None:
    beta = draft.value("beta")
    draft.set("grpo.kl_coef", beta if beta is not None else 0.0, "beta")
    in_reward = draft.value("kl_in_reward")
    if in_reward is None:
        in_reward = draft.value("advantage_estimator") in ("rloo", "reinforce_plus_plus")
    if beta:
        draft.set("grpo.kl_in", "reward" if in_reward else "loss", "kl_in_reward")
        if not in_reward:
            draft.set("grpo.kl_gradient", "k3")
    draft.needless("beta is 0", "kl_in_reward")


CORRECTIONS = {
    "token_truncate": ("truncated", "token"),
    "token_mask": ("masked", "token"),
    "sequence_truncate": ("truncated", "sequence"),
    "sequence_mask": ("masked", "sequence"),
}


def _carry_correction(draft: Draft) -> None:
    """Carry weights for the difference between engine and trainer, which is none if the engine is the trainer."""
    # Read the mode and the cap under the framework's names.
    is_trl = draft.framework in ("trl", "open-r1", "axolotl")
    names: tuple[str, ...] = ("rollout_importance_sampling_mode",)
    caps: tuple[str, ...] = ("rollout_importance_sampling_threshold",)
    mode, cap = draft.value(names[0]), draft.value(caps[0])
    if is_trl:
        prefix = "vllm_importance_sampling"
        names = (f"{prefix}_correction", f"{prefix}_mode")
        caps = (f"{prefix}_cap", f"{prefix}_clip_max", f"{prefix}_clip_min")
        mode = draft.value(names[1]) if draft.value(names[0]) else None
        cap = draft.value(caps[0]) or draft.value(caps[1])
    # Carry them if there is an engine.
    if not draft.value("use_vllm") or is_off(mode):
        if _is_weighted_by_lag(draft, names[-1]):
            return
        draft.set("grpo.rollout_correction", "none", *names)
        draft.needless("no weights are used", *caps)
        return
    if str(mode) not in CORRECTIONS:
        draft.lacking(names[-1], f"expected one of {', '.join(CORRECTIONS)}")
        return
    kind, level = CORRECTIONS[str(mode)]
    if draft.settings.get("rollout.engine", "local") == "local":
        draft.set("grpo.rollout_correction", "none", *names)
        draft.needless("the engine is the model that trains, and needs no weights", *names, *caps)
        return
    draft.set("grpo.rollout_correction", kind, *names)
    draft.set("grpo.rollout_correction_level", level, names[-1])
    draft.set("grpo.rollout_correction_cap", cap, *caps[:-1] or caps)
    if is_trl and is_number(floor := draft.value("vllm_importance_sampling_clip_min")):
        draft.set("grpo.rollout_correction_floor", floor, caps[-1])


def _is_weighted_by_lag(draft: Draft, name: str) -> bool:
    """Record that any run of taut weights answers of older weights by the ratio. Whether there are such answers."""
    if "rollout.lag" not in draft.settings:
        return False
    why = "answers of older weights are weighted by the ratio of trainer to engine, which is off there"
    draft.lacking(name, why)
    return True


def _carry_openrlhf_policy(draft: Draft) -> None:
    """Carry the options algo.* and actor.* for GRPO and PPO."""
    # Loss and clipping.
    method, value = draft.method, draft.value
    kind = str(value("actor.policy_loss_type"))
    if kind in POLICY_LOSSES:
        loss, aggregation = POLICY_LOSSES[kind]
        draft.set(f"{method}.loss", loss, "actor.policy_loss_type")
        draft.set(f"{method}.loss_aggregation", aggregation, "actor.policy_loss_type")
    else:
        draft.lacking("actor.policy_loss_type", "losses are ppo and gspo")
    clip, sides = value("actor.eps_clip"), value("actor.eps_clip_low_high")
    low, high = sides if isinstance(sides, list) and len(sides) == 2 else (clip, clip)
    draft.set(f"{method}.clip_low", low, "actor.eps_clip_low_high", "actor.eps_clip")
    draft.set(f"{method}.clip_high", high, "actor.eps_clip_low_high", "actor.eps_clip")
    draft.set("rollout.epochs", value("num_iterations"), "num_iterations")
    # Divergence from the reference.
    coefficient, in_loss = value("algo.kl.init_coef"), value("algo.kl.use_loss")
    draft.set(f"{method}.kl_coef", coefficient, "algo.kl.init_coef")
    estimator = value("algo.kl.estimator")
    if coefficient:
        draft.set(f"{method}.kl_in", "loss" if in_loss else "reward", "algo.kl.use_loss")
        if in_loss and estimator in ("k2", "k3"):
            draft.set(f"{method}.kl_gradient", estimator, "algo.kl.estimator")
        elif in_loss:
            draft.lacking("algo.kl.estimator", "k1 in the loss has no gradient on average")
        elif estimator == "k1":
            draft.needless("k1 in the reward", "algo.kl.estimator")
        else:
            draft.lacking("algo.kl.estimator", "in the reward the estimator is k1")
    draft.needless("algo.kl.init_coef is 0", "algo.kl.use_loss", "algo.kl.estimator")
    if draft.is_on("algo.kl.target"):
        draft.set(f"{method}.kl_target", value("algo.kl.target"), "algo.kl.target")
    # Rewards.
    if (bound := symmetric(value("reward.clip_range"))) is not None:
        draft.set("shaping.clip", bound, "reward.clip_range")
    else:
        draft.lacking("reward.clip_range", "shaping.clip is the same on both sides")
    if value("reward.normalize_enable"):
        draft.set("shaping.scale", "running", "reward.normalize_enable")
        draft.assumed.append(
            "rewards are divided by their running deviation; OpenRLHF takes their mean off as well"
        )
    draft.off("reward.normalize_enable")
    # Weights for the difference between engine and trainer.
    corrected = value("algo.advantage.is_correction_enable")
    kinds = {"tis": ("truncated", "token"), "icepop": ("masked", "token")}
    kind = str(value("algo.advantage.is_correction_type"))
    bounds = value("algo.advantage.is_correction_threshold")
    names = ("algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold")
    if corrected and kind in kinds:
        draft.set(
            f"{method}.rollout_correction",
            kinds[kind][0],
            "algo.advantage.is_correction_enable",
            names[0],
        )
        draft.set(f"{method}.rollout_correction_level", kinds[kind][1], names[0])
        if isinstance(bounds, list) and len(bounds) == 2:
            draft.set(f"{method}.rollout_correction_floor", bounds[0], names[1])
            draft.set(f"{method}.rollout_correction_cap", bounds[1], names[1])
    elif corrected:
        draft.lacking(names[0], f"{kind}: weights by token of answers that are masked whole")
    else:
        if not _is_weighted_by_lag(draft, "algo.advantage.is_correction_enable"):
            name = "algo.advantage.is_correction_enable"
            draft.set(f"{method}.rollout_correction", "none", name)
        draft.needless("no weights are used", *names)
    # Advantage.
    if method == "grpo":
        estimators = {
            "group_norm": "group", "dr_grpo": "mean", "rloo": "rloo", "reinforce_baseline": "reinforce_pp_baseline",
            "reinforce": "reinforce_pp", "reinforce_plus_plus": "reinforce_pp",
        }  # fmt: skip
        estimator = str(value("algo.advantage.estimator"))
        if estimator in estimators:
            draft.set("grpo.advantage", estimators[estimator], "algo.advantage.estimator")
        else:
            draft.lacking("algo.advantage.estimator", f"expected one of {', '.join(estimators)}")
        if value("gamma") in (1, 1.0):
            draft.needless("1", "gamma")
        else:
            draft.lacking("gamma", "rewards of answers are not discounted within them")
        draft.needless(
            "of a critic", "lam", "cliprange_value", "critic_learning_rate", "critic_model"
        )
        draft.needless("of a critic", *(name for name in draft.given if name.startswith("critic.")))
        if value("algo.advantage.no_std_norm"):
            draft.lacking(
                "algo.advantage.no_std_norm", "advantages are not normalized: grpo.advantage=mean"
            )
        draft.off("algo.advantage.no_std_norm")


def carry_critic(draft: Draft) -> None:
    """Carry PPO's critic, clip ranges and penalty."""
    value = draft.value
    draft.carried(["algo.advantage.estimator"], ["method"])
    for name, key in (
        ("gamma", "ppo.gamma"),
        ("lam", "ppo.gae_lambda"),
        ("cliprange_value", "ppo.value_clip"),
    ):
        draft.set(key, value(name), name)
    if draft.framework == "openrlhf":
        draft.set("critic.learning_rate", value("critic_learning_rate"), "critic_learning_rate")
        model = value("critic_model")
        if not model and not value("reward.remote_url"):  # a server's: it begins as the policy
            model = value("reward_model")
        if model and not str(model).startswith("http"):
            draft.set(
                "critic.model", model, "critic_model" if value("critic_model") else "reward_model"
            )
        if is_count(steps := value("critic.freezing_steps")):
            draft.set("critic.warmup_steps", steps, "critic.freezing_steps")
        draft.assumed.append(
            "policy and critic are updated together: ppo.value_coef is a matter of AdamW's scale"
        )
        if value("algo.advantage.no_std_norm"):
            draft.lacking(
                "algo.advantage.no_std_norm",
                "advantages are centered and divided by their deviation: ppo.whiten_advantages",
            )
        draft.off("algo.advantage.no_std_norm")
        return
    draft.set("rollout.epochs", value("num_ppo_epochs"), "num_ppo_epochs")
    draft.set("ppo.kl_coef", value("kl_coef"), "kl_coef")
    if value("kl_coef"):
        draft.set("ppo.kl_in", "reward")
    if value("kl_estimator") not in (None, "k1"):
        draft.lacking("kl_estimator", "in the reward the estimator is k1")
    draft.needless("k1 in the reward", "kl_estimator")
    if draft.is_on("kl_target"):
        draft.set("ppo.kl_target", value("kl_target"), "kl_target")
    for key in ("clip_low", "clip_high"):
        draft.set(f"ppo.{key}", value("cliprange"), "cliprange")
    draft.set("ppo.loss", "clip")
    draft.set("ppo.loss_aggregation", "token")
    draft.set("ppo.value_coef", value("vf_coef"), "vf_coef")
    model = value("reward_model")
    if isinstance(model, str):
        draft.set("critic.model", model, "reward_model")
    if value("whiten_rewards"):
        draft.lacking(
            "whiten_rewards",
            "rewards are whitened per token there: shaping.scale divides those of answers",
        )
    draft.off("whiten_rewards")
