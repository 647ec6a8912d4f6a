"""Rows to token ids and loss masks, a batch at a time: what runs in the worker processes of `tokenize_dataset`."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Features
from jaxtyping import Bool
from transformers import PreTrainedTokenizerBase

from jaxtrl.rows import chat, formats
from jaxtrl.rows.formats import Conversation, Format, Text
from jaxtrl.rows.sources import Origin

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


class Result(NamedTuple):
    input_ids: list[int]
    loss_mask: Bool[np.ndarray, "n"]
    outcome: int


@dataclass(frozen=True)
class Encoder:
    """Everything that tokenising a row depends on; can be pickled."""

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

    def __getstate__(self) -> dict[str, Any]:
        # `datasets` pickles in Python what goes to workers, which takes seconds for a vocabulary; this is done in C.
        return {**vars(self), "tokenizer": pickle.dumps(self.tokenizer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tokenizer=pickle.loads(state["tokenizer"]))

    def needed(self) -> tuple[str, ...]:
        """The columns that the format reads, whether the data set has them or not."""
        return (self.options.dataset_text_field,) if self.form == "text" else formats.COLUMNS[self.form]

    def table(self, batch: pa.Table, indices: list[int]) -> pa.Table:
        results = self.encode({name: batch.column(name).to_pylist() for name in batch.column_names}, indices, True)
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

    def encode(self, batch: dict[str, list[Any]], indices: list[int], json_text: bool) -> list[Result]:
        """One result per row. `json_text`: JSON columns of the batch are not decoded yet."""
        readers = formats.column_readers(self.features, keep_none=self.formatting_func is not None, json_text=json_text)
        wanted = batch if self.formatting_func else [name for name in self.needed() if name in batch]
        read = {name: list(map(readers[name], batch[name])) if name in readers else batch[name] for name in wanted}
        rows = [{name: values[i] for name, values in read.items()} for i in range(len(indices))]
        with_index = list(zip(indices, rows, strict=True))
        if self.form == "tokens":
            return [self._attempt(index, self._tokens, row) for index, row in with_index]
        items = [self._attempt(index, self._parse, row) for index, row in with_index]
        return self._texts(indices, items) if self.template is None else self._conversations(indices, items)

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

    def _tokens(self, row: dict[str, Any]) -> Result:
        tokens = formats.parse_tokens(row, self.completion_only)
        return self._finish(tokens.input_ids, np.array(tokens.loss_mask, bool))

    def _texts(self, indices: list[int], items: list[Text]) -> list[Result]:
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

    def _conversations(self, indices: list[int], items: list[Conversation]) -> list[Result]:
        marked = self.options.assistant_only_loss
        wholes, prompts = [], []
        for index, item in zip(indices, items, strict=True):
            empty = not item.messages or item.prompt_length == 0
            wholes.append(("", []) if empty else self._attempt(index, self._render, item))
            no_prompt = empty or item.prompt_length is None
            prompts.append("" if no_prompt else self._attempt(index, self._render, item, item.prompt_length, True)[0])
        all_ids, all_offsets = self._encode([text for text, _ in wholes], special=False, offsets=marked)
        all_prompt_ids, _ = self._encode(prompts, special=False)
        results = []
        for i, (index, item, (text, spans), ids) in enumerate(zip(indices, items, wholes, all_ids, strict=True)):
            mask, reason = np.ones(len(ids), bool), KEPT if text else NO_MESSAGES
            flags = LOST_REASONING * chat.loses_reasoning(item.messages, text)
            start = common_prefix_length(all_prompt_ids[i], ids)
            mask[: start if self.completion_only else 0] = False
            if start < len(all_prompt_ids[i]):
                flags |= DIVERGED
                reason = self._attempt(index, self._divergence, item, text)
            if marked and reason == KEPT:
                in_spans = _tokens_in_spans(all_offsets[i], spans)
                reason = self._attempt(index, _check_marks, item, in_spans)
                mask &= in_spans
            results.append(self._attempt(index, self._finish, ids, mask, flags, reason))
        return results

    def _divergence(self, item: Conversation, text: str) -> int:
        """What to do with a row whose prompt is not a prefix of the whole. Where only the generation prompt differs,
        the completion starts where they part (as in TRL). Where the prompt's messages themselves are written
        differently, that would train on the prompt: the row is dropped."""
        return KEPT if text.startswith(self._render(item, item.prompt_length)[0]) else REWRITTEN

    def _finish(self, ids: list[int], mask: Bool[np.ndarray, "n"], flags: int = 0, reason: int = KEPT) -> Result:
        options = self.options
        if options.vocab_size is not None:
            check_vocab(ids, options.vocab_size)
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
        return Result(ids, mask, reason << 4 | flags)


def _check_marks(item: Conversation, marked: Bool[np.ndarray, "n"]) -> int:
    if all(message["role"] != "assistant" for message in item.messages):
        return NO_ASSISTANT
    if not marked.any():
        raise ValueError(
            "the chat template marks no token of the assistant's messages; what it says has to stand in "
            "{% generation %} ... {% endgeneration %}"
        )
    return KEPT


def common_prefix_length(first: list[int], second: list[int]) -> int:
    """Number of leading ids that two lists share."""
    if second[: len(first)] == first:
        return len(first)
    return next(i for i, (a, b) in enumerate(zip([*first, -1], [*second, -2], strict=False)) if a != b)


def _tokens_in_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Bool[np.ndarray, "n"]:
    """Which tokens (character offsets) overlap one of the spans (characters; in order, disjoint)."""
    if not spans or not offsets:
        return np.zeros(len(offsets), bool)
    starts, ends = np.array(offsets).T
    first, last = np.array(spans).T
    span = np.searchsorted(last, starts, side="right")
    return (span < len(spans)) & (ends > first[np.minimum(span, len(spans) - 1)])


def check_vocab(ids: list[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise ValueError(
            f"token id {max(ids)} at position {ids.index(max(ids))}, but the embedding has {vocab_size} rows; the "
            "tokenizer does not belong to this model"
        )
