"""Checkpoints that are either whole or not there.

    directory/
      step-000000123/
        state.pt         tensors, by torch.save; read with weights_only=True
        meta.json        {"step": 123, "meta": {...}}
        manifest.json    format, and size and sha256 of the two files; written last
      .new-*             being written          } left by a killed process,
      .removed-*         being deleted          } cleared by the next save
      .replaced-step-*   old copy of a step that is being saved again; counts until the new one is in place

A checkpoint becomes visible by one rename of its complete, synced directory. One process writes at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

FORMAT = "cdp-repro checkpoint"
FORMAT_VERSION = 1
STATE, META, MANIFEST = "state.pt", "meta.json", "manifest.json"
_NAME = re.compile(r"step-(\d{9,})")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file, the numbers and a way on."""


@dataclass(frozen=True)
class Checkpoint:
    """A training step, its nested tensors and the JSON beside them."""

    step: int
    tensors: dict[str, Any]
    meta: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run: saves atomically, keeps the newest `keep`, reads only whole ones."""

    def __init__(self, directory: Path, keep: int = 2, before_saving: Callable[[], None] = lambda: None) -> None:
        """`before_saving` raises an error where nothing must be saved any more."""
        if keep < 1:
            raise CheckpointError(f"keep={keep} would delete every checkpoint; keep at least 1")
        self.directory = Path(directory)
        self.keep = keep
        self._before_saving = before_saving

    def save(self, step: int, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its path; an existing one of the same step is replaced.

        `tensors`: nested dict, list and tuple of tensor, int, float, str, bool and None; dict keys int or str.
        `meta`: JSON; NaN and Infinity are allowed and read back.
        Raises CheckpointError if it cannot be written: what was there before stays as it was.
        """
        if step < 0:
            raise CheckpointError(f"step {step} is negative; steps count from 0")
        self._before_saving()
        _refuse_unloadable(tensors, "tensors")
        text = _encode(step, meta)
        final = self.path_of(step)
        new = self.directory / f".new-{final.name}"
        needed: dict[str, int] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            new.mkdir()
            _write(new, dict(tensors), text, needed)
            self._publish(new, final)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)  # before the message measures the free space
            raise CheckpointError(self._save_failed(step, error, sum(needed.values()))) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):  # the checkpoint is in place; what cannot be deleted now is tried next time
            self._prune(final)
        return final

    def path_of(self, step: int) -> Path:
        """Return where the checkpoint of a step is, if there is one."""
        return self.directory / f"step-{step:09d}"

    def latest(self) -> Path | None:
        """Path of the newest checkpoint by step, None if there is none; `load` checks its content."""
        found = self._checkpoints()
        return found[max(found)] if found else None

    def load(self, path: Path | None = None) -> Checkpoint:
        """Read the checkpoint at `path`, or the newest; sizes and hashes are checked before any unpickling.

        Raises CheckpointError if it is not there, damaged, or not ours; it never falls back to another one unasked,
        but names the newest other one that is whole.
        """
        chosen = self.latest() if path is None else Path(path)
        if chosen is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        try:
            _verify(chosen)
            return _read(chosen)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{error}. {self._way_on(chosen)}") from error

    def _checkpoints(self) -> dict[int, Path]:
        """Complete checkpoints by step."""
        found: dict[int, Path] = {}
        prefixes = (".replaced-", "")  # a step in place hides the old copy that it replaces
        entries = [entry.name for entry in self.directory.iterdir()] if self.directory.is_dir() else []
        for prefix in prefixes:
            for name in entries:
                if name.startswith(prefix) and (match := _NAME.fullmatch(name.removeprefix(prefix))):
                    found[int(match[1])] = self.directory / name
        return found

    def _publish(self, new: Path, final: Path) -> None:
        if final.exists():
            # A rename cannot replace a full directory: move that first. If killed here, `latest` finds the old copy.
            final.rename(self.directory / f".replaced-{final.name}")
        new.replace(final)
        _sync(self.directory)

    def _prune(self, written: Path) -> None:
        """Delete all but the newest `keep`, and never the one just written."""
        found = self._checkpoints()
        for step in sorted(found)[: -self.keep]:
            if found[step] != written:
                self._remove(found[step])
        self._clear_leftovers()

    def _clear_leftovers(self) -> None:
        for entry in list(self.directory.iterdir()):
            final = entry.with_name(entry.name.removeprefix(".replaced-"))
            if final != entry and not final.exists():
                entry.rename(final)
            elif entry.name.startswith((".new-step-", ".removed-step-", ".replaced-step-")):
                shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        removed = self.directory / f".removed-{path.name}"
        path.rename(removed)  # at once out of sight, so that a kill never leaves half a checkpoint in sight
        shutil.rmtree(removed, ignore_errors=True)

    def _newest_whole(self, other_than: Path | None = None) -> Path | None:
        found = self._checkpoints()
        others = (found[step] for step in sorted(found, reverse=True))
        return next((path for path in others if not _same(path, other_than) and _is_whole(path)), None)

    def _save_failed(self, step: int, error: OSError, needed_bytes: int) -> str:
        survivor = self._newest_whole()
        kept = f"the newest whole checkpoint is still {survivor}" if survivor else "there is no earlier checkpoint"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        space = f" ({_space(self.directory, needed_bytes)})" if is_full else ""
        way_on = "Free some space, move" if is_full else "Move"
        return (
            f"cannot save the checkpoint of step {step} in {self.directory}: {error.strerror or error}{space}; {kept}. "
            f"{way_on} the run to another disk, or begin one there by run_dir="
        )

    def _way_on(self, damaged: Path) -> str:
        other = self._newest_whole(damaged)
        if other is None:
            return f"No other checkpoint in {self.directory} is whole"
        return f"The newest other checkpoint that is whole is {other}: delete {damaged} to go on from that one"


class _HashingFile:
    """A file for torch.save that counts and hashes the bytes written.

    A write error is held back until `finish`: the count then tells how many bytes the whole file needs, and the error
    keeps its errno (torch's own writer turns a full disk into "unexpected pos 704 vs 598").
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._error: OSError | None = None
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        if self._error is None:
            try:
                self._hash.update(data)
                self._file.write(data)
            except OSError as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Nothing to do: `finish` flushes, where it may fail."""

    def finish(self) -> dict[str, Any]:
        """Sync to disk; return the file's entry in the manifest. Raises the first OSError of any write."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}


def _write(new: Path, tensors: dict[str, Any], meta: bytes, needed: dict[str, int]) -> None:
    """Write the three files, manifest last, and sync; `needed` receives the bytes of the other two."""
    files: dict[str, Any] = {}
    needed[META] = len(meta)
    for name in (STATE, META):
        with (new / name).open("wb") as raw:
            file = _HashingFile(raw)
            if name == STATE:
                torch.save(tensors, file)  # type: ignore[arg-type]
            else:
                file.write(meta)
            needed[name] = file.bytes
            files[name] = file.finish()
    manifest = json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, "files": files}, indent=2).encode()
    with (new / MANIFEST).open("wb") as raw:
        file = _HashingFile(raw)
        file.write(manifest)
        file.finish()
    _sync(new)


def _sync(directory: Path) -> None:
    """Make the entries of `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(step: int, meta: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps({"step": step, "meta": dict(meta)}, indent=2).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta is not JSON: {error}") from error


def _refuse_unloadable(value: Any, where: str) -> None:
    """Raise CheckpointError at the first value that torch.load(weights_only=True) would refuse to read back."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) not in (int, str):
                raise CheckpointError(f"{where} has the key {key!r} of type {type(key).__name__}; use int or str")
            _refuse_unloadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _refuse_unloadable(item, f"{where}[{index}]")
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which weights_only loading refuses; "
            "use dict, list, tuple, tensor, int, float, str, bool or None"
        )


def _verify(path: Path) -> None:
    """Raise CheckpointError unless `path` is a checkpoint of ours whose files have the recorded sizes and hashes."""
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing"
        raise CheckpointError(f"{path} is {what}, expected a checkpoint directory with {STATE}, {META}, {MANIFEST}")
    for name, entry in _manifest(path / MANIFEST).items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, expected {entry['bytes']:,} bytes")
        if (size := file.stat().st_size) != entry["bytes"]:
            raise CheckpointError(f"{file} is damaged: expected {entry['bytes']:,} bytes, found {size:,}")
        with file.open("rb") as raw:
            found = hashlib.file_digest(raw, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise CheckpointError(f"{file} is damaged: expected sha256 {entry['sha256']}, found {found}")


def _manifest(file: Path) -> dict[str, dict[str, Any]]:
    """Entries of the manifest by file name, each with `bytes` and `sha256`."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: {file.parent} is not a checkpoint, or not a complete one")
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:  # also what is not UTF-8
        raise CheckpointError(f"{file} is damaged: expected JSON, found {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(f"{file} is not ours: expected format {FORMAT!r}, found {found!r}")
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(f"{file} has format version {version!r}, this program reads {FORMAT_VERSION}")
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != {STATE, META}:
        raise CheckpointError(f"{file} is damaged: expected entries for {STATE} and {META}, found {files!r}")
    for name, entry in files.items():
        if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"} or not isinstance(entry["bytes"], int):
            raise CheckpointError(f"{file} is damaged: expected bytes and sha256 for {name}, found {entry!r}")
    return files


def _read(path: Path) -> Checkpoint:
    """Read a verified checkpoint."""
    meta = _meta(path / META)
    try:
        tensors = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # torch documents no list of what it raises; its texts give advice that is wrong here
        tensors = None
    if not isinstance(tensors, dict):  # the hash fits, so somebody else wrote both
        raise CheckpointError(
            f"{path / STATE} is not ours, though its hash fits: it is no file of torch.save, or holds more than a dict "
            "of tensors and plain values"
        )
    return Checkpoint(step=meta["step"], tensors=tensors, meta=meta["meta"])


def _meta(file: Path) -> dict[str, Any]:
    """Return the step and the JSON of a checkpoint."""
    try:
        meta = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: expected JSON, found {error}") from error
    fits = isinstance(meta, dict) and isinstance(meta.get("step"), int) and isinstance(meta.get("meta"), dict)
    if not fits:
        raise CheckpointError(f'{file} is not ours, though its hash fits: expected {{"step": 123, "meta": {{...}}}}')
    return dict(meta)


def _is_whole(path: Path) -> bool:
    try:
        _verify(path)
    except (CheckpointError, OSError):
        return False
    return True


def _same(path: Path, other: Path | None) -> bool:
    return other is not None and path.resolve() == other.resolve()


def _space(directory: Path, needed_bytes: int) -> str:
    """Bytes needed and free, as far as they are known."""
    try:
        free = f"{shutil.disk_usage(directory).free:,} bytes free"
    except OSError:
        free = "free space unknown"
    return f"{needed_bytes:,} bytes needed, {free}" if needed_bytes else free
