"""Load a model with a scalar head: a reward model or a critic.

From a causal language model: its backbone's weights, and a new head ``score`` drawn from N(0, 1 / (D + 1))
(arXiv:2009.01325) by a generator of its own; a bias starts at 0. From a reward model's directory: its head too.

The library's class that holds the model, so that the library can load what is saved:

    AutoModelForSequenceClassification   one number per sequence, no bias. The library reads it at the last token that
                                         is not the pad, so the pad that is saved never ends a sample (``save.py``).
    AutoModelForTokenClassification      a number at each token: a process model, read at each step; and a head with a
                                         bias, which the sequence class has no place for. Its number for a sequence is
                                         its logit at the last token.

A process model of others has two labels at each token, wrong and right. Its probability of right is the softmax's,
which is the sigmoid of their difference: where no head is to be trained, the head is read as one number, the right
label's row less the wrong one's. A causal language model that judges by its next token (+ or -) is read in the same
way, by the rows of these tokens (``compare_tokens``).

``heads.list_with_library`` adds these classes for families that take pictures. Architectures without such a class,
other labels, and dropout before the head are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from taut.errors import ModelError
from taut.io import capabilities
from taut.models.architecture import head as head_of
from taut.models.architecture import takes_pictures
from taut.models.cpu import faster_layers
from taut.models.heads import check_head, initialize, list_with_library, scalar_head
from taut.models.layerwise import StreamedLayers
from taut.models.load import (
    ShardLayers,
    explain_load_errors,
    is_reward_config,
    load_config,
    read_model,
    require_family,
)
from taut.models.quantized.frozen_storage import Storage
from taut.models.settings import NewHead

HEAD = "score"
RIGHT = frozenset({"label_1", "true", "right", "correct", "good", "positive", "yes", "+", "1"})
"""Names of the label that says that a step is right, in lower case; label_1 is the library's for the second one."""


def load_reward_model(
    path: str,
    head: NewHead | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
    is_narrow: bool = False,
    storage: Storage | None = None,
    shard: ShardLayers | None = None,
    streamed: StreamedLayers | None = None,
) -> PreTrainedModel:
    """The model at ``path`` with its scalar head, in train mode; the other arguments as for ``load.load_model``.

    ``head``: the head to train, which a reward model's own has to match; None: the directory must have one.
    """
    config = load_config(path, trust_remote_code)
    # which head: the directory's own, or a new one
    may_lack_head = head is not None and not is_reward_config(config)
    right = _right_label(path, config, head)
    auto_class = _configure(path, config, head)
    if right is not None:
        config.num_labels = 2
    model, is_new = read_model(
        auto_class,
        path,
        config,
        "a reward model",
        dtype=dtype,
        device=device,
        attention=attention,
        trust_remote_code=trust_remote_code,
        is_narrow=is_narrow,
        storage=storage,
        shard=shard,
        streamed=streamed,
        new_module=HEAD if may_lack_head else "",
    )
    if right is not None:  # one number of two: the right label's less the wrong one's
        labels: Any = model
        labels.score = _difference(labels.score.weight, labels.score.bias, right, 1 - right)
        labels.config.num_labels = labels.num_labels = 1
    module = scalar_head(model)
    if head is not None:
        if is_new:
            initialize(module, head.seed)
        has_bias = module.bias is not None
        if has_bias != head.bias:
            actual, wanted = ("a bias", "false") if has_bias else ("no bias", "true")
            raise ModelError(
                f"model={path} has a scalar head with {actual}, and bias={wanted} was requested; expected its own; "
                f"set reward.bias={str(has_bias).lower()}"
            )
    check_head(model)
    ready: PreTrainedModel = model.to(device).train()  # type: ignore[arg-type]  # a device
    return ready


def reward_skeleton(
    path: str, config: PreTrainedConfig, head: NewHead | None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model's modules on the meta device: the architecture without weights."""
    auto_class = _configure(path, config, head)
    with explain_load_errors(path, "a reward model"), torch.device("meta"):
        skeleton: PreTrainedModel = auto_class.from_config(
            config, trust_remote_code=trust_remote_code
        )
    faster_layers.install(skeleton)
    return skeleton


def _right_label(path: str, config: PreTrainedConfig, head: NewHead | None) -> int | None:
    """The label of a process model that says that a step is right; None for other models."""
    name = str((getattr(config, "architectures", None) or [""])[0])
    if head is not None or not name.endswith("ForTokenClassification") or config.num_labels != 2:
        return None
    names = [str(label) for _, label in sorted((config.id2label or {}).items())]
    found = [number for number, label in enumerate(names) if label.lower() in RIGHT]
    if len(found) != 1:
        raise ModelError(
            f"model={path} has the labels {', '.join(names)}; expected one that says that a step is "
            f"right: {', '.join(sorted(RIGHT))}; name it so in id2label of its config.json"
        )
    return found[0]


def compare_tokens(model: Any, right: int, wrong: int) -> None:
    """Give a causal language model a scalar head: the logit of one token less that of another. Raises ModelError where
    that is no linear function of the hidden state.
    """
    spec = head_of(model)
    if spec.softcap is not None:
        raise ModelError(
            f"steps.tokens: {type(model).__name__} caps its logits, so their difference is no scalar head; expected a "
            "model without a softcap; name another"
        )
    model.score = _difference(spec.weight, spec.bias, right, wrong, spec.scale)


@torch.no_grad()
def _difference(
    weight_VD: Tensor, bias_V: Tensor | None, right: int, wrong: int, scale: float = 1.0
) -> torch.nn.Linear:
    """A scalar head: what one row of a head gives less what another gives, in float32 at least."""
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    head = torch.nn.Linear(weight_VD.shape[1], 1, bias_V is not None, weight_VD.device, wide)
    for ours, theirs in ((head.weight, weight_VD), (head.bias, bias_V)):
        if theirs is not None:
            ours.copy_(scale * (theirs[[right]].to(wide) - theirs[[wrong]].to(wide)))
    return head


def _configure(path: str, config: PreTrainedConfig, head: NewHead | None) -> Any:
    """The library's automatic class for this directory, with ``config`` set up for its scalar head."""
    is_reward_model = is_reward_config(config)
    name = str((config.architectures or [""])[0])
    if is_reward_model:
        is_sequence = name.endswith("ForSequenceClassification")
    else:
        is_sequence = head is not None and head.kind == "sequence" and not head.bias
    # the directory's own head, if it has one, is the one that is asked for
    problem = ""
    if not is_reward_model and head is None:
        problem = "has no scalar head; expected a reward model; train one (taut reward), or name its directory"
    elif not is_reward_model:
        pass
    elif config.num_labels != 1 and _right_label(path, config, head) is None:
        problem = f"is a {name} with {config.num_labels} labels; expected one number: num_labels=1"
    elif head is not None and head.kind == "process" and is_sequence:
        problem = (
            f"is a {name}, which gives one number for a sequence; expected a head that is read at each step; start "
            "from the causal language model it was trained from"
        )
    if problem:
        raise ModelError(f"model={path} {problem}")
    # the library's class for it
    auto_class: Any = (
        AutoModelForSequenceClassification if is_sequence else AutoModelForTokenClassification
    )
    require_family(path, config)
    if takes_pictures(config):
        capabilities.require("a scalar head on a model with pictures", f"model={path}")
    list_with_library(config)
    remote_classes = getattr(config, "auto_map", None) or {}
    if type(config) not in auto_class._model_mapping and auto_class.__name__ not in remote_classes:
        raise ModelError(
            f"model={path}: transformers has no {auto_class.__name__} for {config.model_type} that could be saved; "
            "expected an architecture with one, like llama, qwen3 or gemma2"
            + ("; without a bias there may be one" if "Token" in auto_class.__name__ else "")
        )
    # settings with which the library and servers read one number
    config.num_labels = 1
    config.problem_type = "regression"  # the number as it is: servers put no sigmoid on it
    config.id2label, config.label2id = {0: HEAD}, {HEAD: 0}
    if auto_class is AutoModelForTokenClassification:
        if getattr(config, "classifier_dropout", None) is None:
            config.classifier_dropout = 0.0  # the library's default would be 0.1
        if head is not None and not is_reward_model:
            config.token_classification_bias = head.bias
    return auto_class
