"""The report as one static page that opens without a network: styles, tables and pictures are inside the file."""

from __future__ import annotations

import base64
import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from cdp_repro.report.tables import Table

_STYLE = """
:root { --ink: #1b1b1b; --soft: #5c5c5c; --line: #d9d9d9; --blue: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; border-top: 1px solid var(--line); padding-top: 1.2rem; }
p { max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--blue); }
nav a { margin-right: 1rem; white-space: nowrap; }
.table { overflow-x: auto; margin: 1rem 0 .4rem; }
table { border-collapse: collapse; font-size: .84rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
th { border-bottom: 2px solid var(--ink); }
td code { white-space: normal; } td:has(code) { min-width: 20rem; }
#claims td:nth-child(3) { font-weight: 600; white-space: nowrap; }
#claims td:nth-child(2) { min-width: 14rem; } #claims td:nth-child(4) { min-width: 22rem; }
code { font: .86em ui-monospace, "DejaVu Sans Mono", monospace; background: #f4f4f4; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; height: auto; display: block; }
figcaption, .note { color: var(--soft); font-size: .84rem; max-width: 60rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Picture:
    """A figure of the page."""

    name: str
    svg: bytes
    caption: str
    """Directs the eye: the observation to make."""

    def html(self) -> str:
        """Return the figure with the picture inside."""
        data = base64.b64encode(self.svg).decode()
        alt = html.escape(self.caption, quote=True)
        return (
            f'<figure id="{self.name}"><img alt="{alt}" src="data:image/svg+xml;base64,{data}">\n'
            f"<figcaption>{html.escape(self.caption)}</figcaption></figure>\n"
        )


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables and pictures, in that order."""

    anchor: str
    title: str
    paragraphs: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()

    def html(self) -> str:
        """Return the section."""
        parts = [f'<h2 id="{self.anchor}-section">{html.escape(self.title)}</h2>']
        parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in self.paragraphs]
        parts += [picture.html() for picture in self.pictures] + [table.html() for table in self.tables]
        return "\n".join(parts)


def page(title: str, introduction: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the page."""
    links = "".join(f'<a href="#{section.anchor}-section">{html.escape(section.title)}</a> ' for section in sections)
    head = "\n".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in introduction)
    body = "\n".join(section.html() for section in sections)
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{textwrap.dedent(_STYLE)}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n{head}\n"
        f"<nav>{links}</nav>\n{body}\n</body></html>\n"
    )
