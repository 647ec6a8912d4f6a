"""The memory of a step, estimated before compiling, against XLA's own figure."""

import dataclasses

import jax
import pytest

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.train.compiled import Programs
from jaxtrl.train.memory import FACTOR, step_memory
from jaxtrl.trainers.model_source import tiny_model
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_steps import SFTSteps
from jaxtrl.trainers.steps import make_adamw

MODEL_S = Qwen3Config(
    vocab_size=151936,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
TINY = tiny_model(0)[0].config


def both(tmp_path, config, shape, **options):
    """(estimated, XLA's) bytes of a train program, optimizer state included."""
    args = SFTConfig(output_dir=str(tmp_path), **options)
    programs = Programs()
    steps = SFTSteps(config, args, None, programs)
    steps.prepare_training(make_adamw(args, 10)[0])
    jobs = [job for job in steps.train_jobs([shape]) if job.shape == shape]
    programs.foresee(jobs)
    programs.warm_up()
    (program,) = programs.compiled
    state = steps.abstract_state()
    estimate = step_memory(
        config,
        shape,
        state.opt_state,
        itemsize=steps.dtype.itemsize,
        remat="full" if args.gradient_checkpointing else "matmuls",
        unroll=steps.unroll,
        accumulates=args.gradient_accumulation_steps > 1,
    )
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))  # given to the program or beside it
    accumulated = estimate.parameters if args.gradient_accumulation_steps > 1 else 0
    return estimate.total, held + accumulated + program.memory.temporaries


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (ShapeClass(128, 128, 128, 1), {}),
        (ShapeClass(2048, 2048, 2048, 40), {}),
        (ShapeClass(2048, 2048, 2048, 40), {"gradient_checkpointing": False}),
        (ShapeClass(2048, 512, 512, 40), {"gradient_accumulation_steps": 2}),
    ],
)
def test_the_estimate_is_near_that_of_xla_for_a_tiny_model(tmp_path, shape, options):
    estimate, measured = both(tmp_path, TINY, shape, **options)
    assert measured / FACTOR < estimate < measured * FACTOR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (ShapeClass(2048, 2048, 2048, 40), {}),
        (ShapeClass(2048, 256, 256, 40), {"bf16": True}),
    ],
)
def test_the_estimate_is_near_that_of_xla_for_a_large_vocabulary(tmp_path, shape, options):
    estimate, measured = both(tmp_path, MODEL_S, shape, **options)
    assert measured / FACTOR < estimate < measured * FACTOR


def test_parts_follow_what_they_are_made_of():
    opt_state = jax.eval_shape(lambda: jax.numpy.zeros(10))
    shape = ShapeClass(1024, 1024, 1024, 20)
    base = step_memory(TINY, shape, opt_state, itemsize=4)
    assert base.optimizer == 40
    assert base.gradients == base.parameters
    assert step_memory(TINY, shape, opt_state, itemsize=4, accumulates=True).gradients == 2 * base.parameters
    longer = step_memory(TINY, shape._replace(tokens=2048), opt_state, itemsize=4)
    assert base.activations < longer.activations < 4 * base.activations
    assert longer.head == base.head, "the head sees slots, a chunk at a time"
    assert step_memory(TINY, shape._replace(slots=128), opt_state, itemsize=4).head < base.head
    assert step_memory(TINY, shape._replace(slots=4096), opt_state, itemsize=4).head == base.head
    kept = step_memory(TINY, shape, opt_state, itemsize=4, remat="matmuls")
    assert kept.activations > base.activations
    deeper = dataclasses.replace(TINY, num_hidden_layers=2 * TINY.num_hidden_layers)
    assert step_memory(deeper, shape, opt_state, itemsize=4).activations < 2 * base.activations
