"""The load-balancing loss of the routers of a mixture of experts, over a whole step.

    f_le = 1/W sum_t w_t [router l sends token t to expert e]        P_le = 1/W sum_t w_t softmax(logits_lt)_e

    pooled       coef * E * sum_e f_e P_e, f_e and P_e the means of f_le and P_le over the L routers: what transformers
                 computes of one batch (``load_balancing_loss_func``)
    per_layer    coef * sum_l E/k sum_e f_le P_le: Switch Transformer (arXiv 2101.03961) of each layer, as Megatron-LM

k is the number of experts a token is sent to, w_t the number of samples that have token t in common (1 outside shared
prefixes), W their sum: the tokens of the step without sharing. f has no derivative. Once it is known for the whole step
(a pass without gradient counts it), the loss is linear in the probabilities,

    loss = sum_le slope_le * sum_t w_t softmax(logits_lt)_e

so its value and its gradient do not depend on how the step is cut. A mean of the losses of micro-batches, each with
fractions of its own, would.
"""

from __future__ import annotations

from torch import Tensor

from taut.losses.settings import RouterLossKind


def slopes(
    count_LE: Tensor, num_tokens: float, top_k: int, kind: RouterLossKind, coef: float
) -> Tensor:
    """``slope_le`` [L, E]. ``count_LE``: sum_t w_t [router l sends token t to expert e]; ``num_tokens``: W."""
    num_routers, num_experts = count_LE.shape
    fraction_LE = count_LE / num_tokens
    if kind == "per_layer":
        return coef * num_experts / (top_k * num_tokens) * fraction_LE
    fraction_LE = fraction_LE.mean(0).expand_as(fraction_LE)
    return coef * num_experts / (num_routers * num_tokens) * fraction_LE
