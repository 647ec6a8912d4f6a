"""Callbacks with the API of transformers.TrainerCallback, so that callbacks written for TRL work here.

The classes are jaxtrl's own, since importing Transformers' would import torch where it is installed. Any object with
the events as methods will do: Transformers' EarlyStoppingCallback, a subclass of its TrainerCallback or of this one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxtrl.trainers.options import count_steps

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_evaluate",
    "on_save",
    "on_log",
)


@dataclass
class TrainerState:
    """What a callback sees of a run, and trainer_state.json, under Transformers' names."""

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    num_train_epochs: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Set the intervals from the options: steps, or a share of all steps."""
        for kind in ("logging", "eval", "save"):
            steps = getattr(args, f"{kind}_steps")
            if steps is not None:
                setattr(self, f"{kind}_steps", count_steps(steps, max_steps))


@dataclass
class TrainerControl:
    """What callbacks decide. The three above the last are reset before every step."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False

    def new_step(self) -> None:
        self.should_log = self.should_evaluate = self.should_save = False


class TrainerCallback:
    """Does nothing at each event; a subclass overrides those it wants, and may return a new control.

    `kwargs` hold `model` (with the parameters of the moment), `processing_class`, and `logs` or `metrics` if any.
    """


def _nothing(self: Any, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
    return None


for _event in EVENTS:
    setattr(TrainerCallback, _event, _nothing)


class FlowCallback(TrainerCallback):
    """Decides from the options when to log, evaluate and save, as Transformers' DefaultFlowCallback does."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if args.logging_strategy == "steps" and not step % state.logging_steps:
            control.should_log = True
        if args.eval_strategy == "steps" and (last or not step % state.eval_steps):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or not step % state.save_steps):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch"
        control.should_save |= args.save_strategy == "epoch"


class Callbacks:
    """Calls the flow callback and the user's callbacks in order; each may change `control`."""

    def __init__(self, callbacks: Iterable[Any]):
        self.callbacks: list[Any] = [FlowCallback(), *(cb() if isinstance(cb, type) else cb for cb in callbacks)]

    def call(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """`callback.EVENT(args, state, control, **kwargs)` for each callback."""
        for callback in self.callbacks:
            result = getattr(callback, event)(args, state, control, **kwargs)
            if result is not None and result is not control:
                vars(control).update(vars(result))

    def _stateful(self) -> list[Any]:
        """Those with a `state` method, as transformers.ExportableState has it."""
        return [callback for callback in self.callbacks if callable(getattr(callback, "state", None))]

    def state(self) -> list[dict[str, Any]]:
        """JSON values that callbacks such as EarlyStoppingCallback need to go on after a resume."""
        return [{"name": type(callback).__name__, **callback.state()} for callback in self._stateful()]

    def restore(self, stored: list[dict[str, Any]]) -> None:
        """Give each stateful callback what `state` stored for it: the first of a class to the first of that class."""
        waiting = self._stateful()
        for entry in stored:
            callback = next((cb for cb in waiting if type(cb).__name__ == entry["name"]), None)
            if callback is not None:
                waiting.remove(callback)
                for name, value in entry["attributes"].items():
                    setattr(callback, name, value)
