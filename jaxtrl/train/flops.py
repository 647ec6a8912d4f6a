"""Counted floating-point operations of a step's matrix products, the work that the hardware's matmul rate bounds.

A product [m, k] x [k, n] counts 2 m k n. Element-wise work, norms, softmax and the optimizer are not counted: they are
what the distance between a measured step and `flops / matmul rate` is made of.
"""

from typing import NamedTuple

from jaxtrl.model.config import Qwen3Config


class Flops(NamedTuple):
    """Matrix-product FLOPs of one pass or one step, by where they arise."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head


def linear_parameters(config: Qwen3Config) -> int:
    """Number of weights of all layers' matrices (embedding and head left out)."""
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv) + 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * layer


def forward_flops(config: Qwen3Config, tokens: int, pairs: int, slots: int) -> Flops:
    """FLOPs of one forward pass.

    `tokens` run through the layers, `pairs` is the number of (query, key) pairs that attention computes (blocks times
    block size squared), `slots` positions go through the LM head.
    """
    per_pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return Flops(
        linear=2.0 * tokens * linear_parameters(config),
        attention=float(per_pair * pairs),
        head=2.0 * slots * config.vocab_size * config.hidden_size,
    )


def train_flops(config: Qwen3Config, tokens: int, pairs: int, slots: int, *, remat: str) -> Flops:
    """FLOPs of loss and gradient: forward, backward and recomputation.

    A linear layer's backward pass is two products for one, plus the forward once more under `remat="full"`. Attention's
    backward has five products for two and recomputes its scores (one of the five); `remat="full"` adds its forward.
    The head forms its gradient in the same pass (`train/head.py`): three products.
    """
    once = forward_flops(config, tokens, pairs, slots)
    again = 1 if remat == "full" else 0
    return Flops(once.linear * (3 + again), once.attention * (3.5 + again), once.head * 3)
