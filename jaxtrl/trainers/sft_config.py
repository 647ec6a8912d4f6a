"""SFTConfig: the options of `SFTTrainer` and `python -m jaxtrl.sft`, under TRL's names and with TRL's defaults."""

import dataclasses
from typing import ClassVar

from jaxtrl.trainers import refused
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.options import Refusals, option


@dataclasses.dataclass
class SFTConfig(TrainConfig):
    """Options of supervised fine-tuning.

    Names and defaults are those of `trl.SFTConfig` 1.16; `REFUSED` gives a reason for each of TRL's options that is
    missing.
    """

    REFUSED: ClassVar[Refusals] = refused.REFUSED | refused.SFT

    dataset_streaming: bool = option(False, "Read the data set while training; needs max_steps.", group="data")
    dataset_num_proc: int | None = option(None, "Processes that tokenize.", group="data", minimum=1)
    per_device_eval_batch_size: int = option(
        8, "As per_device_train_batch_size, for evaluation.", group="batch", minimum=1
    )
    dataset_text_field: str = option("text", "Column of plain-text data.", group="data")
    eos_token: str | None = option(None, "Token that ends a turn or a sequence (none: the tokenizer's).", group="data")
    max_length: int | None = option(
        1024, "Longest sequence in tokens, and the row length when packing (none: no limit).", group="data", minimum=1
    )
    truncation_mode: str = option(
        "keep_start", "Which end of a too long sequence is kept.", group="data", choices=("keep_start", "keep_end")
    )

    packing: bool = option(
        False, "Pack sequences into rows of max_length tokens; documents never see each other.", group="packing"
    )
    packing_strategy: str = option(
        "bfd",
        "bfd: best fit decreasing, truncates; bfd_split: splits what is too long; wrapped: cuts anywhere; "
        "tree: truncates, and samples with a common prefix share its tokens.",
        group="packing",
        choices=("bfd", "bfd_split", "wrapped", "tree"),
    )
    eval_packing: bool | None = option(None, "Pack the evaluation data too (none: as packing).", group="packing")
    pad_to_multiple_of: int | str | None = option(
        "auto",
        "Row sizes, each compiled once: auto (128, 256, 384, 512, 768, ...), K (multiples of K), "
        "optimal:K (the K sizes that waste least on this data), fixed:N or none.",
        group="packing",
        minimum=1,
    )
    max_programs: int | None = option(
        None,
        "Shapes of batches at most; others are merged into larger ones before step 1 (none: 12 with auto).",
        group="packing",
        minimum=1,
    )
    batch_window: int = option(
        1,
        "Form batches among so many consecutive ones so that they fall on few row sizes with little padding (1: not).",
        group="packing",
        minimum=1,
    )

    completion_only_loss: bool | None = option(
        None, "Train on completions only (none: yes for prompt-completion data, else no).", group="loss"
    )
    assistant_only_loss: bool = option(False, "Train on the assistant's turns only.", group="loss")
    loss_type: str = option(
        "nll",
        "nll: negative log-likelihood; dft: dynamic fine-tuning (arXiv 2508.05629).",
        group="loss",
        choices=("nll", "dft"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and self.max_length is None:
            raise ValueError("max_length: packing needs a row length, set it to a number of tokens")
        if self.eval_packing and self.max_length is None:
            raise ValueError("max_length: eval_packing needs a row length, set it to a number of tokens")
        if self.pad_to_multiple_of is None:
            self.pad_to_multiple_of = "none"
        _check_row_sizes(self.pad_to_multiple_of)
        if self.dataset_streaming and self.max_steps < 1:
            raise ValueError("max_steps: dataset_streaming needs a number of steps, the length of a stream is unknown")
        packs = self.packing or self.eval_packing
        if self.dataset_streaming and packs and self.packing_strategy == "tree":
            raise ValueError("packing_strategy: tree is planned over the whole data set, use bfd for a stream")
        if self.batch_window > 1 and self.packing:
            raise ValueError("batch_window: packed rows have one size already, leave it out or set packing to false")


def _check_row_sizes(setting: int | str) -> None:
    if isinstance(setting, int) or setting in ("auto", "none"):
        return
    kind, _, number = setting.partition(":")
    if kind not in ("fixed", "optimal") or not number.isdigit() or int(number) < 1:
        raise ValueError(f"pad_to_multiple_of: expected auto, none, a number, optimal:K or fixed:N, got {setting!r}")
