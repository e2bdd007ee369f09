"""Models with a scalar head of families that take pictures: the classes that transformers lacks.

Transformers has its classes for a sequence's and for each token's number as mixins over any family, and lists few
families that take pictures. Here the same mixins are put over a family's own base class and listed with the library's
automatic classes, so that loading, saving and wrapping know nothing of it:

    Qwen2_5_VLForSequenceClassification    model.* as in the family's other models, and score.weight [1, D]

A program that has not imported this module cannot open what is saved; one that calls ``list_with_library`` first can,
with the library's own ``AutoModelForSequenceClassification``. May import vision.towers; models.reward does.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers import conversion_mapping as conversions
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from taut.vision import towers

_MIXINS: dict[Any, tuple[type, str]] = {
    AutoModelForSequenceClassification: (
        GenericForSequenceClassification,
        "ForSequenceClassification",
    ),
    AutoModelForTokenClassification: (GenericForTokenClassification, "ForTokenClassification"),
}


def list_with_library(config: PreTrainedConfig) -> None:
    """Let the library's automatic classes know a family's models with a scalar head, where they do not."""
    if config.model_type not in towers.FAMILIES:
        return
    listed: Any = AutoModel
    backbone = listed._model_mapping[type(config)]
    base = next(kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    for auto, (mixin, name) in _MIXINS.items():
        if type(config) not in auto._model_mapping:
            family = backbone.__name__.removesuffix("Model")
            made = type(family + name, (mixin, base), {"__module__": __name__})
            auto.register(
                type(config), made, exist_ok=True
            )  # else a config of the library's own is passed over
            library: Any = conversions
            renamed = library.get_checkpoint_conversion_mapping(f"{family}ForConditionalGeneration")
            if renamed is not None:  # weights have other names in its files
                library.register_checkpoint_conversion_mapping(
                    family + name, renamed, overwrite=True
                )
