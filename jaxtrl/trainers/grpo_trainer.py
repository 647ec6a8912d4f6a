"""AsyncGRPOTrainer: reinforcement learning on groups of completions, sampled beside training, under TRL's names."""

import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxtrl.model.qwen3 import Qwen3
from jaxtrl.rollout.groups import Group, Rollout
from jaxtrl.rollout.pacing import StalenessCounter
from jaxtrl.rollout.scoring import check_reward_functions
from jaxtrl.rows.order import DataPosition
from jaxtrl.train.mesh import row_count
from jaxtrl.trainers import grpo_report, refused, saving
from jaxtrl.trainers.data import MicroBatch
from jaxtrl.trainers.fitting import check_fits
from jaxtrl.trainers.grpo_batches import (
    Scored,
    count_trained,
    group_metrics,
    has_spread,
    make_micro_batches,
    make_samples,
    score_groups,
    staleness_metrics,
    weigh_rewards,
)
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.grpo_data import PromptData, prepare_prompts, prompt_room, row_shape
from jaxtrl.trainers.grpo_processes import check_processes
from jaxtrl.trainers.grpo_resume import GROUPS_FILE, pack_groups, read_groups, run_facts
from jaxtrl.trainers.grpo_rollout import (
    RewardArgument,
    check_weights,
    make_pacing,
    make_rollout,
    make_setup,
    rename_metrics,
    reward_functions,
    unique_names,
)
from jaxtrl.trainers.grpo_steps import GRPOSteps
from jaxtrl.trainers.options import refuse_arguments
from jaxtrl.trainers.trainer import Optimizers, Trainer

DRAWS_PER_STEP = 10  # times as many groups as a step takes are looked at for some that are not dropped
UNLIMITED = 2**62  # groups


class AsyncGRPOTrainer(Trainer):
    """Trains a Qwen3 on what reward functions say of its completions; arguments as in TRL.

    Args:
        model: folder of a checkpoint, hub id, or a `Qwen3` (which the trainer takes over and keeps up to date).
        reward_funcs: one or several; a callable `(prompts, completions, completion_ids, **columns) -> list[float |
            None]`, sync or async, or the name of a built-in one or a dotted path (`jaxtrl.rollout.rewards`).
        args: options; None means the defaults.
        train_dataset: anything `load_source` takes, with a column `prompt` (text or messages). Needed for `train`.
        eval_dataset: the same, for `evaluate`.
        processing_class: the tokenizer; None loads the one beside the model.
        callbacks: objects or classes with the methods of `transformers.TrainerCallback`.
        optimizers: (optax transformation, its learning-rate schedule for the log); None builds AdamW from `args`.
        mesh: devices to train on, by `jaxtrl.make_mesh`; None takes all.
        rollout: where groups come from, instead of what `args` say. It is started and closed here.

    Raises ValueError, FileNotFoundError or TypeError, each with one sentence, for input that cannot be trained on.
    """

    args: AsyncGRPOConfig
    steps: GRPOSteps

    def __init__(
        self,
        model: str | Path | Qwen3,
        reward_funcs: RewardArgument | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: Optimizers = (None, None),
        *,
        mesh: Mesh | None = None,
        rollout: Rollout | None = None,
        **unsupported: Any,
    ):
        refuse_arguments(unsupported, AsyncGRPOTrainer, AsyncGRPOConfig, refused.GRPO_ARGUMENTS)
        columns = grpo_report.COLUMNS
        super().__init__(model, args, AsyncGRPOConfig, processing_class, callbacks, optimizers, mesh, columns)
        self.reward_funcs = reward_functions(reward_funcs)
        self.reward_names = unique_names(self.reward_funcs)
        self.reward_weights = check_weights(self.args.reward_weights, self.reward_names)
        self._groups_per_step = self.args.groups_per_step(row_count(self.mesh))
        self._data: dict[str, PromptData] = {}
        for name, dataset in (("train", train_dataset), ("eval", eval_dataset)):
            if dataset is not None:
                self._data[name] = self._prepare(dataset)
        wants_evaluation = self.args.eval_strategy != "no" or self.args.eval_on_start
        if wants_evaluation and "eval" not in self._data:
            raise ValueError("eval_dataset is missing: eval_strategy is set, so give prompts to evaluate on.")
        self._params = self._found.load_params()
        self._reference: Any = None
        self._checksum: int | None = None
        self.steps = GRPOSteps(self.config, self.args, self.mesh, self.programs)
        self._given_rollout = rollout
        self._rollout: Rollout | None = None
        self._finished: list[Group] = []  # of the checkpoint that is continued
        self._next = self._total_groups = self._most_groups = 0  # groups so far, of the whole run, and of its epochs
        self._published = self._logged = 0  # optimizer steps
        self._last: Scored | None = None
        self._call("on_init_end")

    # Training

    def _begin(self, resume: bool | str | Path | None) -> DataPosition:
        if "train" not in self._data:
            raise ValueError("train_dataset is missing: pass the prompts to train on.")
        args, data = self.args, self._data["train"]
        total = self._count_steps(len(data.prompts))
        if args.beta > 0:
            self._reference_checksum()  # while the parameters are those of the reference
        check_processes(args, self._groups_per_step, len(data.prompts), self._total_groups)
        self.shape = row_shape(data, args.num_generations, args.max_completion_length, args.token_budget)
        self.steps.prepare_training(self._make_optimizer(total))
        path = saving.find_resume_path(resume, Path(str(args.output_dir)))
        resumed = self._read(path)
        position = resumed.position if resumed else DataPosition()
        count = len(data.prompts)
        epochs = -(-self._total_groups // count) if self._total_groups < UNLIMITED else 1
        self._most_groups = self._total_groups
        if args.max_steps > 0 and self._total_groups < UNLIMITED:
            left = -(-(total - self.state.global_step) // args.num_iterations) * self._groups_per_step
            self._most_groups = epochs * count
            self._total_groups = min(position.epoch * count + position.offset + left, self._most_groups)
        self._finished = [] if path is None else read_groups(path)
        jobs = list(self.steps.jobs(self.shape))
        check_fits(self.steps, jobs)
        self._rollout = self._make_rollout(max(each.longest for each in self._data.values()), self._total_groups)
        if args.beta > 0 and self._reference is None:  # a second run keeps the reference of the first
            self._reference = self.steps.place(self._params)
        self._open_run(resumed, total, epochs)
        self.programs.foresee(jobs)
        self._introduce(resume, path)
        self.display.start(total, self.state.global_step)
        return position

    def _train_loop(self, position: DataPosition) -> None:
        """The whole of training. A batch of groups is trained in `num_iterations` optimizer steps."""
        state, control, rollout, args = self.state, self.control, self.rollout, self.args
        count = len(self._data["train"].prompts)
        self._next, self._published = position.epoch * count + position.offset, state.global_step
        rollout.start(self.params, state.global_step, self._next, self._finished)
        self._finished, self._logged = [], state.global_step
        staleness = StalenessCounter(args.max_staleness)
        self._start_training()
        self._begin_epoch()
        while state.global_step < state.max_steps and not control.should_training_stop:
            epoch = self._next // count
            scored, dropped = self._take()
            if scored is None:
                break
            micro_batches, metrics = self._make_batch(scored)
            metrics["sample/dropped_zero_std_total"] = float(dropped)
            self._last = scored
            wants_save, is_over = False, self._next >= self._total_groups
            for iteration in range(args.num_iterations):
                for group in scored.groups:
                    staleness.add(group.first_version, state.global_step)
                is_last = iteration == args.num_iterations - 1
                if is_last and is_over:
                    state.max_steps = state.global_step + 1
                self._step(micro_batches, {**metrics, **staleness_metrics(scored.groups, state.global_step)})
                state.epoch = (self._next - (0 if is_last else len(scored.groups) + dropped)) / count
                self._call("on_step_end")
                if is_last and control.should_epoch_stop:
                    self._skip_to((epoch + 1) * count)
                self._after_step(is_last and self._next // count > epoch)
                wants_save |= control.should_save
                if state.global_step >= state.max_steps or control.should_training_stop:
                    break
            if wants_save:  # between batches, so that a resumed run never begins within one
                self._publish()
                self._save_checkpoint(
                    DataPosition(*divmod(self._next, count)), {GROUPS_FILE: pack_groups(rollout.finished())}
                )
            goes_on = state.global_step < state.max_steps and self._next < self._total_groups
            if self._next // count > epoch and goes_on:
                self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.control.should_epoch_stop = False
        self._call("on_epoch_begin")

    def _skip_to(self, end: int) -> None:
        """A callback ends the epoch at group `end`. What a run of max_steps skips is made up for, in its epochs."""
        skipped = min(end, self._most_groups) - self._next  # below 0 where a batch reached into the next epoch
        if skipped > 0:
            more = min(skipped, self._most_groups - self._total_groups)
            self.rollout.skip(skipped, more)
            self._next, self._total_groups = self._next + skipped, self._total_groups + more

    def _step(self, micro_batches: list[MicroBatch], host_metrics: dict[str, float]) -> None:
        """One optimizer step, and the new weights to the rollout where they are due."""
        state, meter = self.state, self.meter
        self.control.new_step()
        self._call("on_step_begin")
        meter.wait_for_step_before_last()
        assert self._train_state is not None
        self._train_state, metrics = self.steps.train(self._train_state, micro_batches)
        meter.add({**metrics, **host_metrics}, micro_batches, self.steps.count_flops(micro_batches))
        state.global_step += 1
        self.display.step(state.global_step)
        if state.global_step % self.args.weight_sync_steps == 0:
            self._publish()

    def _publish(self) -> None:
        """Sampling goes on with the current weights."""
        if self._published != self.state.global_step:
            self.rollout.publish(self.params, self.state.global_step)
            self._published = self.state.global_step

    def _take(self) -> tuple[Scored | None, int]:
        """The groups of the next batch, fewer or none at the end of the run, and how many were dropped on the way."""
        kept: list[Group] = []
        dropped = 0
        while len(kept) < self._groups_per_step:
            groups = self.rollout.take(self._groups_per_step - len(kept))
            self._next += len(groups)
            good = groups
            if self.args.drop_zero_std_groups:
                good = [group for group in groups if has_spread(weigh_rewards(group, self.reward_weights))]
            kept += good
            if not groups:
                break
            if len(good) < len(groups):
                dropped += len(groups) - len(good)
                self.rollout.release(len(groups) - len(good))
            if dropped > DRAWS_PER_STEP * self._groups_per_step and not kept:
                raise ValueError(
                    f"drop_zero_std_groups: the rewards of {dropped} groups in a row are all equal, so there is "
                    "nothing to learn from: look at the rewards (log_completions), or leave it out"
                )
        if not kept:
            return None, dropped
        return score_groups(kept, self.reward_weights, str(self.args.scale_rewards)), dropped

    def _make_batch(self, scored: Scored) -> tuple[list[MicroBatch], dict[str, float]]:
        """The micro-batches of these groups, with the columns that the trainer itself computes, and their metrics."""
        samples, masked = make_samples(scored, self.args.mask_truncated_completions)
        micro_batches = make_micro_batches(samples, masked, self.shape, self.mesh, self.args)
        if self._reference is not None:
            micro_batches = self.steps.rescore(self._reference, micro_batches, "ref_logp")
        if self.args.recompute_old_logps:
            micro_batches = self.steps.rescore(self.params, micro_batches, "old_logp")
        metrics = group_metrics(scored, self.reward_names)
        metrics["completions/masked_total"] = float(masked)
        metrics["batch/trained_tokens_per_step"] = count_trained(micro_batches)
        return micro_batches, metrics

    def _count_steps(self, prompts: int) -> int:
        """Optimizer steps of the run; sets how many groups it has."""
        args, size = self.args, self._groups_per_step
        if args.max_steps > 0:
            batches = -(-args.max_steps // args.num_iterations)
            self._total_groups = UNLIMITED if args.drop_zero_std_groups else batches * size
            return args.max_steps
        if args.num_train_epochs <= 0:
            raise ValueError("num_train_epochs is 0 and max_steps is not set: one must be positive")
        self._total_groups = math.ceil(args.num_train_epochs * prompts)
        return -(-self._total_groups // size) * args.num_iterations

    def _end(self, is_complete: bool) -> None:
        if self._rollout is not None:
            self._rollout.close()
            self._rollout = None
        super()._end(is_complete)

    # Evaluation

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float | int]:
        """Rewards and lengths of completions of the evaluation prompts (or of `eval_dataset`); logged too."""
        data = self._data.get("eval") if eval_dataset is None else self._prepare(eval_dataset)
        if data is None:
            raise ValueError("eval_dataset is missing: pass prompts to evaluate on.")
        generations = self.args.num_generations_eval or self.args.num_generations
        with self.meter.paused():
            if self._rollout is not None:
                self._publish()
                groups = self._rollout.evaluate(data.prompts, generations)
            else:
                groups = self._evaluate_alone(data, generations)
        scored = score_groups(groups, self.reward_weights, "none")
        metrics: dict[str, float | int] = {
            f"{metric_key_prefix}_{name}": value for name, value in group_metrics(scored, self.reward_names).items()
        }
        self.log(metrics)
        self._call("on_evaluate", metrics=metrics)
        return metrics

    def _evaluate_alone(self, data: PromptData, generations: int) -> list[Group]:
        """Outside of training: a rollout of its own."""
        rollout = self._make_rollout(data.longest, 0)
        try:
            rollout.start(self.params, self.state.global_step, 0, [])
            return rollout.evaluate(data.prompts, generations)
        finally:
            rollout.close()

    # Logging

    def _more_logs(self, logs: Mapping[str, float | int], steps: float) -> dict[str, float]:
        since, self._logged = self.state.global_step - self._logged, self.state.global_step
        out = rename_metrics(self.rollout.metrics(), since, self.args.num_generations)
        if "packing_ratio" in logs:
            tokens = float(logs["tokens_per_second"])
            out["batch/row_fill_frac"] = 1 - logs["padding_share"]
            out["perf/forwarded_tok_s_wall_clock"] = tokens / max(logs["packing_ratio"], 1e-9)
            out["perf/trained_tok_s_wall_clock"] = logs["batch/trained_tokens_per_step"] * steps
        return out

    def _log_training(self) -> None:
        super()._log_training()
        if self.args.log_completions and self._last is not None and self._run is not None:
            step = self.state.global_step
            columns = grpo_report.completions_table(self._last, self._decode, self.reward_names, step)
            grpo_report.print_completions(self.display, columns, self.args.num_completions_to_print)
            self._run.log_table("completions", columns, step)

    # What the rest is made of

    @property
    def rollout(self) -> Rollout:
        """Where groups come from; there while training."""
        if self._rollout is None:
            raise RuntimeError("there is no rollout: training has not begun, or has ended")
        return self._rollout

    def _prepare(self, dataset: Any) -> PromptData:
        args = self.args
        room = prompt_room(self.config.max_position_embeddings, args.max_completion_length, args.token_budget)
        kwargs = args.chat_template_kwargs
        return prepare_prompts(dataset, self.processing_class, self.config.vocab_size, room, kwargs)

    def _make_rollout(self, longest: int, total_groups: int) -> Rollout:
        if self._given_rollout is not None:
            return self._given_rollout
        args, data, size = self.args, self._data.get("train") or PromptData([], 0), self._groups_per_step
        check_reward_functions(self.reward_funcs, list(data.prompts[0].columns) if data.prompts else [])
        dtype, source = str(self.steps.dtype), self._source
        tokenizer, functions = self.processing_class, self.reward_funcs
        setup = make_setup(args, self.config, tokenizer, source, functions, longest, size, dtype)
        return make_rollout(args, setup, make_pacing(args, size, total_groups), data)

    def _facts(self) -> dict[str, Any]:
        checksum = self._reference_checksum() if self.args.beta > 0 else None
        sizes = self._groups_per_step, row_count(self.mesh)
        return run_facts(self.args, self._data["train"], self.shape, sizes, self.steps.dtype, self.config, checksum)

    def _reference_checksum(self) -> int:
        """Of the weights that `beta` pulls towards, which a resumed run is given anew."""
        if self._checksum is None:
            self._checksum = zlib.crc32(np.asarray(self._params["embed_tokens"]).tobytes())
        return self._checksum

    def _decode(self, ids: list[int]) -> str:
        return str(self.processing_class.decode(ids))

    def _introduce(self, resume: bool | str | Path | None, path: Path | None) -> None:
        """Say what is going to be trained on what, with one prompt."""
        text = grpo_report.introduction(
            self.config,
            self.args,
            self.steps.dtype,
            {name: data.describe() for name, data in self._data.items()},
            self.reward_names,
            self.shape,
            (self.state.max_steps, self._groups_per_step),
            self.compile_cache or "off",
            row_count(self.mesh),
        )
        self.display.say(text)
        ids = self._data["train"].prompts[0].ids
        self.display.say("first prompt:\n" + self._decode(ids[-grpo_report.MOST_TOKENS :]))
        for line in saving.describe_start(resume, path, Path(str(self.args.output_dir))):
            self.display.say(line)
