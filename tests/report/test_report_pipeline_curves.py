"""The curves over the number of micro-batches are those of the closed forms."""

from __future__ import annotations

import pytest

from cdp_repro.report.pipeline_curves import (
    CHUNKS,
    GPIPE_PUBLISHED,
    MICRO_BATCHES,
    RANKS,
    curves,
    draw_curves,
    gpipe_table,
    priced_throughput,
)

CLOSED_FORMS = {
    "naive": lambda m, d: (d - 1) / d,
    "gpipe": lambda m, d: (d - 1) / (m + d - 1),
    "interleaved": lambda m, d: (d - 1) / (CHUNKS * m + d - 1),
    "chimera": lambda m, d: (d - 2) / (2 * m + d - 2),
    "zero_bubble": lambda m, d: (d - 1) / (3 * m + d - 1),
    "cdp_v2": lambda m, d: 0.0,
}


@pytest.mark.parametrize("mode", CLOSED_FORMS)
def test_idle_shares(mode):
    points = {m: share for m, share in curves().idle[mode].items() if m >= RANKS}
    assert points.keys() >= {4, 8, 12, 16, 24, 32}
    assert points == pytest.approx({m: CLOSED_FORMS[mode](m, RANKS) for m in points})


def test_one_grows_and_one_levels_off():
    assert curves().activations == {
        "gpipe": {m: m for m in MICRO_BATCHES},
        "one_f_one_b": {m: min(m, RANKS) for m in MICRO_BATCHES},
    }


@pytest.mark.parametrize(("d", "m"), GPIPE_PUBLISHED)
def test_a_price_without_links_is_the_closed_form(d, m):
    assert priced_throughput(d, m) == pytest.approx(d * m / (m + d - 1))


def test_the_table_has_the_published_numbers():
    rows = {(int(d), int(m)): float(published) for d, m, published, *_ in gpipe_table().rows}
    assert rows == GPIPE_PUBLISHED


def test_the_figure_shows_every_curve():
    memory, idle = draw_curves(curves()).axes
    assert [line.get_label() for line in memory.lines] == [*curves().activations]
    assert [line.get_label() for line in idle.lines] == [*curves().idle]
