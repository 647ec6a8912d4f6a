"""SFTTrainer: supervised fine-tuning under TRL's names."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxtrl.model.qwen3 import Qwen3, abstract_params
from jaxtrl.rows.order import BatchSizes, DataPosition
from jaxtrl.train.mesh import param_shardings, row_count
from jaxtrl.trainers import refused, report, saving
from jaxtrl.trainers.data import Batches
from jaxtrl.trainers.evaluation import EvalPrediction, evaluate
from jaxtrl.trainers.extent import Extent
from jaxtrl.trainers.fitting import check_fits
from jaxtrl.trainers.foresight import Foresight, eval_jobs, fix_shapes, foresee_run
from jaxtrl.trainers.options import refuse_arguments
from jaxtrl.trainers.prefetch import prefetch
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_data import PreparedData, data_seed, is_shuffled, make_batches, run_facts
from jaxtrl.trainers.sft_steps import SFTSteps
from jaxtrl.trainers.trainer import Optimizers, Trainer, TrainOutput


class SFTTrainer(Trainer):
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

    args: SFTConfig
    steps: SFTSteps

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
        optimizers: Optimizers = (None, None),
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        mesh: Mesh | None = None,
        **unsupported: Any,
    ):
        refuse_arguments(unsupported, SFTTrainer, SFTConfig, refused.ARGUMENTS)
        super().__init__(model, args, SFTConfig, processing_class, callbacks, optimizers, mesh)
        self._data: dict[str, PreparedData] = {}
        self._batches: dict[str, Batches] = {}
        self._formatting_func = formatting_func
        named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        evals = {f"eval_{name}".rstrip("_"): data for name, data in named.items()}
        for name, dataset in {"train": train_dataset, **evals}.items():
            if dataset is not None:
                self._data[name], self._batches[name] = self._prepare(name, dataset)
        if self.args.eval_strategy != "no" and not self._data.keys() - {"train"}:
            raise ValueError("eval_dataset is missing: eval_strategy is set, so give data to evaluate on.")
        self._params = self._found.load_params(param_shardings(abstract_params(self.config), self.mesh))
        self.compute_metrics = compute_metrics
        self.steps = SFTSteps(self.config, self.args, self.mesh, self.programs)
        self._call("on_init_end")

    # Training

    def _train_loop(self, position: DataPosition) -> None:
        """The whole of training. An optimizer step is a list of micro-batches, each one token row per device."""
        state, control, meter, batches = self.state, self.control, self.meter, self._batches["train"]
        assert self._train_state is not None
        self._start_training()
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
                    self._after_step(position.epoch > epoch)
                    if control.should_save:
                        self._save_checkpoint(position)
                    if control.should_training_stop or control.should_epoch_stop:
                        break

    def _begin(self, resume: bool | str | Path | None) -> DataPosition:
        """Set up a run, or take one up again; returns where its data begin."""
        if "train" not in self._batches:
            raise ValueError("train_dataset is missing: pass the data to train on.")
        args, batches = self.args, self._batches["train"]
        sizes = BatchSizes(batches.per_device, row_count(self.mesh), args.gradient_accumulation_steps)
        total = sizes.total_steps(batches.lines.count, args.num_train_epochs, args.max_steps)
        self._extent = Extent(sizes, batches.lines.count, total)
        self.steps.prepare_training(self._make_optimizer(total))
        path = saving.find_resume_path(resume, Path(str(args.output_dir)))
        fix_shapes(batches, self._extent, args, path)
        resumed = self._read(path)
        position = resumed.position if resumed else DataPosition()
        done, scored = self.state.global_step, self.compute_metrics is not None
        foresight = foresee_run(self.steps, self._batches, self._extent, args, position, done, scored)
        check_fits(self.steps, foresight.jobs)
        self._open_run(resumed, total, self._extent.epochs)
        self._introduce(resume, path, foresight)
        self.display.start(total, self.state.global_step)
        return position

    def _finish(self, seconds: float, steps: int) -> TrainOutput:
        output = super()._finish(seconds, steps)
        for name, data in self._data.items():
            if data.lines.count is None:
                self.display.say(f"{name} data read: {data.report.summary()}")
        return output

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

    # What the rest is made of

    def _prepare(self, name: str, dataset: Any) -> tuple[PreparedData, Batches]:
        """Tokenise, pack and choose shapes for the data set called "train", "eval" or "eval_NAME"."""
        vocabulary, function = self.config.vocab_size, self._formatting_func
        return make_batches(name, dataset, self.processing_class, self.args, vocabulary, self.mesh, function)

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
