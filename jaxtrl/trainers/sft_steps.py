"""The device programs of supervised fine-tuning, called with the trainer's micro-batches."""

from collections.abc import Iterable, Iterator
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.train.compiled import Job, Programs
from jaxtrl.train.mesh import param_shardings
from jaxtrl.train.step import make_eval_step, make_score_step, make_sft_step
from jaxtrl.trainers.data import MicroBatch
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.steps import TrainSteps


class SFTSteps(TrainSteps):
    """Train, eval and score steps."""

    def __init__(self, config: Qwen3Config, args: SFTConfig, mesh: Mesh | None, programs: Programs):
        super().__init__(config, args, mesh, programs)
        self._loss_type = args.loss_type
        common: dict[str, Any] = {"dtype": self.dtype, "unroll": self.unroll}
        self._eval = make_eval_step(config, mesh, loss_type=args.loss_type, **common)
        self._score = make_score_step(config, mesh, hits=True, **common)

    def prepare_training(self, optimizer: optax.GradientTransformation) -> None:
        """Make the train step for this optimizer."""
        self.optimizer = optimizer
        self._step = make_sft_step(self.config, optimizer, self.mesh, loss_type=self._loss_type, **self.step_options)

    def evaluate(self, params: Any, micro: MicroBatch) -> dict[str, Any]:
        """Sums of a batch: loss_sum, denominator, entropy_sum, hit_sum, num_terms."""
        return self.programs.call("eval", micro.shape, self._eval, params, self._batch(micro))

    def score(self, params: Any, micro: MicroBatch) -> Any:
        """(logp, entropy, hit) of each term, [D, T]."""
        return self.programs.call("score", micro.shape, self._score, params, self._batch(micro))

    def eval_jobs(
        self, shapes: Iterable[ShapeClass], scored: bool, block_size: int = DEFAULT_BLOCK_SIZE
    ) -> Iterator[Job]:
        """The programs of evaluation on batches of these classes; `scored`: with those of `score`."""
        params = abstract_params(self.config)
        params = self._abstract(params, param_shardings(params, self.mesh))
        for shape in shapes:
            batch = self._abstract_batch(shape, block_size)
            yield Job("eval", shape, self._eval, (params, batch))
            if scored:
                yield Job("score", shape, self._score, (params, batch))
