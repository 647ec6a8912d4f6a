"""Callbacks: the API of transformers.TrainerCallback, so that callbacks written for TRL work here.

`TrainerCallback`, `TrainerState` and `TrainerControl` are Transformers' own classes (they need no torch).
"""

from collections.abc import Iterable
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState


class FlowCallback(TrainerCallback):
    """Decides from the configuration when to log, evaluate and save, as Transformers' DefaultFlowCallback does."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        step, last = state.global_step, state.global_step >= state.max_steps
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and not step % state.logging_steps
        ):
            control.should_log = True
        if args.eval_strategy == "steps" and (last or not step % state.eval_steps):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or not step % state.save_steps):
            control.should_save = True
        if last:
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch"
        control.should_save |= args.save_strategy == "epoch"
        return control


class Callbacks:
    """Calls the flow callback and the user's callbacks in order; each may change `control`."""

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]]):
        self.callbacks = [FlowCallback(), *(cb() if isinstance(cb, type) else cb for cb in callbacks)]

    def call(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """`callback.EVENT(args, state, control, **kwargs)` for each callback; what it returns is the new control."""
        for callback in self.callbacks:
            result = getattr(callback, event)(args, state, control, **kwargs)
            control = control if result is None else result
        return control

    def state(self) -> list[dict[str, Any]]:
        """JSON values that callbacks such as EarlyStoppingCallback need to go on after a resume."""
        stateful = [cb for cb in self.callbacks if isinstance(cb, ExportableState)]
        return [{"name": type(cb).__name__, **cb.state()} for cb in stateful]

    def restore(self, stored: list[dict[str, Any]]) -> None:
        """Give each stateful callback what `state` stored for it: the first of a class to the first of that class."""
        waiting = [cb for cb in self.callbacks if isinstance(cb, ExportableState)]
        for entry in stored:
            callback = next((cb for cb in waiting if type(cb).__name__ == entry["name"]), None)
            if callback is not None:
                waiting.remove(callback)
                for name, value in entry["attributes"].items():
                    setattr(callback, name, value)
