"""Carry the weights that train: adapters, a quantized base, the parts of a vision-language model, precision."""

from __future__ import annotations

import re
from typing import Any

from taut_tools.migrate.dialects import find_near
from taut_tools.migrate.draft import (
    Draft,
    is_count,
    is_number,
    is_off,
    words_of,
)
from taut_tools.migrate.recipe import parsed, read_text

PARTS = {
    "freeze_llm": ("language_model", False),
    "freeze_vit": ("vision_tower", True),
    "freeze_aligner": ("projector", True),
}
"""taut's name of a part of a vision-language model, and whether it is frozen by default, by the option for it."""
RATES = {"vit_lr": "vision_tower", "aligner_lr": "projector"}
PEFT_TARGETS = {
    "q_proj v_proj": ("gemma gemma2 gemma3_text llama llama4 mistral mixtral qwen2 qwen3 stablelm"),
    "q_proj v_proj fc1 fc2": "phi",
    "query_key_value": "falcon gpt_neox",
    "c_attn": "gpt2",
}
"""Model types, by the modules that peft 0.21 adapts if none are named."""
EXPERTS = frozenset({"num_experts_per_tok", "num_local_experts", "output_router_logits"})
"""Keys in config.json of a mixture of experts."""
TYPES_BY_NAME = {
    r"qwen-?(1\.5|2(\.5)?)(?!.*vl)": "qwen2",
    r"qwen-?3(?!\.|.*vl|.*omni|.*moe|.*next|.*-a\d)": "qwen3",
    r"llama(?!-?4|.*vision)|smollm[23]?-|tinyllama|deepseek-r1-distill-llama": "llama",
    r"mistral|zephyr|ministral": "mistral",
    r"gemma-?(1|2b|7b)": "gemma",
    r"gemma-2": "gemma2",
    r"pythia|gpt-neox": "gpt_neox",
    r"gpt2": "gpt2",
}
"""Model types by a pattern of the name, for a model whose files are not here."""


def _has_adapters(draft: Draft) -> bool:
    tuner = draft.value("tuner_type")
    if draft.framework in ("trl", "open-r1"):
        return bool(draft.value("use_peft"))
    if draft.framework == "openrlhf":
        return bool(draft.value("lora_r"))
    return tuner in ("lora", "qlora")


def carry_adapters(draft: Draft) -> None:
    """Carry LoRA, which trl has with use_peft, swift unless tuner_type differs, OpenRLHF with a rank above 0."""
    has = _has_adapters(draft)
    draft.carried(("tuner_type", "use_peft"), ["lora.rank"])
    names = ("lora_r", "lora_alpha", "lora_dropout")
    others = (
        "target_modules",
        "target_regex",
        "modules_to_save",
        "use_rslora",
        "use_dora",
        "lora_target_linear",
        "loraplus_lr_ratio",
        *STARTS,
    )
    adapter = draft.value("adapters")
    if is_off(adapter):
        draft.off("adapters")
    elif not has and draft.framework != "megatron":
        draft.lacking("adapters", "an adapter below a model that is trained whole: merge it first")
    elif isinstance(adapter, list) and len(adapter) > 1:
        draft.lacking("adapters", "several adapters")
    else:
        draft.set("lora.adapter", adapter[0] if isinstance(adapter, list) else adapter, "adapters")
        draft.needless("the adapter's own settings hold", *names, *others)
        return
    if not has:
        draft.needless("no adapters are trained", *names, *others)
        return
    rank = draft.value("lora_r")
    if draft.is_unknown("lora_r") or is_count(rank):
        draft.set("lora.rank", rank, "lora_r")
    else:
        draft.lacking("lora_r", "the rank of the adapters is not set")
        draft.leave_open("lora.rank", "the rank of the adapters")
    alpha = draft.value("lora_alpha")
    if alpha is None and is_count(rank) and draft.framework in ("llamafactory", "axolotl"):
        alpha = 2 * rank if draft.framework == "llamafactory" else rank
    if alpha is not None or draft.is_unknown("lora_alpha"):
        draft.set("lora.alpha", alpha, "lora_alpha")
    _carry_rate_of_b(draft)
    _carry_start(draft)
    _carry_dropout(draft)
    for name in ("use_rslora", "use_dora"):
        if draft.value(name):
            draft.set(f"lora.{name.removeprefix('use_')}", True, name)
        else:
            draft.needless("off", name)
    _carry_modules(draft)


STARTS = ("init_weights", "pissa_init", "pissa_iter", "pissa_convert")


def _carry_start(draft: Draft) -> None:
    """Carry the start of adapters: peft's init_lora_weights, or LLaMA-Factory's options of PiSSA."""
    name, iterations = "init_weights", None
    if draft.framework == "llamafactory":
        name, iterations = "pissa_init", draft.value("pissa_iter", 16)
        init = "pissa" if draft.is_on(name) else True
        draft.needless("adapters are saved for the base itself", "pissa_convert")
    else:
        init = draft.value(name, True)
        if isinstance(init, str) and (match := re.fullmatch(r"pissa_niter_(\d+)", init)):
            init, iterations = "pissa", int(match[1])
    if init in ("gaussian", "pissa", "olora"):
        draft.set("lora.init", init, name)
        if init == "pissa" and iterations not in (None, -1):
            draft.set("lora.init_iterations", iterations, name, "pissa_iter")
    elif init in (True, "true", "lora"):
        draft.needless("off", name)
    draft.needless("off" if init != "pissa" else "of the decomposition", "pissa_iter")


def _carry_rate_of_b(draft: Draft) -> None:
    """Carry LoRA+ (arXiv 2402.12354), where the matrices B have a learning rate of their own."""
    name, key = "loraplus_lr_ratio", "optim.group_learning_rates"
    rate, ratio = draft.settings.get("optim.learning_rate"), draft.value(name)
    if draft.is_unknown(name) or (is_number(ratio) and not is_number(rate)):
        draft.leave_open(key, f"the rate of matrices B: learning_rate times {name}")
        draft.lacking(name, "the rate is not known")
    elif is_number(ratio) and is_number(rate):
        draft.set(key, {"*.lora_B.*": float(f"{rate * ratio:.6g}")}, name)
    draft.off(name)


def _carry_dropout(draft: Draft) -> None:
    """Carry dropout. taut has none in methods that compare logprobs, and most frameworks switch it off there too. GRPO
    leaves it on: an answer that is trained on once is compared with nothing older.
    """
    name, dropout = "lora_dropout", draft.value("lora_dropout") or 0
    has_lag = draft.recipe.method == "async_grpo" or any(
        draft.is_on(name) for name in ("async_generate", "train.async_enable")
    )
    updates = draft.settings.get("rollout.minibatches", 1) * (draft.value("num_iterations") or 1)
    is_alone = draft.method == "grpo" and updates == 1 and not has_lag
    is_noisy = bool(dropout) and is_alone and not draft.value("disable_dropout")
    if draft.is_unknown(name) or draft.method == "sft" or is_noisy:
        draft.set("lora.dropout", dropout, name)
        if is_noisy and draft.value("beta") and draft.value("kl_in_reward"):
            draft.assumed.append(
                "the divergence in the reward is taken without dropout, and in the framework with it"
            )
    elif not dropout:
        draft.needless("off", name)
    elif draft.value("disable_dropout") or draft.method == "ppo":
        draft.needless("dropout is off where answers are compared, there as here", name)
    else:
        draft.lacking(
            name,
            f"dropout of {dropout} while answers are compared, which would be noise: lora.dropout=0",
        )
    if is_noisy:
        draft.carried(["disable_dropout"], ["lora.dropout"])
    elif draft.value("disable_dropout") is False and "disable_dropout" in draft.given:
        draft.lacking("disable_dropout", "dropout is off where answers are compared")
    else:
        draft.needless("dropout is off where answers are compared", "disable_dropout")


MEGATRON_MODULES = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
    "word_embeddings": ["embed_tokens"],
    "output_layer": ["lm_head"],
}


def _names(draft: Draft, option: str) -> list[str]:
    """The modules in an option; Megatron has its own names for those of several modules."""
    table = MEGATRON_MODULES if draft.framework == "megatron" else {}
    return [name for word in words_of(draft.value(option)) for name in table.get(word, [word])]


def _carry_modules(draft: Draft) -> None:
    """Carry the modules that are adapted, and the modules that are trained whole next to them."""
    modules = _names(draft, "target_modules")
    expression, is_trl = draft.value("target_regex"), draft.framework in ("trl", "open-r1")
    value = draft.value("target_modules")
    every = {"all-linear", "all"} & set(modules) or draft.value("lora_target_linear")
    if draft.is_unknown("target_modules", "target_regex"):
        draft.set("lora.targets", None, "target_modules", "target_regex")
    elif not is_off(expression):
        draft.set("lora.targets", [f"/{expression}/"], "target_regex")
        draft.needless("target_regex holds", "target_modules")
    elif any(name.startswith("all-") and name != "all-linear" for name in modules):
        draft.lacking("target_modules", "adapters are on linear modules")
        draft.leave_open("lora.targets", "the names of linear modules")
    elif every:
        targets: Any = "all-linear"
        if is_trl and draft.is_vision:
            targets = ["language_model", "vision_tower", "projector"]
        draft.set("lora.targets", targets, "target_modules", "lora_target_linear")
    elif isinstance(value, str) and re.search(r"[|()\\*^$]", value):
        draft.set("lora.targets", [f"/{value}/"], "target_modules")
        draft.assumed.append(f"/{value}/ matches whole names of modules")
    elif modules:
        draft.set("lora.targets", modules, "target_modules")
    elif is_trl:
        _carry_peft_targets(draft)
    else:
        draft.lacking("target_modules", "no modules are named")
        draft.leave_open("lora.targets", "the names of linear modules")
    draft.needless("target_modules holds", "target_modules", "target_regex", "lora_target_linear")
    whole = _names(draft, "modules_to_save")
    if any(name.startswith("all-") for name in whole):
        draft.lacking("modules_to_save", "lora.modules_to_save takes names of modules")
    elif whole:
        draft.set("lora.modules_to_save", whole, "modules_to_save")
    else:
        draft.needless("off", "modules_to_save")


def _carry_peft_targets(draft: Draft) -> None:
    """Carry peft's own choice of modules by the model's type, if none are named."""
    config = draft.facts.file("config.json")
    name = str(draft.value("model") or "").lower()
    if config is not None:
        model_type = str(config.get("model_type"))
    else:
        kinds = (kind for pattern, kind in TYPES_BY_NAME.items() if re.search(pattern, name))
        model_type = next(kinds, "")
        if model_type:
            draft.assumed.append(f"by its name {draft.value('model')} is of the type {model_type}")
    for modules, types in PEFT_TARGETS.items():
        if model_type in types.split():
            draft.set("lora.targets", modules.split(), "target_modules")
            draft.sources["lora.targets"] = f"peft's choice for {model_type}"
            return
    draft.leave_open("lora.targets", "peft's choice for the model's type, which is not known here")
    draft.lacking(
        "target_modules", "not set: peft chooses by the model's type, which is not known here"
    )


def carry_quantization(draft: Draft) -> None:
    """Carry a base in 4 or 8 bits under adapters, by bitsandbytes; the tables say why other bases are lacking."""
    kind, method = draft.value("bnb_4bit_quant_type"), draft.value("quant_method")
    if not _has_adapters(draft) or draft.settings.get("lora.dora"):
        return
    if not is_off(method) and method not in ("bnb", "bitsandbytes", "BNB"):
        return
    bits = str(draft.value("quant_bits") or 0)
    in_4bit = ("load_in_4bit", *(("quant_bits",) if bits == "4" else ()))
    in_8bit = ("load_in_8bit", *(("quant_bits",) if bits == "8" else ()))
    chosen = [name for name in in_4bit if draft.value(name)]
    if chosen and kind in (None, "nf4"):
        draft.set("quantize", "nf4", *chosen)
        draft.needless(
            "quantize=nf4 quantizes the maxima of blocks too",
            "bnb_4bit_use_double_quant", "use_bnb_nested_quant",
        )  # fmt: skip
        draft.needless(
            "quantize=nf4", "bnb_4bit_quant_type", "quant_method", "load_in_8bit", "quant_bits"
        )
        draft.needless(
            "products are in the run's dtype", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"
        )
    elif chosen := [name for name in in_8bit if draft.value(name)]:
        draft.set("quantize", "int8", *chosen)
        draft.needless(
            "quantize=int8", "quant_method", "load_in_4bit", "bnb_4bit_quant_type", "quant_bits"
        )
        draft.needless("quantize=int8", "bnb_4bit_use_double_quant", "use_bnb_nested_quant")
    draft.off("quant_bits")


def carry_tokens(draft: Draft) -> None:
    """Carry new special tokens: words, or files of words."""
    words = draft.value("new_special_tokens")
    words = words if isinstance(words, list) else [] if is_off(words) else str(words).split(",")
    paths = [find_near(draft.facts.directory / "recipe", str(word)) for word in words]
    words = [
        token
        for word, path in zip(words, paths, strict=True)
        for token in ([word] if path is None else read_text(path).split())
    ]
    if any(str(word).endswith(".txt") for word in words):
        draft.lacking("new_special_tokens", "name the words of the file: tokens.add")
    elif words:
        draft.set("tokens.add", [str(word).strip() for word in words], "new_special_tokens")
    draft.off("new_special_tokens")


def carry_routers(draft: Draft) -> None:
    """Carry the load-balancing loss of a mixture of experts, which trl adds by default."""
    name, key = "router_aux_loss_coef", "router.aux_loss_coef"
    config = draft.facts.file("config.json")
    text = None if config is None else {**config, **(config.get("text_config") or {})}
    has_experts = None if text is None else not EXPERTS.isdisjoint(text)
    model, is_trl = draft.value("model") or "the model", draft.framework in ("trl", "open-r1")
    why = "over the whole step, where others take each micro-batch by itself"
    if name not in draft.given and is_trl and has_experts is not False:
        added = "of a mixture of experts trl adds 0.001 times the routers' loss"
        if has_experts is None:
            draft.assumed.append(f"{model} is no mixture of experts: {added}")
        else:
            draft.set(key, 0.001, name, why=why)
    elif has_experts is False:
        draft.needless("the model has no experts", name)
    elif draft.is_unknown(name) or draft.is_on(name):
        draft.set(key, draft.value(name), name, why=why)
        if draft.framework == "megatron":
            draft.set("router.aux_loss", "per_layer", name)
        if has_experts is None:
            draft.assumed.append(f"{model} is a mixture of experts, since {name} is set")
    draft.off(name)


def carry_frozen(draft: Draft) -> None:
    """Carry the names of parameters that do not train, and of exceptions that do. ms-swift takes prefixes of names, or
    expressions that occur in them; axolotl and LLaMA-Factory's freeze name the parameters that train.
    """
    has_adapters = "lora.rank" in draft.settings or "lora.adapter" in draft.settings
    is_layers = draft.framework == "llamafactory" and draft.value("tuner_type") == "freeze"
    if draft.framework == "llamafactory" and not is_layers:
        draft.needless("with finetuning_type: freeze alone", *LAYERS)
    if has_adapters or draft.framework not in ("swift", "axolotl", "llamafactory"):
        return
    frozen, kept = [], []
    if is_layers:
        # All or some modules of the last layers (of the first with a negative number), and other names.
        names = list(LAYERS)
        count, chosen, others = (draft.value(name) for name in LAYERS)
        layers = f"layers[{-count}:]" if is_count(count) else f"layers[:{-(count or 0)}]"
        modules = words_of(chosen)
        kept = [layers] if "all" in modules else [f"{layers}.{module}*" for module in modules]
        kept += [f"*{name}*" for name in words_of(others)]
    elif draft.framework == "axolotl":
        names = ["unfrozen_parameters"]
        words = [re.sub(r"\.(?!\+)", r"\.", word) for word in _texts(draft, names[0])]
        if any(re.search(r"\[\d*:\d*\]$", word) for word in words):
            draft.lacking(names[0], "rows of a parameter: a parameter trains whole or not at all")
            return
        kept = [f"/^(?:{word})/" for word in words]
    else:
        names = ["freeze_parameters_ratio", "freeze_parameters", "freeze_parameters_regex"]
        names += ["trainable_parameters", "trainable_parameters_regex"]
        ratio = draft.value(names[0])
        frozen = [f"{100 * ratio:.12g}%"] if is_number(ratio) and ratio > 0 else []
        by_name = [
            [f"/^{re.escape(word)}/" for word in _texts(draft, name)] for name in names[1::2]
        ]
        found = [[f"/{word}/" for word in _texts(draft, name)] for name in names[2::2]]
        frozen += by_name[0] + found[0]
        kept = by_name[1] + found[1]
    if draft.is_unknown(*names):
        return
    parts = draft.settings.get("freeze", [])
    if kept and draft.framework != "swift":
        if "language_model" in parts or (parts and len(parts) < 2):
            draft.lacking(names[0], "layers that train next to parts of the model: freeze")
            return
        parts, frozen = [], ["*"]
    if not parts and not frozen:
        draft.needless("nothing is frozen", *names)
        return
    if frozen or kept:
        for pattern in (pattern for pattern in (*frozen, *kept) if pattern.startswith("/")):
            try:
                re.compile(pattern[1:-1])
            except re.error as error:
                draft.lacking(names[0], f"{pattern} is no regular expression: {error}")
                return
        draft.set("freeze", [*parts, *frozen, *(f"!{pattern}" for pattern in kept)], *names)


LAYERS = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
"""Options of LLaMA-Factory's finetuning_type: freeze."""


def _texts(draft: Draft, name: str) -> list[str]:
    value = draft.value(name)
    return (
        []
        if is_off(value)
        else [str(word) for word in (value if isinstance(value, list) else [value])]
    )


def carry_parts(draft: Draft) -> None:
    """Carry the parts of a vision-language model that train, by default the language model, with their rates."""
    names = (*PARTS, *RATES)
    if draft.framework == "openrlhf":
        if draft.value("actor.freeze_visual_encoder"):
            draft.set("freeze", ["vision_tower"], "actor.freeze_visual_encoder")
        return
    if not set(PARTS) & set(draft.defaults) or draft.is_vision is False:
        draft.needless("the model takes no pictures", *names)
        return
    has_adapters = "lora.rank" in draft.settings or "lora.adapter" in draft.settings
    asked = [name for name in names if name in draft.given]
    if draft.is_vision is None and not asked:
        if not has_adapters:
            parts = " and ".join(RATES.values())
            draft.assumed.append(
                f"the model takes no pictures: of one that does {draft.framework} freezes {parts}"
            )
        return
    frozen = [part for name, (part, default) in PARTS.items() if draft.value(name, default)]
    trained = [part for part, _ in PARTS.values() if part not in frozen]
    key = "lora.targets" if has_adapters else "freeze"
    if not has_adapters and frozen:
        draft.settings["freeze"], draft.sources["freeze"] = frozen, "the parts that are frozen"
    elif has_adapters and trained != ["language_model"]:
        if draft.settings.get("lora.targets") == "all-linear":
            draft.settings["lora.targets"] = trained
        else:
            for name in (name for name in PARTS if name in draft.given):
                draft.lacking(name, "parts of the model as well as modules by name: lora.targets")
    draft.carried(list(PARTS), [key])
    rates = {part: draft.value(name) for name, part in RATES.items() if part in trained}
    if rates := {part: rate for part, rate in rates.items() if rate is not None}:
        others = draft.settings.get("optim.group_learning_rates", {})
        draft.settings["optim.group_learning_rates"] = others | rates
        draft.sources["optim.group_learning_rates"] = "vit_lr, aligner_lr"
        if others:
            draft.lacking("loraplus_lr_ratio", "matrices B in parts of the model with other rates")
    for name, part in RATES.items():
        if part in trained:
            draft.carried([name], ["optim.group_learning_rates"])
        else:
            draft.needless(f"{part} is frozen", name)


def carry_pictures(draft: Draft) -> None:
    """Carry limits of pictures and of videos."""
    names = {
        "$MAX_PIXELS": "data.images.max_pixels",
        "max_pixels": "data.images.max_pixels",
        "$FPS": "data.images.fps",
        "fps": "data.images.fps",
        "$FPS_MAX_FRAMES": "data.images.max_frames",
        "fps_max_frames": "data.images.max_frames",
        "$IMAGE_MAX_TOKEN_NUM": "data.images.max_pixels",
        "$MIN_PIXELS": "data.images.min_pixels",
        "$IMAGE_MIN_TOKEN_NUM": "data.images.min_pixels",
        "$VIDEO_MAX_PIXELS": "data.images.max_frame_pixels",
        "$VIDEO_MAX_TOKEN_NUM": "data.images.max_frame_pixels",
    }
    model = str(draft.value("model")).lower()
    is_older = re.search(r"qwen-?2(\.5)?-?(vl|omni)|qvq", model)
    side = 28 if is_older else 32 if re.search(r"qwen-?3(\.5)?", model) else 0
    for name, key in names.items():
        is_default = name not in draft.given and name in draft.defaults and draft.is_vision
        if (name not in draft.given and not is_default) or draft.is_unknown(name):
            continue
        value = draft.value(name)
        value = parsed(value) if isinstance(value, str) else value
        if value is None or draft.is_vision is False:
            draft.needless("the model takes no pictures", name)
        elif not is_number(value):
            draft.lacking(name, f"a number is expected by {key}")
        elif name == "$MIN_PIXELS" and not side:
            draft.lacking(name, "a lower limit of pictures in a family that has none in taut")
        elif name.endswith("_TOKEN_NUM"):
            if side:
                pixels = int(value * side * side)
                draft.set(key, min(pixels, draft.settings.get(key, pixels)), name)
            else:
                draft.lacking(
                    name, "how large the picture of a token is is not known of this model"
                )
        else:
            draft.set(key, min(value, draft.settings.get(key, value)), name)
    frame = draft.settings.get("data.images.max_frame_pixels", 0)
    if draft.settings.get("data.images.max_pixels", frame) < frame:
        name = next(name for name in names if name.startswith("$VIDEO") and name in draft.given)
        draft.lacking(name, "frames of videos are at most as large as pictures")
    if frame:
        draft.assumed.append(
            "frames of videos are as large as Qwen's smallest or larger: there smaller ones are enlarged"
        )


def carry_precision(draft: Draft) -> None:
    """Carry training entirely in float32; 16 bits are taut's default."""
    if draft.framework == "openrlhf":
        return
    is_swift = draft.framework in ("swift", "megatron")
    weights = draft.value("torch_dtype" if is_swift else "dtype") or "float32"
    is_mixed = draft.value("bf16") is not False or bool(draft.value("fp16"))
    if is_swift and draft.value("bf16") is None:
        is_mixed = "torch_dtype" not in draft.given
    if weights in ("float32", "fp32") and not is_mixed:
        draft.set("dtype", "float32", "bf16", "torch_dtype", "dtype")
