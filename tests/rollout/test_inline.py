"""`InlineRollout`: groups, versions, seeds, rewards; resuming bit for bit; evaluation."""

import jax
import numpy as np
import pytest

from jaxtrl.model.qwen3 import model_params
from jaxtrl.rollout.groups import Group, Rollout
from jaxtrl.rollout.inline import InlineRollout
from jaxtrl.rollout.pacing import Pacing, StalenessCounter, prompt_index
from tests.rollout.models import fixture_t
from tests.rollout.rewards_for_tests import make_prompts, make_setup, raises, raises_for_odd

PROMPTS = make_prompts(5)


def params_of(version: int):
    """Other weights for every version."""
    return jax.tree.map(lambda x: x * (1 + 0.05 * version), model_params(fixture_t()))


@pytest.fixture(scope="module")
def rollout():
    """One for all tests, which start it again: its programs are compiled once."""
    made = InlineRollout(make_setup(), Pacing(2, 10, 1), PROMPTS)
    yield made
    made.close()


@pytest.fixture
def with_function(rollout, monkeypatch):
    """The same, started, with another reward function."""

    def make(function):
        rollout.start(params_of(0), 0, 0, ())
        monkeypatch.setattr(rollout.producer, "setup", make_setup(function))
        return rollout

    return make


def run(rollout: Rollout, step: int, stop: int, next_number: int = 0, finished=()) -> list[Group]:
    """Trains (not) from `step` to `stop`: what was taken."""
    rollout.start(params_of(step), step, next_number, finished)
    out, counter = [], StalenessCounter(1)
    while step < stop:
        taken = rollout.take(2)
        for group in taken:
            counter.add(group.first_version, step)
        out += taken
        step += 1
        rollout.publish(params_of(step), step)
    return out


def same(a: Group, b: Group) -> bool:
    """Everything but the times."""
    fields = "token_ids", "logps", "sampled_logps", "versions"
    pairs = [(getattr(x, f), getattr(y, f)) for x, y in zip(a.completions, b.completions, strict=True) for f in fields]
    pairs += [(a.rewards, b.rewards), (a.failed, b.failed)]
    return (a.number, a.row, a.prompt_ids, a.texts) == (b.number, b.row, b.prompt_ids, b.texts) and all(
        np.array_equal(x, y, equal_nan=True) for x, y in pairs
    )


@pytest.fixture(scope="module")
def whole(rollout) -> list[Group]:
    """All groups of a run of 5 steps."""
    groups = run(rollout, 0, 5)
    assert rollout.take(2) == []
    metrics = rollout.metrics()
    assert metrics["rollout/finished_groups"] == metrics["rollout/taken_groups"] == 10
    assert metrics["rollout/queue_depth"] == 0
    assert metrics["rollout/sampled_tokens"] == 10 * 3 * 6
    assert rollout.metrics()["rollout/sampled_tokens"] == 0
    return groups


def test_groups_are_scored_and_in_the_order_of_their_numbers(whole):
    assert [group.number for group in whole] == list(range(10))
    for group in whole:
        prompt = PROMPTS[prompt_index(group.number, 5, 5)]
        assert (group.row, group.prompt_ids) == (prompt.row, prompt.ids)
        assert [completion.generation_index for completion in group.completions] == [0, 1, 2]
        ids = [completion.token_ids.tolist() for completion in group.completions]
        assert group.texts == tuple(" ".join(map(str, one)) for one in ids)
        expected = [[one[0], np.nan if prompt.row % 2 else prompt.row] for one in ids]
        np.testing.assert_array_equal(group.rewards, np.array(expected, np.float32))
        assert group.admitted <= group.finished <= group.scored
    assert {group.row for group in whole[:5]} == {group.row for group in whole[5:]} == set(range(5))
    assert len({tuple(c.token_ids.tolist()) for group in whole for c in group.completions}) > 20


def test_versions_are_those_that_were_published(whole):
    """Two batches are admitted at once at the start, then one after each update: staleness 0, then 1."""
    assert [group.first_version for group in whole] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert all((c.versions == group.first_version).all() for group in whole for c in group.completions)


@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_is_bit_for_bit(rollout, whole, stop):
    begun = run(rollout, 0, stop)
    finished = rollout.finished()
    assert [group.number for group in finished] == [2 * stop, 2 * stop + 1]
    rest = run(rollout, stop, 5, 2 * stop, finished)
    assert len(begun + rest) == len(whole)
    assert all(same(a, b) for a, b in zip(begun + rest, whole, strict=True))


def test_a_group_does_not_depend_on_what_runs_beside_it(rollout, whole):
    """Alone, as after a checkpoint that has all others, it has the same tokens."""
    rollout.start(params_of(0), 0, 0, [whole[0], whole[1], whole[3]])
    alone = rollout.take(4)[2]
    for x, y in zip(alone.completions, whole[2].completions, strict=True):
        np.testing.assert_array_equal(x.token_ids, y.token_ids)
        np.testing.assert_allclose(x.logps, y.logps, atol=1e-5)


def test_evaluation_has_its_own_seeds_and_leaves_training_alone(rollout, whole):
    rollout.start(params_of(0), 0, 0, ())
    rollout.take(2)
    first = rollout.evaluate(PROMPTS[:3], 2)
    again = rollout.evaluate(PROMPTS[:3], 2)
    rollout.publish(params_of(1), 1)
    newer = rollout.evaluate(PROMPTS[:3], 2)
    assert [(g.number, g.row, len(g.completions)) for g in first] == [(0, 0, 2), (1, 1, 2), (2, 2, 2)]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert newer[0].first_version == 1
    assert all(same(a, b) for a, b in zip(rollout.take(2), whole[2:4], strict=True))
    trained = {tuple(c.token_ids.tolist()) for g in whole for c in g.completions if g.row < 3}
    assert any(tuple(c.token_ids.tolist()) not in trained for g in first for c in g.completions)


def test_failed_completions_are_marked_counted_and_logged_once(with_function, caplog):
    rollout = with_function(raises_for_odd)
    rollout.metrics()
    groups = rollout.take(4)
    for group in groups:
        odd = [completion.token_ids[0] % 2 == 1 for completion in group.completions]
        assert group.failed.tolist() == odd
        np.testing.assert_array_equal(np.isnan(group.rewards[:, 0]), odd)
    failed = sum(int(group.failed.sum()) for group in groups)
    assert 0 < failed < 12
    assert rollout.metrics()["rollout/failed_completions"] == failed
    (record,) = caplog.records
    assert "an odd first token" in record.getMessage()


def test_a_function_that_raises_for_all_stops_the_run(with_function):
    rollout = with_function(raises)
    with pytest.raises(ValueError, match="this reward function always raises"):
        rollout.take(2)
    rollout.close()
    with pytest.raises(RuntimeError, match="not started, or closed"):
        rollout.take(2)
