"""A tiny executor that tracks, in place of tensors, which micro-batches are in each sum, and at which versions.

It knows nothing of the check: each rank runs its own actions as fast as its values come, messages between two ranks
keep their order, and what an action makes follows from what it is and from the content of what it reads, not from
names.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from math import gcd

from cdp_repro.schedule import Action, Op, Schedule, Slot, Value


class Wrong(Exception):  # noqa: N818 - of a program, not of this module
    """The program would hang, or compute something other than its rule."""


def need(holds: object, why: str) -> None:
    if not holds:
        raise Wrong(why)


def prove(schedule: Schedule, slots: Sequence[Slot], steps: int, first_step: int = 0) -> None:
    """Run a whole program; raise `Wrong` unless every rank ends with what its rule says, and with nothing else."""
    machine = _Machine(schedule, first_step)
    queues = [deque(a for slot in slots for a in slot.actions if a.rank == rank) for rank in range(schedule.ranks)]
    need(sum(map(len, queues)) == sum(len(slot.actions) for slot in slots), "an action of no rank")
    progressed = True
    while progressed:
        progressed = False
        for queue in queues:
            while queue and machine.run(queue[0]):
                queue.popleft()
                progressed = True
    need(not any(queues), f"hangs: {[str(queue[0]) for queue in queues if queue]}")
    machine.end(steps)


class _Machine:
    def __init__(self, schedule: Schedule, first_step: int) -> None:
        self.schedule, self.first = schedule, first_step
        self.step, self.updates = schedule.micro_batches, schedule.sizes.updates
        workers = [turn.worker for turn in schedule.sizes.round.turns] if schedule.sizes.has_own_clocks else None
        self.lane_of = workers or range(gcd(schedule.sizes.lanes, schedule.micro_batches))
        self.store: list[dict[Value, object]] = [{} for _ in range(schedule.ranks)]
        for rank, values in schedule.held_after(first_step).items():
            self.store[rank] = {v: self.held(v, first_step) for v in values}
        self.coming: list[set[Value]] = [set() for _ in range(schedule.ranks)]
        self.sent = defaultdict(deque)
        self.posted = defaultdict(deque)
        self.joined: list[Action | None] = [None] * schedule.ranks
        self.done: set[tuple[str, int, int]] = set()
        self.made: set[tuple[int, int, int]] = set()

    def held(self, value: Value, step: int) -> object:
        """What a value that is held from a drained state on must contain."""
        if value.kind == "p":
            return ("theta", value.stage, value.number, value.part, value.parts)
        return ("buffers", value.stage, value.number, self.before(value.number, step * self.step))

    def lane(self, m: int) -> int:
        return self.lane_of[m % len(self.lane_of)]

    def before(self, lane: int, m: int) -> int:
        """The last micro-batch of a lane before another, whether there is one or not."""
        return next(each for each in range(m - 1, m - 1 - self.step - len(self.lane_of), -1) if self.lane(each) == lane)

    def run(self, action: Action) -> bool:
        rank, store = action.rank, self.store[action.rank]
        for value in action.reads:
            if value not in store:
                need(value in self.coming[rank], f"{action}: {value} is not there")
                return False
        for value in action.frees:
            need(value in action.reads, f"{action}: frees {value}")
        read = {value: store[value] for value in action.reads}
        if action.op is Op.COLLECTIVE:
            return self.collective(action, read)
        for value in action.frees:
            del store[value]
        if action.op is Op.SEND:
            (value,) = action.reads
            content = read[value]
            if action.value.parts > 1 and value.parts == 1:
                content = ("part", action.value.part, action.value.parts, content)
            need(action.peer != rank, "sends to itself")
            self.sent[rank, action.peer].append((action.value, content))
            self.deliver(rank, action.peer)
        elif action.op is Op.RECEIVE:
            need(action.value not in store and action.value not in self.coming[rank], f"{action}: is there already")
            self.coming[rank].add(action.value)
            self.posted[action.peer, rank].append(action.value)
            self.deliver(action.peer, rank)
        else:
            made = {
                "F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weights,
                "A": self.add, "U": self.update,
            }[action.op](action, read)  # fmt: skip
            need(sorted(made) == sorted(action.writes), f"{action}: makes {list(map(str, made))}")
            for value, content in made.items():
                need(value not in store and value not in self.coming[rank], f"{action}: {value} is there already")
                store[value] = content
        return True

    def deliver(self, source: int, destination: int) -> None:
        sent, posted = self.sent[source, destination], self.posted[source, destination]
        while sent and posted:
            (name, content), wanted = sent.popleft(), posted.popleft()
            need(name == wanted, f"{wanted} is wanted and {name} comes")
            self.coming[destination].remove(name)
            self.store[destination][name] = content

    def compute(self, action: Action, read: dict[Value, object]) -> None:
        stage, m, version = action.stage, action.micro_batch, action.version
        key = (str(action.op), stage, m)
        need(key not in self.done, f"{action}: twice")
        self.done.add(key)
        step, i = divmod(m, self.step)
        rule = self.schedule.rule
        delay = (rule.staleness if action.op == "F" else rule.backward_staleness)(
            i // self.schedule.sizes.replicas, stage
        )
        need(
            version == max(0, step * self.updates + i * self.updates // self.step - delay),
            f"{action}: another version than its rule's",
        )
        need(("theta", stage, version, 0, 1) in read.values(), f"{action}: without its parameters")

    def neighbours(self, m: int) -> tuple[int | None, int | None]:
        """The micro-batches with the tokens before and after: in a sequence, the last tokens have the first number."""
        slices, replicas = self.schedule.sizes.slices, self.schedule.sizes.replicas
        place = m // replicas % slices
        return (m + replicas if place < slices - 1 else None), (m - replicas if place else None)

    def forward(self, action: Action, read: dict[Value, object]) -> dict[Value, object]:
        stage, m = action.stage, action.micro_batch
        self.compute(action, read)
        lane = self.lane(m)
        need(
            ("buffers", stage, lane, self.before(lane, m)) in read.values(),
            f"{action}: another worker's buffers, or old ones",
        )
        need(not stage or ("input", stage, m) in read.values(), f"{action}: without its input")
        earlier, later = self.neighbours(m)
        need(earlier is None or ("prefix", stage, earlier) in read.values(), f"{action}: without the tokens before")
        kept = [] if later is None else [(Value("k", stage, m), ("prefix", stage, m))]
        last = stage == self.schedule.stages - 1
        output = (
            (Value("d", stage, m), ("gradient", stage, m))
            if last
            else (Value("x", stage + 1, m), ("input", stage + 1, m))
        )
        return dict([
            (Value("s", stage, m), ("saved", stage, m)),
            output,
            (Value("b", stage, lane), ("buffers", stage, lane, m)),
            *kept,
        ])  # fmt: skip

    def backward(self, action: Action, read: dict[Value, object]) -> dict[Value, object]:
        made = self.passed_on(action, read)
        total = self.summed(action, read)
        return {self.sum_name(total): total, **made}

    def passed_on(self, action: Action, read: dict[Value, object]) -> dict[Value, object]:
        stage, m = action.stage, action.micro_batch
        self.compute(action, read)
        need(("saved", stage, m) in read.values(), f"{action}: without what its forward saved")
        need(("gradient", stage, m) in read.values(), f"{action}: without the gradient of its output")
        earlier, later = self.neighbours(m)
        need(later is None or ("of prefix", stage, m) in read.values(), f"{action}: without the tokens after")
        of_input = {Value("d", stage - 1, m): ("gradient", stage - 1, m)} if stage else {}
        return of_input | ({} if earlier is None else {Value("h", stage, earlier): ("of prefix", stage, earlier)})

    def backward_input(self, action: Action, read: dict[Value, object]) -> dict[Value, object]:
        stage, m = action.stage, action.micro_batch
        return {**self.passed_on(action, read), Value("w", stage, m): ("work", stage, m)}

    def backward_weights(self, action: Action, read: dict[Value, object]) -> dict[Value, object]:
        self.done.add((str(action.op), action.stage, action.micro_batch))
        need(("work", action.stage, action.micro_batch) in read.values(), f"{action}: before the first part")
        total = self.summed(action, read)
        return {self.sum_name(total): total}

    def summed(self, action: Action, read: dict[Value, object]) -> tuple:
        before = [content for value, content in read.items() if value.kind == "g"]
        need(len(before) <= 1, f"{action}: adds to two sums")
        return (*(before[0] if before else ()), (action.stage, action.micro_batch, action.version))

    def sum_name(self, content: tuple) -> Value:
        """The name that a sum must have; with equal distances, its members in their order."""
        members = [m for _, m, _ in content]
        stride = members[1] - members[0] if len(members) > 1 else 1
        name = Value("g", content[0][0], members[0], 0, members[-1] + 1, stride)
        need(list(name.members) == members, f"a sum of {members}")
        return name

    def add(self, action: Action, read: dict[Value, object]) -> dict[Value, object]:
        contents, parts = [], defaultdict(dict)
        for value, content in read.items():
            if content[0] == "part":
                parts[content[2:]][content[1]] = value
            else:
                contents.append(content)
        for (number, content), found in parts.items():
            need(sorted(found) == list(range(1, number + 1)), f"{action}: lacks parts")
            contents.append(content)
        contents.sort(key=lambda content: content[0][1])
        need(len(contents) == 2 and len(contents[1]) == 1, f"{action}: not one more micro-batch")  # a sum from the left
        total = (*contents[0], *contents[1])
        return {self.sum_name(total): total}

    def update(self, action: Action, read: dict[Value, object]) -> dict[Value, object]:
        stage, version = action.stage, action.version
        need((action.rank, stage, version) not in self.made, f"{action}: the optimizer's step for the second time")
        need(version > self.first * self.updates, f"{action}: the optimizer's step of an earlier run")
        self.made.add((action.rank, stage, version))
        old = next(
            (v for v, content in read.items() if v.kind == "p" and content[:3] == ("theta", stage, version - 1)), None
        )
        need(old is not None, f"{action}: without version {version - 1}")
        (total,) = (content for value, content in read.items() if value.kind == "g")
        if total[0] == "part":
            need((total[1], total[2]) == (old.part, old.parts), f"{action}: the sum of another shard")
            total = total[3]
        else:
            need(old.parts == 1, f"{action}: a whole sum for a shard")
        summed = self.step // self.updates
        first = (version - 1) * summed
        need(
            [(j, m) for j, m, _ in total] == [(stage, m) for m in range(first, first + summed)],
            f"{action}: a sum of {total}",
        )
        part = (old.part, old.parts)
        return {Value("p", stage, version).divided(*part): ("theta", stage, version, *part)}

    def collective(self, action: Action, read: dict[Value, object]) -> bool:
        """A rank waits for its own collective only when it needs the result; but it may join one at a time."""
        rank = action.rank
        if self.joined[rank] is not None:
            return False
        self.joined[rank] = action
        for value in action.frees:
            del self.store[rank][value]
        self.coming[rank].update(action.writes)
        self.contents = getattr(self, "contents", {}) | {rank: next(iter(read.values()))}
        if len(self.contents) < len(self.joined):
            return True
        parts, contents = self.joined, [self.contents[each] for each in range(len(self.joined))]
        self.joined, self.contents = [None] * len(parts), {}
        if contents[0][0] == "theta":
            need({c[:3] for c in contents} == {contents[0][:3]}, "versions or stages are mixed")
            need([c[3:] for c in contents] == [(r + 1, len(parts)) for r in range(len(parts))], "shards are missing")
            result = [(*contents[0][:3], 0, 1)] * len(parts)
        else:
            total = tuple(sorted(each for content in contents for each in content))
            result = [
                total if part.value.parts == 1 else ("part", part.value.part, part.value.parts, total) for part in parts
            ]
        for part, content in zip(parts, result, strict=True):
            (name,) = part.writes
            self.coming[part.rank].remove(name)
            need(name not in self.store[part.rank], f"{name} is there already")
            self.store[part.rank][name] = content
        return True

    def end(self, steps: int) -> None:
        last = self.first + steps
        wanted = {
            (op, j, m)
            for op in ("FIW" if self.schedule.timeline.splits_backward else "FB")
            for j in range(self.schedule.stages)
            for m in range(self.first * self.step, last * self.step)
        }
        need(self.done == wanted, "not every micro-batch has run every stage")
        need(not any(self.sent.values()) and not any(self.posted.values()), "messages of one end")
        held = self.schedule.held_after(last)
        for rank, store in enumerate(self.store):
            need(
                store == {v: self.held(v, last) for v in held.get(rank, ())},
                f"rank {rank} holds {list(map(str, store))}",
            )
