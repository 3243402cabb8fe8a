"""A run, written out: the passes in order."""

from __future__ import annotations

from cdp_repro.schedule.actions import Op, Slot
from cdp_repro.schedule.passes.frees import add_frees
from cdp_repro.schedule.passes.placing import compute
from cdp_repro.schedule.passes.sending import add_boundary_messages, add_lending
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation import add_sums


def generate(schedule: Schedule, first_step: int, steps: int) -> list[Slot]:
    """Return the actions of all ranks in a run of `steps` training steps, from a drained state to a drained state.

    A slot's actions depend only on compute up to the next slot. So a run that ends after n steps equals a longer one
    up to the slot before step n would begin.
    """
    slots = compute(schedule, first_step, steps)
    if schedule.ranks > 1:
        slots = add_boundary_messages(slots, schedule)
    slots = add_sums(slots, schedule)
    if schedule.lent:
        slots = add_lending(slots, schedule)
    for actions in slots:
        actions.sort(key=lambda action: action.op is not Op.RECEIVE)  # receives never wait
    marked = add_frees(slots, schedule.held_after(first_step + steps))
    return [Slot(number, tuple(actions)) for number, actions in enumerate(marked)]
