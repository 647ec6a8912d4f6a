"""`Sampler`: completions of prompts with static shapes and continuous batching (DESIGN.md section 9)."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import load_pretrained, resolve_model
from jaxtrl.model.qwen3 import Qwen3, check_input_ids, model_params
from jaxtrl.rollout.decoding import Marks, SlotInputs
from jaxtrl.rollout.engine import LADDER, Copy, Engine, Prefilled, prompt_row
from jaxtrl.rollout.requests import Completion, Request, SamplingParams
from jaxtrl.rollout.sampling import Controls

ROW_TOKENS = 1024  # of prompts that are prefilled together; more for a single longer prompt
OnTokens = Callable[[int, int, list[int]], None]
IDLE = SamplingParams(temperature=0.0)  # of a slot that holds nothing


class Sampler:
    """Generates completions, `slots` at a time, each of at most `max_length` tokens with its prompt.

    `model` is a `Qwen3`, a checkpoint folder or a hub id. `dtype` (float32, bfloat16) is that of the computation,
    `cache_dtype` that of keys and values (default: `dtype`). A device call decodes `tokens_per_call` tokens in every
    slot; between calls finished slots are refilled. Completions end at `eos_token_id` (default: that of a folder's
    generation_config.json, else of the config; one id, several, or ()). Stop strings need the `tokenizer`. Nothing is
    compiled after the first use of a shape (`engine.programs` counts), or at all after `warm_up`. Raises ValueError for
    sizes or dtypes that cannot work.
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
        self.eos_token_ids = _eos_ids(eos_token_id, folder, model.config)
        cache_dtype = dtype if cache_dtype is None else cache_dtype
        self.engine = Engine(model.config, model_params(model), slots, tokens_per_call, dtype, cache_dtype)
        self._running = False
        self._kept: dict[tuple[int, ...], tuple[Prefilled, int]] = {}  # prompt -> its row and where it starts there

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
        return self._run(self._requests(prompts, params, num_generations), on_tokens)

    def update_params(self, params: Any, version: int) -> None:
        """Use these parameters (`model_params`) from the next device call on, also in the middle of a stream.

        Running completions go on with the new weights on the keys and values that they have; each token carries the
        version it was drawn with. A shared prompt is prefilled again for completions that start later.
        """
        self.engine.load(params)
        self.version = version
        self._kept.clear()

    def warm_up(self) -> None:
        """Compile every program that requests of up to max_length tokens can need, in threads; returns when all are."""
        self._check_idle()
        self.engine.reserve(self.max_length)
        self.engine.warm_up(self._row_tokens())

    def _check_idle(self) -> None:
        if self._running:
            raise RuntimeError("a stream of this sampler is unfinished: exhaust or close it first")

    def _row_tokens(self) -> int:
        """The longest row of prompts that is prefilled at once."""
        longest = self.max_length - 1
        return LADDER.token_class(max(longest, min(ROW_TOKENS, self.engine.slots * longest)))

    def _requests(self, prompts, params, num_generations: int) -> list[Request]:
        """All requests, those of equal prompts beside each other so that each prompt is prefilled once."""
        _check_sizes(num_generations=num_generations)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one for all or one for each")
        groups: dict[tuple[int, ...], list[Request]] = {}
        for number, (ids, one) in enumerate(zip(prompts, each, strict=True)):
            prompt = tuple(int(token) for token in ids)
            limit, stop_ids = self._limit(number, prompt, one), self._stop_ids(one)
            decode = self._decoder() if one.stop_strings else None
            groups.setdefault(prompt, []).extend(
                Request(prompt, (number, generation), one, limit, stop_ids, decode)
                for generation in range(num_generations)
            )
        return [request for group in groups.values() for request in group]

    def _limit(self, number: int, prompt: tuple[int, ...], params: SamplingParams) -> int:
        """The most tokens that a completion may have."""
        if not prompt:
            raise ValueError(f"prompt {number} is empty: a completion needs at least one token to start from")
        check_input_ids(np.asarray(prompt), self.engine.config.vocab_size)
        room = self.max_length - len(prompt)
        wanted = params.max_new_tokens or max(1, params.min_new_tokens)
        if wanted > room:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which with {wanted} new ones is more than max_length "
                f"{self.max_length}: raise max_length, or lower max_new_tokens"
            )
        return params.max_new_tokens or room

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        check_input_ids(np.asarray(params.stop_token_ids, np.int64), self.engine.config.vocab_size)
        return self.eos_token_ids | frozenset(map(int, params.stop_token_ids))

    def _decoder(self):
        if self.tokenizer is None:
            raise ValueError("stop_strings need the text of the tokens: give Sampler(tokenizer=...)")
        return lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)

    def _run(self, requests: list[Request], on_tokens: OnTokens | None) -> Iterator[Completion]:
        self._check_idle()
        waiting = deque(requests)
        live: list[Request | None] = [None] * self.engine.slots
        self._running = True
        try:
            self.engine.reserve(max((len(request.prompt) + request.limit for request in requests), default=1))
            while waiting or any(live):
                self._refill(live, waiting)
                yield from self._decode(live, on_tokens)
        finally:
            self._running = False
            self._kept.clear()

    def _refill(self, live: list[Request | None], waiting: deque[Request]) -> None:
        """Start requests in the free slots: their prompts into the cache, but for the last token."""
        started = {}
        for slot, request in enumerate(live):
            if request is None and waiting:
                started[slot] = live[slot] = waiting.popleft()
        prompts = dict.fromkeys(request.prompt[:-1] for request in started.values() if len(request.prompt) > 1)
        self._prefill([prompt for prompt in prompts if prompt not in self._kept])
        copies: dict[int, tuple[Prefilled, list[Copy]]] = {}
        for slot, request in started.items():
            if len(request.prompt) > 1:
                row, start = self._kept[request.prompt[:-1]]
                copies.setdefault(id(row), (row, []))[1].append(Copy(start, request.cached, slot))
        for row, some in copies.values():
            self.engine.insert(row, some)
        following = waiting[0].prompt[:-1] if waiting else ()
        self._kept = {prompt: place for prompt, place in self._kept.items() if prompt == following}

    def _prefill(self, prompts: list[tuple[int, ...]]) -> None:
        """Each prompt once, as many together as a row holds."""
        limit = self._row_tokens()
        while prompts:
            count = max(1, int(np.searchsorted(np.cumsum([len(prompt) for prompt in prompts]), limit, side="right")))
            together, prompts = prompts[:count], prompts[count:]
            row, starts = prompt_row(together)
            prefilled = self.engine.prefill(row)
            self._kept.update({p: (prefilled, start) for p, start in zip(together, starts, strict=True)})

    def _decode(self, live: list[Request | None], on_tokens: OnTokens | None) -> Iterator[Completion]:
        """One device call; yields what ends in it and frees its slots."""
        version = self.version
        drawn = self.engine.decode(self._inputs(live))
        ended = []
        for slot, request in enumerate(live):
            if request is None:
                continue
            known = len(request.tokens)
            for step, (token, logp, sampled_logp) in enumerate(zip(*(x[:, slot].tolist() for x in drawn), strict=True)):
                if not np.isfinite(logp):
                    raise FloatingPointError(f"the logits of prompt {request.index[0]} are not finite: check the model")
                completion = request.add(token, logp, sampled_logp, version)
                if completion is not None:
                    ended.append((step, slot, completion))
                    live[slot] = None
                    break
            if on_tokens is not None:
                on_tokens(*request.index, request.tokens[known:])
        yield from (completion for *_, completion in sorted(ended, key=lambda end: end[:2]))

    def _inputs(self, live: list[Request | None]) -> SlotInputs:
        """What the device is told; a slot without a request draws greedily from token 0, and nobody looks."""
        call = self.engine.call
        params = [IDLE if request is None else request.params for request in live]
        controls = Controls(
            *(
                np.array([getattr(p, name) for p in params], np.int32 if name == "top_k" else np.float32)
                for name in Controls._fields
            )
        )
        uniforms = np.stack([np.zeros(call, np.float32) if r is None else r.uniforms(call) for r in live], axis=1)
        token, length = (
            np.array([0 if request is None else getattr(request, name) for request in live], np.int32)
            for name in ("last", "cached")
        )
        filtered = any(request is not None and (request.params.is_filtered or request.held) for request in live)
        return SlotInputs(token, length, uniforms, controls, self._marks(live) if filtered else None)

    def _marks(self, live: list[Request | None]) -> Marks:
        shape = self.engine.slots, self.engine.config.vocab_size
        marks = Marks(np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape[0], np.int32))
        for slot, request in enumerate(live):
            if request is not None:
                marks.seen[slot, [*request.prompt, *request.tokens]] = True
                marks.stops[slot, list(request.stop_ids)] = True
                marks.held[slot] = request.held
        return marks


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}: it must be a whole number from 1 on")


def _eos_ids(given: int | Sequence[int] | None, folder: Path | None, config: Qwen3Config) -> frozenset[int]:
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
