"""`Session`: the open queue of a sampler. Requests come at any time, and every step is one call of the device."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrl.rollout.decoding import Marks, SlotInputs
from jaxtrl.rollout.engine import Copy, Prefilled, prompt_row
from jaxtrl.rollout.requests import Completion, Request, SamplingParams
from jaxtrl.rollout.sampling import Controls

if TYPE_CHECKING:
    from jaxtrl.rollout.sampler import Sampler

OnTokens = Callable[[int, int, list[int]], None]
IDLE = SamplingParams(temperature=0.0)  # of a slot that holds nothing


class Session:
    """Made by `Sampler.open`. Completions start in the order in which they are added, as slots become free.

    Those of one prompt should be added together: a prompt is prefilled once for the completions that start one after
    the other. `close`, or use it as a context manager; completions that have not ended are then gone.
    """

    def __init__(self, sampler: "Sampler", length: int):
        self.length = length
        self._sampler, self._engine = sampler, sampler.engine
        self._engine.reserve(length)
        self._waiting: deque[Request] = deque()
        self._live: list[Request | None] = [None] * self._engine.slots
        self._added = 0
        self._kept: dict[tuple[int, ...], tuple[Prefilled, int]] = {}  # prompt -> its row and where it starts there

    @property
    def pending(self) -> int:
        """Completions that are added and have not ended."""
        return len(self._waiting) + sum(request is not None for request in self._live)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        num_generations: int = 1,
        key: int | None = None,
    ) -> None:
        """Ask for `num_generations` completions of a prompt. `params` is for all of them, or one for each.

        Their `prompt_index` is `key` (default: the number of calls before this one). Raises ValueError for an empty
        prompt, an id outside the vocabulary, or a prompt that does not fit the session's length with its
        max_new_tokens; RuntimeError where the session is closed.
        """
        self._check_open()
        key = self._added if key is None else key
        self.extend(self._sampler.requests(prompt_ids, params, num_generations, key, self.length))
        self._added += 1

    def extend(self, requests: Iterable[Request]) -> None:
        """Add requests that are checked already (`Sampler.requests`)."""
        self._waiting.extend(requests)

    def step(self, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Fill free slots, make one device call, and return what ended in it, first ended first.

        `on_tokens(prompt_index, generation_index, token_ids)` is told the new tokens of each completion. Without
        pending completions nothing is called. Raises FloatingPointError where the model's logits are not finite.
        """
        self._check_open()
        if not self.pending:
            return []
        self._refill()
        return self._decode(on_tokens)

    def close(self) -> None:
        """Free the sampler for another session."""
        self._waiting.clear()
        self._live = []
        self._kept.clear()
        self._sampler.release(self)

    def forget_prompts(self) -> None:
        """Prefill prompts again: the weights are others."""
        self._kept.clear()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._live:
            raise RuntimeError("this session is closed: open another one")

    def _refill(self) -> None:
        """Start requests in the free slots: their prompts into the cache, but for the last token."""
        started = {}
        for slot, request in enumerate(self._live):
            if request is None and self._waiting:
                started[slot] = self._live[slot] = self._waiting.popleft()
        prompts = dict.fromkeys(request.prompt[:-1] for request in started.values() if len(request.prompt) > 1)
        self._prefill([prompt for prompt in prompts if prompt not in self._kept])
        copies: dict[int, tuple[Prefilled, list[Copy]]] = {}
        for slot, request in started.items():
            if len(request.prompt) > 1:
                row, start = self._kept[request.prompt[:-1]]
                copies.setdefault(id(row), (row, []))[1].append(Copy(start, request.cached, slot))
        for row, some in copies.values():
            self._engine.insert(row, some)
        following = self._waiting[0].prompt[:-1] if self._waiting else ()
        self._kept = {prompt: place for prompt, place in self._kept.items() if prompt == following}

    def _prefill(self, prompts: list[tuple[int, ...]]) -> None:
        """Each prompt once, as many together as a row holds."""
        limit = self._sampler.row_tokens
        while prompts:
            count = max(1, int(np.searchsorted(np.cumsum([len(prompt) for prompt in prompts]), limit, side="right")))
            together, prompts = prompts[:count], prompts[count:]
            row, starts = prompt_row(together)
            prefilled = self._engine.prefill(row)
            self._kept.update({p: (prefilled, start) for p, start in zip(together, starts, strict=True)})

    def _decode(self, on_tokens: OnTokens | None) -> list[Completion]:
        """One device call; what ends in it frees its slot."""
        version = self._sampler.version
        drawn = self._engine.decode(self._inputs())
        ended = []
        for slot, request in enumerate(self._live):
            if request is None:
                continue
            known = len(request.tokens)
            for step, (token, logp, sampled_logp) in enumerate(zip(*(x[:, slot].tolist() for x in drawn), strict=True)):
                if not np.isfinite(logp):
                    raise FloatingPointError(f"the logits of prompt {request.index[0]} are not finite: check the model")
                completion = request.add(token, logp, sampled_logp, version)
                if completion is not None:
                    ended.append((step, slot, completion))
                    self._live[slot] = None
                    break
            if on_tokens is not None:
                on_tokens(*request.index, request.tokens[known:])
        return [completion for *_, completion in sorted(ended, key=lambda end: end[:2])]

    def _inputs(self) -> SlotInputs:
        """What the device is told; a slot without a request draws greedily from token 0, and nobody looks."""
        call, live = self._engine.call, self._live
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
        return SlotInputs(token, length, uniforms, controls, self._marks() if filtered else None)

    def _marks(self) -> Marks:
        shape = self._engine.slots, self._engine.config.vocab_size
        marks = Marks(np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape[0], np.int32))
        for slot, request in enumerate(self._live):
            if request is not None:
                marks.seen[slot, [*request.prompt, *request.tokens]] = True
                marks.stops[slot, list(request.stop_ids)] = True
                marks.held[slot] = request.held
        return marks
