"""Where metrics go: metrics.jsonl always, trackers on request, and the terminal."""

import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Metrics = Mapping[str, float | int | str]


class MetricsFile:
    """`metrics.jsonl`: one JSON object per log with its `step`, appended and written through at once."""

    def __init__(self, path: str | Path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, metrics: Metrics, step: int) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def append_metrics(path: str | Path, metrics: Metrics, step: int) -> None:
    """One line outside of a run."""
    file = MetricsFile(path)
    file.log(metrics, step)
    file.close()


def trim_metrics(path: str | Path, resume_step: int | None) -> None:
    """Make `metrics.jsonl` ready for a run that is about to start or to go on.

    A new run (None) starts a new file. A run resumed at `resume_step` keeps the lines up to that step and drops what
    the killed run had logged after it (and a line cut short by the kill), so that no step stands there twice.
    """
    path = Path(path)
    kept = [] if resume_step is None or not path.exists() else _lines_until(path, resume_step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def _lines_until(path: Path, step: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # cut short: the last thing that the killed run wrote
        if record["step"] <= step and "train_runtime" not in record and line.endswith("\n"):
            kept.append(line)
    return kept


class _TensorBoard:
    def __init__(self, module: Any, folder: Path, resume_step: int | None):
        purge = None if resume_step is None else resume_step + 1
        self._writer = module.SummaryWriter(str(folder / "runs"), purge_step=purge)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in _grouped(metrics).items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Run:
    """wandb and trackio, whose calls are the same."""

    def __init__(self, module: Any, project: str, name: str, config: dict[str, Any]):
        self._module = module
        module.init(project=project, name=name, config=config)

    def log(self, metrics: Metrics, step: int) -> None:
        self._module.log(_grouped(metrics), step=step)

    def log_table(self, name: str, columns: Mapping[str, Sequence[Any]], step: int) -> None:
        """A table of the tracker's own, from equally long columns."""
        from pandas import DataFrame  # a dependency of datasets; slow to import

        self._module.log({name: self._module.Table(dataframe=DataFrame(dict(columns)))}, step=step)

    def close(self) -> None:
        self._module.finish()


Tracker: TypeAlias = _TensorBoard | _Run


def log_table(trackers: Iterable[Tracker], name: str, columns: Mapping[str, Sequence[Any]], step: int) -> None:
    """Equally long columns as a table, in the trackers that have tables: wandb and trackio."""
    for tracker in trackers:
        if isinstance(tracker, _Run):
            tracker.log_table(name, columns, step)


def _grouped(metrics: Metrics) -> dict[str, float | int | str]:
    """Transformers' names in trackers: eval_loss -> eval/loss, loss -> train/loss."""
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in metrics.items()
    }


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def check_trackers(names: Iterable[str]) -> None:
    """Raises ValueError, before anything is trained, where the package of a tracker is not installed."""
    for name in names:
        _import(name)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError as error:
        raise ValueError(
            f"report_to names {name}, but the package {_PACKAGES[name]} cannot be imported ({error}): "
            f"pip install 'jaxtrl[{name}]'."
        ) from None


def open_trackers(
    names: Iterable[str],
    *,
    folder: Path,
    run_name: str,
    project: str,
    config: dict[str, Any],
    resume_step: int | None = None,
) -> list[Tracker]:
    """Start the trackers that `report_to` names. Only these packages are imported.

    Raises ValueError where one of them does not start: wandb without a key, for example.
    """
    trackers: list[Tracker] = []
    for name in names:
        module = _import(name)
        try:
            if name == "tensorboard":
                trackers.append(_TensorBoard(module, folder, resume_step))
            else:
                chosen = os.environ.get("WANDB_PROJECT", project) if name == "wandb" else project
                trackers.append(_Run(module, chosen, run_name, config))
        except Exception as error:  # each package has kinds of its own
            for tracker in trackers:
                tracker.close()
            offline = "set WANDB_MODE=offline, " if name == "wandb" else ""
            raise ValueError(
                f"report_to names {name}, which does not start ({error}): {offline}or leave it out."
            ) from error
    return trackers


class Display:
    """The terminal: a progress bar with loss, tokens/s and time left, or plain lines where there is no terminal.

    `bar`: None draws the bar on a terminal only; True and False decide. With `columns` (names of metrics) the logs of
    training are the rows of a table. A `quiet` one shows nothing.
    """

    SHOWN = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "tokens_per_second")

    def __init__(self, bar: bool | None = None, file: Any = None, columns: tuple[str, ...] = (), quiet: bool = False):
        self._columns, self._has_header = columns, False
        self._console = Console(file=file or sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._bar_wanted = not quiet and (self._console.is_terminal if bar is None else bar)
        self._progress: Progress | None = None
        self._task: Any = None
        self._total = 0

    def say(self, text: str) -> None:
        """A line of text (above the bar)."""
        self._console.print(text, markup=False)

    def show(self, markup: str) -> None:
        """Text with rich markup; [green] becomes marks around it where there are no colours."""
        if not self._console.is_terminal:
            markup = re.sub(r"(?<!\\)\[green\](.*?)(?<!\\)\[/green\]", r"«\1»", markup, flags=re.DOTALL)
        self._console.print(markup)

    def draw(self, renderable: Any) -> None:
        """A table or another object of rich."""
        self._console.print(renderable)

    def start(self, total: int, done: int) -> None:
        self._total = total
        if self._bar_wanted:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            text = TextColumn("{task.description}")
            self._progress = Progress(*columns, text, console=self._console, speed_estimate_period=600)
            self._task = self._progress.add_task("", total=total, completed=done)
            self._progress.start()

    def step(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def log(self, metrics: Metrics, step: int, seconds_left: float | None = None) -> None:
        """One line per log; the bar shows the newest loss and speed besides."""
        if self._columns and self._columns[0] in metrics:
            self._log_row(metrics, step, seconds_left)
            return
        evaluated = [name for name in metrics if name.startswith("eval_")]
        shown = [name for name in (evaluated or self.SHOWN) if name in metrics]
        words = [f"{_short(name)} {_number(metrics[name])}" for name in shown]
        if metrics.get("skipped_steps"):
            words.append(f"skipped steps {metrics['skipped_steps']}")
        if seconds_left is not None and self._progress is None:
            words.append(f"left {_clock(seconds_left)}")
        if words:
            self.say(f"step {step}/{self._total}  " + "  ".join(words))
        if self._progress is not None and "loss" in metrics:
            text = f"loss {_number(metrics['loss'])}  {_number(metrics.get('tokens_per_second', 0))} tokens/s"
            self._progress.update(self._task, description=text)

    def _log_row(self, metrics: Metrics, step: int, seconds_left: float | None) -> None:
        cells = {"step": f"{step}/{self._total}"}
        cells |= {_short(name): _number(metrics[name]) if name in metrics else "-" for name in self._columns}
        cells["left"] = "-" if seconds_left is None else _clock(seconds_left)
        widths = [max(len(name), 9) for name in cells]
        for line in (list(cells.values()),) if self._has_header else (list(cells), list(cells.values())):
            self.say("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
        self._has_header = True

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _short(name: str) -> str:
    short = {"tokens_per_second": "tokens/s", "learning_rate": "lr", "mean_token_accuracy": "accuracy"}
    short |= {"completions/mean_length": "length", "sample/staleness_mean": "staleness"}
    return short.get(name, name)


def _number(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
