"""How many programs generation compiles, and long and many requests."""

from collections import Counter

import jax
import numpy as np
import pytest

from jaxtrl import Sampler, SamplingParams, make_score_step
from jaxtrl.model.qwen3 import model_params
from jaxtrl.rows.batch import Sample, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeSet
from tests.rollout.models import fixture_t

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles():
    """Names of all that XLA compiles, also outside of the counted programs."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **kwargs) -> None:
        if event == COMPILED:
            seen.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def mixed_requests(count: int) -> list[tuple[list[int], SamplingParams, int]]:
    """(prompt of 1 to 500 tokens, parameters, 1 to 16 generations) of fixture T's vocabulary."""
    rng = np.random.default_rng(11)
    out = []
    for number in range(count):
        prompt = rng.integers(2, 64, rng.integers(1, 501)).tolist()
        kinds = {"top_k": int(rng.integers(1, 64)), "top_p": float(rng.uniform(0.1, 1)), "min_p": 0.05}
        kinds |= {"repetition_penalty": 1.2, "min_new_tokens": 2}
        chosen = {name: value for name, value in kinds.items() if rng.random() < 0.2}
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            max_new_tokens=int(rng.integers(2, 12)),
            seed=number,
            **chosen,
        )
        out.append((prompt, params, int(rng.integers(1, 17))))
    return out


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up(compiles):
    made = Sampler(fixture_t(), slots=16, max_length=512)
    made.warm_up()
    programs = Counter(program.kind for program in made.engine.programs.compiled)
    rows = programs["prefill"]
    assert programs == {"weights": 1, "prefill": rows, "insert": rows, "decode": 2}
    assert rows == 6  # 128, 256, 384, 512, 768, 1024 tokens
    assert len(compiles) >= made.engine.programs.count
    compiles.clear()
    requests = mixed_requests(200)
    for first in range(0, 200, 8):
        batch = requests[first : first + 8]
        generations = batch[0][2]
        done = made.generate([prompt for prompt, *_ in batch], [params for _, params, _ in batch], generations)
        where = [(c.prompt_index, c.generation_index) for c in done]
        assert where == [(p, g) for p in range(len(batch)) for g in range(generations)]
        for completion in done:
            params = batch[completion.prompt_index][1]
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 1 else "length")
            assert len(completion.token_ids) <= params.max_new_tokens
    made.update_params(model_params(fixture_t()), 1)
    assert compiles == []
    assert made.engine.programs.count == sum(programs.values())


def test_a_longer_cache_is_two_decode_programs_more():
    made = Sampler(fixture_t(), slots=2, max_length=300, eos_token_id=(), tokens_per_call=4)
    short = SamplingParams(max_new_tokens=4, seed=1)
    first = made.generate([[5, 9, 12]], short)[0].token_ids.tolist()
    assert made.engine.columns == 128
    (done,) = made.generate([[5] * 250], SamplingParams(max_new_tokens=20, seed=1))
    assert (made.engine.columns, len(done.token_ids)) == (384, 20)
    made.generate([[5, 9, 12]], SamplingParams(max_new_tokens=4, seed=1, top_k=3))
    assert made.generate([[5, 9, 12]], short)[0].token_ids.tolist() == first
    kinds = Counter(program.kind for program in made.engine.programs.compiled)
    assert kinds == {"weights": 1, "prefill": 2, "insert": 3, "decode": 3}  # inserts: (128, 128) (256, 384) (128, 384)


def test_prompts_of_several_blocks_have_the_score_steps_logps():
    """150 and 290 tokens in one row, copied block by block to three slots each."""
    made = Sampler(fixture_t(), slots=4, max_length=320, eos_token_id=())
    rng = np.random.default_rng(2)
    prompts = [rng.integers(2, 64, size).tolist() for size in (150, 290, 128, 129)]
    done = made.generate(prompts, SamplingParams(max_new_tokens=20, seed=3), num_generations=3)
    samples = []
    for completion in done:
        prompt = prompts[completion.prompt_index]
        tokens = np.concatenate([np.array(prompt, np.int32), completion.token_ids])
        samples.append(Sample(tokens, np.arange(len(tokens)) >= len(prompt)))
    row = concat_rows(samples)
    batch = make_batch([row], ShapeSet.from_setting("auto").classify([row]))
    scored = make_score_step(fixture_t().config)(model_params(fixture_t()), batch)[0]
    logps = np.concatenate([completion.logps for completion in done])
    np.testing.assert_allclose(logps, scored[0, : len(logps)], atol=1e-5)


@pytest.mark.slow
def test_many_short_requests_are_each_answered_once():
    made = Sampler(fixture_t(), slots=8, max_length=32, eos_token_id=(), tokens_per_call=4)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 64, rng.integers(1, 9)).tolist() for _ in range(500)]
    params = [SamplingParams(max_new_tokens=int(n), seed=0) for n in rng.integers(1, 20, 500)]
    done = list(made.stream(prompts, params))
    assert sorted(c.prompt_index for c in done) == list(range(500))
    assert all(len(c.token_ids) == params[c.prompt_index].max_new_tokens for c in done)
    buffers = len(jax.live_arrays())
    again = list(made.stream(prompts, params))
    assert len(jax.live_arrays()) <= buffers
    key = lambda c: c.prompt_index  # noqa: E731
    assert [c.token_ids.tolist() for c in sorted(again, key=key)] == [
        c.token_ids.tolist() for c in sorted(done, key=key)
    ]
