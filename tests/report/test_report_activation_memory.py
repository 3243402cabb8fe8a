"""Reduction of the activation peak: simulated from block profiles, for any number of workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_rows import row_of

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.memory_reduction import divided, reduction, theory
from cdp_repro.report.activation_memory import answer, cases, memory_table, profiles
from cdp_repro.report.groups import grouped
from cdp_repro.studies.catalog import STUDIES

sizes = st.lists(st.integers(1, 1000), min_size=2, max_size=8)


def blocks(kept):
    ones = (1,) * len(kept)
    return StageCosts(tuple(kept), tuple(kept), ones, ones, ones)


@pytest.mark.parametrize("n", [2, 3, 8, 12])
def test_equal_stages_give_the_theory(n):
    assert reduction(StageCosts.equal(n, 1000), "paper") == theory(n)
    assert reduction(StageCosts.equal(n, 1000), "backward_first") == pytest.approx(0.5, abs=0 if n % 2 == 0 else 1 / n)


@given(sizes)
def test_the_peak_is_the_triangle_of_the_stages(kept):
    n = len(kept)
    triangle = sum((n - j) * a for j, a in enumerate(kept))
    assert reduction(blocks(kept), "paper") == triangle / (n * sum(kept))


@given(sizes, st.integers(2, 20), st.sampled_from(["flops", "activations"]))
def test_dividing_blocks_loses_no_byte(kept, workers, cut):
    assert sum(divided(blocks(kept), workers, cut).forward_bytes) == sum(kept)
    assert divided(blocks(kept), workers, cut).stages == workers


def test_blocks_cut_by_bytes_into_many_stages_are_equal_stages():
    many = divided(blocks([6400, 3200, 640]), 32, "activations").forward_bytes
    assert max(many) - min(many) <= 1


def test_a_case_needs_all_three_runs_and_what_is_missing_shows_its_command():
    wanted = {"model.name": "resnet18", "workers": 4, "partition": "flops"}
    three = [cell for cell in STUDIES["memory"].cells if wanted.items() <= cell.settings.items()]
    rows = [row_of(cell, study="memory") for cell in three]
    assert not cases(grouped(rows[:2]))
    (case,) = cases(grouped(rows))
    assert (case.partition, profiles([case])) == ("flops", {}), "not of blocks, though nothing else has run"
    assert case.ratios == case.simulated_ratios == {"paper": theory(4), "backward_first": 0.5}
    table = memory_table([case])
    assert table.rows[0][3:7] == ["0.625", "0.625", "0.500", "yes"]
    assert len(table.rows) == 1 + len(STUDIES["memory"].cells) - 3
    assert any("cdp-train mode=cdp_v2 slot_order=backward_first" in cell for row in table.rows for cell in row)
    assert answer([case]) == []  # of N = 8 in both cuts only
