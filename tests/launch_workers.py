"""What the ranks of test_launch.py run. Most do without torch, whose import would take most of the time."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from cdp_repro.launch import LaunchError, launch
from cdp_repro.launch.signals import StopRequest

if "SLOW_IMPORT" in os.environ and "WORLD_SIZE" in os.environ:  # in a rank of an agent, or in what forks ranks
    Path(os.environ["SLOW_IMPORT"], f"importing-{os.environ.get('RANK', 'server')}").write_text(str(os.getpid()))
    time.sleep(4)  # longer than it takes to start the other one, on a machine that is busy

RANDOM = random.SystemRandom()


class TwoPartError(Exception):
    """Neither its arguments nor its attributes are what __init__ takes."""

    def __init__(self, step: int, rank: int) -> None:
        super().__init__(f"at step {step}")
        self.step = step
        self.rank = rank


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


def rank() -> int:
    return int(os.environ["RANK"])


def announce(folder: Path) -> None:
    """Leave the process id where a test finds it."""
    partial = folder / f"partial-{rank()}"
    partial.write_text(str(os.getpid()))
    partial.replace(folder / f"pid-{rank()}")


@contextmanager
def group(processes: int):
    import torch

    from cdp_repro.launch.process_group import process_group

    with process_group(torch.device("cpu"), processes, 30):
        yield torch


def keep_the_group_in_a_cycle(folder: Path) -> None:
    """Leave the names of the threads that there are when Python is about to end."""
    tasks = Path("/proc/self/task")
    last = folder / f"threads-{rank()}"
    atexit.register(lambda: last.write_text("".join((task / "comm").read_text() for task in tasks.iterdir())))
    with group(2) as torch:
        cycle = [torch.distributed.group.WORLD]
        cycle.append(cycle)
        assert "gloo" in "".join((task / "comm").read_text() for task in tasks.iterdir())


def add(number):
    with group(2) as torch:
        total = torch.tensor([rank() + number])
        torch.distributed.all_reduce(total)
    return {
        "rank": rank(),
        "local_rank": os.environ["LOCAL_RANK"],
        "total": total.item(),
        "threads": torch.get_num_threads(),
        "unpicklable elsewhere": None if rank() == 0 else threading.Lock(),
    }


def raise_while_the_other_receives(folder):
    with group(2) as torch:
        announce(folder)
        if rank() == 1:
            wait_for_rank_0(folder)  # on a busy machine it may not have joined the group yet
            raise ZeroDivisionError("the first cause")
        torch.distributed.recv(torch.zeros(1), 1)


def die_at_a_random_moment(folder):
    """Rank 1 is killed somewhere among messages."""
    with group(2) as torch:
        announce(folder)
        if rank() == 1:
            threading.Timer(RANDOM.uniform(0, 0.5), os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            torch.distributed.all_reduce(torch.zeros(10))


def exit_without_a_word(folder, code):
    """Rank 1 ends, the other goes on."""
    announce(folder)
    if rank() == 1:
        wait_for_rank_0(folder)
        os._exit(code)
    time.sleep(60)


def lose_a_peer_that_is_seen_to_end_later(folder):
    announce(folder)
    if rank() == 0:
        raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    wait_for_rank_0(folder)
    time.sleep(0.3)
    os._exit(3)


def wait_for_rank_0(folder):
    while not (folder / "pid-0").exists():
        time.sleep(0.01)
    time.sleep(0.2)


def fail_beside_a_stopped_rank(folder):
    announce(folder)
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_rank_0(folder)
    raise ZeroDivisionError("beside a stopped one")


def already_imported(name):
    """Return whether the module, and whether torch, was there when the rank began."""
    return name in sys.modules, "torch" in sys.modules


def wait_for_ever(rank):
    while True:
        time.sleep(1)


def threads():
    return os.environ["OMP_NUM_THREADS"]


def raise_own(ranks):
    if rank() in ranks:
        time.sleep(0.0 if rank() else 0.3)
        raise TwoPartError(7, rank())


def raise_locked():
    raise LockedError


def finish_when_asked(folder, seconds):
    """Return after a signal, at leisure, or fail after half a minute."""
    with StopRequest() as stop:
        announce(folder)
        deadline = time.monotonic() + 30
        while stop.signal is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (folder / f"asked-{rank()}").touch()
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # time.sleep alone would not show a second signal that is ignored
            time.sleep(0.01)
        return f"rank {rank()} got signal {stop.signal}"


def stop_for_ever(folder):
    """Rank 1 is stopped; rank 0 would end only after it."""
    with StopRequest(), group(2) as torch:
        announce(folder)
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        torch.distributed.barrier()


def ask_the_store(folder):
    """Ask the store for a key until it is gone, as ranks do that may be told to stop; live long enough to see that."""
    from torch.distributed.distributed_c10d import _get_default_store

    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: the kernel does not kill this rank with what forked it
    with group(2):
        announce(folder)
        while not _get_default_store().check(["a key that nobody sets"]):
            pass


def wait_unprepared(folder):
    announce(folder)
    time.sleep(90)  # longer than any test waits for its end


def compare(folder, hashes):
    """Let every rank that refuses leave its message."""
    from cdp_repro.launch.process_group import refuse_differing

    with group(3):
        refuse_differing({"code": "a", "config": "b"})
        try:
            refuse_differing(hashes[rank()])
        except LaunchError as error:
            (folder / f"refused-{rank()}").write_text(str(error))
            raise


def addresses_of_the_store():
    """Return where somebody listens at the port of the store, as the kernel writes it."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, port = local.partition(":")
            if state == "0A" and int(port, 16) == int(os.environ["MASTER_PORT"]):
                found.append(address)
    return found


if __name__ == "__main__":
    name, folder, *seconds = sys.argv[1:]
    grace_seconds = float(os.environ.get("GRACE", "20"))
    print(launch(globals()[name], [Path(folder), *map(float, seconds)], 2, grace_seconds))
