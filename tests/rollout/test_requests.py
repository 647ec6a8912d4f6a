"""Sampling parameters that cannot work; how a completion grows and ends."""

import numpy as np
import pytest

from jaxtrl import SamplingParams
from jaxtrl.rollout.requests import Completion, Request


def request(prompt=(5, 9), generation=0, limit=8, stop_ids=(), decode=None, **params) -> Request:
    return Request(prompt, (0, generation), SamplingParams(**params), limit, frozenset(stop_ids), decode)


def feed(made: Request, tokens: list[int]) -> Completion | None:
    for number, token in enumerate(tokens):
        done = made.add(token, -0.5, -0.25, number)
        if done is not None:
            assert number == len(tokens) - 1
            return done
    return None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_strings", "END"),
        ("stop_strings", [""]),
    ],
)
def test_a_parameter_that_cannot_work_is_one_sentence(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*: it must be") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


def test_more_at_least_than_at_most():
    with pytest.raises(ValueError, match="min_new_tokens 5 is more than max_new_tokens 4"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4)


def test_ends_at_a_stop_token_or_at_the_limit():
    done = feed(request(stop_ids=(1, 2)), [7, 8, 2])
    assert (done.finish_reason, done.stop, done.token_ids.tolist()) == ("stop", 2, [7, 8, 2])
    assert (done.logps.tolist(), done.sampled_logps.tolist()) == ([-0.5] * 3, [-0.25] * 3)
    assert done.versions.tolist() == [0, 1, 2]
    done = feed(request(limit=3), [7, 8, 9])
    assert (done.finish_reason, done.stop, len(done.token_ids)) == ("length", None, 3)


def test_a_stop_string_may_span_tokens_and_waits_for_min_new_tokens():
    text = lambda ids: "".join("abcdefgh"[token] for token in ids)  # noqa: E731
    done = feed(request(decode=text, stop_strings=["xyz", "bcd"]), [0, 1, 2, 3])
    assert (done.finish_reason, done.stop, done.token_ids.tolist()) == ("stop", "bcd", [0, 1, 2, 3])
    assert feed(request(decode=text, stop_strings=["bcd"], min_new_tokens=4), [1, 2, 3]) is None
    assert feed(request(decode=text, stop_strings=["dcb"]), [1, 2, 3]) is None


def test_uniform_numbers_depend_on_seed_prompt_generation_and_token_only():
    whole = request(seed=3).uniforms(24)
    made = request(seed=3)
    np.testing.assert_array_equal(np.concatenate([made.uniforms(n) for n in (5, 1, 8, 10)]), whole)
    others = [request(seed=4), request(seed=3, generation=1), request(seed=3, prompt=(5, 8)), request()]
    for other in others:
        assert np.abs(other.uniforms(24) - whole).max() > 0.1


def test_c28_sampled_ids_are_kept_although_their_text_has_others(qwen3_tokenizer):
    decode = lambda ids: qwen3_tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    for ids, other in (([383, 75, 385], [14990]), ([16, 488, 198, 198, 17], [16, 59454, 17])):
        assert qwen3_tokenizer.encode(decode(ids)) == other
        done = feed(request(decode=decode, stop_strings=[decode(ids)]), ids)
        assert (done.token_ids.tolist(), done.stop) == (ids, decode(ids))
        assert len(done.logps) == len(done.sampled_logps) == len(ids)
