"""How the gradients of a stage are summed over the micro-batches of a training step: one file per strategy.

A strategy takes the slots of a run and returns them with the sums and the updates of its stages. No other code knows
strategies: the values of the actions say everything.
"""

from __future__ import annotations

from collections.abc import Callable

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.all_reduce import sum_by_all_reduce
from cdp_repro.schedule.summation.exchange import is_exchangeable, sum_by_exchange
from cdp_repro.schedule.summation.exchange_in_parts import leaves_in_parts, sum_by_exchange_in_parts
from cdp_repro.schedule.summation.local import sum_locally
from cdp_repro.schedule.summation.owner import sum_at_owner
from cdp_repro.schedule.summation.reduce_scatter import sum_by_reduce_scatter
from cdp_repro.schedule.summation.relay import sum_by_relay

Strategy = Callable[[Slots, Schedule, frozenset[int]], Slots]


def add_sums(slots: Slots, schedule: Schedule) -> Slots:
    """Sum the gradients of every stage by its strategy, and update."""
    chosen = [strategy_of(schedule, stage) for stage in range(schedule.stages)]
    for strategy in dict.fromkeys(chosen):
        slots = strategy(slots, schedule, frozenset(stage for stage, own in enumerate(chosen) if own is strategy))
    return [_updates_after_sends(actions) for actions in slots]


def _updates_after_sends(actions: list[Action]) -> list[Action]:
    """Return the actions of a slot, in which each rank updates after its last send: others wait for what it sends.

    Updates stay behind the sums that they need, and before others for which the rank may have to wait.
    """
    last_sends = {action.rank: place for place, action in enumerate(actions) if action.op is Op.SEND}

    def place_of(numbered: tuple[int, Action]) -> tuple[int, bool]:
        place, action = numbered
        last = last_sends.get(action.rank, -1)
        return (last, True) if action.op is Op.UPDATE and place < last else (place, False)

    return [action for _, action in sorted(enumerate(actions), key=place_of)]


def strategy_of(schedule: Schedule, stage: int) -> Strategy:
    """Return the strategy for a stage, which depends on the ranks that hold it and compute it."""
    if schedule.placement.is_sharded:
        return sum_by_reduce_scatter
    if stage in schedule.lent:
        return sum_at_owner
    if len(schedule.placement.holders(stage)) == 1:
        return sum_locally
    if schedule.spec.collectives:
        return sum_by_all_reduce
    if is_exchangeable(schedule, stage):
        return sum_by_exchange_in_parts if leaves_in_parts(schedule) else sum_by_exchange
    return sum_by_relay
