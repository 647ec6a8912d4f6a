"""AsyncGRPOTrainer: what a run trains on, reports and keeps."""

import jax
import numpy as np
import pytest

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
    for log in logs:
        assert log["reward"] == pytest.approx(log["rewards/even_ids/mean"])
        assert 0 < log["reward"] < 1
        assert log["completions/mean_length"] == 6
        assert log["completions/clipped_ratio"] == 1
        assert log["packing_ratio"] > 1.5
        assert log["batch/trained_tokens_per_step"] == 48
        assert log["rollout/finished_groups"] >= log["rollout/taken_groups"]
    assert trainer.state.epoch == 1.0
