"""A model directory -> a model with a scalar head: a reward model or a critic.

From a causal language model: the backbone's weights exactly, and a head ``score`` drawn from N(0, 1 / (D + 1))
(arXiv:2009.01325) by a generator of its own, keyed by the seed; a bias begins at 0. From a directory that is a reward
model already: its head too.

Which of the library's classes holds it, so that the library reads it back:

    AutoModelForSequenceClassification   one number for a sequence, no bias. The library reads it at the last token that
                                         is not the pad, so the pad that is saved never ends a sample (``save.py``).
    AutoModelForTokenClassification      a number at each token: a process model, which is read at each step; and a head
                                         with a bias, which the sequence class has no place for. Its number for a
                                         sequence is its logit at the last token.

Families that take pictures have these classes from ``models/pictured_heads.py`` where the library has none.

Refused: architectures for which there is no such class, several labels, dropout before the head. May import
errors and models.{anatomy,heads,in_force,load,pictured_heads}.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from taut.errors import ModelError
from taut.models.heads import list_with_library, prove_scalar_head, scalar_head
from taut.models.load import (
    Loading,
    is_reward_config,
    load_config,
    one_line,
    put_in_force,
    read_weights,
    require_complete,
    require_family,
)

HEAD = "score"


class NewHead(NamedTuple):
    """The head that is trained, and how it begins where the directory has none."""

    kind: Literal["sequence", "process"] = "sequence"
    """Read once, or at each step."""
    bias: bool = False
    seed: int = 0

    @property
    def auto(self) -> Any:
        """The library's class that holds it."""
        if self.kind == "sequence" and not self.bias:
            return AutoModelForSequenceClassification
        return AutoModelForTokenClassification


def load_reward_model(
    path: str,
    head: NewHead | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
    is_narrow: bool = False,
) -> PreTrainedModel:
    """The model at ``path`` with its scalar head, in train mode; the rest as for ``load.load_model``.

    ``head``: what is to be trained, which a reward model's own has to be; None: the directory must have one.
    """
    config = load_config(path, trust_remote_code)
    auto = _class_of(path, config, head)
    _configure(config, auto, head)
    how = Loading(dtype, attention, trust_remote_code, is_narrow)
    with one_line(path, "a reward model"), torch.random.fork_rng(devices=[]):
        model, report = read_weights(auto, path, config, how)
    missing = {str(name) for name in report["missing_keys"]}
    lacks_head = f"{HEAD}.weight" in missing
    if lacks_head and head is not None and not is_reward_config(config):
        report["missing_keys"] = missing - {f"{HEAD}.weight", f"{HEAD}.bias"}
    require_complete(path, report, model)
    if lacks_head and head is not None:
        initialise(scalar_head(model), head.seed)
    _require_bias(path, model, head)
    put_in_force(model, how)
    prove_scalar_head(model)
    ready: PreTrainedModel = model.to(device).train()  # type: ignore[arg-type]  # a device
    return ready


def reward_skeleton(
    path: str, config: PreTrainedConfig, head: NewHead | None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model's modules on the meta device: its architecture, and no weight."""
    auto = _class_of(path, config, head)
    _configure(config, auto, head)
    with one_line(path, "a reward model"), torch.device("meta"):
        skeleton: PreTrainedModel = auto.from_config(config, trust_remote_code=trust_remote_code)
    return skeleton


@torch.no_grad()
def initialise(head: nn.Linear, seed: int) -> None:
    """N(0, 1 / (D + 1)), the same numbers in every dtype; the bias is 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(head.weight.shape, generator=generator, dtype=torch.float64)
    head.weight.copy_(drawn / (head.in_features + 1) ** 0.5)
    if head.bias is not None:
        head.bias.zero_()


def _class_of(path: str, config: PreTrainedConfig, head: NewHead | None) -> Any:
    """The library's class for this directory; what is asked for has to be what a reward model is."""
    if not is_reward_config(config):
        if head is None:
            raise ModelError(
                f"model={path} has no scalar head; expected a reward model; train one (taut reward), or name its "
                "directory"
            )
        auto = head.auto
    else:
        name = str((config.architectures or [""])[0])
        is_sequence = name.endswith("ForSequenceClassification")
        auto = (
            AutoModelForSequenceClassification if is_sequence else AutoModelForTokenClassification
        )
        if config.num_labels != 1:
            raise ModelError(
                f"model={path} is a {name} with {config.num_labels} labels; expected one number: num_labels=1"
            )
        if head is not None and head.kind == "process" and is_sequence:
            raise ModelError(
                f"model={path} is a {name}, which gives one number for a sequence; expected a head that is read at "
                "each step; start from the causal language model it was trained from"
            )
    _require_class(path, config, auto)
    return auto


def _require_class(path: str, config: PreTrainedConfig, auto: Any) -> None:
    """The library has to have this class for the architecture, or the model to bring it."""
    require_family(path, config)
    list_with_library(config)
    brought = getattr(config, "auto_map", None) or {}
    if type(config) not in auto._model_mapping and auto.__name__ not in brought:
        raise ModelError(
            f"model={path}: transformers has no {auto.__name__} for {config.model_type}, so a reward model of it could "
            "not be saved; expected an architecture that has one, like llama, qwen2, qwen3, mistral or gemma2"
            + ("; without a bias there may be one" if "Token" in auto.__name__ else "")
        )


def _configure(config: PreTrainedConfig, auto: Any, head: NewHead | None) -> None:
    """What the saved config says of the head; asked for before the model is built."""
    config.num_labels = 1
    config.problem_type = "regression"  # one number as it is: servers put no sigmoid on it
    config.id2label, config.label2id = {0: HEAD}, {HEAD: 0}
    if auto is AutoModelForTokenClassification:
        if getattr(config, "classifier_dropout", None) is None:
            config.classifier_dropout = 0.0  # the library would take 0.1 where nothing is said
        if head is not None and not is_reward_config(config):
            config.token_classification_bias = head.bias


def _require_bias(path: str, model: PreTrainedModel, head: NewHead | None) -> None:
    has_bias = scalar_head(model).bias is not None
    if head is not None and has_bias != head.bias:
        found, wanted = ("a bias", "false") if has_bias else ("no bias", "true")
        raise ModelError(
            f"model={path} has a scalar head with {found}, and bias={wanted} was asked for; expected its own; "
            f"set reward.bias={str(has_bias).lower()}"
        )
