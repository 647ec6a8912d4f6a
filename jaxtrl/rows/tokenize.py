"""From a data set of any format to token ids and loss masks, with an account of every row.

The meaning of options is TRL's (`SFTTrainer._prepare_dataset`). Ids that come in are used as they are: nothing is
decoded and tokenised again.
"""

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher, generate_random_fingerprint
from jaxtyping import Bool, Int
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from jaxtrl.rows import chat, formats
from jaxtrl.rows.encode import (
    CUT_OFF,
    DIVERGED,
    KEPT,
    LOST_REASONING,
    NO_EOS,
    REASONS,
    TRUNCATED,
    Encoder,
    TokenizeOptions,
    check_vocab,
)
from jaxtrl.rows.formats import Format
from jaxtrl.rows.sources import origin_of, quiet_progress

__all__ = ["TokenizeOptions", "TokenizeReport", "check_ids", "show_example", "tokenize_dataset"]

STREAM_ROWS = 64  # rows tokenised at a time from a stream
FEATURES = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))})


@dataclass
class TokenizeReport:
    """What happened to the rows. Of a stream it counts what has been read since the stream was last started."""

    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    truncated: int = 0  # of the rows kept, as all that follows
    tokens: int = 0
    trained_tokens: int = 0  # loss terms: the first token of a row is never one
    longest: int = 0
    diverged: int = 0  # tokenised prompt is not a prefix of prompt + completion; trained from where they part
    without_eos: int = 0  # not truncated, and yet no EOS among the trained tokens
    lost_reasoning: int = 0  # reasoning in the data that the chat template leaves out
    template: str | None = None  # chat template used; None: no conversations
    kept_rows: Int[np.ndarray, "kept"] | None = field(default=None, compare=False)  # their numbers; None of a stream

    @property
    def kept(self) -> int:
        return self.rows - sum(self.dropped.values())

    def add(
        self, outcome: Int[np.ndarray, "n"], length: Int[np.ndarray, "n"], trained: Int[np.ndarray, "n"]
    ) -> Bool[np.ndarray, "n"]:
        """Counts rows; returns which of them are kept."""
        reason, kept = outcome >> 4, outcome >> 4 == KEPT
        self.rows += len(outcome)
        counts = Counter(self.dropped)
        for code in np.unique(reason[~kept]):
            counts[REASONS[int(code)]] += int((reason == code).sum())
        self.dropped = dict(counts)
        flags = outcome[kept] & 15
        self.truncated += int((flags & TRUNCATED > 0).sum())
        self.diverged += int((flags & DIVERGED > 0).sum())
        self.without_eos += int((flags & NO_EOS > 0).sum())
        self.lost_reasoning += int((flags & LOST_REASONING > 0).sum())
        self.tokens += int(length[kept].sum(dtype=np.int64))
        self.trained_tokens += int(trained[kept].sum(dtype=np.int64))
        self.longest = max(self.longest, int(length[kept].max(initial=0)))
        return kept

    def restart(self) -> None:
        self.__dict__.update(vars(TokenizeReport(template=self.template)))

    def check_not_empty(self, max_length: int | None) -> None:
        """Raises ValueError if no row is left, with the reasons."""
        if self.kept:
            return
        if not self.rows:
            raise ValueError("the data set has no rows")
        hint = f"; raise max_length={max_length}" if REASONS[CUT_OFF] in self.dropped else ""
        raise ValueError(f"nothing to train on: all {self.rows:,} rows were dropped ({self._reasons()}){hint}")

    def _reasons(self) -> str:
        return ", ".join(f"{count:,}: {reason}" for reason, count in sorted(self.dropped.items()))

    def summary(self) -> str:
        """One line for the log."""
        dropped = sum(self.dropped.values())
        parts = [f"{self.rows:,} rows read", f"{dropped:,} dropped" + (f" ({self._reasons()})" if dropped else "")]
        parts += [f"{self.truncated:,} truncated", f"{self.tokens:,} tokens", f"{self.trained_tokens:,} trained"]
        for count, what in (
            (self.diverged, "rows whose prompt is tokenised differently before its completion"),
            (self.without_eos, "rows without a trained EOS"),
            (
                self.lost_reasoning,
                "rows whose reasoning the chat template leaves out (chat_template_path=qwen3_training keeps it)",
            ),
        ):
            parts += [f"{count:,} {what}"] if count else []
        return ", ".join(parts) + (f"; chat template: {self.template}" if self.template else "")


def tokenize_dataset(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, TokenizeReport]:
    """Token ids and loss masks of a data set in any of the formats of `formats`.

    Returns:
        A data set with columns `input_ids` (list of int32) and `loss_mask` (list of bool, True: trained; entry 0 is
        False, as nothing precedes it), in the order of the rows, and the report. A stream stays lazy: its rows are
        tokenised as they are read, and the report fills meanwhile.

    Raises:
        ValueError: a row that cannot be used, named by file and line or index; options that do not fit the format;
            no chat template; no row left.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError("the data set has a transform (with_transform); apply it with map() first")
    first = next(iter(dataset.with_format(None)), None)
    if first is None:
        raise ValueError("the data set has no rows")
    columns = list(dataset.column_names or first)
    if formatting_func is not None and "input_ids" in columns:
        raise ValueError("a formatting function does not apply to a data set that has `input_ids` already")
    encoder, report = _plan(dataset, first, columns, tokenizer, options, formatting_func)
    if isinstance(dataset, IterableDataset):
        return _tokenize_stream(dataset, encoder, report), report
    needed = columns if formatting_func else [name for name in encoder.needed() if name in columns]
    with _map_settings(num_proc):
        out = dataset.select_columns(needed).with_format("arrow")
        out = out.map(
            encoder.table,
            batched=True,
            with_indices=True,
            remove_columns=needed,
            num_proc=num_proc,
            desc="Tokenizing",
            new_fingerprint=_fingerprint(dataset, encoder),
        ).with_format(None)
    counted = out.select_columns(["outcome", "length", "trained"]).with_format("numpy")[:]
    kept = report.add(*(np.asarray(counted[name], np.int32) for name in ("outcome", "length", "trained")))
    report.kept_rows = np.flatnonzero(kept)
    report.check_not_empty(options.max_length)
    out = out.remove_columns(["outcome", "length", "trained"])
    return (out if kept.all() else out.select(np.flatnonzero(kept))), report


def _plan(
    dataset: Dataset | IterableDataset,
    first: dict[str, Any],
    columns: list[str],
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    formatting_func: Callable[[dict[str, Any]], str] | None,
) -> tuple[Encoder, TokenizeReport]:
    form: Format = "text" if formatting_func else formats.detect_format(columns, options.dataset_text_field)
    pair = form == "prompt_completion"
    conversational = form in ("messages", "conversations") or (pair and not isinstance(first.get("prompt"), str))
    if options.assistant_only_loss and not conversational:
        raise ValueError(f"assistant_only_loss needs conversations, and the data set's format is {form}")
    if options.completion_only_loss and not pair and not (form == "tokens" and "completion_mask" in columns):
        raise ValueError(f"completion_only_loss needs `prompt` and `completion`, and the data set's format is {form}")
    if form == "tokens" and options.completion_only_loss is None and "completion_mask" in columns:
        raise ValueError(
            "the data set has a `completion_mask`: set completion_only_loss to true (train only where it is 1) or "
            "false (train every token)"
        )
    template = None
    if conversational:
        template = chat.choose_template(
            tokenizer, marked=options.assistant_only_loss, prefix_preserving=options.prefix_preserving
        )
        if options.assistant_only_loss and not tokenizer.is_fast:
            raise ValueError("assistant_only_loss needs a fast tokenizer (tokenizer.json), which knows token offsets")
    encoder = Encoder(
        tokenizer=tokenizer,
        options=options,
        form=form,
        template=template,
        completion_only=pair if options.completion_only_loss is None else options.completion_only_loss,
        eos_token=_eos_token(tokenizer, options.eos_token, needed=form != "tokens" and not conversational),
        features=dataset.features,
        formatting_func=formatting_func,
        origin=origin_of(dataset),
    )
    return encoder, TokenizeReport(template=template.name if template else None)


def _eos_token(tokenizer: PreTrainedTokenizerBase, name: str | None, needed: bool) -> str | None:
    if name is not None and name not in tokenizer.get_vocab():
        raise ValueError(f"eos_token {name!r} is not in the tokenizer's vocabulary")
    token = tokenizer.eos_token if name is None else name
    if needed and token is None:
        raise ValueError("the tokenizer has no EOS token to end rows with; name one with eos_token")
    return token


@contextmanager
def _map_settings(num_proc: int | None) -> Iterator[None]:
    """For workers: no threads of the tokenizer inside them (it would warn and switch them off), and no warning that
    forking a process that has JAX loaded can hang: workers use no JAX."""
    several = num_proc is not None and num_proc > 1
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    with quiet_progress(), warnings.catch_warnings() if several else nullcontext():
        if several:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
            warnings.filterwarnings("ignore", message=r".*multi-threaded, use of fork\(\)", category=DeprecationWarning)
        try:
            yield
        finally:
            if several:
                os.environ.pop("TOKENIZERS_PARALLELISM")
                os.environ.update({} if before is None else {"TOKENIZERS_PARALLELISM": before})


def _fingerprint(dataset: Dataset, encoder: Encoder) -> str:
    """The key of the result in the cache of `datasets`, which exists for data sets that lie in files. Left to itself
    `datasets` would pickle the whole tokenizer for it (seconds), and not notice a change of this code."""
    if not dataset.cache_files:
        return generate_random_fingerprint()
    tokenizer = encoder.tokenizer
    try:
        function = Hasher.hash(encoder.formatting_func)
    except Exception:  # whatever pickling raises on a closure: the result is then simply not found again
        return generate_random_fingerprint()
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    state = (
        dataset._fingerprint,
        encoder.version,
        encoder.options,
        encoder.form,
        encoder.template,
        encoder.completion_only,
    )
    text = repr((state, encoder.eos_token, tokenizer.chat_template, tokenizer.special_tokens_map, function))
    return hashlib.sha256((text + backend + datasets.__version__).encode()).hexdigest()[:32]


def _tokenize_stream(dataset: IterableDataset, encoder: Encoder, report: TokenizeReport) -> IterableDataset:
    # Rows are marked, then filtered: a batched map may not change their number while unknown columns are around.
    stream = dataset.map(
        partial(_encode_examples, encoder=encoder, report=report),
        batched=True,
        batch_size=STREAM_ROWS,
        with_indices=True,
        remove_columns=dataset.column_names,
    )
    stream = stream.filter(lambda kept: kept, input_columns=["kept"])
    return stream.select_columns(list(FEATURES)).cast(FEATURES)


def _encode_examples(
    batch: dict[str, list[Any]], indices: list[int], encoder: Encoder, report: TokenizeReport
) -> dict[str, list[Any]]:
    results = encoder.encode(batch, indices, json_text=False)
    if indices[0] == 0:
        report.restart()
    counts = [(r.outcome, len(r.input_ids), int(r.loss_mask.sum())) for r in results]
    kept = report.add(*np.array(counts, np.int32).T)
    return {
        "input_ids": [result.input_ids for result in results],
        "loss_mask": [result.loss_mask.tolist() for result in results],
        "kept": kept.tolist(),
    }


# Checks and display


def check_ids(dataset: Dataset, vocab_size: int) -> None:
    """Refuses ids outside [0, vocab_size), which JAX would clamp or turn into NaN without a word.

    Args:
        dataset: has a column `input_ids` of lists of integers.

    Raises:
        ValueError: names the first such row and its id.
    """
    first_row = 0
    for batch in dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=8192):
        column = batch.column("input_ids")
        limits = pc.min_max(pc.list_flatten(column)).as_py()
        if limits["max"] is not None and (limits["max"] >= vocab_size or limits["min"] < 0):
            for row, ids in enumerate(column.to_pylist(), first_row):
                try:
                    check_vocab(ids, vocab_size)
                    if min(ids, default=0) < 0:
                        raise ValueError(f"negative token id {min(ids)} at position {ids.index(min(ids))}")
                except ValueError as error:
                    raise ValueError(f"{origin_of(dataset)(row)}: {error}") from None
        first_row += len(column)


def show_example(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Int[np.ndarray, "n"] | list[int],
    loss_mask: Bool[np.ndarray, "n"] | list[bool],
    limit: int = 1000,
) -> str:
    """A row as text with rich markup: trained tokens green, the others dim; at most `limit` tokens."""
    parts = []
    pairs = list(zip(list(input_ids)[:limit], list(loss_mask)[:limit], strict=True))
    for trained, run in groupby(pairs, key=lambda pair: bool(pair[1])):
        text = escape(str(tokenizer.decode([int(token) for token, _ in run], skip_special_tokens=False)))
        parts.append(f"[green]{text}[/green]" if trained else f"[dim]{text}[/dim]")
    more = len(input_ids) - len(pairs)
    return "".join(parts) + (f"\n... ({more:,} more tokens)" if more > 0 else "")
