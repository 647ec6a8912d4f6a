"""The device programs of supervised fine-tuning, called with the trainer's micro-batches."""


import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxtrl.model.config import Qwen3Config
from jaxtrl.train.compiled import Programs
from jaxtrl.train.step import make_eval_step, make_score_step, make_sft_step
from jaxtrl.trainers.sft_config import SFTConfig


class SFTSteps:
    """Train, eval and score steps, each compiled once per shape class through `programs`.

    With one micro-batch per optimizer step, loss, gradient and update are one fused program.
    """

    def __init__(self, config: Qwen3Config, args: SFTConfig, mesh: Mesh | None, programs: Programs):
        self.config, self.args, self.mesh, self.programs = config, args, mesh, programs
        self.dtype = jnp.dtype(args.compute_dtype())
        self._eval = make_eval_step(config, mesh, loss_type=args.loss_type, dtype=self.dtype)
        self._score = make_score_step(config, mesh, dtype=self.dtype)

    def prepare_training(self, optimizer: optax.GradientTransformation) -> None:
        self.optimizer = optimizer
        remat = "full" if self.args.gradient_checkpointing else "matmuls"
        self._step = make_sft_step(
            self.config, optimizer, self.mesh, loss_type=self.args.loss_type, dtype=self.dtype, remat=remat
        )
