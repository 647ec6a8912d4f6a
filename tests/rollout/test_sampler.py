"""`Sampler` end to end: greedy tokens, seeds, refills, stops, versions, log-probs, what does not fit."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrl import Sampler, SamplingParams, make_score_step, save_pretrained
from jaxtrl.model.qwen3 import model_params
from jaxtrl.rows.batch import Sample, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeSet
from tests.golden.make_generate_golden import MODELS, NEW, PROMPTS, greedy, hf_model, make_config
from tests.rollout.models import fixture_t, make_model

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "generate.json").read_text(encoding="utf-8"))
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW)
MIXED = [
    SamplingParams(seed=1, max_new_tokens=20),
    SamplingParams(seed=2, max_new_tokens=9, temperature=0.6, top_k=9),
    SamplingParams(seed=3, max_new_tokens=30, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(seed=4, max_new_tokens=1, min_p=0.1),
    SamplingParams(seed=4, max_new_tokens=14, temperature=0.0),
]


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    """Two slots, so that every further request is a refill."""
    return Sampler(fixture_t(), slots=2, max_length=120, eos_token_id=(), tokens_per_call=5)


@pytest.fixture(scope="module")
def wide() -> Sampler:
    return Sampler(fixture_t(), slots=5, max_length=120, eos_token_id=(), tokens_per_call=8)


def ids(completions) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def test_greedy_tokens_are_those_of_transformers(sampler, wide):
    """Ragged prompts: alone, all at once, and through refills; log-probs agree to rounding."""
    expected = [run["tokens"] for run in GOLDEN["fixture T"]]
    for run in GOLDEN["fixture T"]:
        assert ids(sampler.generate([run["prompt"]], GREEDY)) == [run["tokens"]]
    assert ids(wide.generate(PROMPTS, GREEDY)) == expected
    again = sampler.generate(PROMPTS * 2, GREEDY, num_generations=2)
    assert ids(again) == [tokens for tokens in expected * 2 for _ in range(2)]
    assert all(c.finish_reason == "length" and (c.sampled_logps == 0).all() for c in again)


def test_greedy_tokens_of_a_random_model():
    made = Sampler(make_model(**MODELS["random"]), slots=3, max_length=120, eos_token_id=())
    assert ids(made.generate(PROMPTS, GREEDY)) == [run["tokens"] for run in GOLDEN["random"]]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_stored_tokens_are_what_transformers_generates(name):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = hf_model(make_config(**MODELS[name]))
    for run in GOLDEN[name]:
        assert greedy(model, run["prompt"])[0] == run["tokens"]


@pytest.mark.parametrize(
    ("weights", "dtype", "cache"),
    [(jnp.float32, jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16, jnp.float32)],
    ids=["float32 with bfloat16 cache", "bfloat16 with float32 cache"],
)
def test_c21_cache_of_another_dtype(weights, dtype, cache):
    made = Sampler(make_model(weights), slots=2, max_length=64, dtype=dtype, cache_dtype=cache, eos_token_id=())
    params = SamplingParams(temperature=0.0, max_new_tokens=8)
    assert made.generate([[5, 9, 12]], params)[0].token_ids[:5].tolist() == [10, 12, 10, 19, 46]
    assert len(made.generate([[5, 9, 12]] * 2, params)) == 2
    assert {x.dtype for layer in made.engine._caches for x in layer} == {jnp.dtype(cache)}


def test_c21_what_does_not_fit_raises_before_anything_runs():
    made = Sampler(fixture_t(), slots=1, max_length=8)
    with pytest.raises(ValueError, match="prompt 1 has 3 tokens, which with 8 new ones is more than max_length 8"):
        made.generate([[5], [5, 9, 12]], [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=8)])
    for prompts, message in (
        ([[]], "prompt 0 is empty"),
        ([[64]], "outside the vocabulary"),
        ([[1] * 8], "max_length"),
    ):
        with pytest.raises(ValueError, match=message):
            made.stream(prompts)
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
        made.stream([[1]], [GREEDY] * 2)
    with pytest.raises(ValueError, match="stop_strings need the text"):
        made.stream([[1]], SamplingParams(stop_strings=["."]))
    with pytest.raises(ValueError, match="num_generations is 0"):
        made.stream([[1]], num_generations=0)
    assert [program.kind for program in made.engine.programs.compiled] == ["weights"]


def test_sizes_and_dtypes_that_cannot_work():
    for given, message in (
        ({"slots": 0}, "slots is 0"),
        ({"max_length": 2000}, "more than the model's 1024 positions"),
        ({"dtype": jnp.float16}, "dtype is float16"),
        ({"cache_dtype": jnp.int32}, "cache_dtype is int32"),
        ({"eos_token_id": 64}, "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampler(fixture_t(), **given)


def test_a_request_gives_the_same_completion_whatever_else_is_generated(sampler, wide):
    """Alone, among others, after a refill, in a sampler of other slots and calls, and a second time."""
    together = wide.generate(PROMPTS, MIXED, num_generations=3)
    assert [len(c.token_ids) for c in together[::3]] == [params.max_new_tokens for params in MIXED]
    for _ in range(2):
        refilled = sampler.generate(PROMPTS[::-1], MIXED[::-1], num_generations=3)
        assert sorted(ids(refilled)) == sorted(ids(together))
    for number in range(5):
        alone = sampler.generate(PROMPTS[number : number + 1], MIXED[number], num_generations=2)
        assert ids(alone) == ids(together[3 * number : 3 * number + 2])
        for one, other in zip(alone, together[3 * number :], strict=False):
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
    assert ids(together[:3])[0] != ids(together[:3])[1] != ids(together[:3])[2]


def test_without_a_seed_completions_differ(wide):
    assert len({tuple(c.token_ids) for c in wide.generate([[5, 9, 12]] * 2, SamplingParams(max_new_tokens=9), 2)}) == 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_are_those_of_the_score_step(wide, temperature):
    params = SamplingParams(temperature=temperature, top_k=20, max_new_tokens=40, seed=5)
    done = wide.generate(PROMPTS, params)
    samples = []
    for prompt, completion in zip(PROMPTS, done, strict=True):
        tokens = np.concatenate([np.array(prompt, np.int32), completion.token_ids])
        samples.append(Sample(tokens, np.arange(len(tokens)) >= len(prompt)))
    row = concat_rows(samples)
    batch = make_batch([row], ShapeSet.from_setting("auto").classify([row]))
    scored = make_score_step(fixture_t().config, temperature=temperature)(model_params(fixture_t()), batch)[0]
    logps = np.concatenate([completion.logps for completion in done])
    np.testing.assert_allclose(logps, scored[0, : len(logps)], atol=1e-5)
    assert all((c.sampled_logps >= c.logps - 1e-5).all() for c in done)


def test_ends_at_the_eos_ids_and_at_given_ids(sampler):
    tokens = GOLDEN["fixture T"][0]["tokens"]  # 10 12 10 19 46 59 ...
    params = SamplingParams(temperature=0.0, stop_token_ids=[46], max_new_tokens=9)
    (done,) = sampler.generate([[5, 9, 12]], params)
    assert (done.token_ids.tolist(), done.finish_reason, done.stop) == (tokens[:5], "stop", 46)
    held = SamplingParams(temperature=0.0, stop_token_ids=[46, 10], max_new_tokens=9, min_new_tokens=3)
    (done,) = sampler.generate([[5, 9, 12]], held)
    assert not {46, 10} & set(done.token_ids[:3].tolist())
    (done,) = sampler.generate([[5, 9, 12]], SamplingParams(temperature=0.0))
    assert (len(done.token_ids), done.finish_reason) == (117, "length")  # as many as max_length holds


def test_all_eos_ids_of_the_generation_config_count(tmp_path):
    save_pretrained(fixture_t(), tmp_path)
    assert Sampler(tmp_path, slots=1, max_length=32).eos_token_ids == {1}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [59, 19]}', encoding="utf-8")
    made = Sampler(tmp_path, slots=1, max_length=32)
    (done,) = made.generate([[5, 9, 12]], SamplingParams(temperature=0.0))
    assert (made.eos_token_ids, done.stop, len(done.token_ids)) == ({19, 59}, 19, 4)
    (tmp_path / "generation_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="is no JSON object"):
        Sampler(tmp_path, slots=1, max_length=32)


class Letters:
    """A tokenizer of which token i is the letter i."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(chr(0x41 + token) for token in ids)


def test_stop_strings_end_at_the_token_that_completes_them(sampler):
    tokens = GOLDEN["fixture T"][0]["tokens"]
    text = Letters().decode(tokens, False)
    sampler.tokenizer = Letters()
    params = SamplingParams(temperature=0.0, stop_strings=["no", text[3:7]], max_new_tokens=20)
    (done,) = sampler.generate([[5, 9, 12]], params)
    assert (done.token_ids.tolist(), done.finish_reason, done.stop) == (tokens[:7], "stop", text[3:7])


def test_stream_gives_what_ends_first_first(wide):
    lengths = [17, 3, 30, 2, 9]
    params = [SamplingParams(seed=1, max_new_tokens=length) for length in lengths]
    order = [completion.prompt_index for completion in wide.stream(PROMPTS, params)]
    assert order == [3, 1, 4, 0, 2]


def test_new_tokens_are_told_after_every_call(wide):
    told: dict[tuple[int, int], list[int]] = {}

    def listen(prompt: int, generation: int, tokens: list[int]) -> None:
        assert 1 <= len(tokens) <= 8
        told.setdefault((prompt, generation), []).extend(tokens)

    for done in wide.stream(PROMPTS, SamplingParams(seed=1, max_new_tokens=19), 2, on_tokens=listen):
        assert told.pop((done.prompt_index, done.generation_index)) == done.token_ids.tolist()
    assert told == {}


def test_a_second_stream_waits_for_the_first(sampler):
    first = sampler.stream(PROMPTS, GREEDY)
    next(first)
    with pytest.raises(RuntimeError, match="is unfinished"):
        sampler.generate([[5]], GREEDY)
    first.close()
    assert ids(sampler.generate([[5, 9, 12]], GREEDY)) == [GOLDEN["fixture T"][0]["tokens"]]


def test_new_weights_between_calls_are_stamped_and_prompts_prefilled_again(sampler):
    old, new = model_params(fixture_t()), jax.tree.map(lambda x: x * 1.1, model_params(fixture_t()))
    lengths = [8, 40]
    params = [SamplingParams(temperature=0.0, max_new_tokens=length) for length in lengths]
    prompt = [7, 7, 20, 31, 2, 14, 3, 8]
    sampler.update_params(new, 4)
    fresh = sampler.generate([prompt], params[0])[0]
    assert fresh.versions.tolist() == [4] * 8
    sampler.update_params(old, 5)
    before = sampler.generate([prompt], params[1])[0]
    try:
        stream = sampler.stream([prompt, prompt], params, num_generations=2)
        first = next(stream)
        sampler.update_params(new, 6)
        jax.tree.map(lambda x: x.delete(), new)  # as a train step that donates its state
        rest = list(stream)
    finally:
        sampler.update_params(old, 7)
    assert set(first.versions.tolist()) == {5}
    late = [c for c in rest if set(c.versions.tolist()) == {6}]
    assert len(late) == 2
    for completion in late:
        assert completion.token_ids[:8].tolist() == fresh.token_ids.tolist()
        np.testing.assert_allclose(completion.logps[:8], fresh.logps, atol=1e-5)
    assert fresh.token_ids.tolist() != before.token_ids[:8].tolist()


def test_a_running_completion_goes_on_with_the_new_weights():
    made = Sampler(fixture_t(), slots=2, max_length=64, eos_token_id=(), tokens_per_call=4)
    params = [SamplingParams(temperature=0.0, max_new_tokens=length) for length in (4, 20)]
    alone = made.generate([[7, 7, 20]], params[1])[0]
    stream = made.stream([[5], [7, 7, 20]], params)
    next(stream)
    made.update_params(jax.tree.map(lambda x: x * 1.3, model_params(fixture_t())), 1)
    (done,) = stream
    assert done.versions.tolist() == [0] * 4 + [1] * 16
    assert done.token_ids[:4].tolist() == alone.token_ids[:4].tolist()
    assert np.abs(done.logps[4:] - alone.logps[4:]).max() > 0.01


def test_each_distinct_prompt_is_prefilled_once(sampler):
    calls = sampler.engine.programs.calls
    before = calls["prefill", 128]
    prompts = [[5, 9, 12, 3], [5, 9], [5, 9, 12, 3]]
    sampler.generate(prompts, SamplingParams(max_new_tokens=4, seed=1), num_generations=5)
    # Two slots: the first prompt's ten completions start in five refills from one prefilled row, then the second's.
    assert calls["prefill", 128] - before == 2


def test_logits_that_are_not_finite_are_said(sampler):
    params = model_params(fixture_t())
    sampler.update_params(jax.tree.map(lambda x: x * jnp.nan, params), 8)
    with pytest.raises(FloatingPointError, match="prompt 0 are not finite"):
        sampler.generate([[5, 9]], SamplingParams(max_new_tokens=3))
    sampler.update_params(params, 9)
    assert ids(sampler.generate([[5, 9, 12]], GREEDY)) == [GOLDEN["fixture T"][0]["tokens"]]
