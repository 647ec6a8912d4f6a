"""From prompts to scored groups: what a rollout worker does all day, and what `rollout=inline` does between steps."""

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import model_graphdef
from jaxtrl.rollout.groups import Group, Prompt, RewardFunction
from jaxtrl.rollout.pacing import group_seed
from jaxtrl.rollout.requests import Completion, SamplingParams
from jaxtrl.rollout.sampler import Sampler
from jaxtrl.rollout.scoring import ScoringThreads, score


@dataclass(frozen=True)
class RolloutSetup:
    """How groups are sampled and scored, wherever that happens; it can be pickled if its functions and tokenizer can.

    `tokenizer` needs `decode(ids, skip_special_tokens=...)` only. The seed of `params` is not used: `seed` is that of
    the run, `order_seed` that of the order of its prompts. `max_inflight` (completions; None: slots and one group more)
    is how many may be under way at a time, those that wait for a slot included.
    """

    config: Qwen3Config
    reward_funcs: Sequence[RewardFunction]
    tokenizer: Any
    params: SamplingParams
    max_length: int
    num_generations: int = 8
    slots: int = 8
    tokens_per_call: int = 8
    dtype: str = "float32"
    cache_dtype: str | None = None
    eos_token_id: int | Sequence[int] | None = None
    seed: int = 42
    order_seed: int = 42
    max_inflight: int | None = None
    scoring_threads: int = 4
    compile_cache: str = "auto"
    donate: bool = True


class Task(NamedTuple):
    """A group to sample: number `number` of the run, or of an evaluation, which goes first."""

    number: int
    prompt: Prompt
    num_generations: int
    evaluation: bool = False


class Finished(NamedTuple):
    """A task that is done."""

    evaluation: bool
    group: Group


class _Open(NamedTuple):
    """A group in the making."""

    task: Task
    admitted: float
    completions: list[Completion]


class GroupProducer:
    """Samples and scores groups on one device, `worker` being its number.

    `put` tasks, then call `advance` again and again. `counters` only grow: tokens, completions, groups, failed
    completions, and seconds of decoding and scoring.
    """

    def __init__(self, setup: RolloutSetup, params: Any, version: int, worker: int = 0):
        model = nnx.merge(model_graphdef(setup.config), jax.tree.map(jnp.asarray, params))
        self.setup, self.worker = setup, worker
        self.sampler = Sampler(
            model,
            slots=setup.slots,
            max_length=setup.max_length,
            dtype=setup.dtype,
            cache_dtype=setup.cache_dtype,
            tokens_per_call=setup.tokens_per_call,
            eos_token_id=setup.eos_token_id,
            tokenizer=setup.tokenizer,
            donate=setup.donate,
        )
        self.sampler.version = version
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._session = self.sampler.open()
        self._scoring = ScoringThreads(setup.scoring_threads)
        self._tasks: deque[Task] = deque()
        self._first: deque[Task] = deque()  # those of an evaluation
        self._open: dict[int, _Open] = {}
        self._opened = 0
        self._reported: set[str] = set()  # reward functions that have raised

    @property
    def idle(self) -> bool:
        """Nothing waits, is sampled or is scored."""
        return not (self._tasks or self._first or self._session.pending or self._scoring.pending)

    @property
    def inflight(self) -> int:
        """Completions under way."""
        return self._session.pending

    def put(self, task: Task) -> None:
        (self._first if task.evaluation else self._tasks).append(task)

    def update_params(self, params: Any, version: int) -> None:
        """Go on with these weights from the next token on."""
        self.sampler.update_params(params, version)

    def advance(self, wait: float) -> list[Finished]:
        """Admit tasks, make one device call, and return the groups that are scored.

        Waits up to `wait` seconds for scores where there is nothing to sample. Raises what a reward function raised for
        all completions of a group, or for a wrong result.
        """
        self._admit()
        start = time.perf_counter()
        completions = self._session.step()
        if completions or self._session.pending:
            self.counters["decode_seconds"] += time.perf_counter() - start
        for completion in completions:
            self._add(completion)
        return [self._count(*done) for done in self._scoring.collect(0 if self._session.pending else wait)]

    def close(self) -> None:
        self._session.close()
        self._scoring.close()

    def _admit(self) -> None:
        setup = self.setup
        while tasks := self._first or self._tasks:
            generations = tasks[0].num_generations
            most = setup.slots + generations if setup.max_inflight is None else setup.max_inflight
            if self._session.pending and self._session.pending + generations > most:
                return
            task = tasks.popleft()
            seed = group_seed(setup.seed, task.number, task.evaluation)
            params = dataclasses.replace(setup.params, seed=seed)
            self._session.add(task.prompt.ids, params, generations, key=self._opened)
            self._open[self._opened] = _Open(task, time.time(), [])
            self._opened += 1

    def _add(self, completion: Completion) -> None:
        self.counters["completions"] += 1
        self.counters["tokens"] += len(completion.token_ids)
        key = completion.prompt_index
        made = self._open[key]
        made.completions.append(completion)
        if len(made.completions) == made.task.num_generations:
            del self._open[key]
            finished = time.time()
            self._scoring.submit(lambda: self._score(made, finished))

    def _count(self, finished: Finished, seconds: float) -> Finished:
        self.counters["groups"] += 1
        self.counters["failed"] += int(finished.group.failed.sum())
        self.counters["score_seconds"] += seconds
        return finished

    def _score(self, made: _Open, finished: float) -> tuple[Finished, float]:
        """The scored group and the seconds it took; runs in a thread."""
        (number, prompt, _, evaluation), start = made.task, time.perf_counter()
        completions = tuple(sorted(made.completions, key=lambda completion: completion.generation_index))
        ids = [completion.token_ids.tolist() for completion in completions]
        texts = tuple(self.setup.tokenizer.decode(one, skip_special_tokens=True) for one in ids)
        rewards, failed = score(self.setup.reward_funcs, prompt.prompt, texts, ids, prompt.columns, self._reported)
        group = Group(
            number=number,
            row=prompt.row,
            prompt_ids=list(prompt.ids),
            completions=completions,
            texts=texts,
            rewards=rewards,
            failed=failed,
            admitted=made.admitted,
            finished=finished,
            scored=time.time(),
            worker=self.worker,
        )
        return Finished(evaluation, group), time.perf_counter() - start


def plain_tokenizer(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside a fast tokenizer of Transformers, where the two decode alike, else `tokenizer`.

    A worker that is sent this one need not import Transformers.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return tokenizer if inner is None or tokenizer.clean_up_tokenization_spaces else inner
