"""Reads what W&B wrote offline."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def records(wandb_file: Path) -> list[Any]:
    """Records of a .wandb file: 7 bytes of header, then LevelDB's log in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, parts = wandb_file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (room := 2**15 - at % 2**15) < 7:
            at += room
            continue
        _crc, size, kind = struct.unpack_from("<IHB", data, at)  # kind: 1 whole, 2 first, 3 middle, 4 last
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found.append(Record.FromString(parts))
            parts = b""
    return found


def wandb_files(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))


def history(wandb_file: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records(wandb_file) if record.HasField("history")]
    # a table is spread over keys such as memory/path
    return [{(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in row} for row in rows]
