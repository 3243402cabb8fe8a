"""What a run keeps of each stage beside its parameters: the optimizer's state, and the last steps of `delay=`."""

from __future__ import annotations

from dataclasses import dataclass

from cdp_repro.config import RunConfig
from cdp_repro.config.schema import OptimConfig
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.schedule import Schedule


@dataclass(frozen=True)
class TrainingState:
    """Bytes of each stage, for each rank that holds all of it."""

    optimizer: tuple[int, ...]
    delay: tuple[int, ...]

    def most_on_a_rank(self, schedule: Schedule) -> tuple[int, int]:
        """Return the bytes of both on the ranks with most of each; of shards, an equal part."""
        held: list[list[int]] = [[] for _ in range(schedule.ranks)]
        for stage in range(schedule.stages):
            for rank in schedule.placement.holders(stage):
                held[rank].append(stage)
        parts = schedule.ranks if schedule.placement.is_sharded else 1
        optimizer, delay = (
            max(sum(each[stage] for stage in stages) for stages in held) // parts
            for each in (self.optimizer, self.delay)
        )
        return optimizer, delay


def training_state(config: RunConfig, cut: StageCut, schedule: Schedule) -> TrainingState:
    """Return the bytes that the optimizer and the method against delay keep from the second training step of a run."""
    hidden, others = (_values_kept(config.optim, is_hidden) for is_hidden in (True, False))
    return TrainingState(
        tuple(
            hidden * size + others * (trained - size)
            for trained, size in zip(cut.trained_bytes, cut.hidden_bytes, strict=True)
        ),
        tuple(steps * size for steps, size in zip(kept_steps(config, schedule), cut.trained_bytes, strict=True)),
    )


def kept_steps(config: RunConfig, schedule: Schedule) -> list[int]:
    """Return how many last steps each stage keeps to make up for the stale reads of a schedule."""
    if config.delay.name == "none":
        return [0] * schedule.stages
    from cdp_repro.config.numerics import delay_factory  # here: torch takes seconds

    make = delay_factory(config.delay)
    return [make(column).kept_steps for column in zip(*schedule.rule.matrix, strict=True)]


def optimizer_states(optim: OptimConfig) -> int:
    """Return how many values the optimizer keeps for each value of a parameter; the largest number if they differ."""
    return _values_kept(optim, is_hidden=False)


def _values_kept(optim: OptimConfig, is_hidden: bool) -> int:
    """Return how many values the optimizer keeps for each value of a parameter, in or outside `hidden_matrices`."""
    if optim.name == "sgd" or (optim.name == "muon" and is_hidden):
        return int(optim.name == "muon" or optim.momentum > 0)
    return 2
