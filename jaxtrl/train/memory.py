"""What an optimizer step needs of a device's memory, estimated before anything is compiled.

Parameters, optimizer state and gradients are counted exactly. The rest follows the step's code: the inputs of all
layers (or, with `remat="matmuls"`, what each layer keeps), one layer's arrays in the backward pass, and the LM head's
chunk of exponentials over the whole vocabulary, which often is the largest array. XLA's own figure
(`memory_analysis`) exists only once a program is compiled; tests hold the estimate within `FACTOR` of it.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.model.sharding import Shards, param_specs
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.train.head import kept_entries

FACTOR = 1.2  # the estimate and XLA's figure are within this factor of each other (seen: 0.97 to 1.12)


class StepMemory(NamedTuple):
    """Bytes on one device."""

    parameters: int  # float32
    optimizer: int
    gradients: int  # float32, and those of micro-batches before where they are accumulated
    activations: int
    head: int

    @property
    def total(self) -> int:
        return sum(self)


def step_memory(
    config: Qwen3Config,
    shape: ShapeClass,
    opt_state: Any,
    *,
    itemsize: int,
    remat: str = "full",
    unroll: int = 1,
    accumulates: bool = False,
    shards: Shards = Shards(),
) -> StepMemory:
    """For a batch of this class. `opt_state`: (abstract) arrays, cut as their shardings say; `itemsize`: bytes of the
    compute dtype; the others as in `make_sft_step`; `accumulates`: several micro-batches a step; `shards`: how the
    parameters are cut."""
    parameters = _param_bytes(config, shards)
    # XLA's CPU backend computes bfloat16 products on float32 copies.
    copies = 4 if itemsize < 4 and jax.default_backend() == "cpu" else 0
    head = kept_entries(config.vocab_size, shape.slots, shards) * (itemsize + copies)
    kept = config.num_hidden_layers * shape.tokens * _kept_per_token(config, remat, shards.tensor) * itemsize
    entries = _layer_entries(config, shards.tensor)
    layer, ends = (4 * shape.tokens * entries for entries in (entries, 10 * config.hidden_size))
    if shards.fsdp > 1:  # a gathered layer and its gradient
        layer += 2 * _param_bytes(dataclasses.replace(config, num_hidden_layers=1), Shards(1, shards.tensor), "layers")
    # In a loop, a layer's arrays take the place of the head's chunk, which is no longer needed; XLA schedules unrolled
    # layers so that those of all exist at once.
    unrolled = unroll >= config.num_hidden_layers
    working = config.num_hidden_layers * layer + ends if unrolled else max(ends, layer - head)
    casts = 0 if itemsize == 4 else parameters // 4 * (itemsize + copies // 2)
    return StepMemory(
        parameters,
        _bytes(opt_state),
        parameters * (2 if accumulates else 1),
        kept + working + casts,
        head,
    )


def _bytes(tree: Any) -> int:
    """On one device."""

    def size(leaf):
        sharding = getattr(leaf, "sharding", None)
        return math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _param_bytes(config: Qwen3Config, shards: Shards, part: str | None = None) -> int:
    """Of the float32 parameters that a device has, or of a part of them."""
    params = abstract_params(config)
    params = params if part is None else {part: params[part]}
    parts = jax.tree.map(
        lambda leaf, spec: leaf.size // math.prod(getattr(shards, axis) for axis in spec if axis),
        params,
        param_specs(params, shards),
    )
    return 4 * sum(jax.tree.leaves(parts))


def _kept_per_token(config: Qwen3Config, remat: str, tensor: int) -> int:
    """Entries that a layer keeps of a token for its backward pass: its input, and under "matmuls" the outputs of its
    products and of the attention."""
    if remat == "full":
        return config.hidden_size
    q, kv = _widths(config)
    cut = 2 * q + 2 * kv + 2 * config.intermediate_size + config.num_attention_heads
    return 3 * config.hidden_size + cut // tensor


def _layer_entries(config: Qwen3Config, tensor: int) -> int:
    """Float32 entries of a token that live at once in one layer's backward pass, about: its products' outputs, what
    comes of them elementwise, and the gradients of both (measured)."""
    q, kv = _widths(config)
    return 4 * config.hidden_size + 6 * (q + kv + config.intermediate_size) // tensor


def _widths(config: Qwen3Config) -> tuple[int, int]:
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
