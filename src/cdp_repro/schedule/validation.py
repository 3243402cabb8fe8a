"""Validation: a pass that lets a stream of slots through unchanged as long as every rule holds.

It runs when a schedule is made (over a window that shows the fill, the steady state and the drain) and again as
the program is executed. It holds the micro-batches in flight and the versions alive, nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.render import text_grid
from cdp_repro.schedule.rules import Mode


class ScheduleError(ValueError):
    """A schedule that cannot run, or would compute something other than its rule; shows the grid at the fault."""


class _Progress:
    """How far one micro-batch has come."""

    def __init__(self) -> None:
        self.forwards = 0
        self.backwards = 0
        self.slot = -1


class _State:
    """What has happened so far, as far as later actions depend on it."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.workers = len(mode.staleness)
        self.stages = len(mode.staleness[0])
        self._started = False
        self._in_flight: dict[int, _Progress] = {}
        self._backwards_done: dict[tuple[int, int], int] = {}
        self._made_in_slot: list[dict[int, int]] = [{} for _ in range(self.stages)]
        self._newest = [0] * self.stages
        self._busy: dict[str, int] = {}

    def _start(self, step: int) -> None:
        """Start from the versions that a pipeline holds which has drained after `step` training steps."""
        self._started = True
        for stage in range(self.stages):
            self._made_in_slot[stage] = dict.fromkeys(self._needed(stage, step), -1)
            self._newest[stage] = step

    def _needed(self, stage: int, step: int) -> range:
        """Return the versions of `stage` that are alive between training steps `step - 1` and `step`."""
        return range(max(0, step - self.mode.oldest(stage)), step + 1)

    def check(self, slot: int, action: Action) -> str | None:
        """Apply `action`; return what is wrong with it, or None."""
        if action.stage >= self.stages:
            return f"there are only {self.stages} stages"
        if action.version is None:
            return "no version is assigned"
        if action.op is Op.UPDATE:
            return self._update(slot, action.stage, action.version)
        if action.op is Op.FREE:
            return self._free(action.stage, action.version)
        assert action.micro_batch is not None
        if not self._started:
            self._start(action.micro_batch // self.workers)
        return (
            self._version(slot, action)
            or self._exclusive(action, action.micro_batch)
            or self._advance(slot, action, action.micro_batch)
        )

    def end_slot(self) -> str | None:
        """Close a slot; return what is wrong with what it leaves behind, or None."""
        self._busy.clear()
        for stage, alive in enumerate(self._made_in_slot):
            if len(alive) > self.mode.oldest(stage) + 1:
                return f"stage {stage} keeps versions {sorted(alive)}; its rule needs {self.mode.oldest(stage) + 1}"
        return None

    def _exclusive(self, action: Action, micro_batch: int) -> str | None:
        """A worker computes one thing a slot; in a cyclic timeline a stage has one user a slot."""
        places = [f"worker {micro_batch % self.workers}"]
        if self.mode.timeline == "cyclic":
            places.append(f"stage {action.stage}")
        for place in places:
            user = self._busy.setdefault(place, micro_batch)
            if user != micro_batch:
                return f"micro-batches {user} and {micro_batch} use {place} in the same slot"
        return None

    def _version(self, slot: int, action: Action) -> str | None:
        expected = self.expected_version(action)
        if action.version != expected:
            return f"its rule asks for version {expected}"
        alive = self._made_in_slot[action.stage]
        if expected not in alive:
            return f"version {expected} of stage {action.stage} is not alive; alive are {sorted(alive)}"
        if alive[expected] >= slot:
            return f"version {expected} of stage {action.stage} is made only in this same slot"
        return None

    def expected_version(self, action: Action) -> int:
        """Return the version that the rule asks for in a forward or backward."""
        assert action.micro_batch is not None
        step, worker = divmod(action.micro_batch, self.workers)
        return max(0, step - self.mode.staleness[worker][action.stage])

    def _advance(self, slot: int, action: Action, micro_batch: int) -> str | None:
        progress = self._in_flight.setdefault(micro_batch, _Progress())
        expected = (
            Action(Op.FORWARD, progress.forwards, micro_batch)
            if progress.forwards < self.stages
            else Action(Op.BACKWARD, self.stages - 1 - progress.backwards, micro_batch)
        )
        if (action.op, action.stage) != (expected.op, expected.stage):
            return f"micro-batch {micro_batch} is due for {expected}"
        if slot <= progress.slot:
            return f"micro-batch {micro_batch} already computes in slot {progress.slot}"
        progress.slot = slot
        if action.op is Op.FORWARD:
            progress.forwards += 1
            return None
        progress.backwards += 1
        key = (micro_batch // self.workers, action.stage)
        self._backwards_done[key] = self._backwards_done.get(key, 0) + 1
        if progress.backwards == self.stages:
            del self._in_flight[micro_batch]
        return None

    def _update(self, slot: int, stage: int, version: int) -> str | None:
        alive = self._made_in_slot[stage]
        done = self._backwards_done.pop((version - 1, stage), 0)
        if done != self.workers:
            return f"only {done} of {self.workers} workers have completed their backward"
        if version - 1 not in alive or version in alive:
            return f"needs version {version - 1} alive and makes {version}; alive are {sorted(alive)}"
        alive[version] = slot
        self._newest[stage] = version
        return None

    def _free(self, stage: int, version: int) -> str | None:
        alive = self._made_in_slot[stage]
        if version not in alive or len(alive) == 1:
            return f"cannot free version {version}; alive are {sorted(alive)}"
        del alive[version]
        return None

    def leftovers(self) -> str | None:
        """Return what is unfinished or wrong after a drain, or None."""
        if self._in_flight:
            return f"the program ends with micro-batches {sorted(self._in_flight)} unfinished"
        if self._backwards_done:
            missing = ", ".join(f"U{stage}@v{step + 1}" for step, stage in sorted(self._backwards_done))
            return f"the program ends without the updates {missing}"
        for stage, alive in enumerate(self._made_in_slot):
            needed = list(self._needed(stage, self._newest[stage]))
            if self._started and sorted(alive) != needed:
                return f"the program ends with versions {sorted(alive)} of stage {stage}; its rule needs {needed}"
        return None


def validated(slots: Iterable[Slot], mode: Mode) -> Iterator[Slot]:
    """Yield `slots` unchanged; raise ScheduleError at the first that breaks a rule.

    Checked: each micro-batch runs its stages forward, then backward, one a slot; a worker computes one thing a
    slot, and in a cyclic timeline a stage has one user a slot; a forward and its backward read the version that
    `mode` asks for, made in an earlier slot and not freed; a stage is updated once a step, after all workers'
    backwards; no more versions are kept than the rule needs; at the end nothing is left over.
    """
    state = _State(mode)
    recent: deque[Slot] = deque(maxlen=2 * state.stages)
    upcoming = iter(slots)
    for slot in upcoming:
        recent.append(slot)
        for action in slot.actions:
            fault = state.check(slot.number, action)
            if fault is not None:
                hint = _when_it_exists(action, state, slot, upcoming)
                raise ScheduleError(_message(f"slot {slot.number}, {action}: {fault}{hint}", recent, state.workers))
        fault = state.end_slot()
        if fault is not None:
            raise ScheduleError(_message(f"slot {slot.number}: {fault}", recent, state.workers))
        yield slot
    fault = state.leftovers()
    if fault is not None:
        raise ScheduleError(_message(fault, recent, state.workers))


def _when_it_exists(action: Action, state: _State, slot: Slot, upcoming: Iterator[Slot]) -> str:
    """If `action` reads the version of its rule too early, say from which slot on it exists, and what would work.

    Looks no further ahead than the two training steps in which that must happen.
    """
    if not action.op.is_compute or action.micro_batch is None or action.version is None:
        return ""
    if action.stage >= state.stages or action.version != state.expected_version(action):
        return ""
    wanted = Action(Op.UPDATE, action.stage, version=action.version)
    soon = chain([slot], islice(upcoming, 4 * state.stages))
    made = next((later.number for later in soon if wanted in later.actions), None)
    if made is None:
        return ""
    worker = action.micro_batch % state.workers
    delay = state.mode.staleness[worker][action.stage]
    return (
        f".\nStaleness {delay} of (worker {worker}, stage {action.stage}) asks for that version in slot {slot.number}, "
        f"but its last gradient is there only after slot {made}: it exists from slot {made + 1} on. "
        f"Staleness {delay + 1} works at this place; mode=cdp_v2 is the smallest staleness everywhere"
    )


def _message(fault: str, recent: Iterable[Slot], workers: int) -> str:
    return f"{fault}\n\n{text_grid(recent, workers)}"
