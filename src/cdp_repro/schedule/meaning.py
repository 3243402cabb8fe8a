"""The values that each kind of action must read and write, in any program."""

from __future__ import annotations

from cdp_repro.schedule.actions import Action, Op, send
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.values import LENT, Kind, Value, buffers, gradient_sum, micro_batch_value, parameters


def compute_action(schedule: Schedule, op: Op, m: int, stage: int) -> Action:
    """Return a forward or backward, or a part of one, as the placement and the rule require it.

    It does not yet have the gradients of weights, nor the sum to which they are added.
    """
    sizes, rank, version = schedule.sizes, schedule.placement.rank_of(m, stage), schedule.rule.version(m, stage, op)
    is_own = rank in schedule.placement.holders(stage) and not schedule.placement.is_sharded
    lent = Value(Kind.LENT_FORWARD if op is Op.FORWARD else Kind.LENT_BACKWARD, stage, m, version)
    read = parameters(stage, version) if is_own else lent
    before, after = sizes.tokens_before(m), sizes.tokens_after(m)
    saved, gradient, work = (
        micro_batch_value(kind, stage, m) for kind in (Kind.SAVED, Kind.OUTPUT_GRADIENT, Kind.WEIGHT_WORK)
    )
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    if op is Op.BACKWARD_WEIGHTS:
        reads, writes = (work,), ()
    elif op is Op.FORWARD:
        statistics = buffers(stage, schedule.statistics_of(m))
        inputs = [micro_batch_value(Kind.INPUT, source + 1, m) for source in sizes.sources[stage]]
        output = gradient if stage == schedule.stages - 1 else micro_batch_value(Kind.INPUT, stage + 1, m)
        known = () if before is None else (micro_batch_value(Kind.PREFIX, stage, before),)
        kept = () if after is None else (micro_batch_value(Kind.PREFIX, stage, m),)
        reads, writes = (*inputs, read, statistics, *known), (saved, output, statistics, *kept)
    else:
        later = () if after is None else (micro_batch_value(Kind.PREFIX_GRADIENT, stage, m),)
        of_inputs = [micro_batch_value(Kind.OUTPUT_GRADIENT, source, m) for source in sizes.sources[stage]]
        of_prefix = () if before is None else (micro_batch_value(Kind.PREFIX_GRADIENT, stage, before),)
        put_off = (work,) if op is Op.BACKWARD_INPUT else ()
        reads, writes = (saved, gradient, read, *later), (*of_inputs, *of_prefix, *put_off)
    return Action(op, rank, stage, m, version, reads=reads, writes=writes)


def update(schedule: Schedule, stage: int, version: int, rank: int) -> Action:
    """Return the update that makes a version on a rank, or its shard of the version if the stage is sharded."""
    whole = parameters(stage, version - 1), total_of(schedule, stage, version), parameters(stage, version)
    before, total, after = (schedule.own(value, rank) for value in whole)
    return Action(Op.UPDATE, rank, stage, version=version, reads=(before, total), writes=(after,))


def with_sum(backward: Action, total: Value) -> Action:
    """Return a backward, or its second part, whose gradients are the last that are added to `total`."""
    before = (gradient_sum(total.stage, total.members[:-1]),) if len(total.members) > 1 else ()
    return backward._replace(reads=(*backward.reads, *before), writes=(*backward.writes, total))


def addition(total: Value, rank: int) -> Action:
    """Return the action that makes a sum of its last member and of all others: sums are added from the left."""
    operands = gradient_sum(total.stage, total.members[:-1]), gradient_sum(total.stage, total.members[-1:])
    return Action(Op.ADD, rank, total.stage, value=total, reads=operands, writes=(total,))


def collective(schedule: Schedule, value: Value, rank: int) -> Action:
    """Return a rank's part in the collective that gives it `value`.

    It brings its shard of the parameters, or the sum of the gradients of its own micro-batches.
    """
    if value.kind in LENT:
        brought = schedule.own(parameters(value.stage, value.version), rank)
    else:
        brought = gradient_sum(value.stage, value.members[rank :: schedule.ranks])
    return Action(Op.COLLECTIVE, rank, value.stage, value=value, reads=(brought,), writes=(value,))


def total_of(schedule: Schedule, stage: int, version: int) -> Value:
    """Return the whole sum from which a version is made."""
    return gradient_sum(stage, range((version - 1) * schedule.sizes.summed, version * schedule.sizes.summed))


def made_from(schedule: Schedule, value: Value) -> int | None:
    """Return the version that is made from a value: from a whole sum, or a rank's shard of one; None for others."""
    summed = schedule.sizes.summed
    return value.stop // summed if value.kind == Kind.GRADIENTS and len(value.members) == summed else None


def fault_of(action: Action, schedule: Schedule) -> str | None:
    """Return what is wrong with an action by itself, or None."""
    if not 0 <= action.stage < schedule.stages:
        return f"there are only {schedule.stages} stages"
    for value in action.frees:
        if value not in action.reads:
            return f"it frees {value}, which it does not read"
    summed = schedule.sizes.summed
    for value in action.writes:
        if value.kind == Kind.GRADIENTS and value.number // summed != (value.stop - 1) // summed:
            return f"{value} would mix training steps"
    expected = _required(action, schedule)
    if isinstance(expected, str):
        return expected
    fault = _difference(action, expected)
    return f"{fault}: {_WHY[action.op]}" if fault and action.op in _WHY else fault


_WHY = {
    Op.ADD: "a sum is of micro-batches in their order, added from the left one by one",
    Op.COLLECTIVE: "a rank brings its shard of a version, or the sum over its own micro-batches",
}
"""Why an action of a kind must read what it must."""


def _required(action: Action, schedule: Schedule) -> Action | str:
    """Return the action that an action must be, by its label and the sum that it makes, or what is wrong with these."""
    op, rank, stage, value = action.op, action.rank, action.stage, action.value
    if op.is_compute:
        return _required_compute(action, schedule)
    if op is Op.UPDATE:
        if rank not in schedule.placement.holders(stage):
            return f"rank {rank} does not hold stage {stage}"
        if action.version < 1:
            return "an update makes version 1 or a later one: version 0 is there from the start"
        return update(schedule, stage, action.version, rank)
    assert value is not None
    if op is Op.ADD:
        return _required_addition(action, value)
    if op is Op.COLLECTIVE:
        if not schedule.spec.collectives:
            return "the schedule has collectives = false: its sums are of micro-batches in their order, by messages"
        if value.kind not in LENT and made_from(schedule, value) is None:
            return "it must make the sum of an update, or lent parameters"
        return collective(schedule, value, rank)
    if value.kind not in (Kind.INPUT, Kind.OUTPUT_GRADIENT, Kind.GRADIENTS, Kind.BUFFERS, *LENT):
        return f"{value} cannot be sent"
    return send(value, rank, action.peer)[0] if op is Op.SEND else send(value, action.peer, rank)[1]


def _required_compute(action: Action, schedule: Schedule) -> Action | str:
    stage, m = action.stage, action.micro_batch
    expected = compute_action(schedule, action.op, m, stage)
    if action.version != expected.version:
        return f"its rule asks for version {expected.version}"
    if action.rank != expected.rank:
        return f"it is on rank {action.rank}; the placement puts it on rank {expected.rank}"
    if not action.op.gives_gradients:
        return expected
    sums = [value for value in action.writes if value.kind == Kind.GRADIENTS]
    if len(sums) != 1 or sums[0].members[-1:] != range(m, m + 1) or (sums[0].stage, sums[0].parts) != (stage, 1):
        return f"it must write one sum, of which micro-batch {m} is the last"
    return with_sum(expected, sums[0])


def _required_addition(action: Action, total: Value) -> Action | str:
    if total.kind != Kind.GRADIENTS or (total.stride, total.parts) != (1, 1) or len(total.members) < 2:
        return "it must make a sum of several micro-batches in their order, without gaps"
    expected = addition(total, action.rank)
    # an operand may be there in parts; of too many to be all read, one more than there are reads is enough
    parts = {value.whole: min(value.parts, len(action.reads) + 1) for value in action.reads}
    reads = [v.divided(part, n) for v in expected.reads for n in [parts.get(v, 1)] for part in range(1, n + 1)]
    return expected._replace(reads=tuple(reads))


def _difference(action: Action, expected: Action) -> str | None:
    """Say which values an action should read or write instead; None if it has exactly these, in any order."""
    pairs = ("read", action.reads, expected.reads), ("write", action.writes, expected.writes)
    for verb, found, wanted in pairs:
        if found != wanted and (len(found) != len(wanted) or set(found) != set(wanted)):
            names = [", ".join(map(str, values)) or "nothing" for values in (wanted, found)]
            return f"it must {verb} {names[0]}, not {names[1]}"
    return None
