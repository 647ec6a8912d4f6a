"""Options of `python -m jaxtrl.generate`."""

import dataclasses
from typing import Any

from jaxtrl.rollout.requests import SamplingParams
from jaxtrl.trainers.options import OptionsType, option

_DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "seed")


@dataclasses.dataclass
class GenerateConfig(metaclass=OptionsType):
    """What to generate from, how tokens are drawn, and the sizes of the sampler."""

    model: str | None = option(
        None, "Checkpoint folder or hub id, with its tokenizer (none: a tiny random model).", group="prompts"
    )
    prompt: str | None = option(
        None, "Text of one user message (none, without prompts: a chat in the terminal).", group="prompts"
    )
    prompts: str | None = option(
        None,
        "JSONL file whose lines have a prompt (text, or messages), or messages, and perhaps tools.",
        group="prompts",
    )
    system: str | None = option(None, "System message before a text prompt.", group="prompts")
    raw: bool = option(False, "Take a text prompt as it is, without the chat template.", group="prompts")
    enable_thinking: bool | None = option(
        None, "The chat template's variable of this name (none: the template's default).", group="prompts"
    )
    tools: str | None = option(None, "JSON file with a list of tools for the chat template.", group="prompts")
    num_generations: int = option(1, "Completions of each prompt.", group="prompts", minimum=1)
    output: str | None = option(None, "JSONL file for the completions.", group="prompts")
    temperature: float = option(1.0, "0 takes the most likely token.", group="sampling")
    top_k: int = option(0, "Draw from the k most likely tokens (0: off).", group="sampling")
    top_p: float = option(1.0, "Draw from the fewest tokens with this share of the mass.", group="sampling")
    min_p: float = option(0.0, "Leave out what is less likely than this share of the first.", group="sampling")
    repetition_penalty: float = option(1.0, "Above 1: tokens that occurred are less likely.", group="sampling")
    max_new_tokens: int = option(256, "Tokens of a completion at most.", group="sampling", minimum=1)
    min_new_tokens: int = option(0, "Tokens of a completion at least.", group="sampling")
    stop_strings: list[str] | None = option(None, "Texts that end a completion.", group="sampling")  # noqa: RUF009
    seed: int | None = option(None, "The same prompt and seed give the same completion.", group="sampling")
    slots: int = option(8, "Sequences that are decoded together.", group="sampler", minimum=1)
    max_length: int | None = option(
        None, "Tokens of prompt and completion at most (none: what the prompts need; in a chat 4,096).", group="sampler"
    )
    dtype: str | None = option(
        None,
        "Compute and cache dtype (none: bfloat16 on accelerators, float32 on CPU).",
        group="sampler",
        choices=("float32", "bfloat16"),
    )

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("prompt and prompts are both given: name one of them")
        if self.raw and (self.system, self.tools, self.enable_thinking) != (None, None, None):
            raise ValueError("raw takes the prompt as it is: leave out system, tools and enable_thinking")
        self.sampling_params()  # raises for what cannot work

    def sampling_params(self) -> SamplingParams:
        """The options of the group "sampling"."""
        chosen: dict[str, Any] = {name: getattr(self, name) for name in _DRAWN}
        return SamplingParams(**chosen, stop_strings=tuple(self.stop_strings or ()))
