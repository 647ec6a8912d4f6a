"""The device programs of jaxtrl with small shapes, for the Neuron lint."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params, init_params
from jaxtrl.rollout.engine import Engine
from jaxtrl.rows.batch import TERM_COLUMNS, Sample, concat_rows, make_batch
from jaxtrl.rows.blocks import BlockTables, CountedTables
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.grpo import make_grpo_step
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import make_eval_step, make_score_step, make_sft_step

# Shapes do not change which operations a program has; a small model with every kind of layer keeps the lint fast.
CONFIG = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def all_programs() -> list[tuple[str, Any, tuple]]:
    """(name, jitted function, arguments) of every step program; arrays stand for their shapes only."""
    sample = Sample(np.arange(40, dtype=np.int32), np.ones(40, bool))
    row = concat_rows([sample] * 5)
    batch = make_batch([row], ShapeSet.from_setting("auto").classify([row]))
    optimizer = make_optimizer(1e-5, 100)
    params = abstract_params(CONFIG)
    state = jax.eval_shape(lambda p: TrainState.create(p, optimizer), params)
    found = []
    for loss_type, dtype, remat in product(("nll", "dft"), ("float32", "bfloat16"), ("full", "matmuls")):
        step = make_sft_step(CONFIG, optimizer, loss_type=loss_type, dtype=jnp.dtype(dtype), remat=remat)
        sums = jax.eval_shape(step.init, params)
        name = f"sft {loss_type} {dtype} {remat}"
        found += [
            (f"{name} fused", step.fused, (state, batch)),
            (f"{name} accumulate", step.accumulate, (params, sums, batch)),
            (f"{name} apply", step.apply, (state, sums)),
        ]
    found.append(("eval", make_eval_step(CONFIG), (params, batch)))
    found.append(("score", make_score_step(CONFIG), (params, batch)))
    return found + grpo_programs(params, state, batch, optimizer) + generation_programs()


def grpo_programs(params: Any, state: Any, batch: Any, optimizer: Any) -> list[tuple[str, Any, tuple]]:
    """The same for GRPO: what the options add to a program, in as few of them as show it."""
    batch = batch._replace(**dict.fromkeys(TERM_COLUMNS, batch.weight))
    sequence = {"importance_sampling_level": "sequence", "importance_sampling_mode": "sequence_truncate"}
    options: dict[str, dict[str, Any]] = {
        "clipped token": {},
        "cispo token": {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_mode": "token_mask"},
        "clipped sequence": {**sequence, "delta": 2.0, "beta": 0.1, "temperature": 0.7},
    }
    found = []
    for (name, chosen), dtype in product(options.items(), ("float32", "bfloat16")):
        step = make_grpo_step(CONFIG, optimizer, dtype=jnp.dtype(dtype), **chosen)
        sums = jax.eval_shape(step.init, params)
        found.append((f"grpo {name} {dtype} fused", step.fused, (state, batch)))
        found.append((f"grpo {name} {dtype} apply", step.apply, (state, sums)))
    return found


def generation_programs() -> list[tuple[str, Any, tuple]]:
    """The same for the programs of the sampler."""
    found = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine(CONFIG, init_params(CONFIG, 0), 2, 4, jnp.dtype(dtype), jnp.dtype(dtype))
        engine.reserve(200)
        for job in engine.jobs(200):
            name = f"generate {dtype} {job.kind} {job.shape}"
            found.append((name, job.function, jax.tree.map(_uncounted, job.args, is_leaf=_is_counted)))
    return found


def _is_counted(x: Any) -> bool:
    return isinstance(x, CountedTables)


def _uncounted(x: Any) -> Any:
    """The tables that Neuron is given where this machine's CPU ends a loop early."""
    return BlockTables(*x) if _is_counted(x) else x
