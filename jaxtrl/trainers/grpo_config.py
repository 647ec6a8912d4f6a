"""AsyncGRPOConfig: the options of `AsyncGRPOTrainer` and `python -m jaxtrl.grpo`, under TRL's names and defaults."""

# ruff: noqa: RUF009 - `option` makes a dataclass field

import dataclasses
from typing import ClassVar

from jaxtrl.hardware.environment import worker_environments
from jaxtrl.rollout.pacing import Pacing
from jaxtrl.rollout.places import worker_places
from jaxtrl.rollout.requests import SamplingParams
from jaxtrl.rows.advantages import LOSS_TYPES, SCALES
from jaxtrl.trainers import refused
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.options import Refusals, option

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclasses.dataclass
class AsyncGRPOConfig(TrainConfig):
    """Options of asynchronous GRPO.

    Names and defaults are those of `trl.experimental.async_grpo.AsyncGRPOConfig` 1.16 and, where it lacks an option,
    of `trl.GRPOConfig`; `REFUSED` gives a reason for each of their options that is missing.
    """

    REFUSED: ClassVar[Refusals] = refused.REFUSED | refused.GRPO

    learning_rate: float = option(1e-6, "Peak learning rate.", group="optimizer", minimum=0)
    lr_scheduler_type: str = dataclasses.field(
        default="constant", metadata=TrainConfig.__dataclass_fields__["lr_scheduler_type"].metadata, kw_only=True
    )
    logging_steps: int | float = option(
        1, "Steps between logs; below 1 a share of all steps.", group="logging", minimum=0
    )
    shuffle_dataset: bool = option(True, "Prompts in a new order each epoch.", group="data")

    num_generations: int = option(8, "Completions of each prompt: a group.", group="generation", minimum=2)
    num_generations_eval: int | None = option(
        None, "The same in evaluation (none: num_generations).", group="generation", minimum=1
    )
    max_completion_length: int = option(2048, "Tokens of a completion at most.", group="generation", minimum=1)
    temperature: float = option(1.0, "Of sampling, and of the log-probs that are trained.", group="generation")
    top_p: float = option(1.0, "Draw from the fewest tokens with this share of the mass.", group="generation")
    top_k: int = option(0, "Draw from the k most likely tokens (0: off).", group="generation", minimum=0)
    min_p: float | None = option(
        None, "Leave out what is less likely than this share of the most likely token.", group="generation"
    )
    repetition_penalty: float = option(1.0, "Above 1: tokens that occurred are less likely.", group="generation")

    epsilon: float = option(0.2, "The ratio of new to old probability is clipped below 1 - this.", group="loss")
    epsilon_high: float | None = option(None, "And above 1 + this (none: epsilon).", group="loss")
    delta: float | None = option(None, "Upper bound of the unclipped ratio (dual clip; none: no bound).", group="loss")
    beta: float = option(0.0, "Weight of the KL divergence from the initial model (0: none).", group="loss", minimum=0)
    use_bias_correction_kl: bool = option(True, "The KL term is multiplied by the ratio.", group="loss")
    loss_type: str = option(
        "dapo",
        "dapo: mean over the tokens of a step; grpo: mean over completions of their means; dr_grpo: sum over "
        "completions * max_completion_length; cispo: clipped weights; bnpo: as dapo.",
        group="loss",
        choices=LOSS_TYPES,
    )
    importance_sampling_level: str = option(
        "token", "One ratio per token, or one per completion (GSPO).", group="loss", choices=("token", "sequence")
    )
    scale_rewards: bool | str = option(
        "group",
        "Advantages are divided by the standard deviation of the group, of the whole batch, or not (also true, false).",
        group="loss",
        choices=SCALES,
    )
    reward_weights: list[float] | None = option(
        None, "A weight for each reward function (none: 1 for all).", group="loss"
    )
    mask_truncated_completions: bool = option(
        False, "Completions that were cut off at max_completion_length are not trained.", group="loss"
    )
    num_iterations: int = option(1, "Optimizer steps on each batch of groups.", group="loss", minimum=1)
    importance_sampling_mode: str = option(
        "none",
        "Correction between sampler and trainer, per token or completion, clipped or masked: what TRL calls "
        "vllm_importance_sampling_mode.",
        group="loss",
        choices=CORRECTIONS,
    )
    importance_sampling_clip_max: float | None = option(3.0, "Upper bound of that correction.", group="loss")
    importance_sampling_clip_min: float | None = option(None, "Lower bound of that correction.", group="loss")
    recompute_old_logps: bool = option(
        False,
        "Old log-probs are computed by the trainer before the first update on a batch, else they are the sampler's.",
        group="loss",
    )
    drop_zero_std_groups: bool = option(
        False, "Groups whose rewards are all equal are replaced by later ones (dynamic sampling of DAPO).", group="loss"
    )

    token_budget: int | None = option(
        None,
        "Tokens of a device's row (none: the longest prompt with its completion, rounded up).",
        group="batch",
        minimum=1,
    )

    rollout: str = option(
        "workers",
        "Where completions are sampled: in processes beside the trainer, inline in turn with training, or in Ray.",
        group="rollout",
        choices=("workers", "inline", "ray"),
    )
    rollout_workers: int = option(1, "Worker processes, or Ray actors.", group="rollout", minimum=1)
    ray_address: str | None = option(
        None, "Address of the Ray cluster (none: RAY_ADDRESS, else one that starts on this machine).", group="rollout"
    )
    rollout_slots: int | None = option(
        None, "Completions that a worker decodes together (none: those of a step, 8 to 64).", group="rollout", minimum=1
    )
    rollout_cores: str | None = option(
        None,
        "What the workers share evenly and the trainer does not use, like 1-3: CPU cores, GPUs or NeuronCores (none, "
        "on CPUs only: all run on any core).",
        group="rollout",
    )
    max_inflight_tasks: int = option(
        -1, "Completions that a worker has begun at most (-1: what fills its slots and a little more).", group="rollout"
    )
    max_staleness: int = option(
        4, "Optimizer steps by which the weights that began a group are older at most.", group="rollout", minimum=0
    )
    queue_maxsize: int = option(1024, "Completions that wait for the trainer at most.", group="rollout", minimum=1)
    weight_sync_steps: int = option(
        1, "Optimizer steps between weight updates of the sampler.", group="rollout", minimum=1
    )
    weights_folder: str | None = option(
        None, "Folder through which weights go to workers (none: shared memory where it has room).", group="rollout"
    )
    heartbeat_stale_after_s: float = option(
        300.0, "Seconds of silence after which a worker counts as hung.", group="rollout", minimum=0
    )

    log_completions: bool = option(
        False,
        "Print prompts, completions and rewards of the last step with each log; also a table in wandb and trackio.",
        group="logging",
    )
    num_completions_to_print: int | None = option(
        None, "How many of them (none: all of the last step).", group="logging", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address is not None and self.rollout != "ray":
            raise ValueError(f"ray_address: it needs rollout ray, got rollout {self.rollout}")
        if self.rollout == "ray" and (self.rollout_cores or self.weights_folder):
            raise ValueError("rollout_cores, weights_folder: Ray places its actors and moves weights itself")
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        try:
            self.worker_environments()
        except ValueError as error:
            raise ValueError(f"rollout_cores: {error}") from None
        if self.rollout_cores is not None:
            worker_places("cpu", self.rollout_workers, self.rollout_cores)  # raises where they cannot be shared
        if self.max_inflight_tasks == 0 or self.max_inflight_tasks < -1:
            raise ValueError(f"max_inflight_tasks: expected -1 or at least 1, got {self.max_inflight_tasks}")
        if self.epsilon < 0 or (self.epsilon_high or 0) < 0:
            raise ValueError("epsilon: expected at least 0")
        if self.temperature == 0:
            raise ValueError("temperature: expected more than 0, or all completions of a prompt are the same")
        self.sampling_params()  # raises for what cannot work
        Pacing(1, 0, self.max_staleness, self.num_iterations, self.weight_sync_steps)  # raises for what would wait

    def worker_environments(self) -> list[dict[str, str]] | None:
        """The Neuron environment of each worker, where neuron_instance is set and there are workers; raises ValueError
        for cores that they may not have, or that the trainer has."""
        if self.neuron_instance is None or self.rollout != "workers":
            return None
        if self.rollout_cores is None:
            raise ValueError("name the workers' NeuronCores, others than neuron_cores, or use rollout=inline")
        return worker_environments(
            self.neuron_instance,
            self.neuron_cores,
            self.rollout_cores,
            self.rollout_workers,
            compile_effort=self.compile_effort,
            compile_cache=self.compile_cache,
        )

    @property
    def shuffles(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self.shuffle_dataset and self.train_sampling_strategy == "random"

    @property
    def order_seed(self) -> int:
        """The seed of the order of the prompts."""
        return self.seed if self.data_seed is None else self.data_seed

    def sampling_params(self) -> SamplingParams:
        """How completions are drawn, but for their seeds."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=self.max_completion_length,
        )

    def groups_per_step(self, devices: int) -> int:
        """Groups of a batch. Raises ValueError where completions do not make whole groups, with sizes that would."""
        completions = self.per_device_train_batch_size * self.gradient_accumulation_steps * devices
        if completions % self.num_generations:
            fits = ", ".join(str(n) for n in range(2, completions + 1) if completions % n == 0)
            raise ValueError(
                f"num_generations: {self.num_generations} does not divide the {completions} completions of a step "
                f"(per_device_train_batch_size {self.per_device_train_batch_size} * gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} * {devices} devices): {fits or 'no number'} would, or change the "
                "batch size"
            )
        return completions // self.num_generations
