"""Sizes that fit together, as advice: they are accepted, and differ as little as can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.compose import compose_config
from cdp_repro.config.fitting import fits, sizes_that_fit
from cdp_repro.config.schema import ModeConfig, ModelConfig, PlacementConfig


@pytest.mark.parametrize(
    ("choices", "works"),
    [
        ("model=two_towers", "workers=3 batch_size=63"),
        ("mode=chimera workers=3", "workers=4"),
        ("mode=chimera workers=3 batch_size=63", "workers=4 batch_size=64"),
        ("mode=pipedream_2bw micro_batches=3 batch_size=63", "workers=3"),
        ("mode=cdp_v1 placement=pipeline stages=3", "stages=4"),
        ("workers=3 stages=7 batch_size=100 replicas=2", "stages=6 batch_size=102"),
    ],
)
def test_advice_names_all_sizes_that_must_change(choices, works):
    with pytest.raises(ConfigError, match=f"with the other values, {works} would fit$"):
        compose_config(choices.split())
    compose_config([*choices.split(), *works.split()])


@pytest.mark.parametrize("choices", ["workers=5", "stages=6", "delay=prediction optim.momentum=0"])
def test_advice_that_works_alone_is_not_followed_by_another(choices):
    with pytest.raises(ConfigError) as caught:
        compose_config(choices.split())
    assert "would fit" not in str(caught.value)


def test_no_more_stages_than_the_model_has_blocks():
    config = RunConfig(workers=8, batch_size=64)
    assert sizes_that_fit(config) is None, "they fit but for the model"
    assert sizes_that_fit(config, most_stages=5) == "workers=4"
    assert sizes_that_fit(replace(config, workers=40), most_stages=5) is None, "nothing near"


def test_ranks_may_be_all_workers_however_far_away():
    config = RunConfig(mode=ModeConfig("cdp_v1"), placement=PlacementConfig("pipeline"), workers=8, batch_size=64)
    assert sizes_that_fit(replace(config, ranks=3)) == "ranks=8"


@given(
    mode=st.sampled_from(["cdp_v1", "chimera", "interleaved", "pipedream_2bw", "gpipe"]),
    model=st.sampled_from(["mlp", "two_towers"]),
    workers=st.integers(1, 9),
    stages=st.none() | st.integers(1, 12),
    batch_size=st.integers(1, 70),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_is_advised_fits(mode, model, workers, stages, batch_size):
    config = RunConfig(
        mode=ModeConfig(mode), model=ModelConfig(model), workers=workers, stages=stages, batch_size=batch_size
    )
    found = sizes_that_fit(config)
    if fits(config):
        assert found is None
    elif found is not None:
        values = {name: int(value) for name, value in (each.split("=") for each in found.split())}
        assert fits(replace(config, **values))
        assert all(getattr(config, name) != value for name, value in values.items())
