"""Convert a recipe to a run of taut: the objective, the topics of all methods, then the topics of its own method.

Each function reads the options of a topic, under the names of ``frameworks/``, and gives keys of taut their values. For
an option that the recipe does not set, the framework's default is written, so that no default of taut replaces it. A
method that taut does not have is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from taut.config import home_path
from taut_tools.migrate.draft import (
    ADAMW,
    ADAMW_8BIT,
    PLACES,
    POLICY_METHODS,
    PREFERENCE_METHODS,
    Carried,
    Draft,
    is_off,
    words_of,
)
from taut_tools.migrate.facts import Facts, count_processes
from taut_tools.migrate.frameworks import tables_of, words
from taut_tools.migrate.recipe import Recipe
from taut_tools.migrate.topics.data import carry_data
from taut_tools.migrate.topics.evaluation import carry_evaluation
from taut_tools.migrate.topics.machine import carry_distribution, carry_reports
from taut_tools.migrate.topics.policy import carry_critic, carry_policy
from taut_tools.migrate.topics.preferences import carry_preferences
from taut_tools.migrate.topics.rewards import carry_rewards
from taut_tools.migrate.topics.rollouts import carry_rollouts
from taut_tools.migrate.topics.rows import carry_length, carry_targets, carry_template
from taut_tools.migrate.topics.steps import (
    carry_batch,
    carry_duration,
    carry_optimizer,
    carry_schedule,
)
from taut_tools.migrate.topics.teacher import carry_grpo_teacher, carry_online_pairs, carry_teacher
from taut_tools.migrate.topics.weights import (
    carry_adapters,
    carry_frozen,
    carry_parts,
    carry_pictures,
    carry_precision,
    carry_quantization,
    carry_routers,
    carry_tokens,
)

DIRECT = {
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "seed": "seed",
    "output_dir": "out",
    "trust_remote_code": "trust_remote_code",
    "torch_compile": "compile",
    "neftune_noise_alpha": "noise.neftune_alpha",
    "label_smoothing": "{method}.label_smoothing",
}
"""Options whose values taut's keys take unchanged."""
FAST_PLUGINS = "CutCrossEntropyPlugin LigerPlugin KernelsPlugin SwanLabPlugin ExpertParallelPlugin"
"""Plugins of axolotl that change no number."""
NO_CLIPPING = 1e9
NO_OPTIMIZER = "taut has AdamW and Muon, no other optimizer"
ALLOWED: dict[str, tuple[tuple[str | None, ...], str]] = {
    "task_type": (
        (None, "causal_lm"),
        "taut trains language models: no classifiers, embedding models or rerankers",
    ),
    "tuner_type": (
        (None, "full", "lora", "qlora"),
        "taut trains all weights or LoRA adapters, with no other tuner",
    ),
    "optim": ((None, *ADAMW, *ADAMW_8BIT, "muon", "dist_muon"), NO_OPTIMIZER),
    "optimizer": ((None, *ADAMW, "lorap", "muon", "dist_muon"), NO_OPTIMIZER),
}
"""Allowed values of options, and the reason why taut has no run with another value."""
SWITCHES = {
    NO_OPTIMIZER: "use_galore use_apollo use_badam use_adam_mini lisa_activated_layers",
    "taut has LoRA, no other tuner": "use_swift_lora use_llama_pro",
    "taut has no loss that weights tokens by their probability": (
        "enable_dft_loss use_dft_loss use_asft_loss use_eaft_loss"
    ),
    "sampling is another program of ms-swift": "sampler_type sampler_engine",
}
"""Switches with which taut has no such run, by the reason."""


def convert(recipe: Recipe, facts: Facts, requested_processes: int | None = None) -> Carried:
    """Convert a recipe to a run of taut. ``requested_processes`` replaces the recipe's number of processes."""
    tables = tables_of(recipe.framework)
    method = tables.methods.get(recipe.method, "")
    if recipe.framework == "openrlhf" and recipe.value("algo.advantage.estimator", "gae") != "gae":
        method = {"ppo": "grpo"}.get(method, method)
    is_known = method in (*PREFERENCE_METHODS, *POLICY_METHODS, "sft")
    processes = count_processes(recipe, facts.directory, requested_processes)
    draft = Draft(recipe, facts, tables, processes, method if is_known else "")
    # The objective and the model.
    carry_objective(draft, method if not is_known else "")
    carry_names(draft)
    carry_model(draft)
    if draft.method == "gkd":
        carry_teacher(draft)
    # Rows: their sources, tokens that are learned, length and template.
    carry_data(draft)
    carry_targets(draft)
    carry_length(draft)
    carry_template(draft)
    # Steps: batch, duration, learning rate, optimizer.
    carry_batch(draft)
    carry_duration(draft)
    carry_schedule(draft)
    carry_optimizer(draft)
    # Weights that train, and their precision.
    carry_adapters(draft)
    carry_quantization(draft)
    carry_tokens(draft)
    carry_routers(draft)
    carry_parts(draft)
    carry_frozen(draft)
    carry_pictures(draft)
    carry_precision(draft)
    # The machine, evaluation, and last the topics of the method.
    carry_distribution(draft)
    carry_reports(draft)
    carry_evaluation(draft)
    for carry in BY_METHOD.get(draft.method, ()):
        carry(draft)
    return draft.finish()


def carry_objective(draft: Draft, lacks: str) -> None:
    """Carry the method, and refuse other kinds of training. ``lacks`` is the name of a method that taut lacks."""
    if lacks:
        name = next(
            (name for name in ("rlhf_type", "rl", "stage") if name in draft.given), "command"
        )
        draft.lacking(name, f"taut has no {lacks}", refuses=True)
    else:
        draft.carried(("rlhf_type", "rl", "stage", "do_train"), ["method"], f"taut {draft.method}")
    for name, (allowed, why) in ALLOWED.items():
        value = draft.value(name)
        value = value.lower() if isinstance(value, str) else value
        if draft.method == "reward" and (name, value) == ("task_type", "seq_cls"):
            continue
        if draft.framework == "llamafactory" and (name, value) == ("tuner_type", "freeze"):
            continue
        if name in draft.given and not draft.is_unknown(name) and value not in allowed:
            draft.lacking(name, why, refuses=True)
    trains = draft.is_on("do_train") or "dataset" in draft.given
    if draft.framework == "llamafactory" and not trains and "config" not in draft.given:
        others = (name for name in ("export_dir", "infer_backend") if name in draft.given)
        why = "nothing is trained: neither dataset nor do_train; taut merge, taut export, taut chat"
        draft.lacking(next(others, "do_train"), why, refuses=True)
    draft.needless("a language model", "task_type")
    for why, names in SWITCHES.items():
        for name in words(names):
            if draft.is_on(name) and draft.value(name) != 0:
                draft.lacking(name, why, refuses=True)
            elif not draft.is_unknown(name):
                draft.needless("off", name)
    draft.carried(("process_reward_model",), ["reward.loss"])
    if draft.framework == "axolotl":
        plugins = [str(plugin).rpartition(".")[2] for plugin in words_of(draft.value("plugins"))]
        if set(plugins) <= set(words(FAST_PLUGINS)):
            draft.needless("kernels, and where curves go: the numbers are the same", "plugins")
        draft.carried(("reward_model",) if draft.method == "reward" else (), ["method"])
    if (
        draft.framework in ("swift", "megatron", "llamafactory")
        and draft.method not in POLICY_METHODS
    ):
        sampling = "max_new_tokens max_completion_length temperature top_k top_p repetition_penalty"
        draft.needless("nothing is generated while training", *words(sampling))
    if draft.is_on("script"):
        draft.lacking("script", str(draft.value("script")))
    if draft.method == "sft":
        losses = (None, "nll", "chunked_nll", "loss_scale", "cross_entropy")
        if not draft.is_unknown("loss_type") and draft.value("loss_type") not in losses:
            why = "taut sft minimizes the mean negative log-likelihood, no other loss"
            draft.lacking("loss_type", why, refuses=True)
        draft.needless("the mean negative log-likelihood", "loss_type")
    if draft.method == "cpo" and draft.value("loss_type") == "simpo":
        draft.method = "simpo"


def carry_names(draft: Draft) -> None:
    """Carry options whose values taut takes unchanged, clipping, and recomputation."""
    for name, key in DIRECT.items():
        key = key.format(method=draft.method)
        if name == "label_smoothing" and draft.method not in ("dpo", "cpo", "simpo"):
            continue
        value = draft.value(name)
        if draft.is_unknown(name):
            draft.set(key, None, name)
        elif value is not None and not isinstance(value, bool | int | float | str):
            draft.lacking(name, f"one value is expected by {key}", changes=name not in PLACES)
        elif name in draft.given and value is None:
            draft.needless("not set", name)
        elif value is not None and not (name == "label_smoothing" and value == 0):
            if name in ("torch_compile", "trust_remote_code", "neftune_noise_alpha") and not value:
                draft.off(name)
                continue
            draft.set(key, str(value) if key == "out" else value, name)
    norm = draft.value("max_grad_norm")
    if draft.is_unknown("max_grad_norm"):
        draft.set("optim.clip_grad_norm", None, "max_grad_norm")
    elif norm is not None or "max_grad_norm" in draft.given:
        why = "" if norm else "no gradient is that large: no clipping"
        draft.set("optim.clip_grad_norm", norm or NO_CLIPPING, "max_grad_norm", why=why)
    recompute = draft.value("gradient_checkpointing")
    if draft.is_on("disable_gradient_checkpointing"):
        recompute = False
        draft.carried(["disable_gradient_checkpointing"], ["activation_checkpointing"])
    values = {"full": True, "none": False, "selective": "selective", "offload": "offload", "offload_disk": "offload",
              "true": True, "unsloth": True}  # fmt: skip
    recompute = values.get(str(recompute).lower(), bool(recompute))
    draft.set("activation_checkpointing", recompute, "gradient_checkpointing")


def carry_model(draft: Draft) -> None:
    """Carry the model with its revision, and a reference that is another model."""
    value = draft.value("model")
    if draft.is_unknown("model") or not isinstance(value, str) or not value:
        draft.leave_open("model", "its name is not known")
        if isinstance(value, list | dict):
            draft.lacking("model", "several values in the place of one model")
        elif draft.is_unknown("config"):
            draft.lacking(
                "model", "it is in the file that config names, which is not here", refuses=True
            )
        elif not draft.is_unknown("model"):
            draft.lacking("model", "the recipe names no model", refuses=True)
        return
    model = str(home_path(value)) if value[0] == "~" else value
    is_directory = any(
        (base / home_path(value)).is_dir() for base in (Path(), draft.facts.directory)
    )
    revision = draft.value("model_revision")
    if draft.facts.answer("is_adapter").holds:
        draft.lacking(
            "model", "an adapter in the model's place: name its base model, and it as lora.adapter"
        )
        draft.leave_open("model", "the base model of the adapter")
    elif revision in (None, "main", "master") or is_directory:
        draft.set("model", model, "model")
        why = "a directory has no revisions" if is_directory else "the hub's own default"
        draft.needless(why, "model_revision")
    else:
        draft.set("model", f"{model}@{revision}", "model", "model_revision")
    for pattern, why in NOT_READ.items():
        if draft.facts.model is None and re.search(pattern, value.lower()):
            draft.lacking("model", why)
    if draft.facts.model is None and re.search(r"gemma-?4-(26|31)b", value.lower()):
        draft.assumed.append(f"the rows have no pictures: those of {value} are refused")
    is_swift = draft.framework in ("swift", "megatron")
    if is_swift and draft.facts.model is None and not draft.value("use_hf"):
        draft.assumed.append(f"{value} is the same on the Hugging Face hub as on ModelScope")
    if draft.framework in ("swift", "megatron", "openrlhf") or "ref_model" in draft.given:
        reference = draft.value("ref_model")
        if (
            not is_off(reference)
            and reference != value
            and draft.method in ("dpo", "kto", "grpo", "ppo")
        ):
            draft.set("reference.model", reference, "ref_model")
        else:
            draft.needless("the model that training starts from", "ref_model")


NOT_READ = {
    r"diffusion-?gemma": "it fills in a text in no order, and taut trains models that write one token after another",
    r"gemma-?4-12b|gemma-?3n|deepseek-?vl|glm-?4\.\d+v|minicpm-[vo]|ovis|pixtral|paligemma|kimi-vl|lfm2-vl|omni|"
    r"phi-3(\.5)?-vision|llama-?3\.2-\d+b-vision|llama-?4|mistral-small-3\.[12]": (
        "its pictures are of a family that taut does not read (docs/vision.md)"
    ),
    r"internvl(?!.*-hf$)": "taut reads the library's form of it, whose name ends in -hf (docs/vision.md)",
}
"""Models that taut refuses, by a pattern of their names, for a model whose files are not here."""


BY_METHOD: dict[str, tuple[Callable[[Draft], None], ...]] = {
    **dict.fromkeys(PREFERENCE_METHODS, (carry_preferences,)),
    "grpo": (carry_rollouts, carry_policy, carry_grpo_teacher, carry_rewards),
    "ppo": (carry_rollouts, carry_policy, carry_critic, carry_rewards),
    "online_dpo": (carry_rollouts, carry_online_pairs, carry_rewards),
    "gkd": (carry_rollouts,),
}
