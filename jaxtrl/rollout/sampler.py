"""`Sampler`: completions of prompts with static shapes and continuous batching (DESIGN.md section 9)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import load_pretrained, resolve_model
from jaxtrl.model.qwen3 import Qwen3, check_input_ids, model_params
from jaxtrl.rollout.engine import LADDER, Engine
from jaxtrl.rollout.requests import Completion, Request, SamplingParams
from jaxtrl.rollout.session import OnTokens, Session

ROW_TOKENS = 1024  # of prompts that are prefilled together; more for a single longer prompt


class Sampler:
    """Generates completions, `slots` at a time, each of at most `max_length` tokens with its prompt.

    `model` is a `Qwen3`, a checkpoint folder or a hub id. `dtype` (float32, bfloat16) is that of the computation,
    `cache_dtype` that of keys and values (default: `dtype`). A device call decodes `tokens_per_call` tokens in every
    slot; between calls finished slots are refilled. Completions end at `eos_token_id` (default: that of a folder's
    generation_config.json, else of the config; one id, several, or ()). Stop strings need the `tokenizer`. With
    `donate` the cache is written in place. Nothing is compiled after the first use of a shape (`engine.programs`
    counts), or at all after `warm_up`. Raises ValueError for sizes or dtypes that cannot work.
    """

    def __init__(
        self,
        model: Qwen3 | str | Path,
        *,
        slots: int = 8,
        max_length: int = 1024,
        dtype: DTypeLike = jnp.float32,
        cache_dtype: DTypeLike | None = None,
        tokens_per_call: int = 8,
        eos_token_id: int | Sequence[int] | None = None,
        tokenizer: Any = None,
        donate: bool = True,
    ):
        _check_sizes(slots=slots, max_length=max_length, tokens_per_call=tokens_per_call)
        for name, kind in (("dtype", dtype), ("cache_dtype", dtype if cache_dtype is None else cache_dtype)):
            if jnp.dtype(kind) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
                raise ValueError(f"{name} is {jnp.dtype(kind)}: devices compute in float32 or bfloat16")
        folder = None
        if not isinstance(model, Qwen3):
            folder = resolve_model(model)
            model = load_pretrained(folder)
        limit = model.config.max_position_embeddings
        if max_length > limit:
            raise ValueError(f"max_length {max_length} is more than the model's {limit} positions: lower it")
        self.max_length, self.tokenizer, self.version = max_length, tokenizer, 0
        self.eos_token_ids = stop_ids(eos_token_id, folder, model.config)
        cache_dtype = dtype if cache_dtype is None else cache_dtype
        self.engine = Engine(
            model.config, model_params(model), slots, tokens_per_call, dtype, cache_dtype, donate=donate
        )
        self._session: Session | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        num_generations: int = 1,
    ) -> list[Completion]:
        """`num_generations` completions of each prompt (token ids), in the order of the prompts; see `stream`."""
        done = self.stream(prompts, params, num_generations)
        return sorted(done, key=lambda completion: (completion.prompt_index, completion.generation_index))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        num_generations: int = 1,
        on_tokens: OnTokens | None = None,
    ) -> Iterator[Completion]:
        """The completions in the order in which they end. `params` is for all prompts, or one per prompt.

        `on_tokens(prompt_index, generation_index, token_ids)` is told the new tokens of each completion after each
        device call.

        Raises ValueError before anything runs: an empty prompt, an id outside the vocabulary, or a prompt that does not
        fit max_length with its max_new_tokens. While it runs, raises RuntimeError if another stream of this sampler is
        unfinished, FloatingPointError where the model's logits are not finite.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one for all or one for each")
        requests = [
            request
            for number, (ids, one) in enumerate(zip(prompts, each, strict=True))
            for request in self.requests(ids, one, num_generations, number, self.max_length)
        ]
        return self._run(requests, on_tokens)

    def open(self, length: int | None = None) -> Session:
        """A queue for requests that come one after the other, of at most `length` tokens each with their prompts.

        Raises ValueError if `length` (default: max_length) is more than max_length, RuntimeError if a stream or another
        session of this sampler is unfinished.
        """
        length = self.max_length if length is None else length
        _check_sizes(length=length)
        if length > self.max_length:
            raise ValueError(f"length {length} is more than the sampler's max_length {self.max_length}")
        self._check_idle()
        self._session = Session(self, length)
        return self._session

    def release(self, session: Session) -> None:
        """Called by a session that is closed."""
        if self._session is session:
            self._session = None

    def update_params(self, params: Any, version: int) -> None:
        """Use these parameters (`model_params`) from the next device call on, also in the middle of a stream.

        Running completions go on with the new weights on the keys and values that they have; each token carries the
        version it was drawn with. A shared prompt is prefilled again for completions that start later.
        """
        self.engine.load(params)
        self.version = version
        if self._session is not None:
            self._session.forget_prompts()

    def warm_up(self) -> None:
        """Compile every program that requests of up to max_length tokens can need, in threads; returns when all are."""
        self._check_idle()
        self.engine.reserve(self.max_length)
        self.engine.warm_up(self.row_tokens)

    @property
    def row_tokens(self) -> int:
        """The longest row of prompts that is prefilled at once."""
        longest = self.max_length - 1
        return LADDER.token_class(max(longest, min(ROW_TOKENS, self.engine.slots * longest)))

    def requests(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | Sequence[SamplingParams],
        num_generations: int,
        number: int,
        length: int,
    ) -> list[Request]:
        """The completions of prompt `number`, checked; `params` is for all of them, or one for each."""
        _check_sizes(num_generations=num_generations)
        each = [params] * num_generations if isinstance(params, SamplingParams) else list(params)
        if len(each) != num_generations:
            raise ValueError(f"prompt {number} has {len(each)} SamplingParams for {num_generations} completions")
        prompt = tuple(int(token) for token in prompt_ids)
        if not prompt:
            raise ValueError(f"prompt {number} is empty: a completion needs at least one token to start from")
        check_input_ids(np.asarray(prompt), self.engine.config.vocab_size)
        return [
            Request(
                prompt,
                (number, generation),
                one,
                _limit(number, len(prompt), one, length),
                self._stop_ids(one),
                self._decoder() if one.stop_strings else None,
            )
            for generation, one in enumerate(each)
        ]

    def _check_idle(self) -> None:
        if self._session is not None:
            raise RuntimeError("a stream or session of this sampler is unfinished: exhaust or close it first")

    def _run(self, requests: list[Request], on_tokens: OnTokens | None) -> Iterator[Completion]:
        """Those of equal prompts one after the other, so that each prompt is prefilled once."""
        if not requests:
            return
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            groups.setdefault(request.prompt, []).append(request)
        with self.open(max(len(request.prompt) + request.limit for request in requests)) as session:
            session.extend(request for group in groups.values() for request in group)
            while session.pending:
                yield from session.step(on_tokens)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        check_input_ids(np.asarray(params.stop_token_ids, np.int64), self.engine.config.vocab_size)
        return self.eos_token_ids | frozenset(map(int, params.stop_token_ids))

    def _decoder(self):
        if self.tokenizer is None:
            raise ValueError("stop_strings need the text of the tokens: give Sampler(tokenizer=...)")
        return lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)


def _limit(number: int, prompt: int, params: SamplingParams, length: int) -> int:
    """The most tokens that a completion of a prompt of `prompt` tokens may have, of `length` for both."""
    room = length - prompt
    wanted = params.max_new_tokens or max(1, params.min_new_tokens)
    if wanted > room:
        raise ValueError(
            f"prompt {number} has {prompt} tokens, which with {wanted} new ones is more than max_length "
            f"{length}: raise max_length, or lower max_new_tokens"
        )
    return params.max_new_tokens or room


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}: it must be a whole number from 1 on")


def stop_ids(given: int | Sequence[int] | None, folder: Path | None, config: Qwen3Config) -> frozenset[int]:
    """The ids that end a completion: those given, else generation_config.json's, else config.json's."""
    file = None if folder is None else folder / "generation_config.json"
    if given is None and file is not None and file.is_file():
        try:
            given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, AttributeError) as error:
            raise ValueError(f"{file} is no JSON object ({error}): repair or remove it") from None
    given = config.eos_token_id if given is None else given
    ids = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    check_input_ids(np.asarray(ids, np.int64), config.vocab_size)
    return frozenset(int(token) for token in ids)
