"""Whether a run goes on elsewhere: then its trace is not that of the run."""

from __future__ import annotations

import pytest

from cdp_repro.config.compose import compose_config
from cdp_repro.training.resuming import is_moved


@pytest.mark.parametrize(
    ("earlier", "now", "moved"),
    [
        ("placement=pipeline", "placement=pipeline ranks=2", False),
        ("placement=pipeline ranks=2", "placement=pipeline ranks=1", True),
        ("placement=pipeline", "placement=pipeline pipeline_schedule=gpipe", True),
        ("placement=replicated", "placement=zero", True),
        ("placement=zero", "placement=zero collectives=true", True),
        ("placement=parameter_server", "placement=parameter_server servers=1", False),
        ("placement=parameter_server servers=2", "placement=parameter_server", True),
        ("workers=2", "workers=2 log_every_steps=7", False),
    ],
)
def test_a_run_has_moved_if_other_ranks_compute_it_or_in_another_order(earlier, now, moved):
    before, after = (compose_config(["workers=2", "stages=2", "mode=dp", *text.split()]) for text in (earlier, now))
    assert is_moved(before.to_dict(), after) is moved
    assert is_moved(after.to_dict(), before) is moved


def test_another_program_is_another_place():
    config = compose_config(["workers=2"])
    assert is_moved(config.to_dict() | {"program": "mine.txt"}, config)


def test_settings_that_an_older_version_lacks_have_their_defaults():
    config = compose_config(["workers=2"])
    assert not is_moved(
        {key: value for key, value in config.to_dict().items() if key not in ("servers", "ranks")}, config
    )
