"""Workers of different speeds on a clock, event by event: what `virtual_clock` is compared with."""

from __future__ import annotations

import heapq
from itertools import count


def pushes(ticks, slack, number):
    """The first pushes, as (worker, pull tick, push tick, pushes that the pull saw); all workers start at tick 0."""
    durations, message = ticks
    clocks = [0] * len(durations)
    events, waiting, pulled, found = [], [], {}, []
    order = count()

    def pull(worker, tick):
        taken = durations[worker][clocks[worker] % len(durations[worker])]
        pulled[worker] = tick, len(found)
        heapq.heappush(events, (tick + message + taken + message, worker, next(order)))

    for worker in range(len(durations)):
        pull(worker, 0)
    while len(found) < number:
        tick, worker, _ = heapq.heappop(events)
        begin, seen = pulled.pop(worker)
        found.append((worker, begin, tick, seen))
        clocks[worker] += 1
        waiting.append(worker)
        # the one that has just pushed is first, then those that wait, by number
        for each in sorted(waiting, key=lambda one, mine=worker: (one != mine, one)):
            if slack is None or clocks[each] - min(clocks) <= slack:
                waiting.remove(each)
                pull(each, tick)
    return found
