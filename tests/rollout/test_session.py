"""The open queue: requests that come while others run, what they are called, and what is refused."""

import jax
import pytest

from jaxtrl import Sampler, SamplingParams
from jaxtrl.model.qwen3 import model_params
from tests.rollout.models import fixture_t


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(fixture_t(), slots=3, max_length=120, eos_token_id=(), tokens_per_call=4)


def seeded(seed: int, tokens: int, **changes) -> SamplingParams:
    return SamplingParams(seed=seed, max_new_tokens=tokens, **changes)


def test_requests_added_while_others_run_give_what_they_give_alone(sampler):
    wanted = [([5, 9, 12, 3], seeded(1, 14)), ([7, 20], seeded(2, 5, top_k=9)), ([31], seeded(3, 9))]
    alone = [sampler.generate([prompt], params, 2) for prompt, params in wanted]
    done = []
    with sampler.open() as session:
        assert (session.pending, session.step()) == (0, [])
        for number, (prompt, params) in enumerate(wanted):
            session.add(prompt, params, 2, key=70 + number)
            before = session.pending
            ended = session.step()
            assert session.pending == before - len(ended)
            done += ended
        while session.pending:
            done += session.step()
    assert len(done) == 6
    for completion in done:
        same = alone[completion.prompt_index - 70][completion.generation_index]
        assert completion.token_ids.tolist() == same.token_ids.tolist()


def test_every_completion_may_have_parameters_of_its_own(sampler):
    each = [seeded(seed, 3 + seed) for seed in range(4)]
    with sampler.open(length=32) as session:
        session.add([5, 9], each, 4)
        session.add([8], seeded(0, 2))
        assert sampler.engine.columns == 128
        done = []
        while session.pending:
            done += session.step()
    assert {(c.prompt_index, c.generation_index): len(c.token_ids) for c in done} == {
        **{(0, seed): 3 + seed for seed in range(4)},
        (1, 0): 2,
    }
    with sampler.open() as session, pytest.raises(ValueError, match="prompt 0 has 4 SamplingParams for 3 comp"):
        session.add([5], each, 3)


def test_a_group_is_prefilled_once_also_over_several_steps(sampler):
    calls = sampler.engine.programs.calls
    before = calls["prefill", 128]
    with sampler.open() as session:
        session.add([5, 9, 12], seeded(1, 4), 7)
        while session.pending:
            session.step()
    assert calls["prefill", 128] - before == 1


def test_new_tokens_are_told_and_carry_the_version(sampler):
    told: list[int] = []
    params = model_params(fixture_t())
    with sampler.open() as session:
        session.add([5, 9], seeded(1, 9), key=3)
        assert session.step(lambda prompt, generation, ids: told.extend(ids)) == []
        assert len(told) == 4
        sampler.update_params(jax.tree.map(lambda x: x * 1.1, params), 8)
        session.step()
        (done,) = session.step()
    sampler.update_params(params, 0)
    assert (done.prompt_index, done.token_ids[:4].tolist()) == (3, told)
    assert done.versions.tolist() == [0] * 4 + [8] * 5


def test_what_cannot_work_is_refused_at_once(sampler):
    with pytest.raises(ValueError, match="length 121 is more than"):
        sampler.open(121)
    session = sampler.open(10)
    for prompt, message in (
        ([], "prompt 0 is empty"),
        ([64], "outside the vocabulary"),
        ([1] * 7, "prompt 0 has 7 tokens, which with 4 new ones is more than max_length 10"),
    ):
        with pytest.raises(ValueError, match=message):
            session.add(prompt, seeded(0, 4))
    assert session.pending == 0
    with pytest.raises(RuntimeError, match="is unfinished"):
        sampler.open()
    with pytest.raises(RuntimeError, match="is unfinished"):
        sampler.generate([[5]])
    session.add([5], seeded(0, 4))
    session.close()
    for call in (session.step, lambda: session.add([5])):
        with pytest.raises(RuntimeError, match="is closed"):
            call()
    assert len(sampler.generate([[5]], seeded(0, 4))) == 1
