"""The files that `cdp-report build` writes, and whether those present are what the rows give."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from matplotlib import rc_context

from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.report.contents import Report
from cdp_repro.report.pictures import Shown, pictures
from cdp_repro.report.sections import page_of
from cdp_repro.studies.rows import RowError

_MARKED = re.compile(r"(<!-- report:(?P<name>\w+) -->\n).*?(<!-- /report -->)", re.DOTALL)
_DATA = "data "
"""Marks the digest of a figure's data in its file."""

Form = Callable[[Shown, str], bytes]
"""(figure, "svg" or "png") -> the content of its file."""


def build(results: Path, documents: Iterable[Path] = (), form: Form | None = None) -> dict[Path, bytes]:
    """Return every file of the report with its content, and the documents with their marked parts renewed.

    `form` draws a figure, by default `drawn`; `undrawn` leaves out what `stale` does not compare.

    Raises:
        RowError: as `Report`.
    """
    report, form = Report(results), form or drawn
    files: dict[Path, bytes] = {}
    for name, table in report.tables.items():
        files[results / f"{name}.csv"] = table.csv().encode()
        if not table.for_readers:
            continue
        files[results / f"{name}.md"] = f"# {table.title}\n\n{table.markdown()}".encode()
        files[results / f"{name}.tex"] = table.latex().encode()
    figures, svgs = pictures(report), {}
    for name, shown in figures.items():
        svgs[name] = form(shown, "svg")
        files[results / "figures" / f"{name}.svg"] = svgs[name]
        files[results / "figures" / f"{name}.png"] = form(shown, "png")
    files[results / "report.html"] = page_of(report, figures, svgs).encode()
    for path in documents:
        files[path] = _renewed(path.read_text(), path.name, report).encode()
    return files


def marked(root: Path) -> list[Path]:
    """Return the documents of a project that show tables of the report: the README and those in docs/."""
    found = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [path for path in found if path.exists() and _MARKED.search(path.read_text())]


def undrawn(shown: Shown, form: str) -> bytes:  # noqa: ARG001 - both forms hold the same digest
    """Return only the digest of a figure's data, which is all that `stale` compares: drawing takes seconds."""
    return f"{_DATA}{shown.data}".encode()


def drawn(shown: Shown, form: str) -> bytes:
    """Return a figure as a file that holds the digest of its data, by which `stale` finds it out of date."""
    file = io.BytesIO()
    said = {"Description": _DATA + shown.data}
    with rc_context({"svg.hashsalt": "cdp-repro", "svg.fonttype": "none" if form == "svg" else "path"}):
        shown.draw().savefig(file, format=form, dpi=120, metadata={**said, "Date": None} if form == "svg" else said)
    return file.getvalue()


def _renewed(text: str, name: str, report: Report) -> str:
    """Return a document with the texts between its marks renewed."""

    def shown(match: re.Match[str]) -> str:
        if match["name"] not in report.texts:
            raise RowError(f"{name} asks for {match['name']!r}: there are {', '.join(report.texts)}")
        return f"{match[1]}{report.texts[match['name']]}{match[3]}"

    return _MARKED.sub(shown, text)


def write(files: Mapping[Path, bytes]) -> list[Path]:
    """Write the files that differ from those present, each atomically; return their paths.

    Raises:
        RowError: a folder cannot be written; nothing is half-written.
    """
    changed = [path for path, content in files.items() if not path.exists() or path.read_bytes() != content]
    for folder in sorted({path.parent for path in changed}):  # a folder before its subfolders
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RowError(f"cannot write to {folder}: {error.strerror or error}; nothing was written") from error
        if not os.access(folder, os.W_OK):
            raise RowError(f"cannot write to {folder}: it is read-only; nothing was written. Copy results away and "
                           "pass --results=")  # fmt: skip
    for path in changed:
        try:
            replace_file(path, files[path])
        except OSError as error:
            raise RowError(f"cannot write {path}: {error.strerror or error}") from error
    return changed


def stale(files: Mapping[Path, bytes]) -> list[str]:
    """Return a sentence for each file that is missing or out of date.

    Texts are compared byte by byte, figures by the digest of their data, because versions of the drawing library draw
    different bytes; a figure must also be a whole file.
    """
    found = []
    for path, content in files.items():
        if not path.exists():
            found.append(f"{path} is missing")
        elif _essence(path, present := path.read_bytes()) != _essence(path, content):
            found.append(f"{path} differs from what the rows give")
        elif not _is_whole(path, present):
            found.append(f"{path} is not a whole picture")
    return found


def _is_whole(path: Path, content: bytes) -> bool:
    """Whether a picture begins and ends as its kind does; True of other files."""
    begin, end = {".svg": (b"<?xml", b"</svg>"), ".png": (b"\x89PNG", b"IEND\xaeB`\x82")}.get(path.suffix, (b"", b""))
    return content.startswith(begin) and content.rstrip(b"\n").endswith(end)


def _essence(path: Path, content: bytes) -> bytes:
    if path.suffix in (".svg", ".png"):
        match = re.search(_DATA.encode() + rb"[0-9a-f]{16}", content)
        return match[0] if match else content
    if path.suffix == ".html":
        return re.sub(rb'src="data:[^"]*"', b"", content)
    return content
