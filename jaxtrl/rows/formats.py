"""What a row of a data set means: the formats that TRL's SFTTrainer reads, brought to three forms.

    Conversation   `messages`, ShareGPT `conversations`, or conversational `prompt` + `completion`
    Text           `text` (any column name), a formatting function's result, or plain `prompt` + `completion`
    Tokens         `input_ids` with optional `labels`, masks and `attention_mask`

A ValueError raised here says what is wrong with the row; the caller knows which row it was.
"""

import json
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import numpy as np
from datasets import Features
from datasets.features import Json, LargeList, List

Format = Literal["tokens", "prompt_completion", "messages", "conversations", "text"]
Message = dict[str, Any]

# Columns read per format. `text` stands for the column named by dataset_text_field.
COLUMNS: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks"),
    "prompt_completion": ("prompt", "completion", "tools", "chat_template_kwargs"),
    "messages": ("messages", "tools", "chat_template_kwargs"),
    "conversations": ("conversations", "tools", "chat_template_kwargs"),
    "text": ("text",),
}
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


class Conversation(NamedTuple):
    messages: list[Message]  # all of it
    prompt_length: int | None  # how many of the messages are the prompt; None: there is no prompt
    tools: list[Any] | None
    template_kwargs: dict[str, Any]


class Text(NamedTuple):
    text: str  # all of it
    prompt: str | None


class Tokens(NamedTuple):
    input_ids: list[int]
    loss_mask: list[bool]


def detect_format(columns: Collection[str], text_field: str) -> Format:
    """The format that a data set with these columns has. Raises ValueError naming the columns if it has none."""
    if "input_ids" in columns:
        if "seq_lengths" in columns:
            raise ValueError("the data set is packed already (column `seq_lengths`); pass one document per row instead")
        return "tokens"
    if "prompt" in columns and "completion" in columns:
        return "prompt_completion"
    for name in ("messages", "conversations"):
        if name in columns:
            return name
    if text_field in columns:
        return "text"
    found = ", ".join(f"`{column}`" for column in columns) or "none"
    if "prompt" in columns:
        raise ValueError(
            f"the data set has a column `prompt` but no `completion` (columns: {found}); rename the answer's column "
            "to `completion` or pass a formatting function"
        )
    raise ValueError(
        f"the data set has no column to train on (columns: {found}); expected `messages`, `prompt` and `completion`, "
        f"`conversations`, `{text_field}` (dataset_text_field) or `input_ids`"
    )


def parse_row(row: dict[str, Any], form: Format, text_field: str) -> Conversation | Text:
    """One row of any format but `tokens`. Raises ValueError on a missing, null or misshaped column."""
    if form == "text":
        return Text(_string(row.get(text_field), text_field), None)
    if form != "prompt_completion":
        return Conversation(_messages(row.get(form), form), None, _tools(row), _template_kwargs(row))
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(prompt + completion, prompt)
    if isinstance(prompt, str) != isinstance(completion, str) and prompt is not None and completion is not None:
        raise ValueError("`prompt` and `completion` must both be text or both be lists of messages")
    prompt, completion = _messages(prompt, "prompt"), _messages(completion, "completion")
    if not completion:
        raise ValueError("`completion` is an empty list of messages")
    return Conversation(prompt + completion, len(prompt), _tools(row), _template_kwargs(row))


def _string(value: Any, column: str) -> str:
    if value is None:
        raise ValueError(f"no `{column}` (missing or null)")
    if not isinstance(value, str):
        raise ValueError(f"`{column}` must be text, found {type(value).__name__}")
    return value


def _container(value: Any, column: str) -> Any:
    """A list or dict, also from JSON text (as CSV cells and many data sets hold it)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"`{column}` is text but not valid JSON ({error.msg} at character {error.pos})") from None


# Conversations


def _messages(value: Any, column: str) -> list[Message]:
    if value is None:
        raise ValueError(f"no `{column}` (missing or null)")
    messages = _container(value, column)
    if not isinstance(messages, list):
        raise ValueError(f"`{column}` must be a list of messages, found {type(messages).__name__}")
    return [_message(message, f"`{column}`, message {i}") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    """A message with `role` and text `content`, without keys whose value is None (templates test whether a key such as
    `tool_calls` is there)."""
    if not isinstance(message, dict):
        raise ValueError(f"{where}: expected a dict with role and content, found {type(message).__name__}")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.pop("from", None) or message.get("role")  # ShareGPT says from and value
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    if not isinstance(role, str):
        raise ValueError(f"{where}: no role")
    if role == "function_call" and "tool_calls" not in message:
        message["tool_calls"] = _container(message.pop("content", None), f"{where}: function call")
    message["role"] = SHAREGPT_ROLES.get(role, role)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    if "content" not in message and not (
        message["role"] == "assistant" and ("tool_calls" in message or _thinks(message))
    ):
        raise ValueError(f"{where} (role {message['role']!r}): no content")
    message["content"] = _content(message.get("content", ""), where)
    return {"role": message.pop("role"), "content": message.pop("content"), **message}


def _thinks(message: Message) -> bool:
    return isinstance(message.get("reasoning_content"), str)


def _content(content: Any, where: str) -> str:
    """Text, also from a list of text parts. Parts of another kind are refused: a text template would leave them out."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            text = part.get("text") if isinstance(part, dict) else part
            if kind != "text" or not isinstance(text, str):
                raise ValueError(f"{where}: content of type {kind!r} is not supported, only text")
        return "".join(part["text"] if isinstance(part, dict) else part for part in content)
    raise ValueError(f"{where}: content must be text, found {type(content).__name__}")


def _tool_calls(value: Any, where: str) -> list[Any]:
    calls = _container(value, f"{where}: tool_calls")
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls must be a list, found {type(calls).__name__}")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a tool call needs a function with a name")
        arguments = function.get("arguments")
        function = {**function, "arguments": {} if arguments is None else arguments}
        result.append({**call, "function": function} if "function" in call else function)
    return result


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if not tools:
        return None
    tools = _container(tools, "tools")
    if not isinstance(tools, list):
        raise ValueError(f"`tools` must be a list of tool specifications, found {type(tools).__name__}")
    tools = [_container(tool, "tools") for tool in tools]
    for tool in tools:
        if not isinstance(tool, dict):
            raise ValueError(f"`tools` must be a list of JSON schemas, found an element {tool!r}")
    return tools or None


def _template_kwargs(row: dict[str, Any]) -> dict[str, Any]:
    value = _container(row.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(value, dict):
        raise ValueError(f"`chat_template_kwargs` must be a dict, found {type(value).__name__}")
    return {key: item for key, item in value.items() if item is not None}


# Tokens


def parse_tokens(row: dict[str, Any], completion_only: bool) -> Tokens:
    """A pre-tokenised row. `labels` (-100: not trained) are used as they are; without them the masks are: the
    assistant mask always, the completion mask if `completion_only`. Tokens outside `attention_mask` are padding and
    are removed. Raises ValueError on lengths that differ or labels that are not the row's own tokens."""
    ids = _integers(row.get("input_ids"), "input_ids")
    lists = {name: row[name] for name in COLUMNS["tokens"][1:] if row.get(name) is not None}
    lists = {name: _integers(value, name) for name, value in lists.items()}
    for name, values in lists.items():
        if len(values) != len(ids):
            raise ValueError(f"`{name}` has {len(values)} entries for {len(ids)} input_ids")
    if any(isinstance(token, bool) for token in ids):  # in a mask they are fine
        raise ValueError("`input_ids` holds true or false: it must be a list of integers")
    if any(token < 0 for token in ids):
        raise ValueError(f"`input_ids` holds the negative id {min(ids)}")
    if "labels" in lists:
        for position, (token, label) in enumerate(zip(ids, lists["labels"], strict=True)):
            if label not in (-100, token):
                raise ValueError(
                    f"label {label} at position {position} is neither -100 nor the input id {token}; labels must "
                    "stand at the position of their own token, unshifted"
                )
        mask = [label != -100 for label in lists["labels"]]
    else:
        names = ["assistant_masks"] + ["completion_mask"] * completion_only
        masks = [lists[name] for name in names if name in lists]
        mask = [all(bits) for bits in zip(*masks, strict=True)] if masks else [True] * len(ids)
    if "attention_mask" in lists:
        kept = [i for i, seen in enumerate(lists["attention_mask"]) if seen]
        return Tokens([ids[i] for i in kept], [mask[i] for i in kept])
    return Tokens(ids, mask)


def _integers(value: Any, column: str) -> list[int]:
    value = _container(value, column)
    if value is None:
        raise ValueError(f"no `{column}` (missing or null)")
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list) or any(not isinstance(item, int) for item in value):
        raise ValueError(f"`{column}` must be a list of integers")
    return value


# Arrow values to Python objects


def column_readers(features: Features | None, keep_none: bool, json_text: bool) -> dict[str, Callable[[Any], Any]]:
    """For each column that needs it, what turns its Python value into the object that was stored.

    JSON text is parsed here (`json_text`: the values are Arrow's, not decoded yet), since `datasets` parses it with a
    parser that rounds floats. Keys that are None inside an Arrow struct are removed unless `keep_none`: a struct has
    the keys of all its rows, so these are other rows' keys (tool arguments, schema fields). A null in a JSON column
    was written by the user and stays.
    """
    readers = {name: _reader(feature, keep_none, json_text) for name, feature in (features or {}).items()}
    return {name: reader for name, reader in readers.items() if reader is not None}


def _reader(feature: Any, keep_none: bool, json_text: bool) -> Callable[[Any], Any] | None:
    if isinstance(feature, Json):
        return _parse_json if json_text else None
    if isinstance(feature, List | LargeList | list):
        item = _reader(feature[0] if isinstance(feature, list) else feature.feature, keep_none, json_text)
        return None if item is None else lambda value: value if value is None else [item(each) for each in value]
    if isinstance(feature, dict):
        fields = {key: _reader(inner, keep_none, json_text) for key, inner in feature.items()}
        return lambda value: value if value is None else _read_struct(value, fields, keep_none)
    return None


def _parse_json(value: Any) -> Any:
    return value if value is None else json.loads(value)


def _read_struct(value: dict[str, Any], fields: dict[str, Any], keep_none: bool) -> dict[str, Any]:
    read = {key: fields[key](item) if fields.get(key) else item for key, item in value.items()}
    return read if keep_none else {key: item for key, item in read.items() if item is not None}
