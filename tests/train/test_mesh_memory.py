"""What a device holds where parameters are cut over "fsdp": from compiled programs, nothing is run."""

import re

import jax
import numpy as np
import pytest

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.model.sharding import Shards
from jaxtrl.rows.batch import Sample, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.memory import FACTOR, step_memory
from jaxtrl.train.mesh import make_mesh, row_count, row_sharding
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState, state_shardings
from jaxtrl.train.step import make_sft_step, skip_lanes

OPTIMIZER = make_optimizer(1e-3, 10)
MODEL_M = Qwen3Config(
    vocab_size=151936,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)


def compiled(config, fsdp, tokens, **options):
    """The train step on rows of so many tokens, its abstract state, and its shape class."""
    mesh = make_mesh(1, fsdp, 1)
    row = concat_rows([Sample(np.arange(tokens, dtype=np.int32) % 100, np.ones(tokens, bool))])
    shape = ShapeSet.from_setting("auto").classify([row])
    batch = skip_lanes(make_batch([row] * row_count(mesh), shape))
    state = jax.eval_shape(lambda p: TrainState.create(p, OPTIMIZER), abstract_params(config))
    shardings = state_shardings(config, OPTIMIZER, mesh)
    state, batch = (
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding)
        for tree, sharding in ((state, shardings), (batch, jax.tree.map(lambda _: row_sharding(mesh), batch)))
    )
    return make_sft_step(config, OPTIMIZER, mesh, **options).fused.lower(state, batch).compile(), state, shape


def gathered_shapes(program):
    """The float shapes in the program that are whole matrices of all layers, and of one."""
    text = program.as_text()
    return re.findall(r"f32\[8,128,384\]", text), re.findall(r"f32\[(?:1,)?128,384\]", text)


def test_no_program_holds_all_gathered_layers():
    """With rolled layers there are buffers for the device's part of a stacked kernel and for one gathered layer."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    all_layers, one_layer = gathered_shapes(compiled(config, 4, 128)[0])
    assert one_layer
    assert not all_layers


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [512, 2048])
def test_model_m_on_eight_devices(tokens):
    """The table of 151,936 words is most of the model: neither it nor its gradient is ever whole on a device."""
    memory, estimates = [], []
    for fsdp in (1, 8):
        program, state, shape = compiled(MODEL_M, fsdp, tokens)
        memory.append(program.memory_analysis())
        estimate = step_memory(MODEL_M, shape, state.opt_state, itemsize=4, shards=Shards(fsdp))
        estimates.append(estimate.total)
        assert not (fsdp > 1 and re.search(r"f32\[151936,512\]", program.as_text()))
    one, eight = memory
    assert eight.argument_size_in_bytes < one.argument_size_in_bytes / 7
    both = [x.argument_size_in_bytes + x.temp_size_in_bytes for x in memory]
    assert both[1] < both[0] / 3
    for estimate, measured in zip(estimates, both, strict=True):
        assert measured / FACTOR < estimate < measured * FACTOR
