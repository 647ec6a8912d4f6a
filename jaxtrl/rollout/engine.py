"""The device side of generation: cache, weights and counted programs, and prompts as token rows."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Linear
from jaxtrl.rollout.decoding import (
    BLOCK,
    KeyValue,
    Marks,
    PromptRow,
    SlotInputs,
    decode,
    insert,
    make_weights,
    prefill,
)
from jaxtrl.rollout.sampling import Controls, Drawn
from jaxtrl.rollout.skinny import COMPILER_OPTIONS, SkinnyLinear
from jaxtrl.rows.batch import pad_visible
from jaxtrl.rows.blocks import CountedTables, block_tables
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.compiled import Job, Programs

LADDER = ShapeSet.from_setting("auto")


class Prefilled(NamedTuple):
    """Keys and values of a prompt row, per layer [kv_heads, tokens + BLOCK, head_dim]."""

    tokens: int
    layers: tuple[KeyValue, ...]


class Copy(NamedTuple):
    """Tokens `start` to `start + length` of a prefilled row become those of `slot`."""

    start: int
    length: int
    slot: int


class DecodeShape(NamedTuple):
    """The class of a decode program."""

    columns: int
    filtered: bool


def prompt_row(prompts: Sequence[Sequence[int]]) -> tuple[PromptRow, list[int]]:
    """The prompts, none empty, as one row of a class of the ladder, and where each starts."""
    lengths = [len(prompt) for prompt in prompts]
    ends = np.cumsum(lengths)
    tokens = LADDER.token_class(int(ends[-1]))
    ids, positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    ids[: ends[-1]] = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
    positions[: ends[-1]] = np.concatenate([np.arange(length) for length in lengths])
    visible = pad_visible(np.repeat(ends, lengths), tokens)
    blocks = tokens // BLOCK
    tables = block_tables(visible, BLOCK, max(1, blocks * (blocks - 1) // 2))
    if jax.default_backend() == "cpu":
        tables = CountedTables(*tables)  # unused lanes take no time
    return PromptRow(ids, positions, visible, tables), [int(end - n) for end, n in zip(ends, lengths, strict=True)]


class Engine:
    """The cache of `slots` sequences on the device, the weights, and the programs that work on them.

    Every program is compiled once per shape and counted in `programs`: "weights" one, "prefill" one per token class,
    "insert" one per token class and cache length, "decode" two per cache length. `columns` is 0 until `reserve`.
    On the `platform` "cpu" (default: that in use) products are those of `skinny`. With `donate` the cache is written in
    place, else each call makes another.
    """

    def __init__(
        self,
        config: Qwen3Config,
        params: Any,
        slots: int,
        call: int,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
        platform: str | None = None,
        donate: bool = True,
    ):
        self.config, self.slots, self.call = config, slots, call
        self.dtype, self.cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
        self.columns = 0
        self.programs = Programs()
        cpu = (platform or jax.default_backend()) == "cpu"
        linear = SkinnyLinear if cpu else Linear
        self._make_weights = jax.jit(partial(make_weights, config, self.dtype, linear))
        self._prefill = jax.jit(partial(prefill, config, self.dtype, self.cache_dtype, linear))
        self._insert = jax.jit(insert, donate_argnums=0 if donate else ())
        options = COMPILER_OPTIONS if cpu else None
        step = partial(decode, config, self.dtype, linear)
        self._decode = jax.jit(step, donate_argnums=1 if donate else (), compiler_options=options)
        self._caches: tuple[KeyValue, ...] = ()
        self.load(params)

    def load(self, params: Any) -> None:
        """Use these parameters from the next call on."""
        self.weights = self.programs.call("weights", params["embed_tokens"].dtype.name, self._make_weights, params)

    def reserve(self, length: int) -> None:
        """Columns for sequences of `length` tokens: a class of the ladder, and a block where a last call needs it.

        What the slots hold is lost where that is more than there are. The last call of a sequence begins at most at its
        last token but one, and writes a whole call from there.
        """
        columns = LADDER.token_class(length)
        if length - 2 + self.call > columns:
            columns += -(-self.call // BLOCK) * BLOCK
        if columns > self.columns:
            self._caches = ()  # before the longer ones exist
            self._caches = tuple(KeyValue(self._zeros(columns), self._zeros(columns)) for _ in self.weights.layers)
            self.columns = columns

    def prefill(self, row: PromptRow) -> Prefilled:
        """Keys and values of a row of prompts."""
        tokens = len(row.input_ids)
        return Prefilled(tokens, self.programs.call("prefill", tokens, self._prefill, self.weights, row))

    def insert(self, prefilled: Prefilled, copies: Sequence[Copy]) -> None:
        """Copies prompts of a prefilled row to the start of slots."""
        pieces = [(c.start + i, c.slot, i) for c in copies for i in range(0, c.length, BLOCK)]
        for first in range(0, len(pieces), self.slots):
            some = pieces[first : first + self.slots]
            padded = np.array(some + some[-1:] * (self.slots - len(some)), np.int32)  # the last again: the same values
            shape = prefilled.tokens, self.columns
            self._caches = self.programs.call("insert", shape, self._insert, self._caches, prefilled.layers, padded)

    def decode(self, inputs: SlotInputs) -> Drawn:
        """What is drawn in one call, arrays of the host [k, slots]. Raises ValueError where a write would not fit."""
        if int(inputs.length.max()) + self.call > self.columns:
            raise ValueError(f"{self.call} tokens after {inputs.length.max()} do not fit {self.columns} cache columns")
        shape = DecodeShape(self.columns, inputs.marks is not None)
        self._caches, drawn = self.programs.call("decode", shape, self._decode, self.weights, self._caches, inputs)
        return jax.tree.map(np.asarray, drawn)

    def warm_up(self, row_tokens: int) -> None:
        """Compile all programs for this cache length and for prompt rows of up to `row_tokens` tokens, in threads."""
        self.programs.foresee(self.jobs(row_tokens))
        self.programs.warm_up()

    def jobs(self, row_tokens: int) -> list[Job]:
        """Those programs, with arguments of which only the shapes count."""
        jobs, tokens = [], 0
        caches = jax.tree.map(_abstract, self._caches)
        copies = np.zeros((self.slots, 3), np.int32)
        while tokens < row_tokens:
            row, _ = prompt_row([[0] * (tokens + 1)])
            tokens = len(row.input_ids)
            jobs.append(Job("prefill", tokens, self._prefill, (self.weights, row)))
            prefilled = jax.eval_shape(self._prefill, self.weights, row)
            jobs.append(Job("insert", (tokens, self.columns), self._insert, (caches, prefilled, copies)))
        for filtered in (False, True):
            args = self.weights, caches, self._empty_inputs(filtered)
            jobs.append(Job("decode", DecodeShape(self.columns, filtered), self._decode, args))
        return jobs

    def _zeros(self, columns: int) -> Array:
        shape = self.slots, self.config.num_key_value_heads, columns, self.config.head_dim
        return jax.device_put(np.zeros(shape, self.cache_dtype), may_alias=False)  # what numpy owns cannot be donated

    def _empty_inputs(self, filtered: bool) -> SlotInputs:
        count, vocab = self.slots, self.config.vocab_size
        whole, real = np.zeros(count, np.int32), np.zeros(count, np.float32)
        marks = Marks(np.zeros((count, vocab), bool), np.zeros((count, vocab), bool), whole) if filtered else None
        uniforms = np.zeros((self.call, count), np.float32)
        return SlotInputs(whole, whole, uniforms, Controls(real, whole, real, real, real), marks)


def _abstract(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
