"""GRPO in several processes: each samples a stripe of the prompts, and all exchange what they have sampled."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxtrl.rollout.groups import Group, Prompt, Rollout
from jaxtrl.train.distributed import gather_bytes
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.grpo_resume import pack_groups, unpack_groups


class SharedRollout:
    """The `Rollout` of all processes, made of the `own` one of each: group n of process p is group n * processes + p.

    All processes take the same groups in the same order, so that they plan the same batches, of which each builds the
    rows of its own devices. All call each method at the same place, but for `metrics`, which are those of `own`.
    """

    def __init__(self, own: Rollout):
        self._own, self._process, self._processes = own, jax.process_index(), jax.process_count()

    def start(self, params: Any, version: int, next_number: int, finished: Sequence[Group]) -> None:
        ours = [
            group._replace(number=group.number // self._processes)
            for group in finished
            if group.number % self._processes == self._process
        ]
        self._own.start(params, version, self._share(next_number), ours)

    def take(self, count: int) -> list[Group]:
        return self._exchange(self._own.take(self._share(count)))

    def release(self, count: int) -> None:
        self._own.release(self._share(count))

    def skip(self, count: int, more: int) -> None:
        self._own.skip(self._share(count), self._share(more))

    def publish(self, params: Any, version: int) -> None:
        self._own.publish(params, version)

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> list[Group]:
        return self._exchange(self._own.evaluate(prompts[self._process :: self._processes], num_generations))

    def finished(self) -> list[Group]:
        return self._exchange(self._own.finished())

    def metrics(self) -> dict[str, float]:
        return self._own.metrics()

    def close(self) -> None:
        self._own.close()

    def _share(self, count: int) -> int:
        share, rest = divmod(count, self._processes)
        if rest:
            raise ValueError(f"{count} groups cannot be shared by {self._processes} processes: this is a jaxtrl defect")
        return share

    def _exchange(self, groups: list[Group]) -> list[Group]:
        """Those of all processes, in the order of the numbers that they have in the whole run."""
        everyone = [
            group._replace(number=group.number * self._processes + process)
            for process, part in enumerate(gather_bytes(pack_groups(groups)))
            for group in unpack_groups(part)
        ]
        return sorted(everyone, key=lambda group: group.number)


def check_processes(args: AsyncGRPOConfig, groups_per_step: int, prompts: int, total_groups: int) -> None:
    """Raises ValueError, with what to change, for a run that several processes cannot share equally."""
    count = jax.process_count()
    if count == 1:
        return
    if args.rollout == "ray":
        raise ValueError("rollout: ray serves one trainer process so far: use workers or inline with several")
    if args.drop_zero_std_groups:
        raise ValueError("drop_zero_std_groups: processes take equal numbers of groups: leave it out with several")
    sizes = {
        "per_device_train_batch_size: the groups of a step are": groups_per_step,
        "train_dataset: the prompts are": prompts,
        "num_train_epochs: the groups of the run are": total_groups,
    }
    for what, size in sizes.items():
        if size % count:
            raise ValueError(f"{what} {size}, which {count} processes cannot share equally: make it a multiple")
