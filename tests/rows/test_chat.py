"""Chat templates: which one is used, and what the shipped training template writes (cases C04 and C05)."""

from importlib.resources import files

import pytest
from transformers import AutoTokenizer

from jaxtrl.rows import chat
from jaxtrl.rows.chat import ChatTemplate

PLAIN_CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"

TRAINING = ChatTemplate("training", chat.TRAINING_TEMPLATE_PATH.read_text())
UNMARKED = TRAINING.text.replace("{%- generation %}", "{%- if true %}").replace("{%- endgeneration %}", "{%- endif %}")
NO_THINK = UNMARKED.replace("is defined else true", "is defined else false")
THINKS_LAST = UNMARKED.replace("{%- if with_think %}", "{%- if with_think and loop.last %}")  # as the stock template
USER = {"role": "user", "content": "Q"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(str(files("jaxtrl") / "assets" / "tokenizer"))


def assistant(content="A", **more):
    return {"role": "assistant", "content": content, **more}


def written(tokenizer, *messages, **kwargs):
    return chat.render(tokenizer, TRAINING, list(messages), **kwargs)[0]


def turn_of(tokenizer, message):
    """What stands between the assistant's header and the end of its turn."""
    text, [(start, end)] = chat.render(tokenizer, TRAINING, [USER, message], marked=True)
    assert text[:start] == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert text[end:] == ""
    assert text[start:end].endswith("<|im_end|>\n")
    return text[start:end].removesuffix("<|im_end|>\n")


def test_choice_of_template(tokenizer):
    def chosen(text, **needs):
        tokenizer.chat_template = text
        return chat.choose_template(tokenizer, **{"marked": False, "prefix_preserving": False, **needs})

    assert chosen(NO_THINK) is chat.OWN
    assert chosen(NO_THINK, prefix_preserving=True) is chat.OWN
    assert chosen(NO_THINK, marked=True).kwargs == {"think_blocks": False}
    assert chosen(UNMARKED, marked=True).kwargs == {}
    assert chosen(THINKS_LAST) is chat.OWN
    assert chosen(THINKS_LAST, marked=True).kwargs == {}
    assert chosen(THINKS_LAST, prefix_preserving=True).kwargs == {}
    assert chosen(TRAINING.text, marked=True, prefix_preserving=True) is chat.OWN
    assert chosen(OTHER) is chat.OWN
    with pytest.raises(ValueError, match=r"has no \{% generation %\} marks"):
        chosen(OTHER, marked=True)
    with pytest.raises(ValueError, match="no chat template; name one with chat_template_path"):
        chosen(None)


def test_probes_see_more_than_single_turns(tokenizer):
    """A template that differs from Qwen3's only in how it writes tool calls is not replaced."""
    tokenizer.chat_template = UNMARKED.replace('<tool_call>\\n{"name": "', '<call>\\n{"name": "')
    assert tokenizer.chat_template != UNMARKED
    assert not chat.has_generation_marks(tokenizer.chat_template)
    with pytest.raises(ValueError, match="not Qwen3's"):
        chat.choose_template(tokenizer, marked=True, prefix_preserving=False)


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%-generation%}", "{%+ generation %}"])
def test_generation_marks_in_every_spelling(mark):
    assert chat.has_generation_marks(f"x {mark} y")
    assert not chat.has_generation_marks("{# generation #} {% set generation = 1 %}")


@pytest.mark.parametrize("think", [True, False])
def test_earlier_turns_never_change(tokenizer, think):
    """Every beginning of a conversation that ends before or after an assistant turn is a prefix of the whole."""
    turns = [
        {"role": "system", "content": "S"},
        USER,
        assistant("<think>\nfirst\n</think>\n\nA"),
        USER,
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "R1"},
        {"role": "tool", "content": "R2"},
        assistant("both", tool_calls=[CALL, CALL["function"]]),
        {"role": "tool", "content": "R3"},
        assistant("\nA2", reasoning_content="third"),
        USER,
        assistant(),
    ]
    kwargs = {"think_blocks": think}
    whole, spans = chat.render(tokenizer, TRAINING, turns, [TOOL], kwargs, marked=True)
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    assert len(spans) == len(answers)
    for i, (start, end) in zip(answers, spans, strict=True):
        before = chat.render(tokenizer, TRAINING, turns[:i], [TOOL], kwargs, add_generation_prompt=True)[0]
        assert whole[:start] == before
        assert whole[:end] == chat.render(tokenizer, TRAINING, turns[: i + 1], [TOOL], kwargs)[0]
        assert whole[start:end].endswith("<|im_end|>\n")
        assert whole[start:end].startswith("<think>\n") == (think or i == answers[0])  # there it is in the content
    assert ("third" in whole) == think
    assert whole.count("<|im_start|>user") == 3 + 2  # the tools' answers to one turn share a user turn


def test_reasoning_stands_in_exactly_one_block(tokenizer):
    def block(reasoning, answer):
        return f"<think>\n{reasoning}\n</think>\n\n{answer}"

    assert turn_of(tokenizer, assistant("A")) == block("", "A")
    assert turn_of(tokenizer, assistant("<think>\nR\n</think>\n\nA")) == block("R", "A")
    assert turn_of(tokenizer, assistant("A", reasoning_content="\nR\n")) == block("R", "A")
    assert turn_of(tokenizer, assistant("It is 4.\n</think>\n\n4")) == block("It is 4.", "4")  # C05 (b)
    assert turn_of(tokenizer, assistant("<think>\ncut off")) == block("cut off", "")
    # Nothing is lost where a tag stands elsewhere in the text.
    assert turn_of(tokenizer, assistant("See: <think>R</think> A")) == block("", "See: <think>R</think> A")
    assert turn_of(tokenizer, assistant("<think>R</think>A </think> B")) == block("R", "A </think> B")
    assert turn_of(tokenizer, assistant("<think>x</think>A", reasoning_content="R")) == block("R", "<think>x</think>A")


def test_tool_calls_and_generation_prompt(tokenizer):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text_call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert turn_of(tokenizer, assistant("", tool_calls=[CALL, text_call])).endswith(f"</think>\n\n{call}\n{call}")
    assert turn_of(tokenizer, assistant("A", tool_calls=[CALL])).endswith(f"</think>\n\nA\n{call}")
    assert written(tokenizer, USER, add_generation_prompt=True).endswith("<|im_end|>\n<|im_start|>assistant\n")
    off = written(tokenizer, USER, add_generation_prompt=True, kwargs={"enable_thinking": False})
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_template_that_refuses(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ValueError, match=r"cannot render the conversation .no system messages."):
        chat.render(tokenizer, chat.OWN, [USER])


def test_messages_left_out_are_found(tokenizer):
    tokenizer.chat_template = TRAINING.text
    for role in ("developer", "human"):
        messages = [USER, {"role": role, "content": "Q"}]
        with pytest.raises(ValueError, match=f"message 1 .role '{role}'. is left out"):
            chat.check_rendered(messages, chat.render(tokenizer, chat.OWN, messages)[0])
    with pytest.raises(ValueError, match=r"message 0 .role 'system'. is left out"):
        chat.check_rendered([{"role": "system", "content": "S"}], "something else")
    chat.check_rendered([USER, assistant("gone")], chat.render(tokenizer, chat.OWN, [USER])[0])


def test_lost_reasoning():
    answers = [assistant("<think>\nadd\n</think>\n\n2"), assistant("x", reasoning_content="add again")]
    assert not chat.loses_reasoning(answers, "... add ... 2 ... add again ... x")
    assert chat.loses_reasoning(answers, "... 2 ... add again ... x")  # "add" is found once, "add again" not after it
    assert not chat.loses_reasoning([USER, assistant()], "")


def test_set_chat_template(tokenizer, tmp_path):
    (tmp_path / "own.jinja").write_text(PLAIN_CHATML)
    chat.set_chat_template(tokenizer, str(tmp_path / "own.jinja"))
    assert tokenizer.chat_template == PLAIN_CHATML
    chat.set_chat_template(tokenizer, "qwen3_training")
    assert tokenizer.chat_template == TRAINING.text
    other = AutoTokenizer.from_pretrained(str(files("jaxtrl") / "assets" / "tokenizer"))
    other.chat_template, other.eos_token = OTHER, "<|endoftext|>"
    other.save_pretrained(tmp_path / "other")
    chat.set_chat_template(tokenizer, str(tmp_path / "other"))
    assert (tokenizer.chat_template, tokenizer.eos_token) == (OTHER, "<|endoftext|>")
    other.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"lacks 1 tokens of .*such as <\|new\|>"):
        chat.set_chat_template(tokenizer, str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError, match="no such file"):
        chat.set_chat_template(tokenizer, str(tmp_path / "missing.jinja"))
    with pytest.raises(ValueError, match=r"neither a .jinja file nor a tokenizer") as info:
        chat.set_chat_template(tokenizer, str(tmp_path))
    assert "\n" not in str(info.value)


def test_stock_qwen3_template_is_replaced_by_its_equal(qwen3_tokenizer, shared_data):
    """On single turns the training template writes what the stock template writes, character by character."""
    from jaxtrl.rows.sources import load_source

    template = chat.choose_template(qwen3_tokenizer, marked=True, prefix_preserving=False)
    assert template.name == "Qwen3 training template"
    assert chat.choose_template(qwen3_tokenizer, marked=False, prefix_preserving=True) == template
    assert chat.choose_template(qwen3_tokenizer, marked=False, prefix_preserving=False) is chat.OWN
    for row in load_source(shared_data / "jsonl" / "chat_singleturn.jsonl", split="train[:200]"):
        own = chat.render(qwen3_tokenizer, chat.OWN, row["messages"])
        assert chat.render(qwen3_tokenizer, template, row["messages"]) == own
