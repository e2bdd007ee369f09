"""Adapters that plain peft makes, one of each kind: what ``lora.adapter`` continues, and what it refuses by name.

The table of docs/models.md is made of ``KINDS`` (tests/docs/pages.py), and tests/unit/models/lora/test_peft_adapters.py
trains each of them.
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from taut.models.load import quiet_library

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Kind(NamedTuple):
    """One kind of adapter."""

    settings: dict[str, Any]
    """Of peft's configuration, beside ``target_modules=LINEAR`` and ``r=4``."""
    says: str = ""
    """Words of the refusal; empty: it is gone on with."""
    base: str = "llama"
    config: str = "LoraConfig"
    """peft's class."""
    edits: dict[str, Any] = {}  # noqa: RUF012 (of a tuple)
    """What is changed in adapter_config.json afterwards."""
    is_converted: bool = False
    """Whether its start is subtracted again, as peft converts it."""
    note: str = ""
    """For the table."""


_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_UP = r"layers\.1\.mlp\.up_proj"
KINDS: dict[str, Kind] = {
    "plain": Kind({}),
    "alpha": Kind({"lora_alpha": 3}),
    "rsLoRA": Kind({"use_rslora": True, "lora_alpha": 3}),
    "DoRA": Kind({"use_dora": True}),
    "dropout": Kind({"lora_dropout": 0.1}, note="drawn by sample"),
    "all-linear": Kind({"target_modules": "all-linear"}),
    "targets by expression": Kind({"target_modules": r".*layers\.1\..*(q|v)_proj"}),
    "targets by whole names": Kind({"target_modules": ["model.layers.0.self_attn.q_proj"]}),
    "rank_pattern": Kind({"rank_pattern": {"q_proj": 2, _UP: 8}}),
    "alpha_pattern": Kind({"alpha_pattern": {"q_proj": 2, _UP: 16}}),
    "both patterns, rsLoRA": Kind(
        {
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"down_proj": 5},
            "use_rslora": True,
        }
    ),
    "rank_pattern, DoRA": Kind({"rank_pattern": {"q_proj": 2}, "use_dora": True}),
    "layers_to_transform": Kind({"layers_to_transform": [1]}),
    "layers_to_transform, one": Kind({"layers_to_transform": 0}),
    "layers_pattern": Kind({"layers_to_transform": [1], "layers_pattern": "layers"}),
    "exclude_modules": Kind({"exclude_modules": ["k_proj"]}),
    "exclude_modules by expression": Kind({"exclude_modules": r".*\.0\..*"}),
    "exclude_modules of all-linear": Kind(
        {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}
    ),
    "target_parameters": Kind(
        {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}, base="qwen3_moe"
    ),
    "target_parameters alone": Kind(
        {"target_modules": [], "target_parameters": _EXPERTS[1:]}, base="qwen3_moe"
    ),
    "modules_to_save, head": Kind({"modules_to_save": ["lm_head"]}),
    "modules_to_save, both tables": Kind({"modules_to_save": ["lm_head", "embed_tokens"]}),
    "modules_to_save, norms": Kind({"modules_to_save": ["input_layernorm"]}),
    "modules_to_save, tied embedding": Kind(
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, base="qwen2"
    ),
    "modules_to_save, tied head": Kind({"modules_to_save": ["lm_head"]}, base="qwen2"),
    "trainable_token_indices": Kind({"trainable_token_indices": [3, 5]}),
    "trainable_token_indices, both tables": Kind(
        {"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3]}}
    ),
    "trainable_token_indices, tied": Kind({"trainable_token_indices": [3, 5]}, base="qwen2"),
    "lora_bias": Kind({"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}, base="qwen2"),
    "lora_bias on layers without bias": Kind(
        {"lora_bias": True},
        says="lora_bias=true.*no bias",
        note="there is nothing to merge it into; begin anew",
    ),
    "bias=all": Kind(
        {"bias": "all"},
        says="bias=all.*expected bias=none",
        base="qwen2",
        note="the base would train; merge it with `taut merge`",
    ),
    "bias=lora_only": Kind(
        {"bias": "lora_only"},
        says="bias=lora_only.*expected bias=none",
        base="qwen2",
        note="the base would train; merge it with `taut merge`",
    ),
    "bias=all without biases": Kind({"bias": "all"}),
    "gaussian": Kind({"init_lora_weights": "gaussian"}),
    "orthogonal": Kind({"init_lora_weights": "orthogonal"}),
    "EVA": Kind({}, edits={"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}),
    "PiSSA": Kind(
        {"init_lora_weights": "pissa"},
        says="init_lora_weights=pissa.*convert",
        note="it belongs to a residual; convert it with peft",
    ),
    "PiSSA, converted": Kind({"init_lora_weights": "pissa"}, is_converted=True),
    "OLoRA": Kind(
        {"init_lora_weights": "olora"},
        says="init_lora_weights=olora.*convert",
        note="it belongs to a residual; convert it with peft",
    ),
    "CorDA": Kind(
        {},
        edits={"init_lora_weights": "corda"},
        says="init_lora_weights=corda",
        note="it belongs to a residual; convert it with peft",
    ),
    "LoftQ": Kind(
        {},
        edits={"init_lora_weights": "loftq"},
        says="init_lora_weights=loftq",
        note="it belongs to a residual; convert it with peft",
    ),
    "QA-LoRA": Kind({"use_qalora": True, "qalora_group_size": 8}, note="on a base in full"),
    "adapter of the embedding": Kind(
        {"target_modules": ["q_proj", "embed_tokens"]},
        says="adapts the embedding.*peft",
        note="merge it with peft",
    ),
    "adapter of the head": Kind(
        {"target_modules": ["q_proj", "lm_head"]}, says="the head.*peft", note="merge it with peft"
    ),
    "adapter of the tied head": Kind(
        {"target_modules": ["q_proj", "lm_head"]},
        says="a copy of its own",
        base="qwen2",
        note="untie the model and merge it with peft",
    ),
    "aLoRA": Kind(
        {"alora_invocation_tokens": [5, 6]},
        says="alora_invocation_tokens.*lora.rank",
        note="it acts behind some tokens alone; begin anew",
    ),
    "layer_replication": Kind(
        {"layer_replication": [[0, 2], [1, 2]]},
        says="layer_replication.*several times",
        note="merge it with peft",
    ),
    "Arrow": Kind(
        {},
        edits={"arrow_config": {"top_k": 3}},
        says="arrow_config.*several adapters",
        note="one of several adapters for each token; begin anew",
    ),
    "KaSA": Kind(
        {},
        edits={"kasa_config": {"beta": 1e-4}},
        says="kasa_config.*singular values",
        note="the base is changed; merge it with peft",
    ),
    "VeLoRA": Kind(
        {"velora_config": {}},
        says="velora_config.*packing",
        note="its gradients depend on packing; take the setting out",
    ),
    "MonteCLoRA": Kind(
        {},
        edits={"monteclora_config": {"n": 2}},
        says="monteclora_config.*drawn",
        note="drawn in each forward; merge it with peft",
    ),
    "BD-LoRA": Kind(
        {},
        edits={"use_bdlora": {"nblocks": 2}},
        says="use_bdlora.*blocks",
        note="merge it with peft",
    ),
    "a setting of a newer peft": Kind(
        {}, edits={"use_new": True}, says="use_new=true.*not know", note="taut does not know it"
    ),
    "one that is off": Kind({}, edits={"use_new": False, "new_config": None}),
    "of another task": Kind(
        {"task_type": "SEQ_CLS"}, says="an adapter for SEQ_CLS", note="another head"
    ),
    "of no task": Kind({"task_type": None}),
    "IA3": Kind(
        {"feedforward_modules": ["down_proj"]},
        says="IA3 adapter",
        config="IA3Config",
        note="no LoRA; merge it with peft",
    ),
    "LoHa": Kind(
        {},
        says="LOHA adapter.*merge_and_unload",
        config="LoHaConfig",
        note="no LoRA; merge it with peft",
    ),
    "LoKr": Kind({}, says="LOKR adapter", config="LoKrConfig", note="no LoRA; merge it with peft"),
    "AdaLoRA": Kind(
        {"total_step": 9},
        says="ADALORA adapter",
        config="AdaLoraConfig",
        note="no LoRA; merge it with peft",
    ),
    "OFT": Kind(
        {"oft_block_size": 4, "r": 0},
        says="OFT adapter",
        config="OFTConfig",
        note="no LoRA; merge it with peft",
    ),
    "layer norms": Kind(
        {"target_modules": None},
        says="LN_TUNING",
        config="LNTuningConfig",
        note="no LoRA; merge it with peft",
    ),
    "prompt tuning": Kind(
        {"num_virtual_tokens": 3, "target_modules": None},
        says="PROMPT_TUNING adapter",
        config="PromptTuningConfig",
        note="no LoRA; begin anew",
    ),
    "prefix tuning": Kind(
        {"num_virtual_tokens": 3, "target_modules": None},
        says="PREFIX_TUNING adapter",
        config="PrefixTuningConfig",
        note="no LoRA; begin anew",
    ),
}


def dtype_of(kind: Kind) -> torch.dtype:
    """peft computes experts in float32, and PiSSA and OLoRA start there."""
    is_narrow = kind.base == "qwen3_moe" or "init_lora_weights" in kind.settings
    return torch.float32 if is_narrow else torch.float64


def loaded(directory: Path, dtype: torch.dtype) -> Any:
    with quiet_library():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def make(kind: Kind, base: Path, directory: Path) -> nn.Module:
    """The adapter as plain peft makes, trains (by noise) and saves it; the peft model."""
    settings = {"task_type": "CAUSAL_LM", "target_modules": LINEAR, "r": 4, **kind.settings}
    if kind.config not in ("LoraConfig", "LoHaConfig", "LoKrConfig", "OFTConfig"):
        del settings["r"]
    settings = {name: value for name, value in settings.items() if value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        made = peft.get_peft_model(
            loaded(base, dtype_of(kind)),
            getattr(peft, kind.config)(**settings),
            autocast_adapter_dtype=False,
        )
        save = partial(made.save_pretrained, save_embedding_layers=False)
        if kind.is_converted:
            made.peft_config["default"].init_lora_weights = True
            save(directory / "start")
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    draw = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.1 * draw.to(parameter.dtype))
        if kind.is_converted:
            made.peft_config["default"].init_lora_weights = "pissa"
            save(directory, path_initial_model_for_weight_conversion=str(directory / "start"))
        else:
            save(directory)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **kind.edits}))
    return made.eval()


def with_adapter(base: Path, adapter: Path, dtype: torch.dtype) -> nn.Module:
    """The base with a saved adapter, as plain peft loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(
            loaded(base, dtype), adapter, autocast_adapter_dtype=False
        )
    return model.eval()


@torch.no_grad()
def logits_on(model: Any, ids_T: Any) -> Tensor:
    logits: Tensor = model(input_ids=torch.as_tensor(ids_T)[None].long(), use_cache=False).logits[0]
    return logits.double()
