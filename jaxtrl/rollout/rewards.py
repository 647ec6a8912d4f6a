"""Built-in reward functions, and functions by name. Names that trl.rewards has mean what they mean there.

A reward function gets `prompts`, `completions` (texts, or lists of one assistant message), `completion_ids` and every
other column of the data, each a list with one entry per completion, and returns a number or None for each.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxtrl.rollout.groups import RewardFunction

NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion, without surrounding space and anything up to `</think>`, is the column `answer`, else 0.

    None where there is no answer.
    """
    texts = (_after_thinking(text_of(completion)) for completion in completions)
    return [
        None if gold is None else float(text == str(gold).strip()) for text, gold in zip(texts, answer, strict=True)
    ]


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any] | None = None, answer: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    r"""1 where the completion's last \boxed{}, else its last number, equals that of column `solution` (or `answer`).

    Numbers are compared by value (1/2 = 0.5 = 50%, thousands separators removed), other boxed text without spaces,
    dollar signs and \left, \right. None where the solution has nothing to compare with. trl.rewards compares with the
    package math_verify, which knows more of LaTeX.
    """
    golds = answer if solution is None else solution
    if golds is None:
        raise ValueError("accuracy_reward needs a column solution or answer in the data")
    out: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        whole = None if gold is None else _number(str(gold))
        expected = final_answer(str(gold)) if gold is not None and whole is None else whole
        found = final_answer(_after_thinking(text_of(completion)))
        out.append(None if expected is None else float(found is not None and found == expected))
    return out


def reasoning_accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any] | None = None, answer: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning; 0 for a completion whose `</think>` is missing."""
    rewards = accuracy_reward(completions, solution, answer)
    done = ["</think>" in text_of(completion) for completion in completions]
    return [reward if ended else 0.0 for reward, ended in zip(rewards, done, strict=True)]


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for a completion that begins with one `<think>...</think>`, else 0."""
    return [float(THINK.match(text_of(completion)) is not None) for completion in completions]


def length_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Minus the number of tokens: give it a small weight to keep completions short."""
    return [-float(len(ids)) for ids in completion_ids]


@dataclass(frozen=True)
class _SoftOverlongPunishment:
    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._one(len(ids)) for ids in completion_ids]

    def _one(self, length: int) -> float:
        allowed = self.max_completion_len - self.soft_punish_cache
        if length <= allowed:
            return 0.0
        return (allowed - length) / self.soft_punish_cache if length <= self.max_completion_len else -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """0 up to max_completion_len - soft_punish_cache tokens, then falling linearly to -1 at max_completion_len.

    DAPO, equation 13, https://arxiv.org/abs/2503.14476.
    """
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._one(list(ids)) for ids in completion_ids]

    def _one(self, ids: list[int]) -> float:
        grams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        return self.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """`max_penalty` times the share of n-grams of tokens that occurred before (https://arxiv.org/abs/2502.03373).

    Raises ValueError for a positive `max_penalty`.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty is {max_penalty}: a penalty is at most 0")
    return _RepetitionPenalty(ngram_size, max_penalty)


REWARDS: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (exact_match, accuracy_reward, reasoning_accuracy_reward, think_format_reward, length_reward)
} | {"get_soft_overlong_punishment": get_soft_overlong_punishment(1280, 256)}  # the numbers of TRL's command


def find_reward(name: str) -> RewardFunction:
    """The built-in reward function of that name, or what a dotted path (`package.module.function`) names.

    Raises ValueError with one sentence for anything else.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"reward_funcs: {name!r} is none of {', '.join(REWARDS)} and no package.module.function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward_funcs: {name!r} cannot be imported ({error})") from None
    if not callable(found):
        raise ValueError(f"reward_funcs: {name!r} is no function")
    return found


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of its message."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def final_answer(text: str) -> Fraction | str | None:
    r"""What a text says last: its last \boxed{} (as a number where it is one), else its last number, else None."""
    boxed = _last_boxed(text)
    if boxed is not None:
        number = _number(boxed)
        return _plain(boxed) if number is None else number
    numbers = NUMBER.findall(text)
    percent = text.rstrip(" .").endswith("%")
    return _number(numbers[-1] + ("%" if percent else "")) if numbers else None


def _after_thinking(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None  # cut off


def _number(text: str) -> Fraction | None:
    """The value of a number, fraction (also of LaTeX) or percentage; None for anything else."""
    plain = re.sub(r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}", r"\1/\2", _plain(text)).replace(",", "")
    percent = plain.endswith("%")
    try:
        value = Fraction(plain.rstrip("%\\"))
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent else value


def _plain(text: str) -> str:
    return re.sub(r"\\left|\\right|\\!|[\s$]", "", text)
