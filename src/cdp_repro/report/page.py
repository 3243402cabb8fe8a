"""The report as one static page that opens without a network: styles, tables and pictures are inside the file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

from cdp_repro.report.tables import Table
from cdp_repro.report.template import filled, web_file


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
            f'<figure id="figure-{self.name}"><img alt="{alt}" src="data:image/svg+xml;base64,{data}">\n'
            f"<figcaption>{html.escape(self.caption)}</figcaption></figure>\n"
        )


@dataclass(frozen=True)
class Finding:
    """One of the main findings: a sentence with its figures."""

    text: str
    verdict: str
    """In a few words; empty if nothing is judged."""
    holds: bool
    measured: str
    pictures: Sequence[Picture] = ()

    def html(self) -> str:
        """Return the finding."""
        kind = "holds" if self.holds else "fails"
        verdict = f': <span class="verdict {kind}">{html.escape(self.verdict)}</span>' if self.verdict else ""
        measured = f"<p>{html.escape(self.measured)}</p>" if self.measured else ""
        return f"<h3>{html.escape(self.text)}{verdict}</h3>\n{measured}" + "".join(p.html() for p in self.pictures)


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it, in the order of the fields."""

    anchor: str
    title: str
    paragraphs: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    embedded: str = ""
    """A page of its own, in a frame."""
    pictures: Sequence[Picture] = ()
    folded: Sequence[Picture] = ()
    """Pictures for readers who want more."""
    tables: Sequence[Table] = ()

    def html(self) -> str:
        """Return the section."""
        parts = [f'<h2 id="{self.anchor}-section">{html.escape(self.title)}</h2>']
        parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in self.paragraphs]
        parts += [finding.html() for finding in self.findings]
        if self.embedded:
            parts.append(f"<iframe title=\"{html.escape(self.title)}\" srcdoc='{_quoted(self.embedded)}'></iframe>")
        parts += [picture.html() for picture in self.pictures]
        if self.folded:
            inside = "".join(picture.html() for picture in self.folded)
            parts.append(f"<details><summary>more figures</summary>{inside}</details>")
        parts += [table.html() for table in self.tables]
        return "\n".join(parts)


def _quoted(text: str) -> str:
    """Return a page as an attribute value in single quotes, of which a page has fewer than of double quotes."""
    return text.replace("&", "&amp;").replace("'", "&#39;")


def page(title: str, introduction: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the page."""
    return filled(
        "page.html",
        title=html.escape(title),
        style=web_file("page.css"),
        links="\n".join(f'<a href="#{each.anchor}-section">{html.escape(each.title)}</a>' for each in sections),
        introduction="\n".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in introduction),
        body="\n".join(section.html() for section in sections),
        script=web_file("page.js"),
    )
