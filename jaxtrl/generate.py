"""Generation: `python -m jaxtrl.generate --model DIR --prompt TEXT | --prompts FILE.jsonl`, or a chat."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PROG = "python -m jaxtrl.generate"
DESCRIPTION = """\
Generates text with a Qwen3 model. One completion is written to the terminal while it grows, several when they end, or
all as lines of JSON to --output (prompt, generation, text, token_ids, logps, sampled_logps, finish_reason, stop).
Without a prompt it is a chat where a terminal is attached, ended by an empty line; else it answers a sample prompt.
"""
SAMPLE = "What is 1 + 1?"
CHAT_LENGTH = 4096


class Prompt(NamedTuple):
    """Text (raw) or messages, and the tools that go with them."""

    content: str | list[dict[str, Any]]
    tools: list[Any] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Wrong input is one sentence on stderr (JAXTRL_TRACEBACK=1: all of it)."""
    from jaxtrl.trainers.arguments import parse
    from jaxtrl.trainers.command import prepare_terminal, run_command
    from jaxtrl.trainers.generate_config import GenerateConfig

    prepare_terminal()
    (args,) = parse([GenerateConfig], argv, prog=PROG, description=DESCRIPTION)
    return run_command(PROG, lambda: _run(args))


def _run(args: Any) -> None:
    prompts = read_prompts(args)
    import jax

    from jaxtrl.hardware.memory import keep_freed_memory
    from jaxtrl.model.config import Qwen3Config
    from jaxtrl.model.hf import resolve_model
    from jaxtrl.trainers.model_source import load_tokenizer, tiny_model

    if jax.default_backend() == "cpu":
        keep_freed_memory()
    model: Any
    if args.model is None:
        model, tokenizer = tiny_model(0)
        limit = model.config.max_position_embeddings
    else:
        model = resolve_model(args.model)
        tokenizer, limit = load_tokenizer(model), Qwen3Config.from_pretrained(model).max_position_embeddings
    if prompts is None:
        chat(args, make_sampler(args, model, tokenizer, args.max_length or min(CHAT_LENGTH, limit)), tokenizer)
        return
    ids = [encode(args, tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, ids)) + args.max_new_tokens
    answer(args, make_sampler(args, model, tokenizer, args.max_length or longest), tokenizer, ids)


def make_sampler(args: Any, model: Any, tokenizer: Any, max_length: int) -> Any:
    import jax

    from jaxtrl import Sampler

    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return Sampler(model, slots=args.slots, max_length=max_length, dtype=dtype, tokenizer=tokenizer)


def read_prompts(args: Any) -> list[Prompt] | None:
    """The prompts of the flags; None for a chat. Raises ValueError naming the file and line that is wrong."""
    tools = None if args.tools is None else _json(Path(args.tools).read_text(encoding="utf-8"), args.tools)
    if args.prompts is None:
        text = args.prompt
        if text is None:
            if sys.stdin.isatty():
                return None
            text = SAMPLE
        return [_prompt(args, {"prompt": text}, tools, "prompt")]
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{args.prompts}:{number}"
            found.append(_prompt(args, _json(line, where), tools, where))
    if not found:
        raise ValueError(f'{args.prompts} has no prompts: give lines such as {{"prompt": "text"}}')
    return found


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _prompt(args: Any, row: Any, tools: list[Any] | None, where: str) -> Prompt:
    content = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(content, str | list) or not content:
        raise ValueError(f"{where} has no prompt: it needs a text or a list of messages")
    if isinstance(content, str) and not args.raw:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        content = [*system, {"role": "user", "content": content}]
    return Prompt(content, row.get("tools") or tools)


def encode(args: Any, tokenizer: Any, prompt: Prompt) -> list[int]:
    """The token ids of a prompt, rendered by the chat template unless it is text."""
    from jaxtrl.rows.chat import OWN, render

    if isinstance(prompt.content, str):
        return tokenizer.encode(prompt.content, add_special_tokens=False)
    kwargs = {} if args.enable_thinking is None else {"enable_thinking": args.enable_thinking}
    text, _ = render(tokenizer, OWN, prompt.content, prompt.tools, kwargs, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


class Printer:
    """Writes a completion while it grows, but for bytes that are no whole character yet."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._shown = tokenizer, ""
        self._ids: list[int] = []

    def __call__(self, prompt: int, generation: int, ids: list[int]) -> None:
        self._ids += ids
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text

    def end(self) -> None:
        """What is left, and the end of the line."""
        print(self._tokenizer.decode(self._ids, skip_special_tokens=True)[len(self._shown) :], flush=True)


def answer(args: Any, sampler: Any, tokenizer: Any, ids: list[list[int]]) -> None:
    """All completions of the prompts, to the terminal or to `--output`; tokens per second at the end on stderr."""
    alone = len(ids) == args.num_generations == 1 and args.output is None
    printer = Printer(tokenizer)
    compiled = sampler.engine.programs.seconds
    start, tokens = time.perf_counter(), 0
    with ExitStack() as stack:
        file = None if args.output is None else stack.enter_context(open(args.output, "w", encoding="utf-8"))
        listener = printer if alone else None
        for done in sampler.stream(ids, args.sampling_params(), args.num_generations, on_tokens=listener):
            tokens += len(done.token_ids)
            if alone:
                printer.end()
            else:
                _write(done, tokenizer.decode(done.token_ids, skip_special_tokens=True), file)
    seconds, compiling = time.perf_counter() - start, sampler.engine.programs.seconds - compiled
    print(
        f"{tokens} tokens in {seconds:.1f} s, {tokens / (seconds - compiling):.1f} tokens/s without the "
        f"{compiling:.1f} s of compiling, {tokens / seconds:.1f} with them",
        file=sys.stderr,
    )


def _write(done: Any, text: str, file: TextIO | None) -> None:
    if file is None:
        print(f"[{done.prompt_index}.{done.generation_index}] {text}", flush=True)
        return
    fields = {"prompt": done.prompt_index, "generation": done.generation_index, "text": text}
    fields |= {name: getattr(done, name).tolist() for name in ("token_ids", "logps", "sampled_logps")}
    fields |= {"finish_reason": done.finish_reason, "stop": done.stop}
    print(json.dumps(fields, ensure_ascii=False), file=file, flush=True)


def chat(args: Any, sampler: Any, tokenizer: Any) -> None:
    """Turns until an empty line or the end of the input; every turn has all before it as its prompt.

    Where that does not fit max_length any more, the oldest turns are left out; the user is told.
    """
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    tools = None if args.tools is None else _json(Path(args.tools).read_text(encoding="utf-8"), args.tools)
    first = len(messages)
    while text := _ask():
        messages.append({"role": "user", "content": text})
        ids = encode(args, tokenizer, Prompt(messages, tools))
        dropped = 0
        while len(ids) + args.max_new_tokens > sampler.max_length and len(messages) > first + 1:
            del messages[first : first + 2]
            dropped += 2
            ids = encode(args, tokenizer, Prompt(messages, tools))
        if dropped:
            print(f"(the oldest {dropped} messages are left out: {_too_long(args, sampler)})", file=sys.stderr)
        if len(ids) + args.max_new_tokens > sampler.max_length:
            messages.pop()
            print(f"(this message of {len(ids)} tokens is too long: {_too_long(args, sampler)})", file=sys.stderr)
            continue
        printer = Printer(tokenizer)
        (done,) = sampler.stream([ids], args.sampling_params(), on_tokens=printer)
        printer.end()
        messages.append({"role": "assistant", "content": tokenizer.decode(done.token_ids, skip_special_tokens=True)})


def _too_long(args: Any, sampler: Any) -> str:
    return f"the chat and {args.max_new_tokens} new tokens do not fit --max_length {sampler.max_length}"


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
