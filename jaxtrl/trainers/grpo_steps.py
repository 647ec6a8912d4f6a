"""The device programs of GRPO, called with the trainer's micro-batches."""

from collections.abc import Iterator
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.train.compiled import Job, Programs
from jaxtrl.train.grpo import make_grpo_step
from jaxtrl.train.mesh import param_shardings
from jaxtrl.train.step import make_score_step
from jaxtrl.trainers.data import MicroBatch
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.steps import TrainSteps


class GRPOSteps(TrainSteps):
    """Train and score steps. A batch of groups is as many rows as they need, so a step always accumulates."""

    args: AsyncGRPOConfig

    def __init__(self, config: Qwen3Config, args: AsyncGRPOConfig, mesh: Mesh | None, programs: Programs):
        super().__init__(config, args, mesh, programs)
        self.fuses = False
        self.columns = ("advantage", "old_logp", "sampler_logp", *(["ref_logp"] if args.beta > 0 else []))
        self._score = make_score_step(config, mesh, dtype=self.dtype, temperature=args.temperature, unroll=self.unroll)

    def prepare_training(self, optimizer: optax.GradientTransformation) -> None:
        """Make the train step for this optimizer."""
        self.optimizer, args = optimizer, self.args
        mode = args.importance_sampling_mode
        self._step = make_grpo_step(
            self.config,
            optimizer,
            self.mesh,
            loss_type=args.loss_type,
            importance_sampling_level=args.importance_sampling_level,
            epsilon=args.epsilon,
            epsilon_high=args.epsilon_high,
            delta=args.delta,
            beta=args.beta,
            use_bias_correction_kl=args.use_bias_correction_kl,
            importance_sampling_mode=None if mode == "none" else mode,
            importance_sampling_clip_max=args.importance_sampling_clip_max,
            importance_sampling_clip_min=args.importance_sampling_clip_min,
            temperature=args.temperature,
            **self.step_options,
        )

    def rescore(self, params: Any, micro_batches: list[MicroBatch], column: str) -> list[MicroBatch]:
        """The batches with the log-probs of these parameters in a term column (arrays on the devices)."""
        out = []
        for micro in micro_batches:
            logps, _ = self.programs.call("score", micro.shape, self._score, params, self._batch(micro))
            out.append(micro._replace(batch=micro.batch._replace(**{column: logps})))
        return out

    def jobs(self, shape: ShapeClass) -> Iterator[Job]:
        """All programs of a run."""
        if self.args.beta > 0 or self.args.recompute_old_logps:
            batch = self._abstract_batch(shape)
            params = abstract_params(self.config)
            params = self._abstract(params, param_shardings(params, self.mesh))
            yield Job("score", shape, self._score, (params, batch))
        yield from self.train_jobs([shape])
