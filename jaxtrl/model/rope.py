"""Rotary position embedding (RoFormer, https://arxiv.org/abs/2104.09864), halves rotated as in Hugging Face's Qwen3."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_tables(
    position_ids: Int[Array, "n"], head_dim: int, theta: float
) -> tuple[Float[Array, "n half"], Float[Array, "n half"]]:
    """Cosine and sine of `position * theta^(-2i / head_dim)`, float32; computed once per row, never in bfloat16."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / np.float32(theta) ** exponent).astype(np.float32)
    angle = position_ids.astype(jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "n h d"], cos: Float[Array, "n half"], sin: Float[Array, "n half"]) -> Float[Array, "n h d"]:
    """Turns the pair (x[i], x[i + d/2]) of every head by its position's angle."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
