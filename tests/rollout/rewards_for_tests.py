"""Reward functions and a set-up for tests of rollouts; worker processes import them from here."""

import os
import time
from pathlib import Path
from typing import Any

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rollout.groups import Prompt
from jaxtrl.rollout.producer import RolloutSetup
from jaxtrl.rollout.requests import SamplingParams
from tests.golden.formula_qwen3 import make_config


class IdTokenizer:
    """The text of tokens is their numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


def answer(completions: list[str], answer: list[int], **_: Any) -> list[float | None]:
    return [None if value % 2 else float(value) for value in answer]


def raises_for_odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    if any(ids[0] % 2 for ids in completion_ids):
        raise ValueError("an odd first token")
    return [1.0] * len(completion_ids)


def raises(**_: Any) -> list[float]:
    raise ValueError("this reward function always raises")


def sleeps_for_first(prompts: list[str], **_: Any) -> list[float]:
    """A second for group 0; nothing for others."""
    time.sleep(1.0 if prompts[0] == "prompt 0" else 0.0)
    return [0.0] * len(prompts)


def sleeps(prompts: list[str], **_: Any) -> list[float]:
    time.sleep(600)
    return [0.0] * len(prompts)


def where(prompts: list[str], **_: Any) -> list[float]:
    """How many CPU cores the process may use."""
    return [float(len(os.sched_getaffinity(0)))] * len(prompts)


def make_setup(*functions: Any, **changes: Any) -> RolloutSetup:
    """Fixture T, groups of 3 completions of 6 tokens."""
    fields: dict[str, Any] = {
        "config": Qwen3Config.from_dict(make_config()),
        "reward_funcs": functions or (first_token, answer),
        "tokenizer": IdTokenizer(),
        "params": SamplingParams(max_new_tokens=6),
        "max_length": 16,
        "num_generations": 3,
        "slots": 4,
        "tokens_per_call": 3,
        "eos_token_id": (),
        "seed": 5,
        "order_seed": 5,
        "scoring_threads": 2,
        "compile_cache": "off",
    }
    return RolloutSetup(**{**fields, **changes})


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(i, [5, 9, 2 + i], f"prompt {i}", {"answer": i, "prompt": f"prompt {i}"}) for i in range(count)]


def processes_with(parent: int) -> list[int]:
    """Process ids of the children of a process, by /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(") ", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
