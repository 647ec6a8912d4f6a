"""From what a user passes as a data set to prompts, and the sizes of the rows that their completions make."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from jaxtrl.model.qwen3 import check_input_ids
from jaxtrl.rollout.groups import Prompt
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.rows.chat import OWN, render
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.sources import load_source


class PromptData(NamedTuple):
    """The prompts that are used, and how many were dropped because they are too long."""

    prompts: list[Prompt]
    dropped: int

    @property
    def longest(self) -> int:
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def fingerprint(self) -> int:
        """A checksum of all token ids."""
        lengths = [len(prompt.ids) for prompt in self.prompts]
        return zlib.crc32(np.array([*lengths, *(i for prompt in self.prompts for i in prompt.ids)], np.int64).tobytes())

    def describe(self) -> str:
        """For the log."""
        text = f"{len(self.prompts):,} prompts of at most {self.longest:,} tokens"
        return f"{text}, {self.dropped:,} dropped that are longer than there is room for" if self.dropped else text


def prepare_prompts(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    room: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> PromptData:
    """Prompts of the column `prompt` (text, or messages that the chat template renders) with at most `room` tokens.

    All other columns go to the reward functions; `tools` also to the template. Raises ValueError that names the row for
    a prompt that cannot be read, and where no prompt is left.
    """
    source = load_source(dataset)
    if isinstance(source, IterableDataset):
        raise ValueError("prompts are numbered over the whole data set: give one of known length, no stream")
    if "prompt" not in source.column_names:
        raise ValueError(f"the data set has no column prompt; its columns are {', '.join(source.column_names)}")
    prompts, dropped = [], 0
    for number, row in enumerate(source):
        columns = {name: value for name, value in row.items() if name != "prompt"}
        try:
            ids = encode_prompt(tokenizer, row["prompt"], columns.get("tools"), template_kwargs)
            check_input_ids(np.asarray(ids, np.int64), vocab_size)
        except ValueError as error:
            raise ValueError(f"row {number} of the prompts: {error}") from None
        if len(ids) > room:
            dropped += 1
        else:
            prompts.append(Prompt(number, ids, row["prompt"], columns))
    if not prompts:
        raise ValueError(
            f"no prompt is left: all {dropped} are longer than the {room} tokens that max_completion_length leaves them"
            if dropped
            else "the data set of prompts has no rows"
        )
    return PromptData(prompts, dropped)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, tools: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """The token ids of a text, or of messages rendered up to where the assistant's turn begins."""
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    else:
        if not isinstance(prompt, list) or not prompt or not all(isinstance(turn, Mapping) for turn in prompt):
            raise ValueError("the prompt must be a text or a list of messages")
        if prompt[-1].get("role") == "assistant":
            raise ValueError("the prompt ends with an assistant's turn: end it with what is to be answered")
        text, _ = render(tokenizer, OWN, prompt, tools or None, dict(template_kwargs or {}), add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError("the prompt is empty: a completion needs a token to start from")
    return list(ids)


def prompt_room(max_positions: int, max_completion_length: int, token_budget: int | None) -> int:
    """The tokens that a prompt may have. Raises ValueError where there is no room for any."""
    limits = {"the model's positions": max_positions}
    if token_budget is not None:
        limits["token_budget"] = token_budget
    name = min(limits, key=lambda name: limits[name])
    if limits[name] <= max_completion_length:
        raise ValueError(
            f"max_completion_length: {max_completion_length} tokens leave no room for a prompt in {name} "
            f"({limits[name]}), lower it"
        )
    return limits[name] - max_completion_length


def row_shape(
    data: PromptData, num_generations: int, max_completion_length: int, token_budget: int | None
) -> ShapeClass:
    """The one shape class of a run: N tokens, and head slots for the share of them that completions can have.

    N is `token_budget`, else the longest prompt with its completion, rounded up. A token that several completions of a
    prompt share is one slot with a term for each: terms are twice the slots, and what has more goes into another row.
    """
    block = DEFAULT_BLOCK_SIZE
    tokens = token_budget or ShapeSet.from_setting("auto").token_class(data.longest + max_completion_length)
    tokens = -(-tokens // block) * block
    completions = num_generations * max_completion_length
    prompt = float(np.median([len(prompt.ids) for prompt in data.prompts]))
    slots = int(tokens * completions / (completions + prompt))
    slots = min(tokens, -(-max(slots, max_completion_length) // block) * block)
    blocks = tokens // block
    return ShapeClass(tokens, slots, 2 * slots, max(1, blocks * (blocks - 1) // 2))
