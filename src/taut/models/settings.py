"""Keys of models: adapters, stored formats, noise, new tokens, routers. Imports no torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from taut.config import configclass
from taut.conflicts import conflict
from taut.losses.settings import RouterLossKind

CRITIC = "critic"
"""The critic's name in the scorer."""
CpuMatmulSetting = Literal["auto", "mkl", "onednn"]
FrozenDtype = Literal["auto", "checkpoint", "float32"]
Quantize = Literal["nf4", "int8"]
ActivationCheckpointing = bool | Literal["selective", "offload"] | None
RESIDUAL_STARTS = ("pissa", "olora")
"""Values of ``lora.init`` that start at a part of the weights."""


@configclass
class LoraConfig:
    """Low-rank adapters; off while ``rank`` is 0 and ``adapter`` is not set."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters. 0 trains the model itself."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale: alpha / rank (alpha / sqrt(rank) with rslora). Default: twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input, keyed per sample. Above 0 it disables prefix sharing."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Linear modules to adapt: by the end of their names (q_proj, mlp.up_proj), wherever they are; by a glob over whole
    names or a /regular expression/; by a part (vision_tower, projector, language_model). all-linear: every one but the
    head; in a vision-language model every one of its language model.
    """
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rank-stabilized LoRA)."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA)."""
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = "kaiming"
    """Start of the adapters. kaiming, gaussian: A is drawn (uniform; normal, deviation 1 / rank), B is 0. pissa: at the
    largest singular values of the weights, olora: at the first rows and columns of their QR decomposition; the model
    starts as the base all the same, and what is saved is a LoRA of twice the rank on the base.
    """
    init_iterations: Annotated[int, Field(ge=1)] | None = None
    """Iterations of a randomized decomposition for init=pissa (peft's pissa_niter_N). Default: the exact one, which is
    slow for large layers.
    """
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained whole next to the adapters, by the end of their names: embed_tokens, lm_head; in a
    vision-language model also projector, whatever its family calls it.
    """
    train_token_rows: Literal["auto", "always", "never"] = "auto"
    """Rows of frozen tables that train on their own. auto: those of added tokens, and of end-of-turn tokens that were
    never trained; always: those of end-of-turn tokens in any case; never: none, and a run that needs one is refused.
    """
    adapter: str | None = None
    """Directory of an adapter to continue training; its own settings apply."""

    rules: ClassVar[str] = """
        alpha dropout targets rslora dora init init_iterations modules_to_save train_token_rows excludes adapter:
            the adapter's own settings apply
        alpha dropout targets rslora dora init init_iterations modules_to_save train_token_rows needs rank
        at most one of rank adapter: the adapter has its own rank
        dora=true excludes init=pissa[starts_at_weights]: its magnitudes are of the weights and the adapter together
        init_iterations needs init=pissa
    """

    @property
    def starts_at_weights(self) -> bool:
        """Whether adapters start at a part of the weights."""
        return self.init in RESIDUAL_STARTS

    @property
    def saved_rank(self) -> int:
        """Rank of the adapters that are saved and pushed."""
        return self.rank * (2 if self.starts_at_weights else 1)

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or self.adapter is not None


@configclass
class NoiseConfig:
    """Noise added in training."""

    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    """NEFTune's alpha: scale of the noise on the embeddings, 5 to 15 in the paper. 0 disables it."""


@configclass
class TokensConfig:
    """Tokens to add to the vocabulary."""

    add: list[str] = field(default_factory=list)
    """Special tokens to add, each a single id that is never split. Existing tokens stay as they are."""

    def __post_init__(self) -> None:
        wrong = [token for token in self.add if not token or token != token.strip()]
        if wrong or len(set(self.add)) != len(self.add):
            why = "a token is empty, padded or repeated"
            raise conflict(
                self, "add", why, "expected each once, without spaces around; correct it"
            )


@configclass
class RouterConfig:
    """The load-balancing loss of a mixture of experts."""

    aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the routers' load-balancing loss (router_aux_loss_coef of transformers). 0: there is none. Adds a
    forward without gradient to each step, which counts the tokens of each expert."""
    aux_loss: RouterLossKind = "pooled"
    """Pooling of the loss. pooled: over all layers, as transformers; per_layer: a loss for each layer, summed, as
    Megatron-LM.
    """


class NewHead(NamedTuple):
    """The scalar head to train, and how it starts where the directory has none."""

    kind: Literal["sequence", "process"] = "sequence"
    """Read once per sequence, or at each step."""
    bias: bool = False
    seed: int = 0
