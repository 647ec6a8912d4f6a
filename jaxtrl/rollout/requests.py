"""What a completion is asked for, what comes back, and how it grows token by token (host only)."""

import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a completion are drawn, and when it ends. Raises ValueError for values that cannot work.

    `temperature` 0 takes the most likely token. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off;
    they apply in Transformers' order. A completion has at most `max_new_tokens` tokens (None: as many as the sampler's
    max_length has room for) and neither ends nor has a stop token before `min_new_tokens`. It ends with a token of the
    sampler's eos_token_ids or of `stop_token_ids`, or with the token that completes one of `stop_strings` in its text.
    The same prompt with the same `seed` (None: a new one each time) gives the same completion whatever else is
    generated, up to the rounding of products that are computed in another place of a batch.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    seed: int | None = None

    def __post_init__(self):
        for name, fits, meaning in _RULES:
            value = getattr(self, name)
            if isinstance(value, bool) or not fits(value):
                raise ValueError(f"{name} is {value!r}: it must be {meaning}")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ValueError(f"stop_strings is {self.stop_strings!r}: it must be a list of strings, none empty")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")

    @property
    def is_filtered(self) -> bool:
        """Whether anything but the temperature changes what is drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.repetition_penalty != 1


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 0


def _is_real(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and bool(np.isfinite(float(value)))


_RULES: tuple[tuple[str, Callable[..., bool], str], ...] = (
    ("temperature", lambda x: _is_real(x) and (x == 0 or x >= 1e-3), "0 (greedy) or a number from 0.001 on"),
    ("top_k", _is_count, "a whole number from 0 (off) on"),
    ("top_p", lambda x: _is_real(x) and 0 < x <= 1, "a number above 0 and at most 1 (off)"),
    ("min_p", lambda x: _is_real(x) and 0 <= x <= 1, "a number from 0 (off) to 1"),
    ("repetition_penalty", lambda x: _is_real(x) and x > 0, "a number above 0 (1 is off)"),
    ("max_new_tokens", lambda x: x is None or (_is_count(x) and x > 0), "a whole number from 1 on, or None"),
    ("min_new_tokens", _is_count, "a whole number from 0 on"),
    ("seed", lambda x: x is None or (_is_count(x) and x < 2**64), "a whole number from 0 to 2**64 - 1, or None"),
)


class Completion(NamedTuple):
    """One completion of m tokens. The token that ended it is among them.

    `logps` are log softmax(logits / temperature) (at temperature 0 those of temperature 1), `sampled_logps` those
    under the distribution that was drawn from, after filters and penalty. `versions` are those of the weights of each
    token. `finish_reason` is "stop", with the token id or string as `stop`, or "length".
    """

    prompt_index: int
    generation_index: int
    token_ids: Int32[np.ndarray, " m"]
    logps: Float32[np.ndarray, " m"]
    sampled_logps: Float32[np.ndarray, " m"]
    versions: Int32[np.ndarray, " m"]
    finish_reason: Literal["stop", "length"]
    stop: int | str | None = None


class Request:
    """One completion in the making: its prompt, parameters, uniform numbers, and tokens so far."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        index: tuple[int, int],
        params: SamplingParams,
        limit: int,
        stop_ids: frozenset[int],
        decode: Callable[[list[int]], str] | None,
    ):
        self.prompt, self.index, self.params, self.limit, self.stop_ids = prompt, index, params, limit, stop_ids
        self.tokens: list[int] = []
        self.logps: list[tuple[float, float]] = []
        self.versions: list[int] = []
        self._decode = decode
        # Every token is at least one byte of text: no stop string can reach further back than its bytes.
        self._window = max((len(text.encode()) for text in params.stop_strings), default=0)
        seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        # The prompt is part of the key, so that prompts with one seed are not drawn with the same numbers.
        prompt_key = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        self._rng = np.random.Generator(np.random.Philox(key=np.array([seed, index[1] << 32 | prompt_key], np.uint64)))

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the cache before the next call: all but the last."""
        return len(self.prompt) - 1 + len(self.tokens)

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def held(self) -> int:
        """Tokens for which a stop token is still forbidden."""
        return max(0, self.params.min_new_tokens - len(self.tokens))

    def uniforms(self, count: int) -> Float32[np.ndarray, " count"]:
        """The uniform numbers of the next tokens: token i has the i-th of a stream of its own."""
        return self._rng.random(count, np.float32)

    def add(self, token: int, logp: float, sampled_logp: float, version: int) -> Completion | None:
        """Takes a token; the completion if that ends it."""
        self.tokens.append(token)
        self.logps.append((logp, sampled_logp))
        self.versions.append(version)
        if token in self.stop_ids:
            return self._end("stop", token)
        text = self._stop_string()
        if text is not None:
            return self._end("stop", text)
        return self._end("length", None) if len(self.tokens) == self.limit else None

    def _stop_string(self) -> str | None:
        if self._decode is None or not self._window or self.held:
            return None
        text = self._decode(self.tokens[-self._window :])
        return next((stop for stop in self.params.stop_strings if stop in text), None)

    def _end(self, reason: Literal["stop", "length"], stop: int | str | None) -> Completion:
        logps, sampled = np.array(self.logps, np.float32).T
        tokens, versions = np.array(self.tokens, np.int32), np.array(self.versions, np.int32)
        return Completion(*self.index, tokens, logps, sampled, versions, reason, stop)
