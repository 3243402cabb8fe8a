"""The values that each kind of action must read and write, in any program."""

from __future__ import annotations

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.values import (
    BUFFERS,
    GRADIENTS,
    INPUT,
    LENT,
    LENT_BACKWARD,
    LENT_FORWARD,
    OUTPUT_GRADIENT,
    PREFIX,
    PREFIX_GRADIENT,
    SAVED,
    WEIGHT_WORK,
    Value,
    buffers,
    gradient_sum,
    micro_batch_value,
    parameters,
)


def compute_action(schedule: Schedule, op: Op, m: int, stage: int) -> Action:
    """Return a forward or backward, or a part of one, as the placement and the rule require it.

    It does not yet have the gradients of weights, nor the sum to which they are added.
    """
    sizes, rank, version = schedule.sizes, schedule.placement.rank_of(m, stage), schedule.rule.version(m, stage, op)
    is_own = rank in schedule.placement.holders(stage) and not schedule.placement.is_sharded
    lent = Value(LENT_FORWARD if op is Op.FORWARD else LENT_BACKWARD, stage, m, version)
    read = parameters(stage, version) if is_own else lent
    before, after = sizes.tokens_before(m), sizes.tokens_after(m)
    saved, gradient, work = (micro_batch_value(kind, stage, m) for kind in (SAVED, OUTPUT_GRADIENT, WEIGHT_WORK))
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    if op is Op.BACKWARD_WEIGHTS:
        reads, writes = (work,), ()
    elif op is Op.FORWARD:
        statistics = buffers(stage, schedule.statistics_of(m))
        inputs = [micro_batch_value(INPUT, source + 1, m) for source in sizes.sources[stage]]
        output = gradient if stage == schedule.stages - 1 else micro_batch_value(INPUT, stage + 1, m)
        known = () if before is None else (micro_batch_value(PREFIX, stage, before),)
        kept = () if after is None else (micro_batch_value(PREFIX, stage, m),)
        reads, writes = (*inputs, read, statistics, *known), (saved, output, statistics, *kept)
    else:
        later = () if after is None else (micro_batch_value(PREFIX_GRADIENT, stage, m),)
        of_inputs = [micro_batch_value(OUTPUT_GRADIENT, source, m) for source in sizes.sources[stage]]
        of_prefix = () if before is None else (micro_batch_value(PREFIX_GRADIENT, stage, before),)
        put_off = (work,) if op is Op.BACKWARD_INPUT else ()
        reads, writes = (saved, gradient, read, *later), (*of_inputs, *of_prefix, *put_off)
    return Action(op, rank, stage, m, version, reads=reads, writes=writes)


def update(schedule: Schedule, stage: int, version: int, rank: int) -> Action:
    """Return the update that makes a version on a rank, or its shard of the version if the stage is sharded."""
    whole = parameters(stage, version - 1), total_of(schedule, stage, version), parameters(stage, version)
    before, total, after = (schedule.own(value, rank) for value in whole)
    return Action(Op.UPDATE, rank, stage, version=version, reads=(before, total), writes=(after,))


def total_of(schedule: Schedule, stage: int, version: int) -> Value:
    """Return the whole sum from which a version is made."""
    return gradient_sum(stage, range((version - 1) * schedule.sizes.summed, version * schedule.sizes.summed))


def made_from(schedule: Schedule, value: Value) -> int | None:
    """Return the version that is made from a value: from a whole sum, or a rank's shard of one; None for others."""
    summed = schedule.sizes.summed
    return value.stop // summed if value.kind == GRADIENTS and len(value.members) == summed else None


def fault_of(action: Action, schedule: Schedule) -> str | None:
    """Return what is wrong with an action by itself, or None."""
    if not 0 <= action.stage < schedule.stages:
        return f"there are only {schedule.stages} stages"
    for value in action.frees:
        if value not in action.reads:
            return f"it frees {value}, which it does not read"
    return _FAULTS[action.op](action, schedule)


def _compute_fault(action: Action, schedule: Schedule) -> str | None:
    expected = compute_action(schedule, action.op, action.micro_batch, action.stage)
    if action.version != expected.version:
        return f"its rule asks for version {expected.version}"
    if action.rank != expected.rank:
        return f"it is on rank {action.rank}; the placement puts it on rank {expected.rank}"
    if not action.op.gives_gradients:
        return _differs(action, expected.reads, expected.writes)
    before, after = ([v for v in values if v.kind == GRADIENTS] for values in (action.reads, action.writes))
    fault = _order_fault(action, schedule, before, after)
    return fault or _differs(action, (*expected.reads, *before), (*expected.writes, *after))


def _order_fault(action: Action, schedule: Schedule, before: list[Value], after: list[Value]) -> str | None:
    """Say what is wrong with the sum to which an action adds the gradients of its micro-batch; None if nothing is."""
    stage, m = action.stage, action.micro_batch
    if len(before) > 1 or len(after) != 1 or any((v.stage, v.parts) != (stage, 1) for v in before):
        return "it must add its gradients to at most one sum, and write one"
    if after[0] != (_followed_by(before[0], m) if before else gradient_sum(stage, (m,))):
        added = f"micro-batch {m} to {before[0] if before else 'no sum'}"
        return f"it adds {added}, which does not make {after[0]}: sums are of micro-batches in their order"
    return _mixed(after[0], schedule)


def _followed_by(total: Value, m: int) -> Value | None:
    """Return a sum with micro-batch m added as its last; None if m breaks the spacing. Does not list the members."""
    spacing = m - (total.stop - 1)
    if spacing < 1 or (len(total.members) > 1 and total.stride != spacing):
        return None
    return gradient_sum(total.stage, range(total.number, m + 1, spacing))


def _add_fault(action: Action, schedule: Schedule) -> str | None:
    parts: dict[Value, list[Value]] = {}
    for value in action.reads:
        parts.setdefault(value.whole, []).append(value)
    for whole, found in parts.items():
        count = len(found)
        if count != found[0].parts or {*found} != {whole.divided(part, count) for part in range(1, count + 1)}:
            return f"it does not read all parts of {whole}"
    if any(value.kind != GRADIENTS or value.stage != action.stage for value in (*parts, *action.writes)):
        return "it must add sums of gradients of its stage"
    operands = sorted(parts, key=lambda value: value.number)
    if len(operands) != 2 or operands[0].stride != 1 or operands[0].stop != operands[1].number:
        added = " and ".join(map(str, operands))
        return f"it adds {added}, but a sum is of micro-batches in their order, without gaps"
    if len(operands[1].members) > 1:  # (a + b) + c and a + (b + c) differ in their last bits
        return f"{operands[1]} holds more than one micro-batch: a sum is added from the left, one by one"
    whole = gradient_sum(action.stage, range(operands[0].number, operands[1].stop))
    if action.value != whole or action.writes != (whole,):
        return f"it must write {whole}"
    return _mixed(whole, schedule)


def _update_fault(action: Action, schedule: Schedule) -> str | None:
    if action.rank not in schedule.placement.holders(action.stage):
        return f"rank {action.rank} does not hold stage {action.stage}"
    if action.version < 1:
        return "an update makes version 1 or a later one: version 0 is there from the start"
    expected = update(schedule, action.stage, action.version, action.rank)
    return _differs(action, expected.reads, expected.writes)


def _send_fault(action: Action, _: Schedule) -> str | None:
    value = action.value
    if value is None or len(action.reads) != 1 or action.writes:
        return "it must read what it sends, and write nothing"
    if value.kind not in (INPUT, OUTPUT_GRADIENT, GRADIENTS, BUFFERS, *LENT):
        return f"{value} cannot be sent"
    own = parameters(value.stage, value.version) if value.kind in LENT else value.whole
    # a part is sent from the whole: where only parts have arrived, the buffer of the others is not filled
    allowed = (own,) if value.parts > 1 else (value, own)
    return None if action.reads[0] in allowed else f"it must read {own}"


def _receive_fault(action: Action, _: Schedule) -> str | None:
    is_plain = not action.reads and action.writes == (action.value,)
    return None if is_plain else "it must write what it receives, and read nothing"


def _collective_fault(action: Action, schedule: Schedule) -> str | None:
    value = action.value
    if not schedule.spec.collectives:
        return "the schedule has collectives = false: its sums are of micro-batches in their order, by messages"
    if value is None or action.writes != (value,) or len(action.reads) != 1 or action.reads[0].stage != value.stage:
        return "it must read what its rank brings, and write what it gets"
    (read,) = action.reads
    if value.kind in LENT:
        is_shard = read == schedule.own(parameters(value.stage, value.version), action.rank)
        return None if is_shard else "it must bring its rank's shard of the version"
    if value.kind != GRADIENTS or read.kind != GRADIENTS or value.parts not in (1, schedule.ranks):
        return "it must bring a sum of gradients"
    return _mixed(value, schedule)


def _differs(action: Action, reads: tuple[Value, ...], writes: tuple[Value, ...]) -> str | None:
    """Say which values an action should read or write instead; None if it has exactly these, in any order."""
    for verb, found, expected in (("read", action.reads, reads), ("write", action.writes, writes)):
        if found != expected and (len(found) != len(expected) or set(found) != set(expected)):
            names = [", ".join(map(str, values)) or "nothing" for values in (expected, found)]
            return f"it must {verb} {names[0]}, not {names[1]}"
    return None


def _mixed(value: Value, schedule: Schedule) -> str | None:
    """Say that a sum mixes the micro-batches of two updates; None if it does not."""
    if value.number // schedule.sizes.summed != (value.stop - 1) // schedule.sizes.summed:
        return f"{value} would mix training steps"
    return None


_FAULTS = {
    **dict.fromkeys((Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHTS), _compute_fault),
    Op.ADD: _add_fault,
    Op.UPDATE: _update_fault,
    Op.SEND: _send_fault,
    Op.RECEIVE: _receive_fault,
    Op.COLLECTIVE: _collective_fault,
}
