"""From what a user passes as a data set to the lines of training or evaluation, for the options of SFTConfig."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from datasets import Dataset, IterableDataset
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.batch import Sample
from jaxtrl.rows.blocks import choose_block_size
from jaxtrl.rows.order import BatchSizes, epoch_order
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, TokenizeReport, tokenize_dataset
from jaxtrl.train.mesh import own_rows, row_count
from jaxtrl.trainers.data import Batches, Lines, Packing, StreamLines, count_tokens
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.tree_data import TreeLines

SHUFFLE_ONCE = 2**63  # the epoch number whose order `shuffle_dataset` uses: no epoch of training reaches it
STREAM_BUFFER = 1000  # rows of a stream among which `shuffle_dataset` chooses the next


class PreparedData(NamedTuple):
    """Lines, what happened to the rows (of a stream: so far), and the first sample."""

    lines: Lines | StreamLines
    report: TokenizeReport
    example: Sample | None


def prepare_data(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    args: SFTConfig,
    vocab_size: int,
    *,
    packed: bool,
    shuffled: bool,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
) -> PreparedData:
    """Tokenise, shuffle once where asked, and pack. Bad rows raise ValueError that names them."""
    options = TokenizeOptions(
        dataset_text_field=args.dataset_text_field,
        max_length=args.max_length if not packed or args.packing_strategy in ("bfd", "tree") else None,
        truncation_mode=args.truncation_mode,
        completion_only_loss=args.completion_only_loss,
        assistant_only_loss=args.assistant_only_loss,
        eos_token=args.eos_token,
        chat_template_kwargs=args.chat_template_kwargs,
        prefix_preserving=packed and args.packing_strategy == "tree",
        vocab_size=vocab_size,
    )
    tokenized, report = tokenize_dataset(
        load_source(dataset), tokenizer, options, formatting_func=formatting_func, num_proc=args.dataset_num_proc
    )
    packing = None
    if packed:
        assert args.max_length is not None  # SFTConfig has checked it
        packing = Packing(args.packing_strategy, args.max_length)
    seed = data_seed(args)
    if isinstance(tokenized, IterableDataset):
        if packing is not None and packing.strategy == "tree":
            raise ValueError("packing_strategy tree is planned over the whole data set: use bfd for a stream")
        if shuffled:
            tokenized = tokenized.shuffle(seed=seed, buffer_size=STREAM_BUFFER)
        return PreparedData(StreamLines(tokenized, packing), report, None)
    assert isinstance(tokenized, Dataset)
    if shuffled:
        tokenized = tokenized.select(epoch_order(seed, SHUFFLE_ONCE, len(tokenized)))
    if packing is not None:
        packing = fit_packing(packing, tokenized, args.pad_to_multiple_of)
    if packing is not None and packing.strategy == "tree":
        lines: Lines = TreeLines(tokenized, packing)
    else:
        lines = Lines(tokenized, packing)
    return PreparedData(lines, report, lines.load([0])[0][0])


def fit_packing(packing: Packing, dataset: Dataset, setting: str | int | None) -> Packing:
    """`packing` with the attention block that suits the tokenised data, if the shapes of the run leave that open."""
    if setting != "auto":
        return packing
    lengths, _ = count_tokens(dataset.with_format("arrow"))
    return packing._replace(block_size=choose_block_size(lengths, packing.length, jax.default_backend()))


def make_batches(
    name: str,
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    args: SFTConfig,
    vocab_size: int,
    mesh: Mesh | None,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
) -> tuple[PreparedData, Batches]:
    """Data and batches of the data set called "train", "eval" or "eval_NAME"; the shapes of evaluation are chosen."""
    train = name == "train"
    packed = args.packing if train or args.eval_packing is None else args.eval_packing
    data = prepare_data(
        dataset,
        tokenizer,
        args,
        vocab_size,
        packed=packed,
        shuffled=train and args.shuffle_dataset,
        formatting_func=formatting_func,
    )
    assert args.pad_to_multiple_of is not None  # SFTConfig makes it "none"
    setting, limit = args.pad_to_multiple_of, args.max_programs
    if train:
        size, window = args.per_device_train_batch_size, args.batch_window
        return data, Batches(data.lines, size, setting, None, limit, window, own_rows(mesh))
    batches = Batches(data.lines, args.per_device_eval_batch_size, setting, None, limit, own=own_rows(mesh))
    if data.lines.count is not None:
        batches.fit(batches.foresee_in_order(row_count(mesh)))
    return data, batches


def is_shuffled(args: SFTConfig) -> bool:
    """Whether each epoch has an order of its own."""
    return args.train_sampling_strategy == "random"


def data_seed(args: SFTConfig) -> int:
    """The seed of the order of the data."""
    return args.seed if args.data_seed is None else args.data_seed


def run_facts(args: SFTConfig, batches: Batches, sizes: BatchSizes, dtype: Any, config: Qwen3Config) -> dict[str, Any]:
    """What decides batches and programs, and so must not change between saving and resuming (JSON values)."""
    return {
        "per_device_train_batch_size": sizes.per_device,
        "the number of devices": sizes.devices,
        "gradient_accumulation_steps": sizes.accumulation,
        "the number of rows": batches.lines.count,
        "the data (checksum of lengths)": batches.lines.fingerprint,
        "the order's seed": data_seed(args),
        "train_sampling_strategy": args.train_sampling_strategy,
        "batch_window": args.batch_window,
        "pad_to_multiple_of": args.pad_to_multiple_of,
        "max_programs": args.max_programs,
        "the shape set": batches.shapes.to_json(),
        "the compute dtype": str(dtype),
        "loss_type": args.loss_type,
        "the model's config": config.to_dict(),
    }
