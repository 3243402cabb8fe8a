"""Checkpoints: bitwise round trips, every kind of damage, a really full disk, kill -9."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cdp_repro.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore


def some_tensors(step: int = 0) -> dict[str, Any]:
    return {"versions": [{"weight": torch.full((32, 8), float(step))}, {"weight": torch.ones(3)}], "epoch": step}


def filled(directory: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    store = CheckpointStore(directory, keep=keep)
    for step in steps:
        store.save(step, some_tensors(step), {"seed": 0, "step": step})
    return store


def assert_bitwise(found: Any, expected: Any, where: str = "tensors") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, where
        as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*as_bytes), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_bitwise(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected), where
        for index, item in enumerate(expected):
            assert_bitwise(found[index], item, f"{where}[{index}]")
    else:
        assert type(found) is type(expected) and found == expected, where


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def optimizer_state(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 5)).square().sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


# ---- round trips


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
def test_every_dtype_returns_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = (torch.randn(7, 3) * 100).to(dtype)
    store = CheckpointStore(tmp_path)
    store.save(4, {"x": tensor, "empty": torch.empty(0, 2, dtype=dtype), "scalar": tensor[0, 0]}, {})
    assert_bitwise(store.load().tensors, {"x": tensor, "empty": tensor[:0, :2], "scalar": tensor[0, 0].clone()})


def test_nan_payloads_negative_zero_and_denormals_survive(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FF8000000000001, -(2**63), 1, 0x7FF0000000000000], dtype=torch.int64)
    store = CheckpointStore(tmp_path)
    store.save(0, {"x": bits.view(torch.float64)}, {})
    assert torch.equal(store.load().tensors["x"].view(torch.int64), bits)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"momentum": 0.9, "weight_decay": 5e-4}), (torch.optim.AdamW, {"betas": (0.9, 0.95)})],
)
def test_state_of_real_optimizers_returns_bit_by_bit(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    state = optimizer_state(kind, **options)
    store = CheckpointStore(tmp_path)
    store.save(12, state, {})
    assert_bitwise(store.load().tensors, state)


def test_plain_values_and_meta_return_as_they_were(tmp_path: Path) -> None:
    tensors = {"a": [1, 2.5, "s", None, True, (0, {3: torch.get_rng_state()})], "p": torch.nn.Parameter(torch.ones(2))}
    meta = {"config": {"lr": 1e-5, "mode": "cdp_v2", "rule": [[0, 1], [1, 1]]}, "commit": None, "loss": float("inf")}
    store = CheckpointStore(tmp_path)
    path = store.save(123, tensors, meta)
    assert path == tmp_path / "step-000000123" and names(path) == ["manifest.json", "meta.json", "state.pt"]
    loaded = store.load(path)
    assert isinstance(loaded, Checkpoint) and loaded.step == 123 and loaded.meta == meta
    assert_bitwise(loaded.tensors, tensors)
    assert names(tmp_path) == ["step-000000123"]


@pytest.mark.parametrize("bad", [{1, 2}, object(), b"bytes", torch.Generator(), {"deep": [lambda: 0]}])
def test_what_could_not_be_loaded_is_refused_before_writing(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tensors\['x'\]"):
        CheckpointStore(tmp_path).save(0, {"x": bad}, {})
    assert names(tmp_path) == []


def test_meta_that_is_not_json_and_bad_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="meta is not JSON"):
        CheckpointStore(tmp_path).save(0, {}, {"path": tmp_path})
    with pytest.raises(CheckpointError, match="step -1"):
        CheckpointStore(tmp_path).save(-1, {}, {})
    with pytest.raises(CheckpointError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


# ---- which checkpoints are there


def test_keeps_the_last_k_and_never_deletes_the_one_just_written(tmp_path: Path) -> None:
    store = filled(tmp_path, 10, 20, 30, keep=2)
    assert names(tmp_path) == ["step-000000020", "step-000000030"]
    written = store.save(5, some_tensors(5), {})  # a run that went back to an earlier checkpoint
    assert names(tmp_path) == ["step-000000005", "step-000000020", "step-000000030"]
    assert store.load(written).step == 5 and store.load().step == 30


def test_latest_goes_by_number_and_ignores_what_is_incomplete_or_foreign(tmp_path: Path) -> None:
    store = filled(tmp_path, 999_999_999, 1_000_000_000)
    for stranger in (".new-step-2000000000", ".removed-step-3000000000", "step-best", "best-step-4000000000"):
        (tmp_path / stranger).mkdir()
    assert store.latest() == tmp_path / "step-1000000000"
    assert CheckpointStore(tmp_path / "absent").latest() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        CheckpointStore(tmp_path / "absent").load()


def test_leftovers_of_a_killed_process_are_cleared_by_the_next_save(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    for leftover in (".new-step-000000002", ".removed-step-000000000", ".replaced-step-000000001"):
        shutil.copytree(tmp_path / "step-000000001", tmp_path / leftover)
    (tmp_path / "notes").mkdir()  # not ours: stays
    store.save(2, some_tensors(2), {})
    assert names(tmp_path) == ["notes", "step-000000001", "step-000000002"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    store.save(2, {"new": torch.zeros(1)}, {"second": True})
    assert store.load().meta == {"second": True} and list(store.load().tensors) == ["new"]
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_killed_between_the_two_renames_of_a_replacement_the_old_copy_counts(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    (tmp_path / "step-000000002").rename(tmp_path / ".replaced-step-000000002")
    assert store.load().step == 2
    store.save(3, some_tensors(3), {})
    assert names(tmp_path) == ["step-000000001", "step-000000002", "step-000000003"]
    assert store.load(tmp_path / "step-000000002").step == 2


def test_interrupted_before_the_second_rename_the_old_copy_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, 1, 2)

    def interrupt(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupt)
        store.save(2, {"new": torch.zeros(1)}, {})
    assert store.load().step == 2 and list(store.load().tensors) == ["versions", "epoch"]


# ---- damage


def damage_truncate(path: Path) -> None:
    os.truncate(path / "state.pt", (path / "state.pt").stat().st_size - 1)


def damage_missing_state(path: Path) -> None:
    (path / "state.pt").unlink()


def damage_missing_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_manifest_text(path: Path) -> None:
    (path / "manifest.json").write_bytes(b'{"format": \xff')


def damage_manifest_list(path: Path) -> None:
    (path / "manifest.json").write_text("[]")


def edit_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def damage_version(path: Path) -> None:
    edit_manifest(path, format_version=99)


def damage_format(path: Path) -> None:
    edit_manifest(path, format="somebody else's")


def damage_entries(path: Path) -> None:
    edit_manifest(path, files={"state.pt": {"bytes": 1, "sha256": ""}})


def damage_entry(path: Path) -> None:
    edit_manifest(path, files={"state.pt": 5, "meta.json": {"bytes": 1, "sha256": ""}})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_truncate, r"state\.pt is damaged: expected [\d,]+ bytes, found [\d,]+"),
        (damage_missing_state, r"state\.pt is missing, expected [\d,]+ bytes"),
        (damage_missing_manifest, r"manifest\.json is missing"),
        (damage_manifest_text, r"manifest\.json is damaged: expected JSON"),
        (damage_manifest_list, r"manifest\.json is not ours: .* found 'list'"),
        (damage_version, r"format version 99, this program reads 1"),
        (damage_format, r"expected format 'cdp-repro checkpoint', found \"somebody else's\""),
        (damage_entries, r"expected entries for state\.pt and meta\.json"),
        (damage_entry, r"expected bytes and sha256 for state\.pt, found 5"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_named_and_the_newest_whole_one_is_offered(tmp_path: Path, damage: Any, says: str) -> None:
    store = filled(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-000000003")
    with pytest.raises(CheckpointError, match=says) as caught:
        store.load()  # must not fall back unasked
    assert f"whole is {tmp_path / 'step-000000002'}: delete" in str(caught.value)
    assert store.load(tmp_path / "step-000000002").step == 2
    damage_truncate(tmp_path / "step-000000002")
    with pytest.raises(CheckpointError, match=r"whole is .*step-000000001: delete"):
        store.load()
    damage_missing_manifest(tmp_path / "step-000000001")
    with pytest.raises(CheckpointError, match=r"No other checkpoint in .* is whole"):
        store.load()


@pytest.mark.parametrize("name", ["state.pt", "meta.json", "manifest.json"])
def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path, name: str) -> None:
    store = filled(tmp_path, 1)
    file = tmp_path / "step-000000001" / name
    whole, draw = file.read_bytes(), random.Random(name)
    refused = 0
    for _ in range(60):
        position, bit = draw.randrange(len(whole)), draw.randrange(8)
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        try:
            loaded = store.load()
        except CheckpointError:
            refused += 1
        else:
            assert name == "manifest.json"  # white space
            assert loaded.step == 1 and loaded.meta == {"seed": 0, "step": 1}
            assert_bitwise(loaded.tensors, some_tensors(1))
    assert refused == 60 if name != "manifest.json" else refused > 30
    file.write_bytes(whole)
    assert store.load().step == 1


def test_foreign_paths_are_refused(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", 1)
    (tmp_path / "photos").mkdir()
    (tmp_path / "model.pt").write_text("x")
    for path, says in (("photos", "manifest.json is missing"), ("model.pt", "is a file"), ("absent", "is nothing")):
        with pytest.raises(CheckpointError, match=says) as caught:
            store.load(tmp_path / path)
        assert "step-000000001" in str(caught.value)


def with_file(path: Path, name: str, data: bytes) -> None:
    """Write a file of a checkpoint, and its hash into the manifest."""
    (path / name).write_bytes(data)
    files = json.loads((path / "manifest.json").read_text())["files"]
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(path, files=files | {name: entry})


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, pickle_module=pickle)
    return file.getvalue()


def test_a_pickle_with_a_fitting_hash_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "pwned"),)

    store = filled(tmp_path / "store", 1)
    with_file(tmp_path / "store" / "step-000000001", "state.pt", saved({"x": Evil()}))
    with pytest.raises(CheckpointError, match="more than a dict of tensors") as caught:
        store.load()
    assert "weights_only" not in str(caught.value), "no advice to load it unsafely"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "data", [b"", b"PK", saved({"x": torch.ones(9)})[:-50], saved([torch.ones(1)]), b"\x80\x02}.", b"no pickle"]
)
def test_another_state_with_a_fitting_hash_is_refused(tmp_path: Path, data: bytes) -> None:
    store = filled(tmp_path / "store", 1, 2)
    with_file(tmp_path / "store" / "step-000000002", "state.pt", data)
    with pytest.raises(CheckpointError, match=r"state\.pt is not ours, though its hash fits.*step-000000001"):
        store.load()


@pytest.mark.parametrize("data", [b"{}", b"[]", b"7", b'{"step": "2", "meta": {}}', b'{"step": 2, "meta": []}', b"{"])
def test_another_meta_with_a_fitting_hash_is_refused(tmp_path: Path, data: bytes) -> None:
    store = filled(tmp_path / "store", 1, 2)
    with_file(tmp_path / "store" / "step-000000002", "meta.json", data)
    with pytest.raises(
        CheckpointError, match=r"meta\.json is (not ours, though its hash fits|damaged).*step-000000001"
    ):
        store.load()


# ---- full disk


SAVE_TWICE = """
import sys, torch
from pathlib import Path
from cdp_repro.training.checkpoint import CheckpointError, CheckpointStore
{prepare}
store = CheckpointStore(Path(sys.argv[1]) / "checkpoints", keep=5)
store.save(1, {{"x": torch.ones(1000)}}, {{}})
store.save(2, {{"x": torch.ones(2000)}}, {{}})
for step in (3, 2):  # a new one, and one that would replace the newest
    try:
        store.save(step, {{"x": torch.ones(1_000_000)}}, {{}})
    except CheckpointError as error:
        print(error)
    else:
        sys.exit("saved?")
    assert sorted(p.name for p in store.directory.iterdir()) == ["step-000000001", "step-000000002"]
    assert torch.equal(store.load().tensors["x"], torch.ones(2000)) and store.load().step == 2
store.save(3, {{"x": torch.ones(3000)}}, {{}})  # the room of the failed one is free again
assert store.load().step == 3
"""


def run_python(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def user_namespaces_work() -> bool:
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not user_namespaces_work(), reason="needs a mount of its own, by user namespaces")
def test_a_full_disk_leaves_the_previous_checkpoints(tmp_path: Path) -> None:
    """1 MiB of tmpfs, in a mount namespace that dies with the process."""
    mount = f"import subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', {str(tmp_path)!r}])"
    done = run_python(SAVE_TWICE.format(prepare=mount), str(tmp_path), prefix=("unshare", "-Urm"))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    for step, line in ((3, first), (2, second)):
        assert f"checkpoint of step {step} in" in line and "No space left on device" in line
        needed, free = (int(part.split()[-1].strip("(").replace(",", "")) for part in line.split(" bytes ")[:2])
        assert 4_000_000 < needed < 4_100_000 and 900_000 < free < 2**20
        assert "still" in line and "step-000000002" in line and "run_dir=" in line


def test_a_write_cut_short_by_a_limit_leaves_the_previous_checkpoints(tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    done = run_python(SAVE_TWICE.format(prepare=limit), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large") == 2 and done.stdout.count("step-000000002; ") == 0
    assert done.stdout.count("still " + str(tmp_path / "checkpoints" / "step-000000002")) == 2


def test_a_checkpoint_is_on_the_disk_before_it_is_in_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is renamed before it is synced may be empty after a power failure."""
    store, done = CheckpointStore(tmp_path / "checkpoints"), list[str]()
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"-> {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    store.save(3, {"x": torch.ones(1)}, {})
    new, final = ".new-step-000000003", "step-000000003"
    assert done == ["state.pt", "meta.json", "manifest.json", new, f"-> {final}", "checkpoints"]


def test_old_checkpoints_that_cannot_be_deleted_do_not_undo_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"x": torch.ones(1)}, {})

    def fixed(self: CheckpointStore, path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(CheckpointStore, "_remove", fixed)
    assert store.save(2, {"x": torch.ones(1)}, {}) == store.latest()


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="there is no earlier checkpoint"):
        CheckpointStore(tmp_path / "file").save(0, {}, {})
    assert (tmp_path / "file").read_text() == "in the way"


# ---- kill -9


SAVE_FOREVER = """
import os, sys, torch
from itertools import count
from pathlib import Path
from cdp_repro.training.checkpoint import CheckpointStore

def save_forever(turn):
    store = CheckpointStore(Path(sys.argv[1]), keep=2)
    for turn in count(turn):
        step = turn // 2  # every step twice, so that replacing is hit too
        store.save(step, {"x": torch.full((50_000,), step), "y": [torch.tensor(step)] * 20}, {"turn": turn})
        os.write(acknowledged, f"{turn}\\n".encode())

acknowledged = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for line in sys.stdin:  # one import of torch for all the children
    if not (child := os.fork()):
        save_forever(int(line))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def acknowledged(file: Path) -> int:
    """The last turn whose save had returned, -1 before the first."""
    return int((["-1", *file.read_text().split()] if file.exists() else ["-1"])[-1])


def test_kill_9_while_saving_always_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    draw, saved, turn = random.Random(2024), tmp_path / "acknowledged", 0
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    command = [sys.executable, "-c", SAVE_FOREVER, str(store.directory), str(saved)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(12):
            process.stdin.write(f"{turn}\n")
            child = int(process.stdout.readline())
            deadline = time.monotonic() + 60
            while acknowledged(saved) < turn and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "dead\n"
            loaded = store.load()
            assert loaded.meta["turn"] >= acknowledged(saved), "a checkpoint that save() had returned is lost"
            assert loaded.step == loaded.meta["turn"] // 2
            assert torch.equal(loaded.tensors["x"], torch.full((50_000,), loaded.step))
            turn = loaded.meta["turn"] + 1
    store.save(turn, {}, {})
    assert all(name.startswith("step-") for name in names(store.directory)) and len(names(store.directory)) == 2
