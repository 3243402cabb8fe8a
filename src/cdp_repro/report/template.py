"""Pages from the files in `web/`: each opens without a network, because everything it needs is put into it."""

from __future__ import annotations

import re
from importlib.resources import files

_PLACE = re.compile(r"\[\[(\w+)\]\]")


def web_file(name: str) -> str:
    """Return the text of a file in `web/`."""
    return (files("cdp_repro.report") / "web" / name).read_text(encoding="utf-8")


def filled(name: str, **parts: str) -> str:
    """Return a file in `web/` with each `[[name]]` replaced by the part of that name."""
    return _PLACE.sub(lambda place: parts[place[1]], web_file(name))
