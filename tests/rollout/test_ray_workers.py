"""`RayWorkers` on a local Ray cluster: a lost actor costs nothing but time."""

import os
import signal
import warnings

import pytest

from jaxtrl.assets import tokenizer_path
from jaxtrl.model.qwen3 import model_params
from jaxtrl.rollout.groups import RolloutError
from jaxtrl.rollout.pacing import Pacing, StalenessCounter, prompt_index
from jaxtrl.rollout.ray_workers import RayWorkers
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from tests.rollout.models import fixture_t
from tests.rollout.rewards_for_tests import first_token, make_prompts, make_setup, raises
from tests.trainers.grpo import make_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPTS = make_prompts(5)


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A cluster with room for two actors."""
    module = pytest.importorskip("ray", reason="Ray is an extra: pip install 'jaxtrl[ray]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    yield module
    module.shutdown()


@pytest.fixture
def make(ray, tmp_path_factory):
    made = []
    cache = tmp_path_factory.getbasetemp() / "ray_cache"

    def one(*functions, total=12, **options):
        setup = make_setup(*functions, compile_cache=str(cache))
        made.append(RayWorkers(setup, Pacing(2, total, 1), PROMPTS, **options))
        return made[-1]

    yield one
    for rollout in made:
        rollout.close()


def test_an_actor_that_is_killed_is_replaced_and_every_prompt_is_trained_once(make):
    params = model_params(fixture_t())
    rollout = make(first_token, workers=2)
    rollout.start(params, 0, 0, ())
    taken, counter = [], StalenessCounter(1)
    for step in range(6):
        groups = rollout.take(2)
        for group in groups:
            counter.add(group.first_version, step)
        taken += groups
        if step == 1:
            os.kill(rollout._ray.get(rollout._workers[1].actor.process_id.remote()), signal.SIGKILL)
        rollout.publish(params, step + 1)
    assert [group.number for group in taken] == list(range(12))
    assert [group.row for group in taken] == [PROMPTS[prompt_index(g, 5, 5)].row for g in range(12)]
    assert {group.worker for group in taken if group.number % 2} == {1}
    assert rollout.lost_actors == 1
    assert rollout.metrics()["rollout/lost_actors"] == 1
    evaluated = rollout.evaluate(PROMPTS[:3], 2)
    assert [group.row for group in evaluated] == [prompt.row for prompt in PROMPTS[:3]]


def test_an_error_in_an_actor_reaches_the_trainer(make):
    rollout = make(raises)
    rollout.start(model_params(fixture_t()), 0, 0, ())
    with pytest.raises(RolloutError, match="this reward function always raises"):
        rollout.take(2)


def test_a_trainer_on_ray_actors(ray, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path())
    trainer = make_trainer(tmp_path, tokenizer, "off", rollout="ray", rollout_workers=2)
    assert trainer.train().global_step == 3
    logs = [record for record in trainer.state.log_history if "reward" in record]
    assert len(logs) == 3
    assert all(record["rollout/lost_actors"] == 0 for record in logs)


def test_options_that_ray_has_no_use_for():
    with pytest.raises(ValueError, match="ray_address: it needs rollout ray"):
        AsyncGRPOConfig(ray_address="auto")
    with pytest.raises(ValueError, match="Ray places its actors"):
        AsyncGRPOConfig(rollout="ray", rollout_cores="0")
