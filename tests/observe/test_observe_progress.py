"""What a terminal shows of a run, and that nothing of it is shown elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time

from cdp_repro.observe.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch) -> Terminal:
    """Be on a terminal from now on; pytest puts its own streams in place between a fixture and the test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_images_their_rate_the_time_left_and_the_idle_share_are_shown(monkeypatch):
    shown = terminal(monkeypatch)
    with Progress(100, 0, units_per_step=64) as progress:
        for _ in range(4):
            time.sleep(0.12)  # a bar is drawn anew ten times a second
            progress.step(1.25, 0.25)
    drawn = shown.getvalue()
    assert re.search(r"/6\.40k \[00:\d\d<\d\d:\d\d, ?\S+ images/s, loss=1\.2500, idle=25%\]", drawn)


def test_a_run_that_goes_on_begins_where_it_stopped_and_tokens_are_named(monkeypatch):
    shown = terminal(monkeypatch)
    with Progress(10, 5, units_per_step=1000, unit="tokens") as progress:
        time.sleep(0.12)
        progress.step(2.0)
    assert "5.00k/10.0k" in shown.getvalue() and "tokens/s" in shown.getvalue() and "idle" not in shown.getvalue()


def test_nothing_is_drawn_where_there_is_no_terminal_or_on_another_rank(monkeypatch):
    shown = terminal(monkeypatch)
    with Progress(10, 0, 64, shown=False) as progress:
        progress.step(1.0)
    assert shown.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", plain := io.StringIO())
    with Progress(10, 0, 64) as progress:
        progress.step(1.0)
    assert plain.getvalue() == ""
