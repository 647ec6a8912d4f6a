"""Rollouts as a data set to plan from: one JSON object a line.

    {"prompt_ids": [...], "completion_ids": [...], "group": 7}     token ids as they were generated
    {"messages": [...], "group": "task-7"}                         or a conversation, tokenised with the chat template

`group` (a number or a text) marks completions of one prompt; without it lines with equal prompts are one group. Other
keys are left alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset


def read_rollouts(path: str) -> Dataset:
    """A data set with columns input_ids and labels (the completion is trained), or messages, and group.

    Raises ValueError naming file and line: not JSON, other keys, no list of ids, lines of both kinds, an empty file.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"rollouts: no such file: {path!r}")
    rows = list(_rows(file))
    if not rows:
        raise ValueError(f"rollouts: {path} is empty: it needs one JSON object a line")
    kinds = {"messages" in row for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"rollouts: {path} has lines with messages and lines with prompt_ids: give one kind")
    return Dataset.from_list(rows)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"rollouts: {file} line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: not valid JSON ({error})") from None
            if not isinstance(entry, dict):
                raise ValueError(f"{place}: expected a JSON object")
            yield _row(entry, place)


def _row(entry: dict[str, Any], place: str) -> dict[str, Any]:
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{place}: messages must be a list of messages")
        return {"messages": messages, "group": str(entry.get("group", json.dumps(messages[:-1], sort_keys=True)))}
    prompt, completion = (_ids(entry, name, place) for name in ("prompt_ids", "completion_ids"))
    return {
        "input_ids": prompt + completion,
        "labels": [-100] * len(prompt) + completion,
        "group": str(entry.get("group", prompt)),
    }


def _ids(entry: dict[str, Any], name: str, place: str) -> list[int]:
    ids = entry.get(name)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(
            f"{place}: {name} must be a list of token ids (a line has prompt_ids and completion_ids, or messages)"
        )
    return ids
