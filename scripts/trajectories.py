"""Show that a change leaves training bitwise as it was: record what short runs end with, later compare with that.

Usage: python scripts/trajectories.py record FILE [word ...]     before the change
       python scripts/trajectories.py compare FILE [word ...]    after it, on the same machine

Words choose the settings whose names have all of them, e.g. `cdp_v2 zero N=3`; without words: all, some minutes.

A setting trains a small network in float64 on the CPU, with real gloo processes, for five steps with a drain in the
middle (none if its name says `one_run`): BatchNorm, dropout, a frozen parameter, SGD with momentum and weight decay, a
learning rate that changes. FILE (JSON) holds the SHA-256 of each tensor of the final model, on which all ranks must
agree, and each loss in hexadecimal. A setting that fails, or takes too long, is recorded as null, with the reason, and
is not compared. `compare` names the settings that differ, and in what, and exits with 1, or says how many are the same.
With `collectives` the order of sums is the library's, so that another version of it may differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import cdp_repro
from cdp_repro import Engine

STEPS, DRAIN = 5, 3
MICRO_BATCH, FEATURES = 3, 5
MATRIX = "matrix"
MODES = ("dp", "cdp_v1", "cdp_v2", MATRIX, "accumulation")
PLACEMENTS = ("single_device", "replicated", "zero", "model_parallel", "pipeline")
SLOT_ORDERS = ("paper", "backward_first")
MOST_RANKS, MOST_RANKS_OF_FOUR_REPLICATED = 20, 8
AT_A_TIME = 2
SECONDS = 60
PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "cdp_repro", "cdp_repro.engine.engine"]
"""A fork server imports these once, so that a rank starts in a fraction of a second."""

Run = dict[str, Any]
"""`losses`, [step][worker], and `tensors`, name -> SHA-256."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how: N workers, S stages, R replicas."""

    mode: str
    placement: str
    n: int
    s: int
    r: int
    slot_order: str
    pipeline_schedule: str | None = None
    collectives: bool = False

    @property
    def name(self) -> str:
        sizes = f"N={self.n} S={self.s} R={self.r}"
        extras = [self.pipeline_schedule, "collectives" * self.collectives, "one_run" * (not self.drains)]
        return " ".join(filter(None, [self.mode, self.placement, sizes, self.slot_order, *extras]))

    @property
    def ranks(self) -> int:
        if self.placement == "single_device":
            return 1
        if self.placement != "model_parallel":
            return self.n * self.r
        return self.s * self.r * (2 * self.n if self.mode == "dp" else self.n + 1) // 2

    @property
    def drains(self) -> bool:
        """Whether the run has a drain in the middle.

        `zero` with a rank that owns no stage has none: what it computed after one was not to be relied on.
        """
        return self.placement != "zero" or self.collectives or self.n * self.r <= self.s

    @property
    def is_possible(self) -> bool:
        return self.mode != "accumulation" or self.placement == "single_device"

    @property
    def is_affordable(self) -> bool:
        if self.n == 3 and self.slot_order != "paper":
            return False
        return self.ranks <= (MOST_RANKS_OF_FOUR_REPLICATED if self.n == 4 and self.r > 1 else MOST_RANKS)


def settings() -> list[Setting]:
    sizes = [(n, c * n, r) for r, n, c in product((1, 2), (2, 3, 4), (1, 2))]
    grid = (
        Setting(mode, placement, *size, order, **variant)
        for order, size, placement, mode in product(SLOT_ORDERS, sizes, PLACEMENTS, MODES)
        for variant in variants(mode, placement)
    )
    return [setting for setting in grid if setting.is_possible and setting.is_affordable]


def variants(mode: str, placement: str) -> list[dict[str, Any]]:
    """Return what else can be chosen there."""
    if mode == "dp" and placement == "pipeline":
        return [{"pipeline_schedule": schedule} for schedule in ("gpipe", "one_f_one_b")]
    if mode == "dp" and placement in ("replicated", "zero"):
        return [{}, {"collectives": True}]
    return [{}]


def make_stages(count: int) -> list[nn.Module]:
    """BatchNorm, dropout, a stage without parameters, and one with a frozen parameter."""
    torch.manual_seed(0)
    size = FEATURES
    kinds: list[Callable[[], nn.Sequential]] = [
        lambda: nn.Sequential(nn.Linear(size, size, bias=False), nn.BatchNorm1d(size), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Linear(size, size), nn.Dropout(0.3), nn.Tanh()),
        lambda: nn.Sequential(nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size)),
    ]
    stages = [kinds[number % 4]().double() for number in range(count)]
    for stage in stages[3::4]:
        stage[0].bias.requires_grad_(False)
    return [*stages]


def make_batches(micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    size = micro_batches * MICRO_BATCH
    return [
        (
            torch.randn(size, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(FEATURES, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def make_engine(setting: Setting) -> Engine:
    matrix = [[1 + (2 * i + j) % 3 for j in range(setting.s)] for i in range(setting.n)]
    chosen = {"pipeline_schedule": setting.pipeline_schedule} if setting.pipeline_schedule else {}
    return Engine(
        make_stages(setting.s),
        F.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        matrix if setting.mode == MATRIX else setting.mode,
        setting.placement,
        workers=setting.n,
        replicas=setting.r,
        collectives=setting.collectives,
        slot_order=setting.slot_order,
        seed=3,
        learning_rate_factor=lambda step: 0.5 if step >= 2 else 1.0,
        **chosen,
    )


def train(setting: Setting) -> Run:
    """Train on this rank; return what can be compared."""
    engine, batches = make_engine(setting), make_batches(setting.n * setting.r)
    parts = [batches[:DRAIN], batches[DRAIN:]] if setting.drains else [batches]
    losses = [[loss.hex() for loss in result.losses] for part in parts for result in engine.run(part)]
    model = engine.model
    if not isinstance(model, nn.Module):
        model = model()
    return {"losses": losses, "tensors": {name: digest(tensor) for name, tensor in model.state_dict().items()}}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def be_rank(setting: Setting, rank: int, store: str, queue: Any) -> None:
    """Train as one of the processes of a setting; put (rank, run, traceback) into `queue`."""
    torch.set_num_threads(1)
    try:
        if setting.ranks > 1:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=setting.ranks)
        queue.put((rank, train(setting), None))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def run(setting: Setting) -> Run | str:
    """Train a setting in processes of its own; return the run of rank 0, or why there is none."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue = context.Queue()
    with TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [
            context.Process(target=be_rank, args=(setting, rank, store, queue), daemon=True)
            for rank in range(setting.ranks)
        ]
        for process in processes:
            process.start()
        found = collect(queue, setting.ranks)
        for process in processes:
            process.join(0 if isinstance(found, str) else 5)
            process.kill()
            process.join()
    return found if isinstance(found, str) else agreed(found)


def collect(queue: Any, ranks: int) -> dict[int, Run] | str:
    """Return the run of each rank, or why one of them has none."""
    runs: dict[int, Run] = {}
    end = time.monotonic() + SECONDS
    while len(runs) < ranks:
        try:
            rank, found, failure = queue.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            return f"{ranks - len(runs)} of {ranks} ranks have not ended after {SECONDS} s"
        if failure is not None:
            return f"rank {rank}: {failure.strip().splitlines()[-1]}"
        runs[rank] = found
    return runs


def agreed(runs: dict[int, Run]) -> Run | str:
    """Return the run of rank 0, which alone knows all losses, or which ranks have another model."""
    others = [rank for rank in sorted(runs) if runs[rank]["tensors"] != runs[0]["tensors"]]
    return f"the models of ranks {others} differ from that of rank 0" if others else runs[0]


def run_all(chosen: Sequence[Setting]) -> Iterator[tuple[Setting, Run | str]]:
    """Run settings, a few at a time; yield them in their order, with a bar on a terminal."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield from tqdm(
            zip(chosen, pool.map(run, chosen), strict=True), total=len(chosen), unit=" settings", disable=None
        )


def header() -> dict[str, str]:
    """Return what the numbers may depend on, and the commit of the code that ran."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "commit": commit(Path(cdp_repro.__file__).parent),
    }


def commit(source: Path) -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=source, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + " with changes" * bool(git("status", "--porcelain", "."))


def read(path: Path) -> dict[str, Any]:
    """Return what `record` has written; exit if it is not there, or something else."""
    try:
        recorded: dict[str, Any] = json.loads(path.read_text())
        if {*header(), "settings"} <= recorded.keys():
            return recorded
    except OSError as error:
        sys.exit(f"cannot read {path}: {error.strerror}")
    except (ValueError, AttributeError):
        pass
    sys.exit(f"{path} is not a file of `record`: write one by python scripts/trajectories.py record FILE")


def record(path: Path, words: Sequence[str]) -> int:
    chosen = matching(settings(), words)
    try:
        path.open("a").close()  # before the runs, which take minutes
    except OSError as error:
        sys.exit(f"cannot write to {path}: {error.strerror}")
    found = {setting.name: outcome for setting, outcome in run_all(chosen)}
    failed = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    runs = {name: None if name in failed else outcome for name, outcome in found.items()}
    path.write_text(json.dumps({**header(), "failed": failed, "settings": runs}, indent=1) + "\n")
    for name, reason in failed.items():
        print(f"{name}: {reason}")
    print(f"{len(runs) - len(failed)} settings recorded, {len(failed)} failed")
    return 0


def compare(path: Path, words: Sequence[str]) -> int:
    recorded = read(path)
    for key, value in header().items():
        if key != "commit" and recorded[key] != value:
            print(f"recorded with {key} {recorded[key]}, this is {value}")
    missing = recorded["settings"].keys() - {setting.name for setting in settings()}
    if missing:
        sys.exit(f"{path} has settings that this script has not: {', '.join(sorted(missing))}")
    chosen = matching([setting for setting in settings() if setting.name in recorded["settings"]], words)
    known = [setting for setting in chosen if recorded["settings"][setting.name]]
    differing = 0
    for setting, found in run_all(known):
        if difference := difference_of(recorded["settings"][setting.name], found):
            tqdm.write(f"{setting.name}: {difference}")
            differing += 1
    skipped = f"; {len(chosen) - len(known)} skipped, which have no recorded run" * (len(chosen) > len(known))
    same = f"{len(known) - differing} settings bitwise the same"
    print(f"{differing} settings differ, {same}{skipped}" if differing else f"{same}{skipped}")
    return 0 if known and not differing else 1


def difference_of(recorded: Run, found: Run | str) -> str:
    """Say in what two runs differ; nothing if they are bitwise the same."""
    if isinstance(found, str):
        return f"failed: {found}"
    before, now = recorded["tensors"], found["tensors"]
    tensors = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    said = [f"{len(tensors)} of {len(before)} tensors differ: {' '.join(tensors[:4])}"] if tensors else []
    if recorded["losses"] != found["losses"]:
        steps = zip(recorded["losses"], found["losses"], strict=False)
        first = next((step for step, (a, b) in enumerate(steps) if a != b), None)
        said.append("another number of steps" if first is None else f"losses differ from step {first} on")
    return "; ".join(said)


def matching(among: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
    """Return the settings whose names have all the words; exit if there is none."""
    wanted = set(" ".join(words).split())
    chosen = [setting for setting in among if wanted <= set(setting.name.split())]
    if not chosen:
        sys.exit(f"no setting has all of {' '.join(words)!r} in its name, as in {settings()[0].name!r}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*", help="of the names of the settings")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, which are as many as the cores or more
    return {"record": record, "compare": compare}[arguments.action](arguments.file, arguments.words)


if __name__ == "__main__":
    sys.exit(main())
