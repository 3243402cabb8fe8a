"""All systems beside each other."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.remembered_cuts import stage_cut
from cdp_repro.predict.simulate import simulate_slots
from cdp_repro.predict.system_specs import SYSTEMS
from cdp_repro.predict.systems import (
    _cluster,
    compare_systems,
    explored,
    left_out,
    simulated_system,
    systems_text,
    write_systems,
)
from cdp_repro.schedule import Program, Schedule

SIZES = ["model=mlp", "model.depth=7", "model.hidden=16", "batch_size=64"]


def compared(*overrides):
    config = compose_config([*SIZES, *overrides], check_device=False)
    return config, {(each.mode, each.placement): each for each in compare_systems(config)}


def test_idle_shares_staleness_and_versions_are_those_of_the_closed_forms():
    d, m = 4, 8
    _, found = compared(f"workers={d}", "accumulate=2")
    assert [*found] == [system for system in SYSTEMS if system[0] != "terapipe"], "images have no tokens to cut along"
    expected = {
        "naive": (d - 1) / d, "gpipe": (d - 1) / (m + d - 1), "one_f_one_b": (d - 1) / (m + d - 1),
        "interleaved": (d - 1) / (2 * m + d - 1), "zero_bubble": (d - 1) / (3 * m + d - 1),
        "chimera": (d - 2) / (2 * m + d - 2), "pipedream": 0, "pipedream_2bw": 0, "ampnet": 0, "cdp_v2": 0,
    }  # fmt: skip
    for mode, idle in expected.items():
        assert found[mode, "pipeline"].idle_share == pytest.approx(idle), mode
    late = {
        mode: (found[mode, "pipeline"].mean_staleness, found[mode, "pipeline"].largest_staleness) for mode in expected
    }
    assert late["pipedream"] == late["ampnet"] == ((d - 1) / 2, d - 1)
    assert late["pipedream_2bw"] == (1, 1) and late["gpipe"] == (0, 0)
    assert late["cdp_v2"] == (sum(d - 1 - j for j in range(d)) / (d * m), 1)
    versions = {mode: found[mode, "pipeline"].versions for mode in expected}
    assert (versions["pipedream"], versions["ampnet"], versions["cdp_v2"], versions["gpipe"]) == (d, 1, 2, 1)


def test_messages_and_bytes_are_of_a_mini_batch_whatever_a_step_is():
    d, m = 2, 4
    _, found = compared(f"workers={d}", "accumulate=2")
    boundary = 2 * m * (d - 1)
    for mode in ("naive", "gpipe", "one_f_one_b", "zero_bubble", "pipedream_2bw", "cdp_v2", "pipedream", "ampnet"):
        assert found[mode, "pipeline"].messages == boundary, mode
    assert found["interleaved", "pipeline"].messages == 2 * m * (2 * d - 1)
    sent = {found[mode, "pipeline"].bytes_sent for mode in ("gpipe", "pipedream", "cdp_v2")}
    assert len(sent) == 1


def test_systems_that_cannot_have_the_sizes_are_left_out():
    _, found = compared("workers=3", "batch_size=60")
    assert ("chimera", "pipeline") not in found and ("interleaved", "pipeline") in found


def test_a_mode_of_the_users_own_is_compared_with_all_where_it_has_as_many_ranks():
    words = ["mode=[[1,1],[1,0]]", "workers=2", "model=mlp", "batch_size=16"]
    config = compose_config([*words, "placement=replicated"])
    *others, own = compare_systems(config)
    assert (own.mode, own.placement, own.ranks, own.largest_staleness) == ("matrix", "replicated", 2, 1)
    assert {(each.mode, each.placement) for each in others} <= {*SYSTEMS}
    assert "matrix" in systems_text([*others, own], config)
    config = compose_config(words)
    assert [each.mode for each in compare_systems(config)] == [each.mode for each in others]
    assert "mode=matrix is left out: on placement=single_device it has 1 ranks, all others 2" in [*left_out(config)]


@pytest.mark.parametrize("mode", ["cdp_v1", "[[1,1],[1,0]]"])
def test_a_mode_that_is_compared_elsewhere_only_is_compared_on_servers_too_where_they_are_chosen(mode):
    words = [f"mode={mode}", "workers=2", "model=mlp", "batch_size=16", "placement=parameter_server"]
    config = compose_config(words)
    *others, own = compare_systems(config)
    name = "cdp_v1" if mode == "cdp_v1" else "matrix"
    assert (own.mode, own.placement, own.largest_staleness) == (name, "parameter_server", 1)
    assert own.ranks == 3 == next(each.ranks for each in others if each.placement == "parameter_server")
    shown = systems_text([*others, own], config)
    assert f"{name} is left out" not in shown and f"mode={name}" not in shown and "mlp on 2 ranks that compute" in shown


def test_a_system_that_needs_more_blocks_than_the_model_has_is_left_out_and_named():
    config, found = compared("workers=4", "model.depth=5")
    assert ("interleaved", "pipeline") not in found and ("chimera", "pipeline") in found
    shown = systems_text([*found.values()], config)
    assert "interleaved is left out: mlp has 6 blocks for its 8 stages\n" in shown
    assert "terapipe is left out: samples without tokens cannot be cut into 2 slices" in shown
    assert "model_parallel is left out: the ranks of 4 workers are 16 in dp, 10 in cdp_v1, 10 in cdp_v2\n" in shown
    assert "single_device is left out: the ranks of 4 workers are 1 in accumulation\n" in shown
    assert shown.count("is left out") == 4


TWO_TOWERS = ("model=two_towers", "workers=2", "stages=6", "batch_size=8")


def test_a_run_is_explored_beside_all_systems_or_alone_where_they_cannot_have_its_sizes():
    def specs(*overrides):
        config = compose_config([*SIZES, *overrides], check_device=False)
        return [(schedule.mode, schedule.spec.placement) for schedule, _ in explored(config)]

    own = [("cdp_v2", "replicated"), ("dp", "replicated")]
    found = specs("workers=2", "mode=cdp_v2", "placement=replicated")
    assert found[:2] == own and sorted(found) == sorted(system for system in SYSTEMS if system[0] != "terapipe")
    alone = specs("workers=2", "mode=cdp_v2", "placement=replicated", "replicas=2")
    assert alone == own
    config = compose_config([*TWO_TOWERS, "mode=cdp_v2"], check_device=False)
    assert [schedule.mode for schedule, _ in explored(config)] == ["cdp_v2", "dp"]


@pytest.mark.parametrize(
    "overrides",
    [["mode=pipedream", "placement=pipeline"], ["mode=async", "placement=parameter_server", "jitter=1"]],
)
def test_all_that_is_explored_has_micro_batches_of_the_same_samples(overrides):
    """A training step of these modes has another number of micro-batches than one of the other systems."""
    config = compose_config(["model=mlp", "batch_size=64", "workers=4", *overrides], check_device=False)
    found = [(schedule, sum(costs.forward_bytes)) for schedule, costs in explored(config)]
    assert len(found) > 10
    assert len({size for schedule, size in found if schedule.mode != "interleaved"}) == 1


def test_no_system_is_explored_twice():
    text = ["dataset=text", "model=gpt", "workers=2", "batch_size=8", "placement=pipeline"]
    for overrides in (["mode=terapipe", "slices=2"], ["mode=terapipe"], ["mode=gpipe", "ranks=2"]):
        config = compose_config([*text, *overrides], check_device=False)
        found = [(schedule.mode, schedule.spec.placement) for schedule, _ in explored(config)]
        assert len({*found}) == len(found), found


def test_systems_run_in_the_order_of_slots_that_is_chosen():
    config = compose_config([*SIZES, "workers=2", "slot_order=backward_first"], check_device=False)
    assert {schedule.spec.slot_order for schedule, _ in explored(config)} == {"backward_first"}


def test_ranks_that_branches_cannot_share_are_refused():
    config = compose_config(TWO_TOWERS, check_device=False)
    with pytest.raises(ConfigError, match=r"a stage for each rank, workers=2: stages=2 is not a multiple of 3"):
        compare_systems(config)


def test_together_counts_what_the_optimizer_keeps_and_clipped_copies():
    large = "workers=2", "model.hidden=256"
    config, plain = compared(*large, "optim.momentum=0")
    sizes = stage_cut(config).costs.parameter_bytes
    of_one = {}
    for name, overrides in {"sgd": (), "adamw": ("optim=adamw",), "clipped": ("optim.clip_norm=1",)}.items():
        _, found = compared(*large, *overrides)
        of_one[name] = found["cdp_v2", "pipeline"].bytes_together
    assert plain["gpipe", "pipeline"].gradient_bytes == max(sizes), "a rank has a stage, all of it is trained"
    base, size = plain["cdp_v2", "pipeline"].bytes_together, sizes[0]  # the first stage is read late: two versions
    assert (of_one["sgd"], of_one["adamw"]) == (base + size, base + 2 * size)
    assert of_one["sgd"] < of_one["clipped"] <= of_one["sgd"] + size


def test_slow_workers_are_busy_for_several_slots():
    schedule = Schedule.build("async", 4, placement="parameter_server", speeds=(1, 1, 1, 2))
    costs, program = StageCosts.equal(4), Program(schedule)
    updates = schedule.sizes.updates
    slots = program.until_it_repeats(schedule.micro_batches)
    trace = replace(simulate_slots(schedule, costs, slots, fill=program.steady_step), is_cut=True)
    found = simulated_system(schedule, costs, schedule.micro_batches)
    assert found.idle_share == pytest.approx(trace.idle_share(schedule.slots_per_step)) == pytest.approx(1 / 5)
    assert updates == 5


def test_a_cluster_gives_seconds():
    config, found = compared("workers=2", "price=true", "cluster.flops_per_second=1e6", "cluster.latency_seconds=0")
    seconds = {
        mode: found[mode, "pipeline"].seconds for mode in ("naive", "gpipe", "zero_bubble", "cdp_v2", "pipedream")
    }
    assert seconds["naive"] > seconds["gpipe"] > seconds["zero_bubble"]
    assert seconds["cdp_v2"] == pytest.approx(seconds["pipedream"], rel=0.05)
    assert "seconds" in systems_text([*found.values()], config)
    _, found = compared("workers=2", "price=true", "cluster.flops_per_second=1e6", "cluster.update_seconds=[1,1]")
    assert found["gpipe", "pipeline"].seconds > 1 and found["interleaved", "pipeline"].seconds is None


def test_text_and_files(tmp_path):
    config, found = compared("workers=2")
    systems = [*found.values()]
    shown = systems_text(systems, config)
    assert all(mode in shown for mode, _ in found) and "seconds" not in shown
    written = write_systems(systems, tmp_path / "new")
    assert [path.name for path in written] == ["systems.csv", "systems.svg", "systems.png"]
    assert b"\r" not in written[0].read_bytes()
    rows = list(csv.DictReader(written[0].open()))
    assert [(row["mode"], row["placement"]) for row in rows] == [*found]
    assert all(path.stat().st_size > 10_000 for path in written[1:])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["replicas=2"], "not replicas=2: leave it out"),
        (["workers=3", "mode=pipedream"], "batch_size=64 is not divisible by workers=3: use batch_size=63 or"),
        (["workers=3", "placement=pipeline", "stages=4", "ranks=2", "mode=dp", "batch_size=60"],
         "3 micro-batches .* are no multiple of ranks=2: use accumulate=2 workers=2"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_compared_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        compared(*overrides)


def test_workers_on_clocks_of_their_own_miss_the_pushes_of_all_others():
    _, found = compared("workers=4", "accumulate=2")
    for mode in ("ssp", "async"):
        system = found[mode, "parameter_server"]
        assert (system.mean_staleness, system.largest_staleness, system.versions) == (3, 3, 4)
        assert system.messages == found["dp", "parameter_server"].messages
    config = compose_config([*SIZES, "mode=async", "speeds=[1,1]", "workers=2"], check_device=False)
    with pytest.raises(ConfigError, match="leave speeds out"):
        compare_systems(config)


TEXT = [
    "dataset=text",
    "model=gpt",
    "model.width=16",
    "model.depth=6",
    "model.heads=2",
    "model.context=16",
    "batch_size=16",
]


def test_a_model_of_text_is_cut_along_its_tokens_as_well():
    d, m, slices = 4, 8, 2
    config = compose_config([*TEXT, f"workers={d}", "accumulate=2"], check_device=False)
    found = {each.mode: each for each in compare_systems(config) if each.placement == "pipeline"}
    assert found["terapipe"].idle_share == pytest.approx((d - 1) / (slices * m + d - 1))
    assert found["gpipe"].idle_share == pytest.approx((d - 1) / (m + d - 1))
    assert found["terapipe"].messages == slices * found["gpipe"].messages
    assert found["terapipe"].bytes_sent == found["gpipe"].bytes_sent
    own = compose_config([*TEXT, "workers=2", "mode=terapipe", "slices=4", "placement=pipeline"], check_device=False)
    (chosen, costs), (parallel, whole) = [*explored(own)][:2]
    assert (chosen.micro_batches, parallel.micro_batches) == (8, 2)
    assert 4 * sum(costs.forward_bytes) < 1.2 * sum(whole.forward_bytes), "a slice costs a share of a sequence"


def test_a_price_is_of_slices(capsys):
    from cdp_repro.cli import plan

    priced = ["price=true", "cluster.flops_per_second=1e9", "placement=pipeline", "workers=2", "mode=terapipe"]
    assert plan.main([*TEXT, *priced]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {(row[0], row[1]) for row in rows if row[2:3] == ["2"]} >= {("terapipe", "pipeline")}


def test_slices_are_not_priced_by_the_seconds_of_whole_sequences():
    config = compose_config(["price=true", "cluster.calibrate=true", "dataset=text", "model=gpt", "workers=2"])
    sliced = Schedule.build("terapipe", 2, 2, "pipeline", ranks=2, slices=2)
    assert _cluster(sliced, None, config) is None


def test_the_mode_does_not_change_the_micro_batches_of_the_comparison():
    """PipeDream's own micro-batch is a whole mini-batch; here it has the micro-batches of all others."""
    one, other = (
        [
            (system.mode, system.placement, system.activation_bytes)
            for system in compare_systems(compose_config([*SIZES, "workers=2", f"mode={mode}"], check_device=False))
        ]
        for mode in ("dp", "pipedream")
    )
    assert one == other
