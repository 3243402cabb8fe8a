"""Which schedules a method against delay fits: what `Engine` and the configuration both ask."""

from __future__ import annotations

import pytest

from cdp_repro.schedule import Schedule
from cdp_repro.schedule.last_steps import refusal


@pytest.mark.parametrize(
    ("mode", "placement", "choices"),
    [
        ("cdp_v2", "zero", {}),
        ("dp", "zero", {"collectives": True, "workers": 1}),
        ("dp", "replicated", {"collectives": True}),
        ("pipedream", "pipeline", {}),
    ],
)
def test_whole_stages_with_one_update_a_step_fit(mode, placement, choices):
    assert refusal(Schedule.build(mode, **{"workers": 2, "stages": 2, "placement": placement, **choices}), "x") is None


@pytest.mark.parametrize(
    ("mode", "placement", "choices", "words"),
    [
        ("async", "parameter_server", {}, "delay=prediction counts training steps, but mode=async makes 2 updates in"),
        ("dp", "zero", {"collectives": True}, "holds shards of them by collectives: use collectives=false, or delay="),
        ("dp", "zero", {"collectives": True, "workers": 1, "replicas": 2}, "holds shards of them by collectives"),
    ],
)
def test_others_are_refused_with_what_works(mode, placement, choices, words):
    sizes = {"workers": 2, "stages": 2, "placement": placement, **choices}
    assert words in refusal(Schedule.build(mode, **sizes), "prediction")
