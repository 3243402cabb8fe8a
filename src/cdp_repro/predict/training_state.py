"""What a run keeps of each stage beside its versions: the optimizer's state, and what `delay=` needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdp_repro.config import RunConfig
from cdp_repro.config.schema import OptimConfig
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.schedule import Op, Program, Schedule
from cdp_repro.schedule.values import Kind

if TYPE_CHECKING:  # torch takes seconds
    from cdp_repro.engine.delay import Uncorrected


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
    return [method.kept_steps for method in _methods(config, schedule)]


def _methods(config: RunConfig, schedule: Schedule) -> list[Uncorrected]:
    """Return the method against delay of each stage."""
    from cdp_repro.config.numerics import delay_factory  # here: torch takes seconds

    return [*map(delay_factory(config.delay), zip(*schedule.rule.matrix, strict=True))]


def predicted_parameter_bytes(config: RunConfig, cut: StageCut, program: Program) -> int:
    """Return the bytes of predicted parameters, which stale reads see with `delay=prediction`, at most on a rank."""
    return copied_bytes(program, cut.trained_bytes) if reads_ahead(config, program.schedule) else 0


def reads_ahead(config: RunConfig, schedule: Schedule) -> bool:
    """Whether stale reads see predicted parameters, which are copies."""
    return config.delay.name != "none" and any(method.reads_ahead for method in _methods(config, schedule))


def copied_bytes(program: Program, stage_bytes: Sequence[int]) -> int:
    """Return the bytes of moved-on copies, at most on a rank, if each stale read of a stage sees one of `stage_bytes`.

    Stale reads of one version share a copy if the micro-batches belong to the same update. It lives from the first
    forward to the last backward among them. The initial parameters, which no step has made, have no copies; they count
    here all the same, as later versions need no fewer. Copies that are lent to other ranks are not counted: they live
    only until they have been sent.
    """
    copy_of: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}
    """By rank, stage and micro-batch under way: rank, stage, version and update of the copy that it reads."""
    readers: Counter[tuple[int, int, int, int]] = Counter()
    held: dict[int, int] = defaultdict(int)
    most = 0
    for action in (action for slot in program.complete_run for action in slot.actions):
        rank, stage, micro_batch = action.rank, action.stage, action.micro_batch
        if action.op is Op.FORWARD:
            update = micro_batch // program.schedule.sizes.summed
            for version in (value.number for value in action.reads if value.kind == Kind.PARAMETERS):
                if version < update:
                    copy = copy_of[rank, stage, micro_batch] = (rank, stage, version, update)
                    held[rank] += 0 if readers[copy] else stage_bytes[stage]
                    readers[copy] += 1
                    most = max(most, held[rank])
        elif action.op.gives_gradients and (read := copy_of.pop((rank, stage, micro_batch), None)):
            readers[read] -= 1
            held[rank] -= 0 if readers[read] else stage_bytes[stage]
    return most


def optimizer_states(config: RunConfig, cut: StageCut, schedule: Schedule) -> list[float]:
    """Return, by stage, how many values the optimizer and the method against delay keep beside one of a parameter.

    It is a mean over the parameters of the stage: some may be frozen, and `muon` keeps less of `hidden_matrices`.
    """
    kept = training_state(config, cut, schedule)
    return [
        (optimizer + delay) / size if size else 0.0
        for optimizer, delay, size in zip(kept.optimizer, kept.delay, cut.costs.parameter_bytes, strict=True)
    ]


def _values_kept(optim: OptimConfig, is_hidden: bool) -> int:
    """Return how many values the optimizer keeps for each value of a parameter, in or outside `hidden_matrices`."""
    kept = {"sgd": int(optim.momentum > 0), "adamw": 2, "nadamw": 2, "muon": 1 if is_hidden else 2}  # outside, AdamW's
    return kept[optim.name]
