"""AsyncGRPOTrainer: what a run trains on, reports and keeps."""

import sys
import types

import jax
import numpy as np
import pytest

from jaxtrl.trainers.callbacks import TrainerCallback
from tests.trainers.grpo import make_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer, compile_cache):
    """A finished run of 3 steps with 1 step of staleness."""
    trainer = make_trainer(tmp_path_factory.mktemp("run"), tiny_tokenizer, compile_cache, max_staleness=1)
    before = jax.device_get(trainer.params)
    output = trainer.train()
    return trainer, before, output


def test_a_run_trains_and_reports(run):
    trainer, before, output = run
    assert output.global_step == 3
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 3
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before, trainer.params)), strict=True)]
    assert max(moved) > 1e-3
    assert [log["sample/staleness_max"] for log in logs] == [0, 1, 1]
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert logs[0]["sampling/sampling_logp_difference/mean"] < 1e-5
    assert all(log["sampling/sampling_logp_difference/max"] > 0 for log in logs)
    assert logs[0]["clip_ratio/high_max"] == logs[0]["clip_ratio/low_min"] == 0
    for log in logs:
        assert log["reward"] == pytest.approx(log["rewards/even_ids/mean"])
        assert 0 < log["reward"] < 1
        assert log["completions/mean_length"] == 6
        assert log["completions/clipped_ratio"] == 1
        assert log["packing_ratio"] > 1.5
        assert log["batch/trained_tokens_per_step"] == 48
        assert log["rollout/finished_groups"] >= log["rollout/taken_groups"]
    assert trainer.state.epoch == 1.0


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("options", [{"max_staleness": 2, "weight_sync_steps": 2}, {"beta": 0.1, "max_staleness": 1}])
def test_a_resumed_inline_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, tiny_tokenizer, compile_cache, options):
    options = {**options, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "run", tiny_tokenizer, compile_cache, **options)
    whole.train()
    again = make_trainer(tmp_path / "run", tiny_tokenizer, compile_cache, **options)
    again.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")
    assert same(whole.params, again.params)
    kinds = ("reward", "loss", "kl", "sample/staleness_mean")
    expected, found = (
        [[log.get(kind) for kind in kinds] for log in trainer.state.log_history if "reward" in log]
        for trainer in (whole, again)
    )
    assert expected == found
    with pytest.raises(ValueError, match="max_completion_length is 6 in the checkpoint and 5 here"):
        make_trainer(tmp_path / "run", tiny_tokenizer, compile_cache, **{**options, "max_completion_length": 5}).train(
            True
        )


def test_several_updates_on_a_batch_and_evaluation(tmp_path, tiny_tokenizer, compile_cache):
    from tests.trainers.grpo import PROMPTS

    trainer = make_trainer(
        tmp_path,
        tiny_tokenizer,
        compile_cache,
        num_iterations=2,
        max_staleness=1,
        max_steps=4,
        recompute_old_logps=True,
        eval_strategy="steps",
        eval_steps=2,
        mask_truncated_completions=False,
        trainer={"eval_dataset": PROMPTS[:2]},
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["sample/staleness_max"] for log in logs] == [0, 1, 0, 1]
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-6), "old log-probs are the trainer's own before the first update"
    assert logs[1]["ratio"] != pytest.approx(1, abs=1e-6), "and stay what they were in the second"
    evals = [log for log in trainer.state.log_history if "eval_reward" in log]
    assert len(evals) == 2
    assert evals[0]["eval_completions/mean_length"] == 6
    assert trainer.evaluate()["eval_reward"] == evals[-1]["eval_reward"], "the same prompts, weights and seeds"


def test_a_second_run_goes_on_from_the_same_reference(tmp_path, tiny_tokenizer, compile_cache):
    trainer = make_trainer(tmp_path, tiny_tokenizer, compile_cache, beta=0.1, max_steps=2)
    reference = jax.device_get(trainer.params)
    trainer.train()
    trainer.train()
    assert same(reference, trainer._reference)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert logs[0]["kl"] > 1e-5, "the second run begins where the first ended, away from the reference"


def test_a_constant_reward_moves_nothing(tmp_path, tiny_tokenizer, compile_cache):
    trainer = make_trainer(tmp_path, tiny_tokenizer, compile_cache, reward=lambda prompts, **_: [0.5] * len(prompts))
    before = jax.device_get(trainer.params)
    trainer.train()
    assert same(before, trainer.params)
    assert all(log["frac_reward_zero_std"] == 1 for log in trainer.state.log_history if "reward" in log)


def test_a_callback_can_end_an_epoch(tmp_path, tiny_tokenizer, compile_cache):
    """6 prompts, 2 a step, 4 steps: two epochs, of which the first ends after its first step, as in Transformers. A run
    resumed behind it goes on in the same way."""
    events = []

    class EndEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 1
            events.append(state.global_step)

        def on_epoch_begin(self, args, state, control, **kwargs):
            assert not control.should_epoch_stop
            events.append("begin")

        def on_epoch_end(self, args, state, control, **kwargs):
            events.append("end")

    def run(resume=None, **options):
        steps = {"max_steps": 4, "max_staleness": 1, "save_strategy": "steps", "save_steps": 2, **options}
        trainer = make_trainer(tmp_path, tiny_tokenizer, compile_cache, trainer={"callbacks": [EndEpoch]}, **steps)
        rows, make_batch = [], trainer._make_batch

        def record(scored):
            rows.append([group.number for group in scored.groups])
            return make_batch(scored)

        trainer._make_batch = record
        trainer.train(resume)
        return trainer, rows

    whole, numbers = run()
    assert numbers == [[0, 1], [6, 7], [8, 9], [10, 11]]
    assert events == ["begin", 1, "end", "begin", 2, 3, 4, "end"]
    logs = [log for log in whole.state.log_history if "reward" in log]
    assert [log["epoch"] for log in logs] == pytest.approx([1 / 3, 4 / 3, 5 / 3, 2])
    assert logs[-1]["rollout/skipped_groups"] == 2, "of the two steps that were sampled ahead"
    again, rest = run(tmp_path / "checkpoint-2")
    assert rest == numbers[2:]
    assert same(whole.params, again.params)


def test_completions_are_printed_and_sent_to_trackers(tmp_path, tiny_tokenizer, compile_cache, monkeypatch, capsys):
    sent = []
    fake = types.SimpleNamespace(
        init=lambda **_: None,
        log=lambda metrics, step: sent.append((step, metrics)),
        finish=lambda: None,
        Table=lambda dataframe: dataframe,
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    options = {"max_steps": 2, "logging_steps": 2, "report_to": ["trackio"], "log_completions": True}
    make_trainer(tmp_path, tiny_tokenizer, compile_cache, num_completions_to_print=1, **options).train()
    ((step, table),) = [(step, metrics["completions"]) for step, metrics in sent if "completions" in metrics]
    assert (step, len(table)) == (2, 8)
    assert list(table.columns) == ["step", "prompt", "completion", "even_ids", "advantage"]
    assert set(table["step"]) == {"2"}
    assert table["prompt"].str.contains("What is").all()
    assert table["advantage"].groupby(table["prompt"]).sum().abs().max() < 1e-5
    printed = capsys.readouterr().out
    assert printed.count("What is") >= 1
    assert "even_ids" in printed


def test_groups_without_spread_are_replaced_or_refused(tmp_path, tiny_tokenizer, compile_cache):
    def some(prompts, completion_ids, answer, **_):  # equal within the groups of two prompts
        return [0.0 if a in ("3", "4") else float(ids[0] % 5) for a, ids in zip(answer, completion_ids, strict=True)]

    options = {"drop_zero_std_groups": True, "max_steps": 4}
    trainer = make_trainer(tmp_path / "a", tiny_tokenizer, compile_cache, reward=some, **options)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 4
    assert sum(log["sample/dropped_zero_std_total"] for log in logs) > 0
    assert all(log["frac_reward_zero_std"] == 0 for log in logs)
    assert all(log["batch/trained_tokens_per_step"] == 48 for log in logs)
    with pytest.raises(ValueError, match=r"drop_zero_std_groups: the rewards of .* groups in a row are all equal"):
        make_trainer(
            tmp_path / "b", tiny_tokenizer, compile_cache, reward=lambda prompts, **_: [1] * len(prompts), **options
        ).train()


def test_rewards_are_weighted_and_failures_counted(tmp_path, tiny_tokenizer, compile_cache):
    def odd(completion_ids, **_):
        if any(ids[0] % 4 == 0 for ids in completion_ids):
            raise RuntimeError("one of them is a multiple of 4")
        return [1.0] * len(completion_ids)

    def none(prompts, **_):
        return [None] * len(prompts)

    trainer = make_trainer(
        tmp_path, tiny_tokenizer, compile_cache, reward=[odd, none], reward_weights=[2.0, 1.0], max_steps=2
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2
    assert sum(log["completions/failed_total"] for log in logs) > 0
    for log in logs:
        assert log["reward"] == 2 * log["rewards/odd/mean"] == 2
        assert "rewards/none/mean" not in log
        assert log["batch/trained_tokens_per_step"] == 6 * (8 - log["completions/failed_total"])


def test_wrong_input_is_one_sentence(tmp_path, tiny_tokenizer, compile_cache):
    def make(**options):
        return make_trainer(tmp_path, tiny_tokenizer, compile_cache, **options)

    with pytest.raises(ValueError, match="does not divide the 8 completions"):
        make(num_generations=3)
    with pytest.raises(ValueError, match="reward_weights: expected one for each of even_ids, got 2 numbers"):
        make(reward_weights=[1, 2])
    with pytest.raises(ValueError, match="reward_funcs is missing"):
        make(reward=[])
    with pytest.raises(ValueError, match="'no_such' is none of exact_match"):
        make(reward="no_such")
    with pytest.raises(ValueError, match="eval_dataset is missing"):
        make(eval_strategy="steps")
    with pytest.raises(ValueError, match="the queue holds 1 groups, but a step takes 2: raise queue_maxsize"):
        make(queue_maxsize=4).train()
    with pytest.raises(TypeError, match="cannot be called with prompts, completions, completion_ids, answer"):
        make(reward=lambda prompts: [0.0]).train()
    with pytest.raises(ValueError, match=r"rollout_worker \(it is called rollout"):
        make(trainer={"rollout_worker": None})
