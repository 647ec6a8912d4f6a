"""The embedded default: a tiny ChatML tokenizer and sample data, made by scripts/make_assets.py."""

from importlib.resources import files
from pathlib import Path


def tokenizer_path() -> Path:
    """Folder of the tiny tokenizer (768 entries, ChatML, single digits); AutoTokenizer.from_pretrained loads it."""
    return _path("tokenizer")


def sample_data_path() -> Path:
    """2,000 training chats as JSONL with a `messages` column: mostly short sums, some text tasks."""
    return _path("data/train.jsonl")


def eval_data_path() -> Path:
    """100 chats like `sample_data_path`, none of which is in it."""
    return _path("data/eval.jsonl")


def prompts_path() -> Path:
    """500 sums for GRPO as JSONL: `prompt` (messages) and `answer` (the number as text)."""
    return _path("data/prompts.jsonl")


def eval_prompts_path() -> Path:
    """100 more, of sums that are not among those of `prompts_path` in any phrasing."""
    return _path("data/eval_prompts.jsonl")


def _path(name: str) -> Path:
    path = Path(str(files(__name__))) / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the package is installed without its assets; install it again")
    return path
