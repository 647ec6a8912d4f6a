"""What every trainer does around its steps: callbacks, logging, checkpoints, the state of a run and its end."""

import json
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxtrl.hardware.compile_cache import enable_compile_cache, set_compile_effort
from jaxtrl.model.hf import save_pretrained
from jaxtrl.model.qwen3 import Qwen3, model_graphdef
from jaxtrl.rows.chat import set_chat_template
from jaxtrl.rows.order import DataPosition
from jaxtrl.train.checkpoint import restore, step_of
from jaxtrl.train.compiled import Program, Programs
from jaxtrl.train.distributed import check_same, is_main, sum_processes, wait_for_all
from jaxtrl.train.mesh import mesh_of, shards_of
from jaxtrl.train.state import TrainState
from jaxtrl.trainers import report, saving
from jaxtrl.trainers.callbacks import Callbacks, TrainerControl, TrainerState
from jaxtrl.trainers.checks import check_files
from jaxtrl.trainers.command import start_several
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.logging import Display, append_metrics
from jaxtrl.trainers.meter import Clock, Meter
from jaxtrl.trainers.model_source import load_tokenizer
from jaxtrl.trainers.run import Run
from jaxtrl.trainers.steps import TrainSteps, make_adamw

Optimizers = tuple[optax.GradientTransformation | None, Callable[[int], Any] | None]


class TrainOutput(NamedTuple):
    """What `train` returns, as in Transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float | int]


class Trainer(ABC):
    """The common part of `SFTTrainer` and `AsyncGRPOTrainer`, which say what is trained on and how a step is made.

    A subclass sets `steps` and calls `_call("on_init_end")` at the end of its own construction.
    """

    args: Any
    steps: TrainSteps

    def __init__(
        self,
        model: str | Path | Qwen3,
        args: Any,
        kind: type[TrainConfig],
        processing_class: PreTrainedTokenizerBase | None,
        callbacks: Iterable[Any] | None,
        optimizers: Optimizers,
        mesh: Mesh | None,
        columns: tuple[str, ...] = (),
    ):
        self.args = args = kind() if args is None else args
        found = check_files(model, args, kind)
        start_several(args)
        bar = None if args.disable_tqdm is None else not args.disable_tqdm
        self.display = Display(bar, columns=columns, quiet=not is_main())
        set_compile_effort(args.compile_effort)
        self.compile_cache = enable_compile_cache(args.compile_cache)
        self.mesh = mesh_of(args.mesh_sizes()) if mesh is None else mesh
        self.config = found.config
        shards_of(self.mesh).check(self.config)
        self._source = found.source
        self.processing_class = processing_class or load_tokenizer(found.source, args.trust_remote_code)
        if args.chat_template_path is not None:
            set_chat_template(self.processing_class, args.chat_template_path)
        self._model = model if isinstance(model, Qwen3) else None
        self._found = found
        self._params: Any = None  # a subclass loads them, after the data; training takes them over
        self._train_state: TrainState | None = None
        self._optimizers = optimizers
        self._learning_rate = optimizers[1]
        self.clock = Clock()
        self.meter = Meter(self.clock, sum_processes)
        self.programs = Programs(self._say_compiled)
        self.state, self.control = TrainerState(), TrainerControl()
        self.callbacks = Callbacks(callbacks or [])
        self._run: Run | None = None

    # What a subclass says

    @abstractmethod
    def evaluate(self) -> dict[str, float | int]:
        """Metrics of the evaluation data; logged too."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """What must not change between saving and resuming (JSON values)."""

    @abstractmethod
    def _begin(self, resume: bool | str | Path | None) -> DataPosition:
        """Set up a run, or take one up again; returns where its data begin."""

    @abstractmethod
    def _train_loop(self, position: DataPosition) -> None:
        """The whole of training."""

    def _more_logs(self, logs: Mapping[str, float | int], steps: float) -> dict[str, float]:
        """What else is logged of training, where `logs` are the metrics and `steps` those per second."""
        return {}

    # The begin and the end of a run

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train to the end; the model is saved in `output_dir` unless `save_strategy` is "no".

        `resume_from_checkpoint`: a checkpoint folder, or True for the newest complete one of the run in `output_dir`
        (step 0 where it has none yet; ValueError where there is no run; "auto" then starts one). Resuming continues
        bit for bit; a checkpoint of another model, optimizer, dtype, shape set or data raises CheckpointError.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        position = self._begin(resume)
        start, first, is_complete = time.perf_counter(), self.state.global_step, False
        try:
            self._train_loop(position)
            output = self._finish(time.perf_counter() - start, self.state.global_step - first)
            is_complete = True
            return output
        finally:
            self._end(is_complete)

    def _make_optimizer(self, total: int) -> optax.GradientTransformation:
        """That of the user, else AdamW with its schedule over `total` steps."""
        optimizer, self._learning_rate = self._optimizers
        if optimizer is None:
            optimizer, self._learning_rate = make_adamw(self.args, total)
        return optimizer

    def _read(self, path: Path | None) -> saving.Resumed | None:
        """What the checkpoint says besides its arrays (None: a new run), taken over."""
        resumed = None if path is None else saving.read_checkpoint(path, self._facts())
        self.meter, self.control = Meter(self.clock, sum_processes), TrainerControl()
        self.state = TrainerState() if resumed is None else resumed.state
        return resumed

    def _open_run(self, resumed: saving.Resumed | None, total: int, epochs: int) -> None:
        """The state of step 0 or of the checkpoint, and the files of the run."""
        if resumed is None:
            self._train_state = self.steps.create_state(self.params)
        else:
            self.meter.load_state_dict(resumed.meter)
            self.callbacks.restore(resumed.callbacks)
            self._params = self._train_state = None  # the memory is needed for what is read
            self._train_state = restore(resumed.path, self.steps.abstract_state())
        self._params = None
        if self._model is not None:
            nnx.update(self._model, self.params)  # frees the arrays that the state is a copy of
        self.state.compute_steps(self.args, total)
        self.state.max_steps, self.state.num_train_epochs = total, epochs
        self.state.is_local_process_zero = self.state.is_world_process_zero = is_main()
        check_same("data or options", zlib.crc32(json.dumps(self._facts()).encode()) >> 1)
        run_id, step = (None, None) if resumed is None else (resumed.run_id, self.state.global_step)
        files = saving.companion_files(self.config, self.processing_class, self._source)
        self._run = Run(Path(str(self.args.output_dir)), self.args, run_id, step, files)

    def _start_training(self) -> None:
        """What comes before the first step."""
        self._call("on_train_begin")
        if self.args.warmup != "none":
            self.programs.warm_up(wait=self.args.warmup == "before")
        if self.args.eval_on_start and self.state.global_step == 0:
            self.evaluate()
        self.meter.start_window()

    def _after_step(self, epoch_ended: bool) -> None:
        """What callbacks want after a step, but for the checkpoint."""
        control = self.control
        if epoch_ended or control.should_training_stop:
            self._call("on_epoch_end")
        if control.should_log:
            self._log_training()
        if control.should_evaluate:
            self._evaluate_for_best()

    def _finish(self, seconds: float, steps: int) -> TrainOutput:
        """Best parameters where asked for, the final model, the summary of `steps` steps in `seconds`."""
        assert self._run is not None
        self._run.checkpoints.wait()
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            self.display.say(f"loading the best checkpoint {best} ({self.state.best_metric:.4g})")
            self._train_state = None
            self._train_state = restore(best, self.steps.abstract_state())
        logs: dict[str, float | int] = {
            "train_runtime": seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": self.meter.train_loss(),
            "num_tokens": self.meter.num_tokens,
            **self.programs.metrics(),
        }
        self.log(logs)
        self._call("on_train_end")
        if self.args.save_strategy != "no":
            self.save_model()
        self.display.say(report.program_table(self.programs))
        self.display.say(report.summary(logs, steps, self.programs, self._run.folder))
        return TrainOutput(self.state.global_step, float(logs["train_loss"]), dict(logs))

    def _end(self, is_complete: bool) -> None:
        """However training ended: complete what is being written, and give the parameters to the model."""
        self.display.stop()
        self.programs.close()
        if self._run is not None:
            self._run.close(is_complete)
            self._run = None

    # Logging, evaluating and saving

    def log(self, logs: Mapping[str, float | int], seconds_left: float | None = None) -> None:
        """Send metrics to metrics.jsonl, trackers, terminal and callbacks."""
        logs = {"epoch": self.state.epoch, **logs}
        step = self.state.global_step
        self.state.log_history.append({**logs, "step": step})
        self.display.log(logs, step, seconds_left)
        if self._run is not None:
            self._run.log(logs, step)
        elif is_main():  # an evaluation outside of training
            append_metrics(Path(str(self.args.output_dir)) / "metrics.jsonl", logs, step)
        self._call("on_log", logs=logs)

    def _log_training(self) -> None:
        logs = self.meter.log()
        tokens, flops, steps = self.meter.speed()
        if self._learning_rate is not None:
            logs["learning_rate"] = float(self._learning_rate(max(self.state.global_step - 1 - self.meter.skipped, 0)))
        logs["tokens_per_second"] = tokens
        logs |= self._more_logs(logs, steps)
        logs |= self.programs.metrics()
        peak = self.steps.peak_flops()
        if peak is not None:
            logs["mfu"] = flops / peak
        self.log(logs, (self.state.max_steps - self.state.global_step) / steps)

    def _evaluate_for_best(self) -> None:
        """Evaluate during training, and note whether it is the best so far."""
        metrics = self.evaluate()
        wanted = self.args.metric_for_best_model
        if wanted is None:
            return
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in metrics:
            raise ValueError(f"metric_for_best_model: evaluation gives no {name}; it gives {', '.join(metrics)}.")
        value, best = float(metrics[name]), self.state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            self.control.should_save |= self.args.save_strategy == "best"

    def _save_checkpoint(self, position: DataPosition, files: Mapping[str, bytes] | None = None) -> None:
        """`position`: where the data go on; `files` go into this checkpoint only."""
        assert self._run is not None
        state, writer = self.state, self._run.checkpoints
        with self.meter.paused():
            if state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(writer.path(state.global_step))
            metadata = saving.checkpoint_metadata(
                self._run.run_id, state, position, self._facts(), self.meter.state_dict(), self.callbacks.state()
            )
            keep = None if state.best_model_checkpoint is None else step_of(state.best_model_checkpoint)
            writer.save(state.global_step, self._train_state, metadata, keep, files)
        self._call("on_save")

    def add_callback(self, callback: Any) -> None:
        """One more callback, a class or an object."""
        self.callbacks.callbacks.append(callback() if isinstance(callback, type) else callback)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model in Hugging Face format, with its tokenizer, to `output_dir` (default: that of the run).

        Of several processes all have to call this.
        """
        folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
        stored = self._found.stored_dtype if self.args.dtype == "auto" else self.args.dtype
        save_pretrained((self.config, self.params), folder, dtype=jnp.dtype(stored), source=self._source)
        if is_main():
            self.processing_class.save_pretrained(folder)
        wait_for_all("model is saved")

    # What the rest is made of

    @property
    def params(self) -> Any:
        """The current parameters, a nested dict."""
        return self._params if self._train_state is None else self._train_state.params

    @property
    def model(self) -> Qwen3:
        """The model with the current parameters. A training step takes its arrays over: ask again afterwards."""
        if self._model is None:
            self._model = nnx.merge(model_graphdef(self.config), self.params)
        else:
            nnx.update(self._model, self.params)
        return self._model

    def _say_compiled(self, program: Program) -> None:
        self.clock.leave_out(program.waited)
        self.display.say(report.describe_compile(program))
        if self._run is not None:
            self._run.log(program.metrics(), self.state.global_step)

    def _call(self, event: str, **kwargs: Any) -> None:
        """Call the callbacks; what they decide is in `self.control` afterwards."""
        if len(self.callbacks.callbacks) > 1:
            kwargs["model"] = self.model
        kwargs["processing_class"] = self.processing_class
        self.callbacks.call(event, self.args, self.state, self.control, **kwargs)
