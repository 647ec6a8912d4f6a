"""SFTTrainer: supervised fine-tuning under TRL's names."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxtrl.hardware.compile_cache import enable_compile_cache, set_compile_effort
from jaxtrl.model.hf import save_pretrained
from jaxtrl.model.qwen3 import Qwen3, model_graphdef
from jaxtrl.rows.chat import set_chat_template
from jaxtrl.rows.order import BatchSizes, DataPosition
from jaxtrl.train.checkpoint import restore, step_of
from jaxtrl.train.compiled import Program, Programs
from jaxtrl.train.mesh import make_mesh, row_count
from jaxtrl.train.state import TrainState
from jaxtrl.trainers import refused, report, saving
from jaxtrl.trainers.callbacks import Callbacks, TrainerControl, TrainerState
from jaxtrl.trainers.checks import check_files
from jaxtrl.trainers.data import Batches
from jaxtrl.trainers.evaluation import EvalPrediction, evaluate
from jaxtrl.trainers.extent import Extent
from jaxtrl.trainers.fitting import check_fits
from jaxtrl.trainers.foresight import Foresight, eval_jobs, fix_shapes, foresee_run
from jaxtrl.trainers.logging import Display, append_metrics
from jaxtrl.trainers.meter import Clock, Meter
from jaxtrl.trainers.model_source import load_tokenizer
from jaxtrl.trainers.options import refuse_arguments
from jaxtrl.trainers.prefetch import prefetch
from jaxtrl.trainers.run import Run
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_data import PreparedData, data_seed, is_shuffled, make_batches, run_facts
from jaxtrl.trainers.sft_steps import SFTSteps, make_adamw


class TrainOutput(NamedTuple):
    """What `train` returns, as in Transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float | int]


class SFTTrainer:
    """Fine-tunes a Qwen3 on next-token prediction; arguments as in TRL.

    Args:
        model: folder of a checkpoint, hub id, or a `Qwen3` (which the trainer takes over and keeps up to date).
        args: options; None means the defaults.
        train_dataset: anything `load_source` takes: a `datasets.Dataset`, `IterableDataset` (needs `max_steps`), a list
            of dicts, a path. Needed for `train`.
        eval_dataset: the same, or a dict of them by name.
        processing_class: the tokenizer; None loads the one beside the model.
        compute_metrics: gets an `EvalPrediction` and returns a dict. Logits over the vocabulary are never kept, so
            `predictions` is (log-prob, entropy, hit) of every trained token, float32[n] each, and `label_ids` the ids.
        callbacks: objects or classes with the methods of `transformers.TrainerCallback`.
        optimizers: (optax transformation, its learning-rate schedule for the log); None builds AdamW from `args`.
        formatting_func: row -> text.
        mesh: devices to train on, by `jaxtrl.make_mesh`; None takes all.

    Raises ValueError, FileNotFoundError or TypeError, each with one sentence, for input that cannot be trained on.
    """

    def __init__(
        self,
        model: str | Path | Qwen3,
        args: SFTConfig | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[optax.GradientTransformation | None, Callable[[int], Any] | None] = (None, None),
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        mesh: Mesh | None = None,
        **unsupported: Any,
    ):
        refuse_arguments(unsupported, SFTTrainer, SFTConfig, refused.ARGUMENTS)
        self.args = args = SFTConfig() if args is None else args
        found = check_files(model, args)
        self.display = Display(None if args.disable_tqdm is None else not args.disable_tqdm)
        set_compile_effort(args.compile_effort)
        self.compile_cache = enable_compile_cache(args.compile_cache)
        self.mesh = make_mesh() if mesh is None and jax.device_count() > 1 else mesh

        self.config = found.config
        self._source, self._stored_dtype = found.source, found.stored_dtype
        self.processing_class = processing_class or load_tokenizer(found.source, args.trust_remote_code)
        if args.chat_template_path is not None:
            set_chat_template(self.processing_class, args.chat_template_path)
        self._data: dict[str, PreparedData] = {}
        self._batches: dict[str, Batches] = {}
        self._formatting_func = formatting_func
        named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        evals = {f"eval_{name}".rstrip("_"): data for name, data in named.items()}
        for name, dataset in {"train": train_dataset, **evals}.items():
            if dataset is not None:
                self._data[name], self._batches[name] = self._prepare(name, dataset)
        if args.eval_strategy != "no" and not self._data.keys() - {"train"}:
            raise ValueError("eval_dataset is missing: eval_strategy is set, so give data to evaluate on.")

        self._model = model if isinstance(model, Qwen3) else None
        self._params: Any = found.load_params()  # until training takes them over
        self._train_state: TrainState | None = None
        self._optimizers = optimizers
        self.compute_metrics = compute_metrics
        self.clock = Clock()
        self.meter = Meter(self.clock)
        self.programs = Programs(self._say_compiled)
        self.steps = SFTSteps(self.config, args, self.mesh, self.programs)
        self.state, self.control = TrainerState(), TrainerControl()
        self.callbacks = Callbacks(callbacks or [])
        self._run: Run | None = None
        self._call("on_init_end")

    # Training

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train to the end; the model is saved in `output_dir` unless `save_strategy` is "no".

        `resume_from_checkpoint`: a checkpoint folder, or True for the newest complete one of the run in `output_dir`
        (step 0 where it has none yet; ValueError where there is no run; "auto" then starts one). Resuming continues
        bit for bit; a checkpoint of another model, optimizer, dtype, shape set or data raises CheckpointError.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        position = self._begin(resume)
        start, first = time.perf_counter(), self.state.global_step
        try:
            self._train_loop(position)
            return self._finish(time.perf_counter() - start, self.state.global_step - first)
        finally:
            self._end()

    def _train_loop(self, position: DataPosition) -> None:
        """The whole of training. An optimizer step is a list of micro-batches, each one token row per device."""
        state, control, meter, batches = self.state, self.control, self.meter, self._batches["train"]
        assert self._train_state is not None
        self._call("on_train_begin")
        if self.args.warmup != "none":
            self.programs.warm_up(wait=self.args.warmup == "before")
        if self.args.eval_on_start and state.global_step == 0:
            self.evaluate()
        meter.start_window()
        while state.global_step < state.max_steps and not control.should_training_stop:
            epoch, control.should_epoch_stop = position.epoch, False
            self._call("on_epoch_begin")
            # The next batches are built in a thread while the device computes; their order is that of the data.
            seed, shuffle = data_seed(self.args), is_shuffled(self.args)
            upcoming = prefetch(batches.epoch_steps(self._extent.sizes, position, seed, shuffle))
            with closing(upcoming):
                for micro_batches, position in upcoming:
                    control.new_step()
                    self._call("on_step_begin")
                    meter.wait_for_step_before_last()
                    self._train_state, metrics = self.steps.train(self._train_state, micro_batches)
                    meter.add(metrics, micro_batches, self.steps.count_flops(micro_batches))
                    state.global_step += 1
                    state.epoch = self._extent.epoch_at(position)
                    self.display.step(state.global_step)

                    self._call("on_step_end")
                    if control.should_epoch_stop and position.epoch == epoch:
                        position = DataPosition(epoch + 1, 0)
                    if position.epoch > epoch or control.should_training_stop:
                        self._call("on_epoch_end")
                    if control.should_log:
                        self._log_training()
                    if control.should_evaluate:
                        self._evaluate_for_best()
                    if control.should_save:
                        self._save_checkpoint(position)
                    if control.should_training_stop or control.should_epoch_stop:
                        break

    def _begin(self, resume: bool | str | Path | None) -> DataPosition:
        """Set up a run, or take one up again; returns where its data begin."""
        if "train" not in self._batches:
            raise ValueError("train_dataset is missing: pass the data to train on.")
        args, batches, folder = self.args, self._batches["train"], Path(str(self.args.output_dir))
        sizes = BatchSizes(batches.per_device, row_count(self.mesh), args.gradient_accumulation_steps)
        total = sizes.total_steps(batches.lines.count, args.num_train_epochs, args.max_steps)
        self._extent = Extent(sizes, batches.lines.count, total)
        optimizer, self._learning_rate = self._optimizers
        if optimizer is None:
            optimizer, self._learning_rate = make_adamw(args, total)
        self.steps.prepare_training(optimizer)
        path = saving.find_resume_path(resume, folder)
        fix_shapes(batches, self._extent, args, path)
        resumed = None if path is None else saving.read_checkpoint(path, self._facts())
        self.meter, self.control = Meter(self.clock), TrainerControl()
        self.state, position = (resumed.state, resumed.position) if resumed else (TrainerState(), DataPosition())
        done, scored = self.state.global_step, self.compute_metrics is not None
        foresight = foresee_run(self.steps, self._batches, self._extent, args, position, done, scored)
        check_fits(self.steps, foresight.jobs)
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
        self.state.compute_steps(args, total)
        self.state.max_steps, self.state.num_train_epochs = total, self._extent.epochs
        run_id, step = (None, None) if resumed is None else (resumed.run_id, self.state.global_step)
        files = saving.companion_files(self.config, self.processing_class, self._source)
        self._run = Run(folder, args, run_id, step, files)
        self._introduce(resume, path, foresight)
        self.display.start(total, self.state.global_step)
        return position

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
        for name, data in self._data.items():
            if data.lines.count is None:
                self.display.say(f"{name} data read: {data.report.summary()}")
        return TrainOutput(self.state.global_step, float(logs["train_loss"]), dict(logs))

    def _end(self) -> None:
        """However training ended: complete what is being written, and give the parameters to the model."""
        self.display.stop()
        self.programs.close()
        if self._run is not None:
            self._run.close()
            self._run = None

    # Evaluation

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float | int]:
        """Metrics of the evaluation data (or of `eval_dataset`), a token mean over all of it; logged too."""
        chosen = {name: batches for name, batches in self._batches.items() if name != "train"}
        if eval_dataset is not None:
            chosen = {"eval": self._prepare("eval", eval_dataset)[1]}
            scored = self.compute_metrics is not None
            self.programs.foresee(eval_jobs(self.steps, chosen["eval"], row_count(self.mesh), scored))
        if not chosen:
            raise ValueError("eval_dataset is missing: pass data to evaluate on.")
        params = self.steps.place(self.params)
        metrics: dict[str, float | int] = {}
        for name, batches in chosen.items():
            with self.meter.paused():
                metrics |= evaluate(
                    batches.in_order(row_count(self.mesh)),
                    lambda micro: self.steps.evaluate(params, micro),
                    lambda micro: self.steps.score(params, micro),
                    metric_key_prefix + name.removeprefix("eval"),
                    self.compute_metrics,
                    lambda: self.programs.waited,
                )
        self.log(metrics)
        self._call("on_evaluate", metrics=metrics)
        return metrics

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

    # Logging and saving

    def log(self, logs: Mapping[str, float | int], seconds_left: float | None = None) -> None:
        """Send metrics to metrics.jsonl, trackers, terminal and callbacks."""
        logs = {"epoch": self.state.epoch, **logs}
        step = self.state.global_step
        self.state.log_history.append({**logs, "step": step})
        self.display.log(logs, step, seconds_left)
        if self._run is not None:
            self._run.log(logs, step)
        else:  # an evaluation outside of training
            append_metrics(Path(str(self.args.output_dir)) / "metrics.jsonl", logs, step)
        self._call("on_log", logs=logs)

    def _log_training(self) -> None:
        logs = self.meter.log()
        tokens, flops, steps = self.meter.speed()
        if self._learning_rate is not None:
            logs["learning_rate"] = float(self._learning_rate(max(self.state.global_step - 1 - self.meter.skipped, 0)))
        logs["tokens_per_second"] = tokens
        logs |= self.programs.metrics()
        peak = self.steps.peak_flops()
        if peak is not None:
            logs["mfu"] = flops / peak
        self.log(logs, (self.state.max_steps - self.state.global_step) / steps)

    def _save_checkpoint(self, position: DataPosition) -> None:
        assert self._run is not None
        state, writer = self.state, self._run.checkpoints
        with self.meter.paused():
            if state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(writer.path(state.global_step))
            metadata = saving.checkpoint_metadata(
                self._run.run_id, state, position, self._facts(), self.meter.state_dict(), self.callbacks.state()
            )
            keep = None if state.best_model_checkpoint is None else step_of(state.best_model_checkpoint)
            writer.save(state.global_step, self._train_state, metadata, keep)
        self._call("on_save")

    def add_callback(self, callback: Any) -> None:
        """One more callback, a class or an object."""
        self.callbacks.callbacks.append(callback() if isinstance(callback, type) else callback)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model in Hugging Face format, with its tokenizer, to `output_dir` (default: that of the run)."""
        folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
        stored = self._stored_dtype if self.args.dtype == "auto" else self.args.dtype
        save_pretrained((self.config, self.params), folder, dtype=jnp.dtype(stored), source=self._source)
        self.processing_class.save_pretrained(folder)

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

    def _prepare(self, name: str, dataset: Any) -> tuple[PreparedData, Batches]:
        """Tokenise, pack and choose shapes for the data set called "train", "eval" or "eval_NAME"."""
        sizes = self.config.vocab_size, row_count(self.mesh)
        return make_batches(name, dataset, self.processing_class, self.args, *sizes, self._formatting_func)

    def _facts(self) -> dict[str, Any]:
        return run_facts(self.args, self._batches["train"], self._extent.sizes, self.steps.dtype, self.config)

    def _introduce(self, resume: bool | str | Path | None, path: Path | None, foresight: Foresight) -> None:
        """Say what is going to be trained on what and with how many programs, with one example."""
        self.programs.foresee(foresight.jobs)
        data = {name: (data.report, self._batches[name]) for name, data in self._data.items()}
        cache = self.compile_cache or "off"
        dtype, extent = self.steps.dtype, self._extent
        text = report.introduction(self.config, self.args, dtype, extent, data, cache, foresight.describe())
        self.display.say(text)
        example = self._data["train"].example
        if example is not None:
            self.display.say("example (trained tokens are marked):")
            self.display.show(report.show_sample(self.processing_class, example))
        for line in saving.describe_start(resume, path, Path(str(self.args.output_dir))):
            self.display.say(line)

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
