"""What the configurations of all trainers share: names, defaults and meaning of TRL 1.16 / Transformers 5."""

# ruff: noqa: RUF009 - `option` makes a dataclass field

import dataclasses
import importlib.util
from typing import Any, ClassVar

from jaxtrl.hardware.cores import INSTANCES
from jaxtrl.hardware.environment import Processes, cores_of, neuron_processes
from jaxtrl.trainers.options import OptionsType, Refusals, count_steps, option
from jaxtrl.trainers.refused import REFUSED

ADAMW_NAMES = ("adamw_torch_fused", "adamw_torch", "adamw_torch_xla", "adamw_torch_npu_fused")
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
)
INTEGRATIONS = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
STRATEGIES = ("no", "steps", "epoch")


@dataclasses.dataclass
class TrainConfig(metaclass=OptionsType):
    """Options that every trainer has; construction raises ValueError or TypeError with a sentence naming the option."""

    REFUSED: ClassVar[Refusals] = REFUSED

    output_dir: str | None = option(
        None,
        "Folder for checkpoints, metrics and the final model (none: trainer_output).",
        group="run",
        positional=True,
    )
    resume_from_checkpoint: bool | str | None = option(
        None,
        "Continue from a checkpoint: true for the newest one in output_dir (step 0 if its run has none yet, an error "
        "if no run is there), auto for the same or a new run, or a checkpoint's path.",
        group="run",
    )
    compile_cache: str = option(
        "auto",
        "Folder where compiled programs are kept for the next run (auto: the user's cache folder; off: nowhere).",
        group="run",
    )
    compile_effort: str = option(
        "low",
        "low: layers in a loop, little compiling (-O1 on Neuron); high: unrolled layers (-O2), meant for Neuron.",
        group="run",
        choices=("low", "high"),
    )
    warmup: bool | str = option(
        "none",
        "When programs are compiled: none (as they come), before step 1 in threads (also: true), or in the background.",
        group="run",
        choices=("none", "before", "background"),
    )
    neuron_instance: str | None = option(
        None,
        "EC2 instance type whose Neuron environment is set before JAX starts (none: the environment stays as it is).",
        group="devices",
        choices=tuple(INSTANCES),
    )
    neuron_cores: int | str | None = option(
        None, "Its cores that this process has: one (3) or a range (0-3); none: all of them.", group="devices"
    )
    mesh: str | None = option(
        None,
        "How devices are used, as data=2,fsdp=4,tensor=1: data splits the batch; fsdp too, and cuts parameters and "
        "optimizer state; tensor cuts the computation on a row (none: all devices are data).",
        group="devices",
    )
    coordinator_address: str | None = option(
        None,
        "HOST:PORT of process 0 where a job has several processes, or auto: what SLURM, Open MPI or Neuron's variables "
        "say (none: one process).",
        group="devices",
    )
    num_processes: int | None = option(None, "How many processes there are.", group="devices", minimum=1)
    process_id: int | None = option(None, "Which of them this one is, from 0.", group="devices", minimum=0)
    initialization_timeout: int = option(
        300, "Seconds within which all processes have to have started.", group="devices", minimum=1
    )
    heartbeat_timeout_seconds: int = option(
        60, "Seconds of silence after which a process counts as dead and ends all others.", group="devices", minimum=5
    )
    donate_buffers: bool = option(
        True,
        "Steps write new parameters and optimizer state, samplers their cache, over the old ones; false needs twice "
        "their memory, for a backend that fails with alias errors.",
        group="devices",
    )
    seed: int = option(
        42, "Seed of the initial weights and, unless data_seed is set, of the data order.", group="run", minimum=0
    )
    data_seed: int | None = option(None, "Seed of the data order (none: seed).", group="run", minimum=0)

    model_name_or_path: str | None = option(
        None,
        "Folder or hub id of a Qwen3 checkpoint with safetensors (none: what the command documents).",
        group="model",
    )
    dtype: str = option(
        "float32",
        "Type of the saved weights (auto: that of the loaded checkpoint); master weights are always float32.",
        group="model",
        choices=("float32", "bfloat16", "float16", "auto"),
    )
    trust_remote_code: bool = option(
        False, "Allow a tokenizer that ships its own Python code to run it; models and data never do.", group="model"
    )
    bf16: bool | None = option(
        None, "Compute in bfloat16 (none: on accelerators, float32 on CPU). Weights stay float32.", group="model"
    )
    gradient_checkpointing: bool = option(
        True,
        "Recompute each layer in the backward pass; false keeps the matmul outputs: faster, more memory.",
        group="model",
    )
    activation_checkpointing: bool | None = option(
        None, "Transformers' new name of gradient_checkpointing; wins where it is set.", group="model"
    )

    dataset_name: str | list[str] | None = option(
        None,
        "JSON, JSONL, CSV or Parquet path, glob or list of them, or a hub id (none: what the command documents).",
        group="data",
    )
    dataset_config: str | None = option(None, "Configuration (name) of a hub data set.", group="data")
    dataset_train_split: str = option("train", "Split to train on.", group="data")
    dataset_test_split: str = option("test", "Split to evaluate on, unless eval_dataset_name is set.", group="data")
    eval_dataset_name: str | list[str] | None = option(
        None, "Path, glob or hub id of the evaluation data (none: dataset_test_split of dataset_name).", group="data"
    )
    chat_template_path: str | None = option(
        None, "Jinja file, or tokenizer folder or id, whose chat template replaces the tokenizer's.", group="data"
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "Variables for the chat template, as JSON: '{\"enable_thinking\": false}'.", group="data"
    )
    shuffle_dataset: bool = option(False, "Shuffle the data set once, before packing.", group="data")
    train_sampling_strategy: str = option(
        "random",
        "Order within an epoch: a new shuffle each epoch, or the order of the data.",
        group="data",
        choices=("random", "sequential"),
    )

    per_device_train_batch_size: int = option(
        8, "Sequences per device and micro-batch (rows, when packing).", group="batch", minimum=1
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches per optimizer step.", group="batch", minimum=1)
    num_train_epochs: float = option(3.0, "Passes over the data.", group="batch", minimum=0)
    max_steps: int = option(-1, "Optimizer steps; from 1 on it overrides num_train_epochs.", group="batch", minimum=-1)

    learning_rate: float = option(2e-5, "Peak learning rate.", group="optimizer", minimum=0)
    lr_scheduler_type: str = option(
        "linear", "Learning-rate schedule after the warm-up.", group="optimizer", choices=SCHEDULES
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        None, "Parameters of the schedule, as JSON: '{\"min_lr_rate\": 0.1}' for cosine_with_min_lr.", group="optimizer"
    )
    warmup_steps: int | float = option(
        0, "Steps of linear warm-up; below 1 a share of all steps.", group="optimizer", minimum=0
    )
    optim: str = option(
        "adamw_torch_fused",
        "AdamW under any of its names; other optimizers: SFTTrainer(optimizers=...).",
        group="optimizer",
        choices=("adamw", *ADAMW_NAMES),
    )
    weight_decay: float = option(0.0, "Decoupled weight decay; not for norms and biases.", group="optimizer", minimum=0)
    adam_beta1: float = option(0.9, "Decay of the first moment.", group="optimizer", minimum=0)
    adam_beta2: float = option(0.999, "Decay of the second moment.", group="optimizer", minimum=0)
    adam_epsilon: float = option(1e-8, "Term in the denominator of the update.", group="optimizer", minimum=0)
    max_grad_norm: float = option(
        1.0, "Gradients are scaled down to this global norm (0: never).", group="optimizer", minimum=0
    )

    eval_strategy: str = option("no", "When to evaluate.", group="evaluation", choices=STRATEGIES)
    eval_steps: int | float | None = option(
        None,
        "Steps between evaluations (none: logging_steps; below 1 a share of all steps).",
        group="evaluation",
        minimum=0,
    )
    eval_on_start: bool = option(False, "Evaluate before the first step.", group="evaluation")

    logging_strategy: str = option("steps", "When to log.", group="logging", choices=STRATEGIES)
    logging_steps: int | float = option(
        10, "Steps between logs; below 1 a share of all steps.", group="logging", minimum=0
    )
    logging_first_step: bool = option(False, "Log the first step too.", group="logging")
    report_to: str | list[str] | None = option(
        "none",
        "Trackers beside metrics.jsonl: tensorboard, wandb, trackio, all (installed ones) or none.",
        group="logging",
    )
    run_name: str | None = option(None, "Name of the run in the trackers (none: output_dir).", group="logging")
    project: str = option("huggingface", "Name of the project in trackio.", group="logging")
    disable_tqdm: bool | None = option(None, "No progress bar (none: no bar without a terminal).", group="logging")

    save_strategy: str = option("steps", "When to save a checkpoint.", group="saving", choices=(*STRATEGIES, "best"))
    save_steps: int | float = option(
        500, "Steps between checkpoints; below 1 a share of all steps.", group="saving", minimum=0
    )
    save_total_limit: int | None = option(
        None, "Checkpoints to keep (none: all); the best one is always kept.", group="saving", minimum=1
    )
    load_best_model_at_end: bool = option(False, "End with the parameters of the best evaluation.", group="saving")
    metric_for_best_model: str | None = option(
        None, "Evaluation metric that decides what is best (none: loss).", group="saving"
    )
    greater_is_better: bool | None = option(
        None, "Whether more of that metric is better (none: unless its name ends with loss).", group="saving"
    )

    def __post_init__(self) -> None:
        self.output_dir = self.output_dir or "trainer_output"
        if self.activation_checkpointing is not None:
            self.gradient_checkpointing = self.activation_checkpointing
        self.resume_from_checkpoint = self.resume_from_checkpoint or None
        self.report_to = _integrations(self.report_to)
        if isinstance(self.warmup, bool):
            self.warmup = "before" if self.warmup else "none"
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        for kind in ("logging", "eval", "save"):
            _check_interval(f"{kind}_steps", getattr(self, f"{kind}_strategy"), getattr(self, f"{kind}_steps"))
        for name in ("seed", "data_seed"):
            if (getattr(self, name) or 0) >= 2**32:
                raise ValueError(f"{name}: expected at most {2**32 - 1}, got {getattr(self, name)}")
        if self.adam_epsilon == 0:
            raise ValueError("adam_epsilon: expected more than 0, or a parameter without a gradient becomes NaN")
        for name in ("adam_beta1", "adam_beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}: expected less than 1, got {getattr(self, name)!r}")
        if self.warmup_steps > 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps: expected a whole number or a share below 1, got {self.warmup_steps!r}")
        self.mesh_sizes()
        if self.neuron_instance is not None:
            try:
                cores_of(self.neuron_instance, self.neuron_cores)
            except ValueError as error:
                raise ValueError(f"neuron_cores: {error}") from None
        elif self.neuron_cores is not None:
            raise ValueError("neuron_cores: set neuron_instance too, it says which sets of cores are allowed")
        self._check_processes()
        self._resolve_best()

    def _check_processes(self) -> None:
        given = {name: getattr(self, name) for name in ("num_processes", "process_id")}
        is_explicit = self.coordinator_address not in (None, "auto")
        for name, value in given.items():
            if is_explicit and value is None:
                raise ValueError(f"{name}: set it too, coordinator_address is HOST:PORT of process 0")
            if not is_explicit and value is not None:
                raise ValueError(f"{name}: set coordinator_address too, as HOST:PORT of process 0")
        if self.neuron_instance is not None and self.coordinator_address == "auto" and self.processes() is None:
            raise ValueError(
                "coordinator_address: auto comes too late for neuron_instance, whose environment is set before JAX "
                "starts: give HOST:PORT, num_processes and process_id"
            )
        self.processes()

    def _resolve_best(self) -> None:
        """Defaults and conditions of load_best_model_at_end, as in Transformers."""
        if (self.load_best_model_at_end or self.save_strategy == "best") and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise ValueError("save_strategy: best needs evaluations, set eval_strategy to steps or epoch")
        if not self.load_best_model_at_end or self.save_strategy == "best":
            return
        if self.eval_strategy == "no" or self.eval_strategy != self.save_strategy:
            raise ValueError(
                "load_best_model_at_end: eval_strategy and save_strategy must both be steps or both be epoch, "
                f"got {self.eval_strategy} and {self.save_strategy}"
            )
        if self.eval_strategy == "steps":
            ratio = self.save_steps / (self.eval_steps or 1)
            if (self.save_steps < 1) != ((self.eval_steps or 1) < 1) or abs(ratio - round(ratio)) > 1e-6:
                raise ValueError(
                    "load_best_model_at_end: save_steps must be a multiple of eval_steps, "
                    f"got {self.save_steps} and {self.eval_steps}"
                )

    def mesh_sizes(self) -> dict[str, int]:
        """What `mesh` says, by axis; raises ValueError for another syntax."""
        sizes: dict[str, int] = {}
        for part in self.mesh.replace(" ", "").split(",") if self.mesh else ():
            name, _, size = part.partition("=")
            if name not in ("data", "fsdp", "tensor") or name in sizes or not size.isdigit() or int(size) < 1:
                raise ValueError(f"mesh: expected sizes from 1 on like data=2,fsdp=4,tensor=1, got {self.mesh!r}")
            sizes[name] = int(size)
        return sizes

    def processes(self) -> Processes | None:
        """This process as one of several, by the options or by Neuron's variables; None: one, or JAX finds out."""
        if self.coordinator_address is None:
            return None
        if self.coordinator_address == "auto":
            return neuron_processes()
        assert self.num_processes is not None
        assert self.process_id is not None
        return Processes(self.coordinator_address, self.num_processes, self.process_id).check()

    def compute_dtype(self) -> str:
        """`"bfloat16"` or `"float32"`: what `bf16` says, by the backend in use where it is unset (starts JAX)."""
        if self.bf16 is None:
            import jax

            return "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return "bfloat16" if self.bf16 else "float32"

    def get_warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps of warm-up in a run of `total_steps`."""
        return count_steps(self.warmup_steps, total_steps)

    def to_dict(self) -> dict[str, Any]:
        """All options, JSON-ready."""
        return dataclasses.asdict(self)


def _check_interval(name: str, strategy: str, steps: int | float | None) -> None:
    if strategy != "steps" or steps is None:
        return
    if steps == 0 or (steps > 1 and steps != int(steps)):
        raise ValueError(f"{name}: expected a whole number of steps or a share between 0 and 1, got {steps!r}")


def _integrations(report_to: str | list[str] | None) -> list[str]:
    """Tracker names; raises ValueError for an unknown one."""
    names = report_to.split(",") if isinstance(report_to, str) else list(report_to or [])
    if names in (["none"], ["all"]):
        installed = [name for name, module in INTEGRATIONS.items() if importlib.util.find_spec(module)]
        return installed if names == ["all"] else []
    for name in names:
        if name not in INTEGRATIONS:
            raise ValueError(f"report_to: expected {', '.join(INTEGRATIONS)}, all or none, got {name!r}")
    return names
