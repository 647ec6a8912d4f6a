"""The device programs that a configuration would run, or all that there are, with abstract arrays: for the Neuron lint.

To be traced inside `as_on_neuron`. Widths of the model are small, since they do not change which operations a program
has; vocabulary and rows are large enough for every loop to have several steps.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Linear, abstract_params, init_params
from jaxtrl.rollout.decoding import make_weights
from jaxtrl.rollout.engine import Engine
from jaxtrl.rows.batch import TERM_COLUMNS, Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.compiled import Job, Programs
from jaxtrl.train.grpo import make_grpo_step
from jaxtrl.train.mesh import make_mesh
from jaxtrl.train.state import TrainState
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.grpo_steps import GRPOSteps
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_steps import SFTSteps
from jaxtrl.trainers.steps import make_adamw

CONFIG = Qwen3Config(
    vocab_size=20_000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
SLOTS, CALL, LENGTH = 2, 4, 200  # of the sampler


class DeviceProgram(NamedTuple):
    """A jax.jit object and (abstract) arguments; `devices` that work on it together."""

    name: str
    function: Any
    args: tuple
    devices: int = 1


def all_programs() -> Iterator[DeviceProgram]:
    """Every step and sampler program on one device; each value of an option that changes operations is there."""
    for loss_type, bf16, recomputes, effort, micro_batches in (
        ("nll", False, True, "low", 1),
        ("nll", True, False, "high", 2),
        ("dft", True, True, "low", 1),
        ("dft", False, False, "high", 2),
    ):
        args = SFTConfig(
            loss_type=loss_type,
            bf16=bf16,
            gradient_checkpointing=recomputes,
            compile_effort=effort,
            gradient_accumulation_steps=micro_batches,
            eval_on_start=loss_type == "nll",
        )
        yield from sft_programs(args, None, scored=True)
    yield from _grpo_steps()
    for dtype in ("float32", "bfloat16"):
        yield from sampler_programs(dtype)


def sft_programs(args: SFTConfig, mesh: Mesh | None, scored: bool = False) -> Iterator[DeviceProgram]:
    """Train and, where there are evaluations, eval programs with these options; `scored`: score programs too."""
    steps = SFTSteps(CONFIG, args, mesh, Programs())
    steps.prepare_training(make_adamw(args, 1000)[0])
    shapes = [_shape(args)]
    jobs = list(steps.train_jobs(shapes))
    if args.eval_strategy != "no" or args.eval_on_start:
        jobs += steps.eval_jobs(shapes, scored)
    remat = "full" if args.gradient_checkpointing else "matmuls"
    loop = "" if args.compile_effort == "low" else ", unrolled"
    for job in jobs:
        yield _program(f"sft {args.loss_type} {steps.dtype} {remat}{loop}", job, 1 if mesh is None else mesh.size)


def _grpo_steps() -> Iterator[DeviceProgram]:
    """GRPO's train step: what the options add to a program, in as few of them as show it."""
    optimizer, params = make_adamw(SFTConfig(), 1000)[0], abstract_params(CONFIG)
    state = jax.eval_shape(lambda p: TrainState.create(p, optimizer), params)
    batch = make_batch([concat_rows([])], _shape(SFTConfig()))
    columns: dict[str, Any] = dict.fromkeys(TERM_COLUMNS, batch.weight)
    sequence = {"importance_sampling_level": "sequence", "importance_sampling_mode": "sequence_truncate"}
    options: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("clipped token", "float32", {}),
        (
            "cispo token",
            "bfloat16",
            {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_mode": "token_mask"},
        ),
        ("clipped sequence", "bfloat16", {**sequence, "delta": 2.0, "beta": 0.1, "temperature": 0.7}),
    )
    for name, dtype, chosen in options:
        step = make_grpo_step(CONFIG, optimizer, dtype=jnp.dtype(dtype), **chosen)
        yield DeviceProgram(f"grpo {name} {dtype} train", step.fused, (state, batch._replace(**columns)))
        sums = jax.eval_shape(step.init, params)
        yield DeviceProgram(f"grpo {name} {dtype} update", step.apply, (state, sums))


def _shape(args: TrainConfig) -> ShapeClass:
    """Of a row of several sequences, by the rule of the options."""
    sample = Sample(np.arange(300, dtype=np.int32), np.ones(300, bool))
    row = concat_rows([sample] * 5)
    rule = (args.pad_to_multiple_of if isinstance(args, SFTConfig) else None) or "auto"
    return ShapeSet.from_setting("auto" if str(rule).startswith("fixed") else rule).classify([row])


def sampler_programs(dtype: str) -> Iterator[DeviceProgram]:
    """Weight update, prefill, insert, and both ways to decode."""
    kind = jnp.dtype(dtype)
    weights = jax.jit(partial(make_weights, CONFIG, kind, Linear))
    yield DeviceProgram(f"sampler {dtype} weights", weights, (abstract_params(CONFIG),))
    engine = Engine(CONFIG, init_params(CONFIG, 0), SLOTS, CALL, kind, kind, platform="neuron")
    engine.reserve(LENGTH)
    for job in engine.jobs(LENGTH):
        yield _program(f"sampler {dtype}", job, 1)


def _program(name: str, job: Job, devices: int) -> DeviceProgram:
    shape = f" {job.shape}" if job.shape else ""
    where = f" on {devices} devices" if devices > 1 else ""
    return DeviceProgram(f"{name} {job.kind}{shape}{where}", job.function, job.args, devices)


def config_mesh(args: TrainConfig, devices: int) -> Mesh | None:
    """The mesh of a run with these options on so many devices. Raises ValueError where there are fewer here."""
    sizes = args.mesh_sizes()
    if not sizes and devices == 1:
        return None
    parts = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    return make_mesh(**{"data": devices // parts, **sizes})


def config_programs(args: TrainConfig, devices: int) -> Iterator[DeviceProgram]:
    """The programs of a run with these options on so many devices."""
    mesh = config_mesh(args, devices)
    if isinstance(args, SFTConfig):
        yield from sft_programs(args, mesh)
    elif isinstance(args, AsyncGRPOConfig):
        yield from grpo_programs(args, mesh)


def grpo_programs(args: AsyncGRPOConfig, mesh: Mesh | None) -> Iterator[DeviceProgram]:
    """Score (where the options need it), train and sampler programs with these options."""
    steps = GRPOSteps(CONFIG, args, mesh, Programs())
    steps.prepare_training(make_adamw(args, 1000)[0])
    name = f"grpo {args.loss_type} {args.importance_sampling_level} {steps.dtype}"
    for job in steps.jobs(_shape(args)):
        yield _program(name, job, 1 if mesh is None else mesh.size)
    yield from sampler_programs(str(steps.dtype))
