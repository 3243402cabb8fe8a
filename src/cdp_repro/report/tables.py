"""A table, and its forms: Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

_LATEX = str.maketrans(
    {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$", "≤": r"$\le$", "×": r"$\times$", "²": r"$^2$",
     "–": "--", "∅": "--", "$": r"\$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)  # fmt: skip

_MARKUP = re.compile(r"""
    \\(?=[!-/:-@\[-`{-~|])    # an escape
    | [*~]                      # emphasis, struck out
    | (?<![^\W_])_ | _(?![^\W_])  # emphasis, but not within a word
    | <(?=[A-Za-z/!?])          # HTML
    | &(?=\#?\w+;)              # an entity
    | (?<=\])\(                 # a link
""", re.VERBOSE)  # fmt: skip
"""Markup in a line of GitHub's Markdown."""


_NUMBER = re.compile(r"[-+<≤~]?\s?\d[\d.,]*(e[-+]?\d+)?( ?%| bytes| [KMG]iB)?( ±.*| \[.*| \(.*)?")
"""A number with its unit, spread, interval and number of runs."""

_SOURCE = re.compile(r"^[cse] ")
"""Closed form, simulation or execution: where a number is from."""


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns, with a title, and below them notes on their origin."""

    name: str
    """Name of its files."""
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    """How to read it."""
    evidence: Sequence[str] = ()
    """The runs behind it and their commands; a page folds it."""
    for_readers: bool = True
    """Whether it is for people; a long table is data, written as CSV only."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.name}: a row of {len(row)} cells in {len(self.columns)} columns: {row}")

    def markdown(self) -> str:
        """Return a GitHub table with its notes; cells and notes are text, with `code` marked."""
        lines = [_pipes(self.columns), _pipes(["---"] * len(self.columns)), *map(_pipes, self.rows)]
        return "\n".join([*lines, *(f"\n{_as_markdown(note)}" for note in [*self.notes, *self.evidence])]) + "\n"

    def csv(self) -> str:
        """Return the table without title and notes."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return file.getvalue()

    def latex(self) -> str:
        """Return a `table` environment, for the package booktabs."""
        body = "\n".join(" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in self.rows)
        head = " & ".join(column.translate(_LATEX) for column in self.columns) + r" \\"
        notes = " ".join([*self.notes, *self.evidence]).replace("`", "").translate(_LATEX)
        return (
            f"\\begin{{table}}\n\\centering\\small\n\\caption{{{self.title.translate(_LATEX)}. {notes}}}\n"
            f"\\label{{tab:{self.name}}}\n\\begin{{tabular}}{{{'l' * len(self.columns)}}}\n\\toprule\n{head}\n"
            f"\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
        )

    def html(self) -> str:
        """Return a table that scrolls sideways on a narrow page, with numbers right-aligned and evidence folded."""
        looks = [' class="number"' if _is_numeric(column) else "" for column in zip(*self.rows, strict=True)]
        looks = looks or [""] * len(self.columns)
        head = "".join(f"<th{look}>{_inline(each)}</th>" for each, look in zip(self.columns, looks, strict=True))
        body = "\n".join(
            f"<tr>{''.join(f'<td{look}>{_inline(cell)}</td>' for cell, look in zip(row, looks, strict=True))}</tr>"
            for row in self.rows
        )
        notes = "".join(f'<p class="note">{_inline(note)}</p>' for note in self.notes)
        evidence = "".join(f"<p>{_inline(text)}</p>" for text in self.evidence)
        folded = f'<details class="evidence"><summary>runs, commands, commits</summary>{evidence}</details>\n'
        return (
            f'<div class="table" id="{self.name}"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>'
            f"</table></div>\n{notes}\n{folded if evidence else ''}"
        )


def _is_numeric(cells: Sequence[str]) -> bool:
    """Return whether a column has numbers, and nothing else but empty cells and missing runs.

    A cell may hold several numbers, each with a letter for its source: `c 3; e 4`.
    """
    said = [cell for cell in cells if cell not in ("", "–") and not cell.startswith("not run: ")]
    return bool(said) and all(_NUMBER.fullmatch(_SOURCE.sub("", part)) for cell in said for part in cell.split("; "))


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_as_markdown(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _as_markdown(text: str) -> str:
    """Return text as GitHub shows it, with `code` marked; only what would be markup where it stands is escaped."""
    line = " ".join(text.split("\n"))
    parts = line.split("`")
    if len(parts) % 2 == 0:
        return "\\`".join(map(_escaped, parts))
    return "`".join(part if index % 2 else _escaped(part) for index, part in enumerate(parts))


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", text)


def _inline(text: str) -> str:
    """Return text as HTML, with `code` marked."""
    parts = html.escape(text).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
