"""The device programs that change the parameters, called with the trainer's micro-batches."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, SingleDeviceSharding

from jaxtrl.hardware.devices import peak_flops
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.model.sharding import place
from jaxtrl.rows.batch import ShapeClass, concat_rows, make_batch
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.train.compiled import Job, Programs
from jaxtrl.train.flops import train_flops
from jaxtrl.train.mesh import param_shardings, place_rows, replicated, row_count, row_sharding, shards_of
from jaxtrl.train.optimizer import make_optimizer, make_schedule
from jaxtrl.train.state import TrainState, state_shardings
from jaxtrl.train.step import Accumulated, skip_lanes
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.data import MicroBatch


class TrainSteps:
    """Optimizer steps, each program compiled once per shape class through `programs`.

    A subclass makes `_step` (an object like `SFTStep`) and says in `fuses` whether a step is one micro-batch; then
    loss, gradient and update are one fused program. On a CPU padding lanes are left out (`CountedTables`).
    """

    _step: Any
    optimizer: optax.GradientTransformation
    columns: tuple[str, ...] = ()  # term columns that the batches of a step have

    def __init__(self, config: Qwen3Config, args: TrainConfig, mesh: Mesh | None, programs: Programs):
        self.config, self.args, self.mesh, self.programs = config, args, mesh, programs
        self.dtype = jnp.dtype(args.compute_dtype())
        self.fuses = args.gradient_accumulation_steps == 1
        self.remat = "full" if args.gradient_checkpointing else "matmuls"
        # Unrolled, XLA gathers the cut parameters of all layers at the start: each device would hold a whole model.
        unrolled = args.compile_effort == "high" and shards_of(mesh).fsdp == 1
        self.unroll = config.num_hidden_layers if unrolled else 1
        self.step_options: dict[str, Any] = {
            "dtype": self.dtype,
            "remat": self.remat,
            "unroll": self.unroll,
            "donate": args.donate_buffers,
        }
        self._single = SingleDeviceSharding(jax.devices()[0])  # where there is no mesh

    def create_state(self, params: Any) -> TrainState:
        """Step 0 with these parameters, on the devices of the mesh."""
        return TrainState.create(self.place(params), self.optimizer)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore one into."""
        params = abstract_params(self.config)
        state = jax.eval_shape(lambda p: TrainState.create(p, self.optimizer), params)
        return self._abstract(state, state_shardings(self.config, self.optimizer, self.mesh))

    def place(self, params: Any) -> Any:
        """The parameters on the devices of the mesh (no copy where they already are).

        Always with an explicit sharding, as restored ones have: else a resumed run would have programs of its own.
        """
        shardings = param_shardings(params, self.mesh)
        return jax.device_put(params, self._single) if shardings is None else place(params, shardings)

    def train(self, state: TrainState, micro_batches: list[MicroBatch]) -> tuple[TrainState, dict[str, Any]]:
        """One optimizer step; `state` is donated. Metrics are device scalars that may still be in the making."""
        if self.fuses:
            (micro,) = micro_batches
            return self.programs.call("train", micro.shape, self._step.fused, state, self._batch(micro))
        sums = self.programs.call("zeros", (), self._step.init, state.params)
        for micro in micro_batches:
            batch = self._batch(micro)
            sums = self.programs.call("accumulate", micro.shape, self._step.accumulate, state.params, sums, batch)
        return self.programs.call("update", (), self._step.apply, state, sums)

    def count_flops(self, micro_batches: list[MicroBatch]) -> float:
        """Model FLOPs of a step, as MFU counts them: real tokens, nothing for recomputation."""
        tokens, pairs, slots = (sum(getattr(m, name) for m in micro_batches) for name in ("distinct", "pairs", "slots"))
        return train_flops(self.config, tokens, pairs, slots, remat="matmuls").total

    def peak_flops(self) -> float | None:
        """FLOP/s of all devices together, or None where it is not known."""
        peak = peak_flops(jax.devices()[0], str(self.dtype))
        return None if peak is None else peak * (1 if self.mesh is None else self.mesh.size)

    def train_jobs(self, shapes: Iterable[ShapeClass], block_size: int = DEFAULT_BLOCK_SIZE) -> Iterator[Job]:
        """The programs of optimizer steps on micro-batches of these classes, attention in blocks of `block_size`."""
        state = self.abstract_state()
        if self.fuses:
            for shape in shapes:
                yield Job("train", shape, self._step.fused, (state, self._abstract_batch(shape, block_size)))
            return
        sums = jax.eval_shape(self._step.init, state.params)
        whole = jax.tree.map(lambda _: replicated(self.mesh), (sums.sums, sums.peaks))
        sums = self._abstract(sums, self.mesh and Accumulated(param_shardings(state.params, self.mesh), *whole))
        yield Job("zeros", (), self._step.init, (state.params,))
        for shape in shapes:
            batch = self._abstract_batch(shape, block_size)
            yield Job("accumulate", shape, self._step.accumulate, (state.params, sums, batch))
        yield Job("update", (), self._step.apply, (state, sums))

    def _abstract(self, tree: Any, shardings: Any) -> Any:
        if shardings is None:
            shardings = jax.tree.map(lambda _: self._single, tree)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    def _abstract_batch(self, shape: ShapeClass, block_size: int = DEFAULT_BLOCK_SIZE) -> Any:
        rows = [concat_rows([])] * row_count(self.mesh)
        batch = skip_lanes(make_batch(rows, shape, block_size))
        columns: dict[str, Any] = dict.fromkeys(self.columns, batch.weight)
        batch = batch._replace(**columns)
        sharding = row_sharding(self.mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)

    def _batch(self, micro: MicroBatch) -> Any:
        return place_rows(skip_lanes(micro.batch), self.mesh)


def make_adamw(args: TrainConfig, total_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW and its learning-rate schedule as the options say."""
    shape: dict[str, Any] = {
        "schedule": args.lr_scheduler_type,
        "warmup_steps": args.get_warmup_steps(total_steps),
        **(args.lr_scheduler_kwargs or {}),
    }
    optimizer = make_optimizer(
        args.learning_rate,
        total_steps,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        max_grad_norm=args.max_grad_norm,
        **shape,
    )
    return optimizer, make_schedule(args.learning_rate, total_steps, **shape)
