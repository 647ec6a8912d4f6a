"""Chat templates: which one renders a data set, rendering, and where the assistant's text is in the result."""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

TRAINING_TEMPLATE_PATH = Path(__file__).parent.parent / "assets" / "qwen3_training.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """`text`: Jinja source, None for the tokenizer's own. `kwargs`: variables that go with it. `name` is for logs."""

    name: str
    text: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


OWN = ChatTemplate("the tokenizer's own")


def choose_template(tokenizer: PreTrainedTokenizerBase, *, marked: bool, prefix_preserving: bool) -> ChatTemplate:
    """The template for a conversational data set: the tokenizer's own unless it lacks what is asked for.

    Args:
        marked: assistant tokens have to be found (`assistant_only_loss`): the template needs generation marks.
        prefix_preserving: earlier turns have to read the same whatever follows (tree rows).

    Raises:
        ValueError: no template, or one that cannot be replaced by the shipped training template.
    """
    text = get_template(tokenizer, None)
    lacks_marks = marked and not has_generation_marks(text)
    if lacks_marks or (prefix_preserving and not _keeps_prefixes(tokenizer)):
        return training_template(tokenizer)
    return OWN


def get_template(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> str:
    """The tokenizer's template. Raises ValueError if it has none."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the data set holds conversations but the tokenizer has no chat template; name one with "
            "chat_template_path (a .jinja file or a tokenizer)"
        )
    return tokenizer.get_chat_template(None, tools)


def has_generation_marks(template: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


def training_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The shipped Qwen3 training template, in the variant (with or without think blocks) that writes single turns as
    the tokenizer's own template does. Raises ValueError if neither does: it is another model's format."""
    text = _training_text()
    for name, kwargs in (
        ("Qwen3 training template", {}),
        ("Qwen3 training template without think blocks", {"think_blocks": False}),
    ):
        template = ChatTemplate(name, text, kwargs)
        if all(_try_render(tokenizer, OWN, probe) == _try_render(tokenizer, template, probe) for probe in _PROBES):
            return template
    raise ValueError(
        "the tokenizer's chat template has no {% generation %} marks or rewrites earlier turns, and it is not Qwen3's, "
        "for which a training template is shipped; give one that has the marks with chat_template_path"
    )


@lru_cache
def _training_text() -> str:
    return TRAINING_TEMPLATE_PATH.read_text(encoding="utf-8")


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_PROBES: list[tuple[list[dict[str, Any]], list[Any] | None]] = [
    ([{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}], None),
    (
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "B", "tool_calls": [_CALL]},
        ],
        [_TOOL],
    ),
    ([{"role": "user", "content": "A"}, {"role": "tool", "content": "T"}, {"role": "assistant", "content": "B"}], None),
]


def _try_render(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, probe: tuple[list[dict[str, Any]], list[Any] | None]
) -> str | None:
    try:
        return render(tokenizer, template, *probe)[0]
    except ValueError:
        return None


def _keeps_prefixes(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether first turns read the same alone and when a tool's answer or another turn follows them."""
    user: dict[str, Any] = {"role": "user", "content": "A"}
    answer: dict[str, Any] = {"role": "assistant", "content": "<think>\nR\n</think>\n\nB"}
    call, result = {**answer, "tool_calls": [_CALL]}, {"role": "tool", "content": "T"}
    for turns in ([user, answer, user, answer], [user, call, result, answer, user, answer]):
        whole = _try_render(tokenizer, OWN, (turns, None))
        ends = [i + 1 for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if whole is None or not all(
            whole.startswith(_try_render(tokenizer, OWN, (turns[:n], None)) or "\0") for n in ends
        ):
            return False
    return True


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    add_generation_prompt: bool = False,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and the character spans of its generation blocks (empty unless `marked`).

    Raises ValueError if the template refuses the conversation.
    """
    try:
        rendered: Any = render_jinja_template(  # annotated as str, returns texts and spans
            conversations=[messages],
            tools=tools,
            chat_template=template.text or get_template(tokenizer, tools),
            return_assistant_tokens_mask=marked,
            add_generation_prompt=add_generation_prompt,
            **{**tokenizer.special_tokens_map, **template.kwargs, **(kwargs or {})},
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot render the conversation ({error})") from None
    texts, spans = rendered
    return texts[0], [(int(start), int(end)) for start, end in spans[0]] if marked else []


def check_rendered(messages: list[dict[str, Any]], text: str) -> None:
    """Raises ValueError if a message is not in the rendered text: a template passes over a role that it does not know
    without a word. (Assistant and tool messages may be rewritten, so they are not looked for.)"""
    for i, message in enumerate(messages):
        role = message["role"]
        left_out = role not in ("assistant", "tool") and message["content"].strip() not in text
        unknown = role not in ("system", "user", "assistant", "tool") and role not in text
        if left_out or unknown:
            raise ValueError(f"message {i} (role {role!r}) is left out by the chat template; use a role that it knows")


def loses_reasoning(messages: list[dict[str, Any]], text: str) -> bool:
    """Whether the reasoning of some assistant message is not in the rendered text (looked for in their order)."""
    position = 0
    for message in messages:
        reasoning = message.get("reasoning_content")
        if message["role"] == "assistant" and reasoning is None and "</think>" in message["content"]:
            reasoning = message["content"].split("</think>", 1)[0].split("<think>", 1)[-1]
        if isinstance(reasoning, str):
            found = text.find(reasoning.strip(), position)
            if found < 0:
                return True
            position = found + len(reasoning.strip())
    return False


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Gives the tokenizer the chat template of `chat_template_path`.

    Args:
        path: a .jinja or .j2 file; `qwen3_training` for the shipped training template; or another tokenizer (folder or
            hub id), whose EOS token is then taken too.

    Raises:
        FileNotFoundError: no such file. ValueError: not a tokenizer, or one with tokens that this one lacks (the
            embedding is not enlarged).
    """
    from transformers import AutoTokenizer  # here: this one import pulls in torch where it is installed

    if path == TRAINING_TEMPLATE_PATH.stem:
        tokenizer.chat_template = _training_text()
        return
    if path.endswith((".jinja", ".j2")):
        if not Path(path).is_file():
            raise FileNotFoundError(f"chat_template_path: no such file: {path!r}")
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        return
    try:
        source = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"chat_template_path: {path!r} is neither a .jinja file nor a tokenizer ({reason})") from None
    vocabulary = tokenizer.get_vocab()
    missing = [str(token) for token in source.added_tokens_decoder.values() if str(token) not in vocabulary]
    if missing:
        raise ValueError(
            f"chat_template_path: the tokenizer lacks {len(missing)} tokens of {path!r} (such as {missing[0]}), and "
            "the embedding is not enlarged; use a template made of tokens that it has"
        )
    tokenizer.chat_template = get_template(source, None)
    tokenizer.eos_token = source.eos_token
