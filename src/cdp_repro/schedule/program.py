"""A program: the actions of all ranks for any number of training steps, in finite form.

    fill      steps 0 .. F-1      until the pattern repeats
    period    step F              replayed with shifted numbers for every later step
    drain     after any step      what is left to do when no further step comes

If ranks send sums or lent parameters, the piece of a step ends one slot before the next step begins: the messages of
that slot depend on whether another step comes. Else a piece ends where the next step begins. With P slots per step, and
ranks that send sums:

    slots     0 ......... P-2 | P-1 ........ 2P-2 | 2P-1 ....... 3P-2 | ...
              piece of step 0 | piece of step 1   | piece of step 2   | ...
                              | drain after 1 ...
                                                  | drain after 2 ...

A run may begin at any step, from a drained pipeline. Versions are never less than 0, so runs from step 0, 1, .. up to
the largest staleness differ. All later runs equal the last of these, with shifted numbers and `Roles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.check import Checker, ScheduleError, State
from cdp_repro.schedule.garbage import without_collection
from cdp_repro.schedule.generate import generate
from cdp_repro.schedule.roles import Roles
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.transport import Edge, batches, blocked_on_nccl, edges

MAX_STEPS = 12
"""Training steps, beyond a multiple of the largest staleness d, within which a pattern must show. PipeDream's repeats
after 2d steps: its pipeline has both to fill and to empty. A run that shows it has d more, in which it drains."""

Piece = Sequence[Slot]
Upcoming = Callable[[], bool]
"""Tells whether another training step comes; called once before each."""


@dataclass
class Run:
    """All runs that begin at one step, of any length, in pieces; slots count from the start of the run."""

    first_step: int
    fill: Sequence[Piece]
    period: Piece
    drains: dict[int, Piece]
    """By the number of steps, from 1 to F + 1, that precede the drain."""


class Program:
    """The checked program of a schedule, in runs."""

    def __init__(self, schedule: Schedule, runs: Mapping[int, Run] | None = None) -> None:
        """Make and check the run from step 0; make other runs, and early drains, when they are asked for.

        `runs`, by their first step, come from a file. They are checked, and nothing that they lack is made.

        Raises:
            ScheduleError: the timeline cannot serve the rule, or a run cannot run; says where, and why.
        """
        self.schedule = schedule
        self.begin = begins(schedule)
        """Maps a step of a run to the slot in which its piece begins."""
        self.roles = Roles(schedule)
        self.is_given = runs is not None
        self._runs = dict(runs or {})
        for run in self._runs.values():
            self._check_given(run)
        self.run_from(0)

    def data_parallel(self) -> Program:
        """Return data parallelism on the same sizes and placement, to compare with.

        It is on a single device if it cannot run on this placement: another package's may give one rank the same stage
        of micro-batches that data parallelism computes at once.
        """
        schedule = self.schedule.data_parallel()
        try:
            return Program(schedule)
        except ScheduleError:
            return Program(Schedule.from_spec(schedule.spec.on("single_device"), schedule.gradient_bytes))

    @cached_property
    def edges(self) -> list[Edge]:
        """The directed edges over which ranks send, in all runs, whatever their length."""
        return edges(chain.from_iterable(slots for _, slots in self.samples()), self.roles.after(1))

    def samples(self) -> Iterator[tuple[int, list[Slot]]]:
        """Yield runs, each with its first step, that together show all edges and orders of messages and sums.

        Runs that the passes make differ in nothing of that, so that one with every piece is enough. In a file, each
        piece may be of its own kind.
        """
        if not self.is_given:
            yield 0, self.complete_run
            return
        for first_step, run in self._runs.items():
            for steps in range(1, len(run.fill) + 3):
                yield first_step, self.slots(steps, first_step)

    @property
    def steady_step(self) -> int:
        """F: the first training step of a run from step 0 that all later ones repeat."""
        return len(self.run_from(0)[0].fill)

    def until_it_repeats(self, steps: int = 1) -> list[Slot]:
        """Return the slots of the first F + `steps` training steps of a run from step 0, without a drain."""
        last = self.steady_step + steps
        return self.slots(last + 1)[: last * self.schedule.slots_per_step]

    @property
    def complete_run(self) -> list[Slot]:
        """A run with everything that a run can have: fill, the period twice, and the drain."""
        return self.slots(self.steady_step + 2)

    def run_from(self, step: int) -> tuple[Run, int]:
        """Return the run for a start at `step`, and the number of training steps by which to shift its numbers."""
        first = min(step, self.schedule.rule.longest)
        if first not in self._runs:
            if self.is_given:
                raise ValueError(f"the program has no run from step {first}: it has runs from {sorted(self._runs)}")
            self._runs[first] = self._made(first)
        return self._runs[first], step - first

    def drain(self, run: Run, steps: int) -> Piece:
        """Return the drain after `steps` steps of a run, at most one more than its fill has."""
        if steps not in run.drains:
            if self.is_given:
                raise ValueError(f"the program has no drain after {steps} steps from step {run.first_step}")
            run.drains[steps] = self._generated(run.first_step, steps).pieces[-1]
        return run.drains[steps]

    @property
    def runs(self) -> dict[int, Run]:
        """All runs by their first step, with all drains."""
        for first in range(self.schedule.rule.longest + 1):
            run, _ = self.run_from(first)
            for steps in range(1, len(run.fill) + 2):
                self.drain(run, steps)
        return dict(sorted(self._runs.items()))

    def slots(self, steps: int, first_step: int = 0) -> list[Slot]:
        """Return the slots of all ranks in a run of `steps` training steps, written out."""
        run, start = self.run_from(first_step)
        return [*self._written_out(run, range(steps), start)]

    def endless(self) -> Iterator[Slot]:
        """Yield the slots of all ranks in an endless run."""
        return self._written_out(self.run_from(0)[0], count())

    def _written_out(self, run: Run, steps: Iterable[int], start: int = 0) -> Iterator[Slot]:
        """Yield the slots of a run with a training step for each of `steps`, its numbers shifted by `start` more."""
        coming = iter(steps)
        for piece, ahead in self.pieces(run, lambda: next(coming, None) is not None):
            yield from self.shifted(piece, ahead, start + ahead)

    def pieces(self, run: Run, upcoming: Upcoming) -> Iterator[tuple[Piece, int]]:
        """Yield each piece of a run with the number of training steps by which it is shifted."""
        done, repeating = 0, len(run.fill)
        while upcoming():
            yield (run.fill[done], 0) if done < repeating else (run.period, done - repeating)
            done += 1
        if done:
            last = min(done, repeating + 1)
            yield self.drain(run, last), done - last

    def shifted(self, piece: Piece, ahead: int, steps: int) -> Piece:
        """Return a piece with slots shifted by `ahead` training steps, and ranks and other numbers by `steps`."""
        if not steps:
            return piece
        later, (micro_batches, versions) = self.roles.after(steps), self.schedule.ahead(steps)
        slots = ahead * self.schedule.slots_per_step

        def moved(actions: Iterable[Action]) -> tuple[Action, ...]:
            return tuple([action.shifted(micro_batches, versions, later) for action in actions])

        return [Slot(s.number + slots, moved(s.actions), tuple(map(moved, s.batches))) for s in piece]

    @without_collection()
    def _made(self, first_step: int) -> Run:
        """Return the run from `first_step`.

        The pattern repeats from the first step that begins and ends in the same state, except for a shift of one
        training step, and whose versions are not clipped at 0. It is searched for in longer and longer runs, each made
        anew: so each is longer by as much as a pipeline takes to fill.
        """
        rule = self.schedule.rule
        longest = rule.longest
        shortest = longest + 2 + rule.least // rule.sizes.updates  # if a run is too short, the next is made anew
        for steps in range(shortest, 3 * longest + MAX_STEPS, max(1, longest)):
            checker = self._generated(first_step, steps)
            for repeating in range(max(0, longest - first_step), steps):
                if self._repeats(*checker.states[repeating : repeating + 2]):
                    *pieces, drain = checker.pieces
                    extra = repeating + 1 - steps
                    drains = {repeating + 1: self.shifted(drain, extra, extra)}
                    return Run(first_step, pieces[:repeating], pieces[repeating], drains)
        raise ScheduleError(f"{self.schedule}: none of the first {steps} training steps ends in the state it began in")

    def _check_given(self, run: Run) -> None:
        """Check a run from a file, with each of its drains, and check that its period can repeat for ever.

        Its slots then have their actions in an order in which one process could run them.
        """
        repeating, drains = len(run.fill), dict[int, Piece]()
        for steps in range(1, repeating + 2):
            checker = self._checked_as_written(run, steps)
            *pieces, drains[steps] = checker.pieces
        run.fill, run.period, run.drains = pieces[:repeating], pieces[repeating], drains
        if not self._repeats(*checker.states[repeating : repeating + 2]):
            raise ScheduleError(
                f"the period of the run from step {run.first_step} does not end as it begins, one training step later: "
                "repeated, it would keep more and more values"
            )
        # the state says which messages are open, not since when: one may be open for longer from one period to the next
        # than from the fill to the first, up to `kept_slots`
        longest_open = 1 + self.schedule.kept_slots // self.schedule.slots_per_step
        self._checked_as_written(run, repeating + 1 + longest_open)

    def _checked_as_written(self, run: Run, steps: int) -> Checker:
        """Check `steps` training steps of a run from a file; an error says in which piece its fault is."""
        checker = Checker(self.schedule, run.first_step, [*self._written_out(run, range(steps))])
        try:
            self._check(checker, steps)
        except ScheduleError as error:
            number, repeating = len(checker.pieces) - 1, len(run.fill)  # the last piece has the fault
            if number == steps:
                error.piece = run.first_step, "drain after", min(number, repeating + 1)
            else:
                error.piece = run.first_step, "fill" if number < repeating else "period", min(number, repeating)
            raise
        stuck = blocked_on_nccl(chain.from_iterable(checker.pieces))  # a program made by the passes never hangs
        if stuck is not None:
            raise ScheduleError(f"rank {stuck.rank}, {stuck.label}: it would wait for ever on NCCL", action=stuck)
        return checker

    def _repeats(self, before: State, after: State) -> bool:
        """Whether `after` is `before` a training step later, so that the same piece can follow both."""
        later, ahead = self.roles.after(1) or int, self.schedule.ahead(1)
        return after == {
            (later(rank), later(peer), value.shifted(*ahead), place) for rank, peer, value, place in before
        }

    def _generated(self, first_step: int, steps: int) -> Checker:
        """Return a run that the passes make, checked."""
        return self._check(Checker(self.schedule, first_step, generate(self.schedule, first_step, steps)), steps)

    def _check(self, checker: Checker, steps: int) -> Checker:
        """Check a whole run of `steps` training steps, piece by piece."""
        for step in range(1, steps + 1):
            checker.follow(self.begin(step))
        checker.end(steps)
        return checker


def begins(schedule: Schedule) -> Callable[[int], int]:
    """Return the function from a step of a run to the slot in which its piece begins.

    A piece begins one slot before its step if gradients or parameters of a stage pass between ranks: what the first
    slot of a step needs is sent in the slot before.
    """
    holders = schedule.placement.holders
    overlap = any(stage in schedule.lent or len(holders(stage)) > 1 for stage in range(schedule.stages))
    period = schedule.slots_per_step
    return lambda step: max(0, step * period - overlap)


class RankProgram:
    """The program of one rank: only its own actions, so a step costs the same for any number of ranks."""

    def __init__(self, program: Program, rank: int, in_batches: bool = False) -> None:
        """`in_batches`: the rank exchanges messages in batches, which its slots have."""
        self.rank = rank
        self.in_batches = in_batches
        self.schedule = program.schedule
        self._program = program
        self._cycle = program.roles.cycle(rank)
        self._own: dict[int, dict[int, list[Slot]]] = {}
        """By the identity of a piece, and by role: the slots that have actions."""
        self.next_slot = 0
        """The slot in which the next run begins. Slots count on from run to run, the same on all ranks."""

    @property
    def edges(self) -> list[Edge]:
        """Those of all ranks."""
        return self._program.edges

    @property
    def stashes(self) -> bool:
        """Whether every backward reads the parameters that its forward has read."""
        return self.schedule.rule.stashes

    @property
    def finishing(self) -> tuple[frozenset[Op], int]:
        """The kinds of actions of which the last finishes a training step on this rank, and their number in a step.

        These are updates on a rank that holds stages; else what gives the gradients of its micro-batches.
        """
        holders, stages = self.schedule.placement.holders, range(self.schedule.stages)
        if held := sum(self.rank in holders(stage) for stage in stages):
            return frozenset({Op.UPDATE}), held * self.schedule.sizes.updates
        own = self._picked(self._program.run_from(0)[0].period)[self.rank]
        giving = sum(action.op.gives_gradients for slot in own for action in slot.actions)
        return frozenset(op for op in Op if op.gives_gradients), giving

    @property
    def losses_late(self) -> int:
        """Slots from the one in which this rank finishes a training step to the last in which another computes a loss.

        Only a rank that holds no stage can finish first, as a worker of `parameter_server`: an update needs all losses.
        """
        kinds, _ = self.finishing
        if Op.UPDATE in kinds:
            return 0
        sizes, last_stage, found = self.schedule.sizes, self.schedule.stages - 1, [0]
        for _, slots in self._program.samples():
            own, computed = dict[int, int](), dict[int, int]()
            for slot in slots:
                for action in slot.actions:
                    step = action.micro_batch // sizes.micro_batches
                    if action.rank == self.rank and action.op in kinds:
                        own[step] = slot.number
                    if action.op is Op.FORWARD and action.stage == last_stage:
                        computed[step] = slot.number
            found += [computed[step] - end for step, end in own.items()]
        return max(found)

    def replay(self, first_step: int, upcoming: Upcoming) -> Iterator[Slot]:
        """Yield the slots of a run from `first_step` in which the rank acts, or exchanges a batch."""
        (run, start), first_slot = self._program.run_from(first_step), self.next_slot
        for piece, ahead in self._program.pieces(run, upcoming):
            role = self._cycle[(-start - ahead) % len(self._cycle)]
            for slot in self._program.shifted(self._picked(piece)[role], ahead, start + ahead):
                yield slot._replace(number=slot.number + first_slot)
            if piece:
                self.next_slot = first_slot + piece[-1].number + 1 + ahead * self.schedule.slots_per_step

    def _picked(self, piece: Piece) -> dict[int, list[Slot]]:
        """Return, by role, the slots of a piece with what each role that the rank plays does in them; cached."""
        if id(piece) not in self._own:  # one walk for all roles: there can be as many as ranks
            picked: dict[int, list[Slot]] = {role: [] for role in self._cycle}
            for slot in piece:
                own: dict[int, list[Action]] = {}
                for action in slot.actions:
                    if action.rank in picked:
                        own.setdefault(action.rank, []).append(action)
                exchanged = batches(slot) if self.in_batches else {}
                for role, slots in picked.items():
                    if role in own or role in exchanged:
                        slots.append(Slot(slot.number, tuple(own.get(role, ())), tuple(exchanged.get(role, ()))))
            self._own[id(piece)] = picked
        return self._own[id(piece)]
