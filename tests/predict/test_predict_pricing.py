"""Prices against closed forms, cases computed by hand, and what `simulate` counts."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from cdp_repro.cli import plan as command
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.pricing import (
    Cluster,
    Collectives,
    Link,
    estimate,
    price,
    price_ddp,
    price_fsdp2,
)
from cdp_repro.predict.pricing.calibration import measure_stages, network_of, time_messages
from cdp_repro.predict.pricing.extrapolated import SIMULATED_FORWARDS, _busiest_rank_seconds, is_extrapolated
from cdp_repro.predict.pricing.quote import _curves, cluster_of, make_quote, prices_on_each, quote_text
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import PLACEMENTS, Program, Schedule, Spec

SECONDS = st.integers(1, 20).map(lambda tenths: tenths / 8)
PLACES = [(mode, place) for mode in ("dp", "cdp_v1", "cdp_v2") for place in PLACEMENTS]
GROWING = [("dp", "replicated"), ("cdp_v1", "replicated"), ("dp", "zero"), ("cdp_v2", "zero"), ("dp", "pipeline"),
           ("cdp_v2", "pipeline"), ("cdp_v1", "model_parallel")]  # fmt: skip
few = settings(max_examples=25, deadline=None)


def linked(cluster, latency=0.0, bandwidth=math.inf, devices_per_host=1):
    return replace(cluster, between_hosts=Link(latency, bandwidth), devices_per_host=devices_per_host)


def estimated(job, costs, cluster, optimizer_states=(), simulated=SIMULATED_FORWARDS):
    (found,) = estimate(job, costs, (cluster,), optimizer_states, simulated)
    return found


def priced(mode, place, n, cluster, costs=None, **options):
    program = Program(Schedule.build(mode, n, n, place, **options))
    return price(program, costs or StageCosts.equal(n, 6, 3), cluster)


@pytest.mark.parametrize(("mode", "place"), PLACES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_with_free_links_and_equal_stages_a_step_takes_its_slots(mode, place, n):
    found = priced(mode, place, n, Cluster.equal(n))
    flush = 2 * (n - 1) if (mode, place) == ("dp", "pipeline") else 0
    slots = 2 * n * n if place == "single_device" else 2 * n + flush
    assert found.step_seconds == slots
    assert found.idle_share == pytest.approx(1 - 2 * n * n / (slots * found.devices))


@pytest.mark.parametrize(("mode", "steps"), [("dp", 1), ("ssp", 1)])
def test_a_slow_worker_takes_as_many_times_longer_as_it_is_slower(mode, steps):
    """Worker 0 is half as fast: 2 stages of 1 s and 2 s take it 12 s, in which worker 1 computes two micro-batches."""
    cluster = Cluster.equal(2, 1, 2)
    schedule = Schedule.build(mode, 2, 2, "parameter_server", speeds=[1, 2])
    assert price(Program(schedule), StageCosts.equal(2, 6, 3), cluster).step_seconds == 12 * steps


@given(n=st.integers(1, 6), forward=SECONDS, backward=SECONDS)
@few
def test_a_flush_costs_its_slots(n, forward, backward):
    """GPipe idles for S-1 forwards and S-1 backwards (Huang et al. 2019), 1F1B for the same with free links."""
    for schedule in ("gpipe", "one_f_one_b"):
        found = priced("dp", "pipeline", n, Cluster.equal(n, forward, backward), pipeline_schedule=schedule)
        assert found.step_seconds == pytest.approx((2 * n - 1) * (forward + backward))


@given(n=st.integers(2, 5), forward=SECONDS, backward=SECONDS, update=SECONDS)
@few
def test_a_pipeline_sends_its_gradients_before_it_updates(n, forward, backward, update):
    """So a flush ends with one update, that of the first stage, and does not wait for those of later stages."""
    cluster = Cluster.equal(n, forward, backward, update)
    for schedule in ("gpipe", "one_f_one_b"):
        found = priced("dp", "pipeline", n, cluster, pipeline_schedule=schedule)
        assert found.step_seconds == pytest.approx((2 * n - 1) * (forward + backward) + update)
    assert priced("cdp_v2", "pipeline", n, cluster).step_seconds == pytest.approx(n * (forward + backward) + update)


@pytest.mark.parametrize("devices_per_host", [1, 2])
@pytest.mark.parametrize("n", [2, 4])
def test_collectives_of_free_compute_take_their_rings_one_after_the_other(n, devices_per_host):
    """An all-reduce a stage is 2(n-1) rounds of 1/n of its bytes; an all-gather or a reduce-scatter is n-1 of them."""
    links = linked(Cluster.equal(n, 0.0, 0.0), 1.0, 2.0, devices_per_host)
    rings = replace(links, collectives=Collectives(all_reduce=1.5, all_gather=2, reduce_scatter=3))
    costs = StageCosts.equal(n, 6, 8)
    replicated = priced("dp", "replicated", n, rings, costs, collectives=True)
    crosses = n > devices_per_host
    assert replicated.step_seconds == pytest.approx(n * 1.5 * 2 * (n - 1) * (1.0 + 8 / n / 2.0) if crosses else 0.0)
    assert replicated.sent_bytes_per_device == pytest.approx(2 * n * 8 * (n - 1) / n)
    zero = priced("dp", "zero", n, rings, costs, collectives=True)
    gathered_twice_and_reduced = (2 * 2 + 3) * n * (n - 1) * (1.0 + 8 / n / 2.0)
    assert zero.step_seconds == pytest.approx(gathered_twice_and_reduced if crosses else 0.0)
    assert zero.sent_bytes_per_device == pytest.approx(3 * n * 8 * (n - 1) / n)


def test_each_rank_updates_its_shard_only():
    cluster = Cluster.equal(4, 1.0, 1.0, 1.0)
    found = priced("dp", "zero", 4, cluster, collectives=True)
    assert (found.step_seconds, found.busy_seconds) == (9, 36)
    assert price_fsdp2(StageCosts.equal(4, 6, 3), cluster, 4).step_seconds == 9


def test_an_all_reduce_is_hidden_behind_compute_but_for_the_last():
    """As DDP's (Li et al. 2020): two stages, each 2 + 3 s, each all-reduce 2 x 0.5 s; the first hides, the last not."""
    cluster = linked(Cluster.equal(2, 2.0, 3.0), 0.0, 4.0)
    found = priced("dp", "replicated", 2, cluster, StageCosts.equal(2, 6, 4), collectives=True)
    assert found.step_seconds == 2 * (2 + 3) + 1
    ddp = price_ddp(StageCosts.equal(2, 6, 4), cluster, 2).step_seconds
    assert ddp == found.step_seconds - 1 + 1 / 64, "most buckets of a stage leave during its backward"


@given(data=st.data(), n=st.integers(2, 5), latency=SECONDS)
@few
def test_a_cyclic_pipeline_takes_its_longest_round_trip(data, n, latency):
    """In steady state, n = k-j+1 micro-batches share the way from stage j to k and back: a max-plus cycle."""
    forward, backward = (data.draw(st.tuples(*[SECONDS] * n)) for _ in range(2))
    cluster = linked(Cluster(forward, backward), latency)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    trips = [(sum(both[j : k + 1]) + 2 * (k - j) * latency) / (k - j + 1) for k in range(n) for j in range(k + 1)]
    found = priced("cdp_v1", "pipeline", n, cluster)
    assert found.step_seconds == pytest.approx(n * max(trips), rel=0.03)  # a long transient is averaged
    assert found.idle_share == pytest.approx(1 - n * sum(both) / (found.step_seconds * n))


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    cluster = linked(Cluster.equal(2, 1.0, 2.0), latency=0.5, bandwidth=12)  # 6 bytes: a second each way
    assert priced("cdp_v2", "pipeline", 2, cluster).step_seconds == pytest.approx(3 + 3 + 1 + 1)


def test_a_link_carries_one_message_at_a_time():
    """Data parallelism on `zero`: in each slot the owner of a stage serves N-1 = 2 others, one after the other."""
    cluster = linked(Cluster.equal(3), bandwidth=3 / 4)  # 3 bytes: 4 seconds a message, far longer than a slot
    assert priced("dp", "zero", 3, cluster).step_seconds >= 2 * 3 * 2 * 4 - 4
    assert priced("dp", "zero", 2, linked(Cluster.equal(2), bandwidth=3 / 4)).step_seconds < 2 * 3 * 2 * 4 - 4


@given(
    where=st.sampled_from(PLACES), n=st.integers(1, 4), latency=SECONDS, bandwidth=st.integers(1, 60),
    factor=st.integers(2, 5),
)  # fmt: skip
@few
def test_slower_links_never_make_a_step_shorter(where, n, latency, bandwidth, factor):
    seconds = [
        priced(*where, n, linked(Cluster.equal(n), *link)).step_seconds
        for link in ((0, math.inf), (latency, math.inf), (latency, factor * bandwidth), (latency, bandwidth))
    ]
    assert all(fast <= slow * (1 + 1e-9) for fast, slow in pairwise(seconds))


@pytest.mark.parametrize(("mode", "place"), PLACES)
def test_bytes_are_those_of_simulate(mode, place):
    program, costs = Program(Schedule.build(mode, 4, 4, place)), StageCosts.equal(4, 6, 3)
    found, trace = price(program, costs, Cluster.equal(4)), simulate(program, costs, 6)
    assert found.sent_bytes_per_device == pytest.approx(
        sum(m.bytes for m in trace.messages) / (program.schedule.ranks * 6)
    )
    assert found.activation_bytes == trace.activation_peak_bytes_per_device
    momentum = price(program, costs, Cluster.equal(4), optimizer_states=[1] * 4)
    own = 3 if place in ("zero", "pipeline", "model_parallel") else 12
    assert momentum.state_bytes - found.state_bytes == own <= found.state_bytes


def test_hosts_divide_the_traffic():
    cluster = linked(Cluster.equal(4), devices_per_host=2)
    found = priced("cdp_v2", "pipeline", 4, cluster)  # 4 micro-batches, 6 bytes there and back, over three borders
    assert (found.within_host_bytes, found.between_hosts_bytes) == (2 * 48, 48)
    slow = replace(cluster, within_host=Link(5.0), between_hosts=Link())
    assert priced("cdp_v2", "pipeline", 4, slow).step_seconds > found.step_seconds == 8


def test_updates_take_their_time():
    assert priced("dp", "single_device", 2, Cluster.equal(2, 1.0, 1.0, 0.5)).step_seconds == 9


def test_ddp_and_fsdp2_by_hand():
    one = linked(Cluster((1.0,), (2.0,)), bandwidth=8)
    costs = StageCosts.equal(1, 6, 8)  # a ring of 2: 4 of 8 bytes, half a second
    assert price_ddp(costs, one, 2).step_seconds == 3 + 1 / 64, "of 64 buckets"
    slow = replace(one, between_hosts=replace(one.between_hosts, latency_seconds=0.25))
    assert price_ddp(costs, slow, 2).step_seconds == 3 + 2 * (0.25 + 0.25), "two buckets, so that the first is hidden"
    assert price_fsdp2(costs, one, 2).step_seconds == 0.5 + 1 + 0.5 + 2 + 0.5
    two, costs = linked(Cluster.equal(2, 1.0, 2.0), bandwidth=8), StageCosts.equal(2, 6, 8)
    assert price_ddp(costs, two, 2).step_seconds == 2 + 4 + 1 / 64, "the last bucket's all-reduce alone is not hidden"
    # gather, F0, F1, gather again, B1, B0, scatter: all others hide behind compute
    assert price_fsdp2(costs, two, 2).step_seconds == 0.5 + 1 + 1 + 0.5 + 2 + 2 + 0.5
    assert price_ddp(costs, two, 2).sent_bytes_per_device == 2 * 16 / 2
    assert price_fsdp2(costs, two, 2).sent_bytes_per_device == 3 * 16 / 2
    for each in (price_ddp(costs, two, 1), price_fsdp2(costs, two, 1)):
        assert (each.step_seconds, each.sent_bytes_per_device, each.idle_share) == (6, 0, 0)
    hosts = replace(two, devices_per_host=2)
    assert price_ddp(costs, hosts, 4).between_hosts_share == 0.5
    assert price_ddp(costs, hosts, 2).step_seconds == 6, "no link between hosts is used"


@pytest.mark.parametrize(("mode", "place"), GROWING)
def test_an_extrapolation_to_more_workers_is_what_a_simulation_finds(mode, place):
    job, costs = Spec(mode, 18, 18, place), StageCosts.equal(18, 6, 3)
    cluster = linked(Cluster.equal(18), 0.05, 20.0)
    guess, truth = (estimated(job, costs, cluster, [1] * 18, number) for number in (16, 400))
    assert (guess.method, truth.method) == ("extrapolated", "simulated")
    for name in ("devices", "step_seconds", "busy_seconds", "sent_bytes_per_device", "activation_bytes"):
        assert getattr(guess, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    assert guess.at_most_seconds >= guess.step_seconds
    assert guess.state_bytes == pytest.approx(truth.state_bytes, rel=0.03)  # a whole number of versions


@pytest.mark.parametrize(("mode", "workers", "hosts"), [
    ("naive", 20, 2), ("gpipe", 20, 2), ("interleaved", 20, 2), ("zero_bubble", 20, 2), ("cdp_v1", 20, 2),
    ("chimera", 40, 4),
])  # fmt: skip
def test_an_extrapolated_pipeline_is_the_one_that_is_simulated(mode, workers, hosts):
    """One micro-batch at a time takes seconds that are quadratic; both ways, hosts border on the middle."""
    stages = 2 * workers if mode == "interleaved" else workers
    job, costs = Spec(mode, workers, stages, "pipeline"), StageCosts.equal(stages, 6, 3)
    cluster = replace(linked(Cluster.equal(stages, 1.0, 2.0, 0.5), 0.1, 10.0, hosts), within_host=Link(0, 100))
    guess, truth = (estimated(job, costs, cluster, simulated=number) for number in (16, workers * stages))
    assert (guess.method, truth.method) == ("extrapolated", "simulated")
    for name in ("step_seconds", "busy_seconds", "within_host_bytes", "between_hosts_bytes", "activation_bytes"):
        assert getattr(guess, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    assert guess.at_most_seconds >= guess.step_seconds


@pytest.mark.parametrize("mode", ["chimera", "interleaved"])
def test_no_estimate_takes_ranks_to_have_neighbouring_stages(mode):
    """The first stages, which are the slowest, are on ranks with last ones."""
    stages = 40 if mode == "interleaved" else 20
    slow = Cluster((10.0,) * 2 + (1.0,) * (stages - 2), (10.0,) * 2 + (1.0,) * (stages - 2))
    job, costs = Spec(mode, 20, stages, "pipeline"), StageCosts.equal(stages, 6, 3)
    guess, truth = (estimated(job, costs, slow, simulated=number) for number in (16, 800))
    assert 0.98 * truth.step_seconds < guess.step_seconds < 1.000001 * truth.step_seconds


@pytest.mark.parametrize(
    "of_each",
    [
        {"speeds": (1,) * 32 + (2,)},
        {"sources": ((), (), (0, 1), *((j,) for j in range(2, 32)))},
        {"jitter": 3},
    ],
)
def test_jobs_that_name_each_worker_or_stage_are_simulated(of_each):
    """Or draw the times of each."""
    mode, place = ("gpipe", "pipeline") if "sources" in of_each else ("dp", "parameter_server")
    mode = "ssp" if "jitter" in of_each else mode
    job = Spec(mode, 33, 33, place, **of_each)
    assert not is_extrapolated(job, Cluster.equal(33))


@pytest.mark.parametrize("servers", [None, 2, 5])
@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
def test_an_extrapolation_knows_that_a_server_serves_all_workers(mode, servers):
    """All of them pull every stage over its one link: the seconds are quadratic in the number of workers."""
    n = 20
    job, costs = Spec(mode, n, n, "parameter_server", servers=servers), StageCosts.equal(n, 6, 3)
    cluster = linked(Cluster.equal(n), bandwidth=0.1, devices_per_host=4)
    guess, truth = (estimated(job, costs, cluster, simulated=number) for number in (16, n * n))
    assert (guess.method, truth.method) == ("extrapolated", "simulated")
    assert truth.step_seconds > 10 * 2 * n, "links decide"
    assert guess.step_seconds == pytest.approx(truth.step_seconds, rel=0.01)
    assert guess.at_most_seconds >= guess.step_seconds


@pytest.mark.parametrize(
    ("job", "simulated"),
    [
        (Spec("dp", 2, 32, "zero", replicas=20), 300),
        (Spec("dp", 2, 32, "zero", replicas=32), 300),
        (Spec("async", 20, 20, "parameter_server"), 300),
    ],
)
def test_extrapolated_state_is_that_of_the_device_with_most(job, simulated):
    """Of more owners each holds fewer stages, in whole numbers; a server keeps a version for each worker."""
    costs, cluster = StageCosts.equal(job.stages, 1, 1000), Cluster.equal(job.stages)
    guess, truth = estimated(job, costs, cluster, simulated=simulated), estimated(job, costs, cluster, simulated=10**6)
    assert (guess.method, truth.method) == ("extrapolated", "simulated")
    assert guess.state_bytes == pytest.approx(truth.state_bytes)


@pytest.mark.parametrize("mode", ["pipedream", "ampnet", "pipedream_2bw"])
@pytest.mark.parametrize("forward", [(1.3, *[1.0] * 7), tuple(1.4 - 0.05 * j for j in range(8)), (1.0, 1.5) * 8])
def test_with_free_links_a_pipeline_that_never_drains_is_as_fast_as_its_slowest_rank(mode, forward):
    n = len(forward)
    cluster = Cluster(forward, tuple(2 * each for each in forward))
    found = price(Program(Schedule.build(mode, n, n, "pipeline")), StageCosts.equal(n, 6, 3), cluster)
    micro_batches = n if mode == "pipedream_2bw" else 1
    assert found.step_seconds == pytest.approx(micro_batches * 3 * max(forward), rel=1e-9)


@pytest.mark.parametrize("place", ["replicated", "zero", "model_parallel", "pipeline"])
def test_an_extrapolation_to_more_replicas_keeps_unequal_stages(place):
    job, costs = Spec("cdp_v1", 2, 2, place, replicas=24), StageCosts.equal(2, 6, 3)
    cluster = linked(Cluster((1.0, 2.0), (3.0, 1.5)), 0.5, 6.0, devices_per_host=2)
    program = Program(Schedule.from_spec(job, costs.gradient_bytes))
    guess, truth = estimated(job, costs, cluster, simulated=1), price(program, costs, cluster)
    assert guess.step_seconds <= truth.step_seconds <= guess.at_most_seconds < 2 * guess.step_seconds
    assert guess.between_hosts_share == pytest.approx(truth.between_hosts_share, abs=0.03)
    assert guess.sent_bytes_per_device == pytest.approx(truth.sent_bytes_per_device)


def test_thousands_of_devices_and_the_slowest_stage_of_a_pipeline():
    cluster = replace(linked(Cluster.equal(1024)), forward_seconds=(1.0,) * 1023 + (5.0,))
    found = estimated(Spec("cdp_v2", 1024, 1024, "pipeline"), StageCosts.equal(1024), cluster)
    assert (found.devices, found.step_seconds) == (1024, 1024 * 6)


def test_an_extrapolation_does_not_lose_the_borders_between_large_hosts():
    cluster = linked(Cluster.equal(2), devices_per_host=64)
    job = Spec("cdp_v2", 2, 2, "pipeline", replicas=40)
    assert estimated(job, StageCosts.equal(2), cluster, simulated=1).between_hosts_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1.0), "latency_seconds=-1.0"),
        (lambda: Link(0, 0), "bandwidth_bytes_per_second=0: use"),
        (lambda: Cluster((1.0,), (1.0, 1.0)), r"one time a stage; got \[1, 2, 1\]"),
        (lambda: Cluster((math.nan,), (1.0,)), "0 or more, e.g. 0.01"),
        (lambda: Cluster((1.0,), (1.0,), devices_per_host=0), "devices_per_host=0: use 1"),
        (lambda: priced("dp", "replicated", 2, Cluster.equal(3)), "times of 3 stages, the schedule has 2"),
    ],
)
def test_mistakes_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_all_mistakes_of_a_cluster_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        compose_config(["price=true", "workers=2", "cluster.backward_seconds=[1]", "cluster.latency_seconds=-1",
                        "cluster.between_hosts_bandwidth_bytes_per_second=0"])  # fmt: skip
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert "cluster.flops_per_second=1e13 or cluster.forward_seconds=[0.01, 0.01]" in text
    assert "cluster.backward_seconds=[1.0]: must be 2 finite numbers" in text
    assert compose_config(["workers=2"]).price is False, "without price=true nothing of it is needed"


def test_the_command_shows_every_mode_placement_and_baseline_and_draws_them(capsys, tmp_path):
    times = ["cluster.forward_seconds=[0.5,0.5]", "cluster.bandwidth_bytes_per_second=1e15"]
    arguments = ["price=true", "workers=2", *times, "cluster.latency_seconds=0", f"--out={tmp_path}"]
    assert command.main(arguments) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    seconds = {(row[0], row[1]): row[3] for row in rows if row and row[0] in ("dp", "cdp_v1", "cdp_v2", "accumulation")}
    assert {row[2] for row in rows if row and row[0] == "dp" and row[1] in ("ddp", "fsdp2")} == {"2"}
    baselines = {("dp", name) for name in ("ddp", "fsdp2", "torch_gpipe", "torch_1f1b")}
    assert {*seconds} == {*PLACES, *baselines, ("accumulation", "single_device")}
    assert seconds["dp", "single_device"] == "6" and seconds["cdp_v2", "pipeline"] == "3"
    assert seconds["dp", "torch_gpipe"] == seconds["dp", "torch_1f1b"] == "4.5"
    with (tmp_path / "prices.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(seconds)
    drawn = (tmp_path / "prices.svg").read_text()
    assert "training step" in drawn and "bandwidth of all links, over that of the cluster" in drawn
    assert (tmp_path / "prices.png").stat().st_size > 1000


def test_curves_are_of_all_links_and_of_jobs_that_send_anything():
    """With one device a host, the bandwidth within a host would tell nothing."""
    slow = "cluster.between_hosts_bandwidth_bytes_per_second=1e5"
    times = ["cluster.forward_seconds=[0.5,0.5]", "cluster.devices_per_host=1", slow]
    quote = make_quote(compose_config(["price=true", "workers=2", *times]))
    found = _curves(quote)
    sending = {name for name, price in quote.prices.items() if price.sent_bytes_per_device}
    assert found.keys() == sending and not any("single_device" in name for name in found)
    for name, curve in found.items():
        assert [*curve] == [0.001, 0.01, 0.1, 1.0, 10.0, 100.0]
        assert curve[1.0] == quote.prices[name].step_seconds < curve[0.001]


def test_processes_and_clusters_beside_change_no_price():
    config = compose_config(
        ["price=true", "model=mlp", "workers=2", "replicas=300", "batch_size=600", "cluster.flops_per_second=1e9"]
    )
    cut = cut_model(config)
    clusters = [
        replace(cluster_of(config, cut), devices_per_host=1, between_hosts=Link(1e-6, bandwidth))
        for bandwidth in (1e6, 1e9)
    ]
    each = [prices_on_each(config, cut, (cluster,))[0] for cluster in clusters]
    assert prices_on_each(config, cut, clusters, processes=2) == each
    assert each[0]["cdp_v1 replicated"] != each[1]["cdp_v1 replicated"]
    assert each[0]["cdp_v1 replicated"].method == "extrapolated"


def test_modes_that_do_not_fit_the_sizes_of_the_chosen_one_have_no_price(capsys):
    sizes = ["workers=6", "stages=4", "ranks=2", "batch_size=48", "model=mlp"]
    seconds = ["cluster.forward_seconds=[1,1,1,1]", "cluster.latency_seconds=0"]
    seconds += ["cluster.bandwidth_bytes_per_second=1e15"]
    assert command.main(["price=true", "mode=dp", "placement=pipeline", *sizes, *seconds]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {
        (row[0], row[1]): (row[2], row[3]) for row in rows if len(row) > 9 and row[0] in ("dp", "cdp_v1", "cdp_v2")
    }
    assert found["dp", "pipeline"][0] == "2" and {mode for mode, _ in found} == {"dp"}
    assert ("dp", "torch_gpipe") not in found, "it runs one stage a process"


def prices_of(*overrides):
    config = compose_config(["price=true", "model=mlp", "cluster.flops_per_second=1e9", *overrides], check_device=False)
    return make_quote(config)


def test_modes_without_speeds_are_not_priced_beside_slow_workers():
    """Several devices would all be priced as the fastest worker."""
    sizes = ("mode=async", "placement=parameter_server", "speeds=[1,1,1,4]", "workers=4", "batch_size=56")
    quote = prices_of(*sizes)
    assert {name for name in quote.prices if "single_device" not in name} == {
        "async parameter_server",
        "dp parameter_server",
    }
    assert "speeds=[1, 1, 1, 4]: only modes that know them are priced on several devices" in quote_text(quote)


@pytest.mark.parametrize(("accumulate", "is_said"), [(1, False), (4, True)])
def test_a_quote_says_that_libraries_have_more_devices_where_workers_accumulate(accumulate, is_said):
    text = quote_text(prices_of("workers=2", f"accumulate={accumulate}"))
    assert (f"ddp and fsdp2 have a device for each of the {2 * accumulate} micro-batches" in text) is is_said


@pytest.mark.parametrize("sizes", [("workers=4",), ("workers=1", "replicas=4"), ("workers=1", "accumulate=4")])
def test_libraries_have_a_device_for_each_micro_batch(sizes):
    prices = prices_of("mode=dp", "placement=replicated", "stages=2", *sizes).prices
    assert prices["dp ddp"].devices == prices["dp fsdp2"].devices == 4


def test_libraries_run_no_branches():
    prices = prices_of("model=two_towers", "mode=dp", "workers=3", "batch_size=63").prices
    assert "dp ddp" not in prices and "dp replicated" in prices


def test_what_libraries_send_of_frozen_parameters():
    """They are gathered twice, and have no gradient."""
    costs = replace(StageCosts.equal(2, 1, 100), gradient_bytes=(100, 0))
    ddp, fsdp2 = (make(costs, Cluster.equal(2), 4).sent_bytes_per_device for make in (price_ddp, price_fsdp2))
    assert (ddp, fsdp2) == (2 * 100 * 3 / 4, (2 * 200 + 100) * 3 / 4)


def test_slices_are_not_measured_without_those_before():
    slices = ("dataset=text", "model=gpt", "mode=terapipe", "placement=pipeline", "workers=2")
    with pytest.raises(ConfigError, match=r"calibrate=true times sequences .* give cluster.flops_per_second=1e13"):
        compose_config(["price=true", "cluster.calibrate=true", *slices], check_device=False)


def test_a_pipeline_of_a_number_of_ranks_that_no_smaller_job_has_is_simulated():
    costs, cluster = StageCosts.equal(33, 6, 3), linked(Cluster.equal(33), 0.05, 20.0)
    assert estimated(Spec("dp", 33, 33, "pipeline", ranks=3), costs, cluster, simulated=1).method == "simulated"
    assert estimated(Spec("dp", 33, 33, "pipeline"), costs, cluster, simulated=1).method == "extrapolated"


@pytest.mark.parametrize("workers", [24, 96])
def test_a_chosen_number_of_micro_batches_does_not_shrink_with_the_workers(workers):
    """It is simulated: a smaller job would have as many, so that nothing could be extrapolated."""
    job = Spec("dp", workers, 24, "pipeline", ranks=24, micro_batches=20)
    costs, cluster = StageCosts.equal(24, 4), Cluster.equal(24)
    found = estimated(job, costs, cluster, simulated=16)
    assert found.method == "simulated"
    assert found.step_seconds == 2 * (20 + 24 - 1) and found.activation_bytes == 20 * 4


def test_the_busiest_rank_computes_the_micro_batches_that_are_chosen():
    job = Spec("dp", 8, 8, "pipeline", ranks=8, micro_batches=20)
    assert _busiest_rank_seconds(job, Cluster.equal(8)) == 20 * 2
    assert _busiest_rank_seconds(replace(job, micro_batches=None, accumulate=2), Cluster.equal(8)) == 2 * 8 * 2


def test_clusters_that_are_priced_together_have_hosts_of_one_size():
    clusters = [linked(Cluster.equal(2), devices_per_host=number) for number in (3, 7)]
    for replicas in (1, 400):
        with pytest.raises(ValueError, match=r"hosts of \[3, 7\] devices"):
            estimate(Spec("dp", 2, 2, "replicated", replicas=replicas), StageCosts.equal(2), clusters)


def test_stages_take_their_flops(capsys):
    assert command.main(["price=true", "workers=1", "model=mlp", "cluster.flops_per_second=1e9"]) == 0
    costs = cut_model(compose_config(["workers=1", "model=mlp"])).costs
    shown = capsys.readouterr().out
    assert f"{costs.forward_flops[0] / 1e9:.4g} + {costs.backward_flops[0] / 1e9:.4g}" in shown


def test_stages_are_measured_with_one_thread_which_is_undone():
    config = compose_config(["workers=2", "model=mlp"])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        forward, backward = measure_stages(config, cut_model(config))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert len(forward) == len(backward) == 2 and min(*forward, *backward) > 0


def test_stages_of_branches_that_join_are_measured():
    config = compose_config(["model=two_towers", "workers=3", "batch_size=12", "mode=gpipe", "placement=pipeline"])
    forward, backward = measure_stages(config, cut_model(config))
    assert len(forward) == len(backward) == config.schedule().stages and min(*forward, *backward) > 0


def test_messages_between_two_processes_are_measured(tmp_path):
    for seconds in run_ranks(time_messages, 2, 2, folder=tmp_path, joins=True):
        assert seconds.keys() == {"small", "large", "all_reduce", "all_gather", "reduce_scatter"}
        assert min(seconds.values()) > 0


def test_collectives_are_counted_in_rings_over_the_measured_link():
    half = 2**22  # what each of two ranks sends in a round of a ring over 8 MiB
    seconds = {"small": 1.0, "large": 1.0 + (2**23 - 8) / half}
    link, collectives = network_of(seconds | {"all_reduce": 4.0, "all_gather": 4.0, "reduce_scatter": 6.0})
    assert link == Link(1.0, half)
    assert collectives == Collectives(all_reduce=1.0, all_gather=2.0, reduce_scatter=3.0, on_streams=False)


def test_slow_collectives_make_what_uses_them_dear_and_nothing_else():
    costs = StageCosts.equal(2, 1, 100, 1)
    ring = Cluster((1.0, 1.0), (1.0, 1.0), within_host=Link(0.0, 10.0), devices_per_host=2)
    slow = replace(ring, collectives=Collectives(all_reduce=2, all_gather=3, reduce_scatter=4))
    # a ring of two moves 50 of a stage's 100 bytes in 5 s; the all-reduce is two of them
    assert price_ddp(costs, ring, 2).step_seconds == 2 + 1 / 64 + 2 * 10, "the first of 64 buckets is not hidden"
    assert price_ddp(costs, slow, 2).step_seconds == 2 + 1 / 64 + 2 * 20
    assert price_fsdp2(costs, ring, 2).step_seconds < price_fsdp2(costs, slow, 2).step_seconds
    waits = replace(ring, collectives=Collectives(on_streams=False))  # for two gathers and a reduction of each stage
    assert price_fsdp2(costs, waits, 2).step_seconds == 2 + 2 + 2 * (2 * 5 + 5)
    program = Program(Schedule.build("cdp_v2", 2, placement="zero"))
    assert price(program, costs, ring) == price(program, costs, slow)


@pytest.mark.parametrize(("mode", "place"), [("dp", "replicated"), ("cdp_v1", "zero"), ("cdp_v2", "replicated")])
def test_extrapolated_bytes_of_unequal_stages_are_those_of_the_whole_model(mode, place):
    """A first stage as large as all others together, such as of a perceptron on images."""
    n = 20
    sizes = (1000 * n, *range(900, 900 + n - 1))
    costs = replace(
        StageCosts.equal(n), forward_bytes=sizes, backward_bytes=sizes, parameter_bytes=sizes, gradient_bytes=sizes
    )
    cluster = linked(Cluster.equal(n, 1.0, 2.0), 0.01, 1e5)
    found, exact = (estimated(Spec(mode, n, n, place), costs, cluster, [1] * n, simulated) for simulated in (1, 10**6))
    assert (found.method, exact.method) == ("extrapolated", "simulated")
    assert found.activation_bytes == pytest.approx(exact.activation_bytes, rel=0.001)
    assert found.sent_bytes_per_device == pytest.approx(exact.sent_bytes_per_device, rel=0.02)
    assert found.step_seconds <= exact.step_seconds * 1.05
    assert exact.step_seconds <= found.at_most_seconds * 1.05


@pytest.mark.parametrize("axis", ["workers", "replicas"])
@pytest.mark.parametrize("link", [(1.0, math.inf), (0.0, 2.0)], ids=["latency", "bandwidth"])
@pytest.mark.parametrize("place", ["replicated", "zero"])
def test_extrapolated_collectives_are_those_that_are_simulated(place, link, axis):
    n, r = (20, 1) if axis == "workers" else (2, 40)
    costs = StageCosts.equal(n, 6, 16 * 960)  # in equal shards
    cluster = linked(Cluster.equal(n, 0.5, 1.0), *link)
    job = Spec("dp", n, n, place, replicas=r, collectives=True)
    found, exact = (estimated(job, costs, cluster, [1] * job.stages, simulated) for simulated in (1, 10**6))
    assert (found.method, exact.method) == ("extrapolated", "simulated")
    assert found.step_seconds == pytest.approx(exact.step_seconds, rel=1e-6)
    assert found.state_bytes == pytest.approx(exact.state_bytes, rel=1e-6)


def test_flags_of_stages_stay_flags_when_a_job_shrinks():
    """Sums of flags, rounded, would count an input that is kept twice, and give negative bytes."""
    n = 24
    kept = tuple(stage % 4 != 1 for stage in range(n))
    costs = replace(StageCosts.equal(n, 6, 8), input_kept=kept, output_kept=(False,) * n)
    found, exact = (
        estimated(Spec("cdp_v2", n, n, "pipeline"), costs, linked(Cluster.equal(n)), [1] * n, simulated)
        for simulated in (1, 10**6)
    )
    assert found.activation_bytes == pytest.approx(exact.activation_bytes, rel=0.05)
