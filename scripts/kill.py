"""Kill runs by SIGKILL, go on, compare with undisturbed ones; write results/kill.json and the table of docs/faults.md.

Usage: python scripts/kill.py [folder]          default: runs/kill; the same command goes on where it was stopped

Every set-up is killed three times in a row: the whole tree of processes, the launching process, or one rank; while it
starts, trains, writes a checkpoint, or evaluates. Each time it must end at once and go on from its newest checkpoint;
at the end every tensor of its checkpoint and every row of its metrics must be those of the undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch

from cdp_repro.cli.console import made_folder, run_script
from cdp_repro.cli.streams import write_out
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import CONFIG, arguments_to_go_on
from cdp_repro.observe.versions import versions
from cdp_repro.report.evidence import origin
from cdp_repro.training.checkpoint import CheckpointStore
from cdp_repro.training.comparing import named_tensors

ROOT = Path(__file__).parents[1]
RESULTS, DOCUMENT = ROOT / "results" / "kill.json", ROOT / "docs" / "faults.md"
MOMENTS = (("start-up", 0), ("training", 3), ("checkpoint", 4), ("evaluation", 5))
"""Each with the training step that it waits for; a run comes to them in this order."""
VICTIMS = ("tree", "rank", "launcher")
TINY = (
    "epochs=2", "log_every_steps=1", "checkpoint_every_steps=2", "traced_steps=0", "grace_seconds=5", "wandb=disabled",
    "precision=fp64", "model.dropout=0.1",
)  # fmt: skip
IMAGES = ("dataset=synthetic", "dataset.image_size=8", "dataset.train_samples=80", "dataset.test_samples=20")
MLP = (*IMAGES, "model=mlp", "model.depth=4", "model.hidden=16", "workers=2")
TOWERS = (*IMAGES, "model=two_towers", "model.width=4", "workers=3")
WORDS = "the quick brown fox jumps over the lazy dog. " * 34
GPT = (
    "dataset=text", "dataset.root={folder}/words.txt", "model=gpt", "model.width=8", "model.depth=2", "model.heads=2",
    "model.context=16", "workers=2",
)  # fmt: skip
"""Two epochs of five training steps each, of 16 images or sequences; of 15 where three parts of a batch are equal."""
LIMIT_SECONDS = 120.0
"""Until a run comes to its moment, and until all its processes have ended after a kill."""
END_SECONDS = 900.0
"""Until a run that nobody disturbs any more has ended: seconds, but for a machine that has much else to do."""
TOGETHER = 2
_BLOCK = re.compile(r"(<!-- kill -->\n).*?(<!-- /kill -->)", re.DOTALL)


def set_ups() -> dict[str, tuple[str, ...]]:
    """Return the overrides of each set-up by its row in the table and its name; they may name its `{folder}`."""
    ours, places = ("dp", "cdp_v1", "cdp_v2"), ("single_device", "replicated", "zero", "model_parallel", "pipeline")
    found = {f"{place}: {mode}": (f"placement={place}", f"mode={mode}") for place, mode in product(places, ours)}
    found["single_device: accumulation"] = ("mode=accumulation",)
    found["single_device: matrix"] = ("mode=[[1,1],[1,0]]",)
    for place in ("replicated", "zero"):
        found[f"collectives: {place}"] = (f"placement={place}", "mode=dp", "collectives=true")
    for name in ("ddp", "fsdp2", "torch_gpipe", "torch_1f1b"):
        found[f"baselines: {name}"] = (f"baseline={name}", "mode=dp")
    for mode in ("gpipe", "one_f_one_b", "zero_bubble", "chimera", "pipedream", "pipedream_2bw", "ampnet"):
        found[f"systems: {mode}"] = ("placement=pipeline", f"mode={mode}")
    found["systems: interleaved"] = ("placement=pipeline", "mode=interleaved", "stages=4", "ranks=2")
    found["variants: servers"] = ("placement=parameter_server", "mode=dp", "servers=2")
    found["variants: accumulate=2"] = ("placement=replicated", "mode=cdp_v2", "accumulate=2")
    found["variants: delay"] = ("placement=pipeline", "mode=cdp_v1", "delay=error_feedback")
    found["variants: adamw"] = ("placement=zero", "mode=cdp_v2", "optim=adamw", "optim.lr=0.01")
    found["variants: micro_batches=3"] = ("placement=pipeline", "mode=cdp_v1", "micro_batches=3")
    for name in ("ssp", "async"):
        found[f"systems: {name}"] = ("placement=parameter_server", f"mode={name}", "speeds=[1,2]")
    in_thirds = {"variants: micro_batches=3", "systems: async"}
    whole = {name: (*MLP, f"batch_size={15 if name in in_thirds else 16}", *own) for name, own in found.items()}
    whole["systems: terapipe"] = (*GPT, "batch_size=16", "placement=pipeline", "mode=terapipe")
    whole["systems: two towers"] = (*TOWERS, "batch_size=15", "placement=pipeline", "mode=one_f_one_b")
    return whole


def main(arguments: list[str]) -> None:
    folder = made_folder(arguments, ROOT / "runs" / "kill").absolute()
    results: dict[str, Any] = {"command": "python scripts/kill.py", "set_ups": {}}
    names = _mixed(list(set_ups()))
    with ThreadPoolExecutor(TOGETHER) as pool:
        for name, found in zip(names, pool.map(lambda name: kept_trial(name, folder), names), strict=True):
            write_out(f"{name}: {'; '.join(map(_told, found['kills']))}\n")
            results["set_ups"][name] = found
            replace_file(RESULTS, f"{json.dumps(results, indent=1)}\n".encode())
            replace_file(DOCUMENT, renewed(DOCUMENT.read_text(), results).encode())


def _mixed(names: Sequence[str]) -> list[str]:
    """Return the set-ups in an order in which those of one kind are far apart, so that what is done first is of all."""
    return [name for k in range(5) for name in names[k::5]]


def _told(kill: Mapping[str, Any]) -> str:
    return f"{kill['moment']}, {kill['victim']}, {'went on' if kill['equal'] else kill['problem']}"


def kept_trial(name: str, folder: Path) -> dict[str, Any]:
    """Return what `trial` has found, now or in an earlier call, with the versions that it was found with."""
    own = folder / re.sub("[^a-z0-9_]+", "-", name)
    file = own / "found.json"
    if not file.exists():
        number = list(set_ups()).index(name)
        found = {**versions(), "kills": trial(set_ups()[name], own, list(moments_of(number)))}
        replace_file(file, json.dumps(found).encode())
    kept: dict[str, Any] = json.loads(file.read_text())
    return kept


def moments_of(number: int) -> Iterator[tuple[str, int, str]]:
    """Yield the moment, its training step and the victim of each kill of a set-up; they take turns over set-ups."""
    chosen = [moment for k, moment in enumerate(MOMENTS) if k != number % len(MOMENTS)]
    for (moment, step), victim in zip(chosen, islice(cycle(VICTIMS), number // len(MOMENTS), None), strict=False):
        yield moment, step, victim


def trial(settings: Sequence[str], folder: Path, moments: Sequence[tuple[str, int, str]]) -> list[dict[str, Any]]:
    """Kill a run at each moment and go on; return, a kill, who was killed, the seconds until all had ended, and whether
    the run ended as an undisturbed one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chance = random.Random(str((settings, moments)))
    (folder / "words.txt").write_text(WORDS)
    begin = [*TINY, *(setting.format(folder=folder) for setting in settings)]
    kills: list[dict[str, Any]] = []
    problem = ""
    for number, (moment, step, victim) in enumerate(moments):
        told = folder / f"told-{number}"
        environment = {"KILL_MOMENT": moment, "KILL_STEP": str(step), "KILL_FILE": str(told)}
        run = _started(_next(begin, folder / "run"), folder, environment)
        is_timed = moment == "start-up"
        has_come = _await(run, told, chance.uniform(0, 8) if is_timed else LIMIT_SECONDS)
        time.sleep(chance.uniform(0, 0.3))
        problem = problem or ("" if run.poll() is None else f"it had ended with exit code {run.returncode}")
        problem = problem or ("" if has_come or is_timed else f"it did not come to {moment} in {LIMIT_SECONDS:g} s")
        who, seconds = _kill(run, victim, chance)
        problem = problem or ("" if seconds < LIMIT_SECONDS else "a process outlived the kill")
        kills.append({"moment": moment, "victim": who, "seconds_until_all_ended": round(seconds, 1)})
    ends = [_started([*begin, f"run_dir={folder / 'undisturbed'}"], folder, {})]
    ends.append(_started(_next(begin, folder / "run"), folder, {}))
    codes = [_exit_code(process) for process in ends]
    problem = problem or ("" if codes == [0, 0] else f"exit codes {codes}, None: not ended in {END_SECONDS:g} s")
    problem = problem or difference(folder / "undisturbed", folder / "run")
    return [{**kill, "equal": not problem, "problem": problem} for kill in kills]


def _next(begin: Sequence[str], run: Path) -> list[str]:
    """Return the arguments that begin the run, or go on with it."""
    return arguments_to_go_on(run) if (run / CONFIG).exists() else [*begin, f"run_dir={run}"]


def _started(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `cdp-train`; by `kill_moments.py`, which makes it slow, if the environment names a moment."""
    start = [str(Path(__file__).with_name("kill_moments.py"))] if environment else ["-m", "cdp_repro.cli.train"]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *start, *arguments], stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip


def _exit_code(run: subprocess.Popen[bytes]) -> int | None:
    """Wait for the end of a run; kill one that takes too long, and return None."""
    try:
        return run.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(run, "tree", random.Random(0))
        return None


def _await(run: subprocess.Popen[bytes], told: Path, seconds: float) -> bool:
    """Wait until the run has come to its moment, has ended, or the time is over; return whether it has come to it."""
    deadline = time.monotonic() + seconds
    while not told.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return told.exists()


def rank_processes(launcher: int) -> dict[int, int]:
    """Return the process of each rank that a launching process has started."""
    found = {}
    for process in _descendants(launcher):
        try:
            name = Path(f"/proc/{process}/comm").read_text()
        except OSError:  # it has ended
            continue
        if rank := re.fullmatch(r"cdp-rank-(\d+)\n", name):
            found[int(rank[1])] = process
    return found


def _descendants(process: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that they have."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _kill(run: subprocess.Popen[bytes], victim: str, chance: random.Random) -> tuple[str, float]:
    """Kill the victim; return who it was, and the seconds until all processes of the run had ended."""
    running = run.poll() is None
    ranks, started = (rank_processes(run.pid), [*_descendants(run.pid)]) if running else ({}, [])
    who = victim if ranks else "launcher"  # a run of one process, or one that has not started its ranks
    begin = time.monotonic()
    if who == "rank":
        os.kill(chance.choice([*ranks.values()]), signal.SIGKILL)
    elif who == "launcher":
        run.kill()
    else:
        tree = [run.pid, *started]
        chance.shuffle(tree)
        for process in tree:
            with suppress(ProcessLookupError):  # it has ended with another one
                os.kill(process, signal.SIGKILL)
    while (run.poll() is None or any(map(_runs, started))) and time.monotonic() < begin + LIMIT_SECONDS:
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    run.kill()
    run.wait()
    return who, seconds


def _runs(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def difference(expected: Path, found: Path) -> str:
    """Return in what two finished runs differ, bit for bit; empty if in nothing."""
    (theirs, their_rows), (mine, my_rows) = (
        (
            CheckpointStore(run / "checkpoints").load(),
            [
                {key: value for key, value in row.items() if key != "time"}
                for row in read_metrics(run / "metrics.jsonl")
            ],
        )
        for run in (expected, found)
    )
    if (theirs.step, their_rows) != (mine.step, my_rows):
        return "the rows of the metrics differ"
    a, b = (dict(named_tensors(each.tensors)) for each in (theirs, mine))
    differing = [
        path for path in a.keys() | b.keys() if path not in a or path not in b or not torch.equal(a[path], b[path])
    ]
    return f"{len(differing)} tensors differ, such as {min(differing)}" if differing else ""


def renewed(text: str, results: Mapping[str, Any]) -> str:
    """Return the document with the table of the results between its marks."""
    return _BLOCK.sub(lambda block: f"{block[1]}{table(results)}{block[2]}", text)


def table(results: Mapping[str, Any]) -> str:
    """Return kills by kind of set-up and moment, how many of them went on bitwise, and where the numbers come from."""
    set_ups: Mapping[str, Any] = results["set_ups"]
    kills = [(name.partition(":")[0], kill) for name, found in set_ups.items() for kill in found["kills"]]
    made, well = Counter(), Counter()  # type: ignore[var-annotated]
    for kind, kill in kills:
        for row, column in product((kind, "all"), (kill["moment"], "all")):
            made[row, column] += 1
            well[row, column] += kill["equal"]
    columns = [*(moment for moment, _ in MOMENTS), "all"]
    lines = [f"| set-ups | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for row in [*dict.fromkeys(kind for kind, _ in kills), "all"]:
        counts = (f"{well[row, each]} of {made[row, each]}" if made[row, each] else "-" for each in columns)
        lines.append(f"| {row} | {' | '.join(counts)} |")
    who = Counter(kill["victim"] for _, kill in kills)
    longest = max(kill["seconds_until_all_ended"] for _, kill in kills)
    return "\n".join([
        *lines,
        "",
        f"{len(set_ups)} set-ups; killed: {who['tree']} times the whole tree of processes, {who['launcher']} "
        f"the launching process, {who['rank']} one rank. All processes had ended after at most {longest:g} s.",
        f"`{results['command']}`, {origin(set_ups.values())}.",
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_script(__doc__, main, sys.argv[1:]))
