"""Validation: a pass that lets a stream of slots through unchanged as long as every rule holds.

It runs when a schedule is made (over a window that shows the fill, the steady state and the drain) and again as
the program is executed. It holds the micro-batches in flight and the versions alive, nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

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
        self.versions: list[int] = []


class _State:
    """What has happened so far, as far as later actions depend on it."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.workers = len(mode.staleness)
        self.stages = len(mode.staleness[0])
        self.first_step: int | None = None
        self.in_flight: dict[int, _Progress] = {}
        self.backwards_done: dict[tuple[int, int], int] = {}
        self.made_in_slot: list[dict[int, int]] = [{} for _ in range(self.stages)]
        self.stage_user: dict[int, int] = {}

    def begin(self, step: int) -> None:
        """Start from the versions that a pipeline holds which has drained after `step` training steps."""
        self.first_step = step
        for stage in range(self.stages):
            oldest = max(0, step - self.mode.oldest(stage))
            self.made_in_slot[stage] = dict.fromkeys(range(oldest, step + 1), -1)

    def check(self, slot: int, action: Action) -> str | None:
        """Apply `action`; return what is wrong with it, or None."""
        if action.op is Op.UPDATE:
            return self._update(slot, action)
        if action.op is Op.FREE:
            return self._free(action)
        assert action.micro_batch is not None
        if self.first_step is None:
            self.begin(action.micro_batch // self.workers)
        return self._exclusive(action) or self._version(slot, action) or self._advance(slot, action)

    def _exclusive(self, action: Action) -> str | None:
        if self.mode.timeline == "cyclic":
            assert action.micro_batch is not None
            user = self.stage_user.setdefault(action.stage, action.micro_batch)
            if user != action.micro_batch:
                return f"micro-batches {user} and {action.micro_batch} use stage {action.stage} in the same slot"
        return None

    def _version(self, slot: int, action: Action) -> str | None:
        assert action.micro_batch is not None and action.version is not None
        step, worker = divmod(action.micro_batch, self.workers)
        delay = self.mode.staleness[worker][action.stage]
        if action.version != max(0, step - delay):
            return (
                f"reads version {action.version}; its staleness {delay} in step {step} asks for {max(0, step - delay)}"
            )
        alive = self.made_in_slot[action.stage]
        if action.version not in alive:
            return f"version {action.version} of stage {action.stage} is not alive; alive are {sorted(alive)}"
        if alive[action.version] >= slot:
            return f"version {action.version} of stage {action.stage} is made only in this same slot"
        return None

    def _advance(self, slot: int, action: Action) -> str | None:
        assert action.micro_batch is not None and action.version is not None
        progress = self.in_flight.setdefault(action.micro_batch, _Progress())
        expected = (
            Action(Op.FORWARD, progress.forwards, action.micro_batch)
            if progress.forwards < self.stages
            else Action(Op.BACKWARD, self.stages - 1 - progress.backwards, action.micro_batch)
        )
        if (action.op, action.stage) != (expected.op, expected.stage):
            return f"micro-batch {action.micro_batch} is due for {expected}"
        if slot <= progress.slot:
            return f"micro-batch {action.micro_batch} already computes in slot {progress.slot}"
        progress.slot = slot
        if action.op is Op.FORWARD:
            progress.forwards += 1
            progress.versions.append(action.version)
            return None
        progress.backwards += 1
        if progress.versions[action.stage] != action.version:
            return f"the forward used version {progress.versions[action.stage]}"
        key = (action.micro_batch // self.workers, action.stage)
        self.backwards_done[key] = self.backwards_done.get(key, 0) + 1
        if progress.backwards == self.stages:
            del self.in_flight[action.micro_batch]
        return None

    def _update(self, slot: int, action: Action) -> str | None:
        assert action.version is not None
        alive = self.made_in_slot[action.stage]
        done = self.backwards_done.pop((action.version - 1, action.stage), 0)
        if done != self.workers:
            return f"only {done} of {self.workers} workers have completed their backward"
        if action.version - 1 not in alive or action.version in alive:
            return f"needs version {action.version - 1} alive and makes {action.version}; alive are {sorted(alive)}"
        alive[action.version] = slot
        return None

    def _free(self, action: Action) -> str | None:
        assert action.version is not None
        alive = self.made_in_slot[action.stage]
        if action.version not in alive or len(alive) == 1:
            return f"cannot free version {action.version}; alive are {sorted(alive)}"
        del alive[action.version]
        readers = [
            micro_batch
            for micro_batch, progress in self.in_flight.items()
            if progress.forwards > action.stage
            and self.stages - 1 - progress.backwards >= action.stage
            and progress.versions[action.stage] == action.version
        ]
        return f"micro-batches {readers} still need it for their backward" if readers else None

    def leftovers(self) -> str | None:
        """Return what is unfinished after a drain, or None."""
        if self.in_flight:
            return f"the program ends with micro-batches {sorted(self.in_flight)} unfinished"
        if self.backwards_done:
            missing = ", ".join(f"U{stage}@v{step + 1}" for step, stage in sorted(self.backwards_done))
            return f"the program ends without the updates {missing}"
        for stage, alive in enumerate(self.made_in_slot):
            if len(alive) > self.mode.oldest(stage) + 1:
                return f"stage {stage} keeps versions {sorted(alive)}; its rule needs {self.mode.oldest(stage) + 1}"
        return None


def validated(slots: Iterable[Slot], mode: Mode) -> Iterator[Slot]:
    """Yield `slots` unchanged; raise ScheduleError at the first that breaks a rule.

    Checked: each micro-batch runs its stages forward, then backward, one a slot; in a cyclic timeline a stage has
    one user a slot; a forward and its backward read the version that `mode` asks for, made in an earlier slot
    and not freed; a stage is updated once a step, after all workers' backwards; at the end nothing is left over.
    """
    state = _State(mode)
    recent: deque[Slot] = deque(maxlen=2 * state.stages)
    upcoming = iter(slots)
    for slot in upcoming:
        recent.append(slot)
        state.stage_user.clear()
        for action in slot.actions:
            fault = state.check(slot.number, action)
            if fault is not None:
                hint = _when_it_exists(action, mode, slot, upcoming)
                raise ScheduleError(_message(f"slot {slot.number}, {action}: {fault}{hint}", recent, state.workers))
        yield slot
    fault = state.leftovers()
    if fault is not None:
        raise ScheduleError(_message(fault, recent, state.workers))


def _when_it_exists(action: Action, mode: Mode, slot: Slot, upcoming: Iterator[Slot]) -> str:
    """Say in which slot the version that `action` reads too early will have been made, and what would work."""
    if not action.op.is_compute or action.micro_batch is None or action.version is None:
        return ""
    wanted = Action(Op.UPDATE, action.stage, version=action.version)
    made = next((later.number for later in (slot, *upcoming) if wanted in later.actions), None)
    if made is None:
        return ""
    worker = action.micro_batch % len(mode.staleness)
    delay = mode.staleness[worker][action.stage]
    return (
        f".\nStaleness {delay} of (worker {worker}, stage {action.stage}) asks for that version in slot {slot.number}, "
        f"but its last gradient is there only after slot {made}: it exists from slot {made + 1} on. "
        f"Staleness {delay + 1} works at this place; mode=cdp_v2 is the smallest staleness everywhere"
    )


def _message(fault: str, recent: Iterable[Slot], workers: int) -> str:
    return f"{fault}\n\n{text_grid(recent, workers)}"
