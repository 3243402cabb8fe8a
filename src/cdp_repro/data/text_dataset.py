"""Text as sequences of tokens, bytes or characters: any UTF-8 file, or a folder of them."""

from __future__ import annotations

import codecs
import hashlib
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cdp_repro.data.dataset import Dataset, DatasetError, Form, MiniBatch

VALIDATION_PART = 10
"""The last 1/10 of the tokens is for validation: a tail, so that no sentence is in both parts."""

_TOLD = 10
"""The most files of a folder that a message names."""

LIBRARY = ("asyncio", "collections", "email", "http", "json", "logging", "urllib")
"""Packages of Python's standard library that are the default text, about 1.4 MB. Every machine has them without a
download. They vary with the version of Python; the fingerprint tells versions apart."""


def load_text(root: Path | None, *, context: int, tokens: str) -> TextDataset:
    """Return the text of a file, or of all files of a folder in the order of their names, cut into sequences.

    Args:
        root: the file or folder; None for Python's own library.
        context: tokens of a sequence.
        tokens: "bytes" or "characters".

    Raises:
        DatasetError: there is no such file, one is empty or not UTF-8, or the text is too short for the context.
    """
    if root is None:
        found = _library()
        description = f"sources of Python's library ({', '.join(LIBRARY)})"
    else:
        found = _files(root)
        description = f"text of {root.name}" + (f", {len(found)} files" if root.is_dir() else "")
    text = "\n".join(_read_all(found))
    dataset = TextDataset(f"{description}, {tokens}", text, context=context, tokens=tokens)
    shortest = min(len(dataset.train_tokens), len(dataset.test_tokens))
    if shortest <= context:
        works = f"model.context={shortest - 1} or less" if shortest > 1 else "a longer text"
        raise DatasetError(
            f"{root or 'the text'} has {len(dataset.train_tokens)} {tokens} for training and "
            f"{len(dataset.test_tokens)} for validation, but model.context={context} needs at least {context + 1} of "
            f"each: use {works}"
        )
    return dataset


def _library() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path for name in LIBRARY for path in sorted((folder / name).rglob("*.py")) if path.stat().st_size]
    if not found:
        raise DatasetError(f"this Python has no sources of its library in {folder}: give dataset.root=FILE")
    return found


def _files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    found = sorted(
        path
        for path in root.rglob("*")
        if path.is_file()
        and path.stat().st_size
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )
    if not found:
        state = "is a folder without text" if root.is_dir() else "is no file" if root.exists() else "does not exist"
        if root.is_dir() and not os.access(root, os.R_OK | os.X_OK):
            state = "is a folder that you may not read"
        raise DatasetError(f"dataset.root={root} {state}: give a UTF-8 file, or a folder of them")
    return found


def _read_all(paths: Sequence[Path]) -> list[str]:
    """Return the texts of files; raise one DatasetError for all that cannot be read, so that one run tells of all."""
    texts: list[str] = []
    faults: list[str] = []
    for path in paths:
        try:
            texts.append(_read(path))
        except DatasetError as error:
            faults.append(str(error))
    if len(faults) > _TOLD:
        faults[_TOLD:] = [f"and {len(faults) - _TOLD} more files"]
    if faults:
        raise DatasetError("\n".join(faults))
    return texts


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}; give another dataset.root=") from error
    if not raw:
        raise DatasetError(f"{path} is empty: give a file with text")
    is_utf16 = raw.startswith((codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE))
    if b"\0" in raw and not is_utf16:
        where = raw.index(b"\0")
        raise DatasetError(f"{path} is binary: it holds the byte 0 at {where}; leave it out, or give a file with text")
    try:
        return raw.decode("utf-8-sig")  # some editors begin a file with a mark, which is no text
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}; convert it, e.g. by iconv -f "
            f"{'utf-16' if is_utf16 else 'latin1'} -t utf-8, or leave it out"
        ) from error


class TextDataset(Dataset):
    """Sequences of `context` tokens that do not overlap, and for each token the one that follows it."""

    name = "text"

    def __init__(self, description: str, text: str, *, context: int, tokens: str) -> None:
        """Cut a text into tokens: bytes, or characters, which are numbered in the order of their code points."""
        self.description = description
        self.input_shape = (context,)
        if tokens == "bytes":
            self._vocabulary: Sequence[int] = [1] * 256
            numbers = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        else:
            characters = sorted(set(text))
            number = {character: index for index, character in enumerate(characters)}
            self._vocabulary = [len(character.encode()) for character in characters]
            numbers = torch.tensor([number[character] for character in text], dtype=torch.int32)
        self.classes = len(self._vocabulary)
        cut = len(numbers) - len(numbers) // VALIDATION_PART
        self.train_tokens, self.test_tokens = numbers[:cut], numbers[cut:]
        self.train_size = (len(self.train_tokens) - 1) // context
        self.test_size = (len(self.test_tokens) - 1) // context
        self._text, self._tokens = text, tokens
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _mini_batches(
        self,
        order: Iterator[tuple[int, Tensor]],
        seed: int,  # noqa: ARG002 - nothing is augmented
        form: Form,
        is_read: Callable[[int, int], bool],  # noqa: ARG002 - tokens are gathered when they are asked for
    ) -> Iterator[MiniBatch]:
        tokens, _ = self._parts(form.device)
        return (_TextMiniBatch(step, indices.to(form.device), tokens, self.input_shape[0]) for step, indices in order)

    def _test_batches(self, batches: Sequence[slice], form: Form) -> Iterator[tuple[Tensor, Tensor]]:
        _, tokens = self._parts(form.device)
        for batch in batches:
            sequences = torch.arange(batch.start, batch.stop, device=form.device)
            yield tuple(_sequences(tokens, sequences, self.input_shape[0], shift) for shift in (0, 1))  # type: ignore[misc]

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the loss as `eval/nats_per_token` and `eval/bits_per_byte`, and the top-1 and top-5 percentages."""
        context = self.input_shape[0]
        predicted = self.test_tokens[1 : self.test_size * context + 1].long()
        size = torch.tensor(self._vocabulary)[predicted].sum().item()
        loss = means["eval/loss"]
        return {
            **{key: value for key, value in means.items() if key != "eval/loss"},
            "eval/nats_per_token": loss,
            "eval/bits_per_byte": loss / math.log(2) * len(predicted) / size,
        }

    def fingerprint(self) -> str:
        """Return a hash of the text and of how it is cut."""
        digest = hashlib.blake2b(repr((self.name, self._tokens, self.input_shape)).encode(), digest_size=8)
        digest.update(self._text.encode())
        return digest.hexdigest()

    def _parts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_device:
            self._on_device[device] = self.train_tokens.to(device), self.test_tokens.to(device)
        return self._on_device[device]


@dataclass(frozen=True, eq=False)
class _TextMiniBatch:
    """`MiniBatch` over tokens; sequence indices [M, B/M] are on the tokens' device. For slices see `MiniBatch`."""

    step: int
    indices: Tensor
    tokens: Tensor
    context: int

    def inputs(self, part: int) -> Tensor:
        return _sequences(self.tokens, self.indices[part], self.context, 0)

    def targets(self, part: int) -> Tensor:
        return _sequences(self.tokens, self.indices[part], self.context, 1)


def _sequences(tokens: Tensor, numbers: Tensor, context: int, shift: int) -> Tensor:
    """Return the sequences with these numbers, [n, context] int64, shifted by `shift` tokens."""
    places = numbers[:, None] * context + torch.arange(shift, context + shift, device=tokens.device)
    return tokens[places].long()
