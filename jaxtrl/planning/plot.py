"""Pictures of a plan: lengths with the buckets, and padding against programs."""

from pathlib import Path
from typing import Any

from jaxtyping import Int
from numpy import ndarray


def check_plot(path: str) -> None:
    """Raises ValueError with one sentence where matplotlib is missing or the file's kind is unknown."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ValueError(
            f"plot: matplotlib cannot be imported ({error}): pip install 'jaxtrl[report]', or leave out --plot"
        ) from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    kind = Path(path).suffix.removeprefix(".")
    if kind not in kinds:
        raise ValueError(f"plot: {path} must end with one of {', '.join(f'.{name}' for name in sorted(kinds))}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"plot: {path} cannot be written: its folder does not exist")


def draw(plan: dict[str, Any], totals: Int[ndarray, " rows"], path: str) -> None:
    """Write the picture. `totals`: the tokens of each row of the run, without padding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    lengths, trade = figure.subplots(1, 2)
    lengths.hist(totals, bins=min(60, max(10, len(set(totals.tolist())))), color="tab:blue")
    for tokens in sorted({shape[0] for shape in plan["run"]["classes"]}):
        lengths.axvline(tokens, color="tab:red", linewidth=0.8)
    lengths.set(title="rows of this run, and its buckets", xlabel="tokens of a row", ylabel="micro-batches")
    for setting in plan["shape_cost"]["settings"]:
        place = setting["programs"]["all"], 100 * setting["padding_share"]
        trade.plot(*place, "o", color="tab:red" if setting["is_this_run"] else "tab:blue")
        trade.annotate(setting["name"], place, textcoords="offset points", xytext=(5, 5), fontsize=8)
    trade.set(title="padding against programs", xlabel="training programs", ylabel="padding, %")
    trade.set_xscale("log")
    trade.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
