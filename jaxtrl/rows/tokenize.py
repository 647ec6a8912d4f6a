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
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher, generate_random_fingerprint
from jaxtyping import Bool, Int
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from jaxtrl.rows import chat, formats
from jaxtrl.rows.formats import Conversation, Format, Text
from jaxtrl.rows.sources import Origin, origin_of, quiet_progress

STREAM_ROWS = 64  # rows tokenised at a time from a stream
FEATURES = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))})

# An outcome is a reason for dropping the row (0: kept) times 16, plus flags.
TRUNCATED, DIVERGED, NO_EOS, LOST_REASONING = 1, 2, 4, 8
KEPT, NO_MESSAGES, NO_ASSISTANT, UNTRAINED, CUT_OFF, REWRITTEN = range(6)
REASONS = {
    NO_MESSAGES: "no messages",
    NO_ASSISTANT: "no assistant message",
    UNTRAINED: "no trained token",
    CUT_OFF: "no trained token within max_length",
    REWRITTEN: "the chat template rewrites the prompt once the completion follows",
}


@dataclass(frozen=True)
class TokenizeOptions:
    """TRL's options by TRL's names and defaults; then jaxtrl's own.

    Attributes:
        max_length: longer rows are cut (`truncation_mode` `keep_start` or `keep_end`); None cuts nothing.
        completion_only_loss: None trains completions of prompt + completion rows and all tokens of other rows.
        assistant_only_loss: train what the assistant says (conversations only).
        eos_token: ends plain text, where it does not end in it yet; None is the tokenizer's.
        chat_template_kwargs: variables for the chat template; a row's own column `chat_template_kwargs` wins.
        prefix_preserving: earlier turns must read the same whatever follows (tree rows); see `chat.choose_template`.
        vocab_size: rows of the embedding; a larger id is refused, naming its row.
    """

    dataset_text_field: str = "text"
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    eos_token: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prefix_preserving: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(f"truncation_mode must be 'keep_start' or 'keep_end', not {self.truncation_mode!r}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"max_length must be at least 2 (one token to read, one to predict), not {self.max_length}"
            )


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
            (self.lost_reasoning, "rows whose reasoning the chat template leaves out"),
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
    columns = _column_names(dataset)
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError("the data set has a transform (with_transform); apply it with map() first")
    if formatting_func is not None and "input_ids" in columns:
        raise ValueError("a formatting function does not apply to a data set that has `input_ids` already")
    work, report = _plan(dataset, columns, tokenizer, options, formatting_func)
    if isinstance(dataset, IterableDataset):
        return _tokenize_stream(dataset, work, report), report
    needed = columns if formatting_func else [name for name in _needed(work) if name in columns]
    with _map_settings(num_proc):
        out = dataset.select_columns(needed).with_format("arrow")
        out = out.map(
            work.table,
            batched=True,
            with_indices=True,
            remove_columns=needed,
            num_proc=num_proc,
            desc="Tokenizing",
            new_fingerprint=_fingerprint(dataset, work),
        ).with_format(None)
    counted = out.select_columns(["outcome", "length", "trained"]).with_format("numpy")[:]
    kept = report.add(*(np.asarray(counted[name], np.int32) for name in ("outcome", "length", "trained")))
    report.check_not_empty(options.max_length)
    out = out.remove_columns(["outcome", "length", "trained"])
    return (out if kept.all() else out.select(np.flatnonzero(kept))), report


def _column_names(dataset: Dataset | IterableDataset) -> list[str]:
    if isinstance(dataset, Dataset):
        if not len(dataset):
            raise ValueError("the data set has no rows")
        return dataset.column_names
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("the data set has no rows")
    return list(dataset.column_names or first)


def _plan(
    dataset: Dataset | IterableDataset,
    columns: list[str],
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    formatting_func: Callable[[dict[str, Any]], str] | None,
) -> tuple["_Work", TokenizeReport]:
    form: Format = "text" if formatting_func else formats.detect_format(columns, options.dataset_text_field)
    first = next(iter(dataset))
    pair = form == "prompt_completion"
    conversational = form in ("messages", "conversations") or (pair and not isinstance(first["prompt"], str))
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
    work = _Work(
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
    return work, TokenizeReport(template=template.name if template else None)


def _eos_token(tokenizer: PreTrainedTokenizerBase, name: str | None, needed: bool) -> str | None:
    if name is not None and name not in tokenizer.get_vocab():
        raise ValueError(f"eos_token {name!r} is not in the tokenizer's vocabulary")
    token = tokenizer.eos_token if name is None else name
    if needed and token is None:
        raise ValueError("the tokenizer has no EOS token to end rows with; name one with eos_token")
    return token


def _needed(work: "_Work") -> tuple[str, ...]:
    return (work.options.dataset_text_field,) if work.form == "text" else formats.COLUMNS[work.form]


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


def _fingerprint(dataset: Dataset, work: "_Work") -> str:
    """The key of the result in the cache of `datasets`, which exists for data sets that lie in files. Left to itself
    `datasets` would pickle the whole tokenizer for it (seconds), and not notice a change of this code."""
    if not dataset.cache_files:
        return generate_random_fingerprint()
    tokenizer = work.tokenizer
    try:
        function = Hasher.hash(work.formatting_func)
    except Exception:  # whatever pickling raises on a closure: the result is then simply not found again
        return generate_random_fingerprint()
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    state = (dataset._fingerprint, work.version, work.options, work.form, work.template, work.completion_only)
    text = repr((state, work.eos_token, tokenizer.chat_template, tokenizer.special_tokens_map, function))
    return hashlib.sha256((text + backend + datasets.__version__).encode()).hexdigest()[:32]


def _tokenize_stream(dataset: IterableDataset, work: "_Work", report: TokenizeReport) -> IterableDataset:
    # Rows are marked, then filtered: a batched map may not change their number while unknown columns are around.
    stream = dataset.map(
        partial(work.examples, report=report),
        batched=True,
        batch_size=STREAM_ROWS,
        with_indices=True,
        remove_columns=dataset.column_names,
    )
    stream = stream.filter(lambda kept: kept, input_columns=["kept"])
    return stream.select_columns(list(FEATURES)).cast(FEATURES)


# The work on a batch of rows (in worker processes, if there are several)


class _Result(NamedTuple):
    input_ids: list[int]
    loss_mask: Bool[np.ndarray, "n"]
    outcome: int


@dataclass(frozen=True)
class _Work:
    tokenizer: PreTrainedTokenizerBase
    options: TokenizeOptions
    form: Format
    template: chat.ChatTemplate | None
    completion_only: bool
    eos_token: str | None
    features: Features | None
    formatting_func: Callable[[dict[str, Any]], str] | None
    origin: Origin
    version: int = 1  # part of the cache key: raise it when results change

    def table(self, batch: pa.Table, indices: list[int]) -> pa.Table:
        results = self.process({name: batch.column(name).to_pylist() for name in batch.column_names}, indices, True)
        lengths = np.array([len(result.input_ids) for result in results], np.int32)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        ids = pa.array(np.concatenate([np.asarray(result.input_ids, np.int32) for result in results]))
        masks = pa.array(np.concatenate([result.loss_mask for result in results]))
        return pa.table(
            {
                "input_ids": pa.ListArray.from_arrays(offsets, ids),
                "loss_mask": pa.ListArray.from_arrays(offsets, masks),
                "outcome": pa.array([result.outcome for result in results], pa.int32()),
                "length": pa.array(lengths),
                "trained": pa.array([int(result.loss_mask.sum()) for result in results], pa.int32()),
            }
        )

    def examples(self, batch: dict[str, list[Any]], indices: list[int], report: TokenizeReport) -> dict[str, Any]:
        results = self.process(batch, indices, False)
        if indices[0] == 0:
            report.restart()
        counts = [(r.outcome, len(r.input_ids), int(r.loss_mask.sum())) for r in results]
        kept = report.add(*np.array(counts, np.int32).T)
        return {
            "input_ids": [result.input_ids for result in results],
            "loss_mask": [result.loss_mask.tolist() for result in results],
            "kept": kept.tolist(),
        }

    def process(self, batch: dict[str, list[Any]], indices: list[int], json_text: bool) -> list[_Result]:
        """One result per row. `json_text`: JSON columns of the batch are not decoded yet."""
        readers = formats.column_readers(self.features, keep_none=self.formatting_func is not None, json_text=json_text)
        wanted = batch if self.formatting_func else [name for name in _needed(self) if name in batch]
        read = {name: list(map(readers[name], batch[name])) if name in readers else batch[name] for name in wanted}
        rows = [{name: values[i] for name, values in read.items()} for i in range(len(indices))]
        with_index = list(zip(indices, rows, strict=True))
        if self.form == "tokens":
            return [self._attempt(index, self._tokens, row) for index, row in with_index]
        parsed = [self._attempt(index, self._parse, row) for index, row in with_index]
        results: list[_Result] = []
        # Rows next to each other of one kind (usually all) are tokenised in one call.
        pairs = list(zip(indices, parsed, strict=True))
        for kind, group in groupby(pairs, key=lambda pair: type(pair[1])):
            part = list(group)
            results += (self._conversations if kind is Conversation else self._texts)(
                [index for index, _ in part], [item for _, item in part]
            )
        return results

    def _attempt(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except ValueError as error:
            raise ValueError(f"{self.origin(index)}: {error}") from None

    def _parse(self, row: dict[str, Any]) -> Conversation | Text:
        if self.formatting_func is None:
            item = formats.parse_row(row, self.form, self.options.dataset_text_field)
        else:
            text = self.formatting_func(row)
            if not isinstance(text, str):
                raise ValueError(f"the formatting function must return one string, not {type(text).__name__}")
            item = Text(text, None)
        if (self.template is None) == isinstance(item, Conversation):
            found, first = ("conversation", "text") if self.template is None else ("text", "conversation")
            raise ValueError(f"a {found} in a data set whose first row is a {first}")
        return item

    def _encode(self, texts: list[str], special: bool, offsets: bool = False) -> tuple[list[list[int]], list[Any]]:
        if not texts:
            return [], []
        encoded = self.tokenizer(
            texts,
            add_special_tokens=special,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=offsets,
            verbose=False,
        )
        return encoded["input_ids"], encoded["offset_mapping"] if offsets else []

    def _tokens(self, row: dict[str, Any]) -> _Result:
        tokens = formats.parse_tokens(row, self.completion_only)
        return self._finish(tokens.input_ids, np.array(tokens.loss_mask, bool))

    def _texts(self, indices: list[int], items: list[Text]) -> list[_Result]:
        eos = self.eos_token or ""
        eos_id = self.tokenizer.convert_tokens_to_ids(eos)
        texts = [item.text if item.text.endswith(eos) else item.text + eos for item in items]
        wholes, _ = self._encode(texts, special=True)
        prompts, _ = self._encode([item.prompt for item in items if item.prompt is not None], special=True)
        rest = iter(prompts)
        results = []
        for index, item, text, ids in zip(indices, items, texts, wholes, strict=True):
            if ids[-2:] == [eos_id, eos_id] and not text.endswith(eos + eos):
                ids = ids[:-1]  # a tokenizer that adds EOS itself
            start, flags = 0, 0
            if item.prompt is not None:
                prompt = next(rest)
                if prompt[-1:] == [eos_id] and not item.prompt.endswith(eos):
                    prompt = prompt[:-1]
                start = common_prefix_length(prompt, ids)
                flags = DIVERGED * (start < len(prompt))
            mask = np.ones(len(ids), bool)
            mask[: start if self.completion_only else 0] = False
            results.append(self._attempt(index, self._finish, ids, mask, flags))
        return results

    def _render(self, item: Conversation, end: int | None = None, generate: bool = False) -> tuple[str, list[Any]]:
        assert self.template is not None
        marked = self.options.assistant_only_loss and end is None
        kwargs = {**(self.options.chat_template_kwargs or {}), **item.template_kwargs}
        text, spans = chat.render(
            self.tokenizer,
            self.template,
            item.messages[:end],
            item.tools,
            kwargs,
            add_generation_prompt=generate,
            marked=marked,
        )
        if end is None:
            chat.check_rendered(item.messages, text)
        return text, spans

    def _conversations(self, indices: list[int], items: list[Conversation]) -> list[_Result]:
        marked = self.options.assistant_only_loss
        filled = [bool(item.messages) and item.prompt_length != 0 for item in items]
        whole = [
            self._attempt(index, self._render, item) if full else ("", [])
            for index, item, full in zip(indices, items, filled, strict=True)
        ]
        all_ids, all_offsets = self._encode([text for text, _ in whole], special=False, offsets=marked)
        prompts = [
            self._attempt(index, self._render, item, item.prompt_length, True)[0] if full and item.prompt_length else ""
            for index, item, full in zip(indices, items, filled, strict=True)
        ]
        prompt_ids, _ = self._encode(prompts, special=False)
        results = []
        for i, (index, item) in enumerate(zip(indices, items, strict=True)):
            text, spans = whole[i]
            ids, mask = all_ids[i], np.ones(len(all_ids[i]), bool)
            flags, reason = LOST_REASONING * chat.loses_reasoning(item.messages, text), KEPT
            start = common_prefix_length(prompt_ids[i], ids)
            if not filled[i]:
                reason = NO_MESSAGES
            elif start < len(prompt_ids[i]):
                # Where only the generation prompt differs, the completion starts where they part (as in TRL). Where
                # the prompt's messages themselves differ, that would train on the prompt.
                flags |= DIVERGED
                messages_only = self._attempt(index, self._render, item, item.prompt_length)[0]
                reason = KEPT if text.startswith(messages_only) else REWRITTEN
            mask[: start if self.completion_only else 0] = False
            if marked and reason == KEPT:
                in_spans = _tokens_in_spans(np.array(all_offsets[i]).reshape(-1, 2), np.array(spans).reshape(-1, 2))
                if all(message["role"] != "assistant" for message in item.messages):
                    reason = NO_ASSISTANT
                elif not in_spans.any():
                    raise ValueError(
                        f"{self.origin(index)}: the chat template marks no token of the assistant's messages; wrap "
                        "what it says in {% generation %} ... {% endgeneration %}"
                    )
                mask &= in_spans
            results.append(self._attempt(index, self._finish, ids, mask, flags, reason))
        return results

    def _finish(self, ids: list[int], mask: Bool[np.ndarray, "n"], flags: int = 0, reason: int = KEPT) -> _Result:
        options = self.options
        if options.vocab_size is not None:
            _check_vocab(ids, options.vocab_size)
        mask[:1] = False
        trained = mask.any()
        if options.max_length is not None and len(ids) > options.max_length:
            cut = (
                slice(options.max_length)
                if options.truncation_mode == "keep_start"
                else slice(-options.max_length, None)
            )
            ids, mask, flags = ids[cut], mask[cut].copy(), flags | TRUNCATED
            mask[:1] = False
        elif self.eos_token is not None:
            eos_id = self.tokenizer.convert_tokens_to_ids(self.eos_token)
            flags |= NO_EOS * (eos_id not in ids or not (mask & (np.asarray(ids) == eos_id)).any())
        if reason == KEPT and not mask.any():
            reason = CUT_OFF if trained else UNTRAINED
        return _Result(ids, mask, reason << 4 | flags)


def common_prefix_length(first: list[int], second: list[int]) -> int:
    """Number of leading ids that two lists share."""
    if second[: len(first)] == first:
        return len(first)
    return next(i for i, (a, b) in enumerate(zip(first + [-1], second + [-2], strict=False)) if a != b)


def _tokens_in_spans(offsets: Int[np.ndarray, "n 2"], spans: Int[np.ndarray, "s 2"]) -> Bool[np.ndarray, "n"]:
    """Which tokens overlap one of the character spans (in order, disjoint)."""
    if not len(spans) or not len(offsets):
        return np.zeros(len(offsets), bool)
    span = np.searchsorted(spans[:, 1], offsets[:, 0], side="right")
    return (span < len(spans)) & (offsets[:, 1] > spans[np.minimum(span, len(spans) - 1), 0])


# Checks and display


def _check_vocab(ids: list[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise ValueError(
            f"token id {max(ids)} at position {ids.index(max(ids))}, but the embedding has {vocab_size} rows; the "
            "tokenizer does not belong to this model"
        )


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
                    _check_vocab(ids, vocab_size)
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
        text = escape(tokenizer.decode([int(token) for token, _ in run], skip_special_tokens=False))
        parts.append(f"[green]{text}[/green]" if trained else f"[dim]{text}[/dim]")
    more = len(input_ids) - len(pairs)
    return "".join(parts) + (f"\n... ({more:,} more tokens)" if more > 0 else "")
