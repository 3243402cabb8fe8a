"""Parameters, buffers and losses against the naive sequential reference, tensor by tensor, in float64."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from reference import SGD, AdamW, staleness, train
from torch import nn

from cdp_repro import Engine

STEPS = 20
TOLERANCE = {"rtol": 0, "atol": 1e-12}


def mlp(stages, seed=0):
    torch.manual_seed(seed)
    widths = [5, *[4 + stage % 3 for stage in range(stages - 1)]]
    body = [
        nn.Sequential(nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.Tanh()) for a, b in itertools.pairwise(widths)
    ]
    return [stage.double() for stage in (*body, nn.Linear(widths[-1], 3))]


def convnet(seed=0):
    torch.manual_seed(seed)

    def conv(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return [stage.double() for stage in (conv(2, 3), conv(3, 4), conv(4, 4), head)]


def make_batches(count, workers, shape, micro=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    size = workers * micro
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def matrix_three(n, s):
    """Staleness 0 to 3, different everywhere."""
    smallest = staleness("cdp_v2", n, s)
    return [[max(smallest[i][j], (i + 2 * j + 3) % 4) for j in range(s)] for i in range(n)]


def matrix_mixed(n, s):
    smallest = staleness("cdp_v2", n, s)
    return [[smallest[i][j] + (i + j) % 2 for j in range(s)] for i in range(n)]


RULES = {
    "dp": lambda n, s: "dp",
    "cdp_v1": lambda n, s: "cdp_v1",
    "cdp_v2": lambda n, s: "cdp_v2",
    "matrix up to 3": matrix_three,
    "matrix mixed": matrix_mixed,
}

OPTIMIZERS = {
    "sgd": (
        lambda: SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adamw": (
        lambda: AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    ),
}


def learning_rate(step):
    return 1.0 if step < 10 else 0.1


def same(actual, expected, what):
    assert set(actual) == set(expected)
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor.detach().to(expected[name]),
            expected[name],
            **TOLERANCE,
            msg=lambda m, name=name: f"{what} {name}: {m}",
        )


def check_against_reference(stages, optimizer, mode, n, shape, pieces, slot_order="paper", k=1, r=1):
    """Run in `pieces`, each ended by a drain, and compare at every drain; losses at every step."""
    mine, theirs = OPTIMIZERS[optimizer]
    steps = sum(pieces)
    batches = make_batches(steps, k * n * r, shape)
    expected = train(stages, F.cross_entropy, mine(), mode, n, batches, learning_rate, k, r)
    engine = Engine(
        copy.deepcopy(stages),
        F.cross_entropy,
        theirs,
        mode,
        workers=n,
        learning_rate_factor=learning_rate,
        slot_order=slot_order,
        accumulate=k,
        replicas=r,
    )
    d = staleness(mode, n, len(stages), k)
    done = 0
    for piece in pieces:
        for result in engine.run(batches[done : done + piece]):
            assert result.step == done and len(result.losses) == k * n
            torch.testing.assert_close(
                torch.tensor(result.losses, dtype=torch.float64),
                torch.tensor(expected.losses[done], dtype=torch.float64),
                **TOLERANCE,
            )
            done += 1
        assert engine.step == done
        same(dict(engine.model().named_parameters()), expected.thetas[done], f"theta[{done}]")
        same(dict(engine.model().named_buffers()), expected.buffers[done - 1], f"buffers after step {done - 1}")
        for j, state in enumerate(engine.state_dict()["stages"]):  # the versions that the next step reads
            oldest = max(row[j] for row in d)
            assert set(state["versions"]) == set(range(max(0, done - oldest), done + 1))
            for number, tensors in state["versions"].items():
                same(tensors, {name: expected.thetas[number][f"{j}.{name}"] for name in tensors}, f"version {number}")
    assert done == steps
    assert engine.ledger_reads == 2 * steps * k * n * r * len(stages)


def test_the_rules_differ_by_far_more_than_the_tolerance():
    """So that agreement with one of them says something."""
    n, batches = 3, make_batches(STEPS, 3, (5,))
    last = [train(mlp(n), F.cross_entropy, SGD(0.1), rule(n, n), n, batches).thetas[-1] for rule in RULES.values()]
    for one, other in itertools.combinations(last, 2):
        assert max((one[name] - other[name]).abs().max().item() for name in one) > 1e-4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("n", "c"), itertools.product(range(1, 5), (1, 2)))
def test_sgd_agrees_after_every_step(rule, n, c):
    # twelve steps in flight without a drain, then a drain after every step
    check_against_reference(mlp(c * n), "sgd", RULES[rule](n, c * n), n, (5,), [12, *[1] * 8])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("n", "c"), [(3, 1)])
def test_adamw_agrees(rule, n, c):
    check_against_reference(mlp(c * n), "adamw", RULES[rule](n, c * n), n, (5,), [1, 1, 14, 1, 3], "backward_first")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [2])
def test_a_convolutional_net_with_batchnorm_and_inplace_relu_agrees(rule, n):
    check_against_reference(convnet(), "sgd", RULES[rule](n, 4), n, (2, 6, 6), [9, 1, 1, 9])


def test_uneven_pieces_are_the_same_rule():
    check_against_reference(mlp(4), "sgd", matrix_three(4, 4), 4, (5,), [2, 3, 1, 1, 4, 9])


# ------------------------------------------------------------------------------------------------- accumulation


def matrix_of_accumulation(n, s, k):
    """Staleness 0 to 3, another in every row."""
    smallest = staleness("cdp_v2", n, s, k)
    return [[max(smallest[i][j], (i + 2 * j + 3) % 4) for j in range(s)] for i in range(k * n)]


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", "matrix"])
@pytest.mark.parametrize(("n", "c", "k"), [(1, 2, 3), (2, 1, 2), (2, 2, 2), (3, 1, 2), (2, 1, 3)])
def test_accumulation_is_the_mean_over_all_micro_batches_of_a_step(mode, n, c, k):
    rule = matrix_of_accumulation(n, c * n, k) if mode == "matrix" else mode
    check_against_reference(mlp(c * n), "sgd", rule, n, (5,), [7, 1, 1, 3], k=k)


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", "matrix"])
@pytest.mark.parametrize(("n", "k", "r"), [(2, 1, 2), (2, 2, 3)])
def test_replicas_share_what_a_worker_computes(mode, n, k, r):
    rule = matrix_of_accumulation(n, n, k) if mode == "matrix" else mode
    check_against_reference(mlp(n), "sgd", rule, n, (5,), [4, 1, 2], k=k, r=r)


def test_accumulation_with_adamw_and_the_other_order_of_slots():
    check_against_reference(mlp(3), "adamw", "cdp_v2", 3, (5,), [1, 5, 2], "backward_first", k=2)


def test_modes_differ_with_accumulation_too():
    n, k, batches = 2, 2, make_batches(8, 4, (5,))
    modes = ["dp", "cdp_v1", "cdp_v2", matrix_of_accumulation(n, n, k)]
    last = [train(mlp(n), F.cross_entropy, SGD(0.1), mode, n, batches, accumulate=k).thetas[-1] for mode in modes]
    for one, other in itertools.combinations(last, 2):
        assert max((one[name] - other[name]).abs().max().item() for name in one) > 1e-4


@pytest.mark.parametrize(("n", "c", "k"), itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 3)))
def test_more_micro_batches_make_fewer_reads_stale(n, c, k):
    """The share of stale reads on stage j is (ceil((S-j)/c) - 1) / M."""
    s, m = c * n, k * n
    lags = staleness("cdp_v2", n, s, k)
    assert [[int(c * (i + 1) + j < s) for j in range(s)] for i in range(m)] == lags
    assert [sum(row[j] for row in lags) for j in range(s)] == [-((j - s) // c) - 1 for j in range(s)]


def linear_tanh(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(count)]


@pytest.mark.parametrize("mode", ["pipedream_2bw", "cdp_v2", "matrix"])
def test_a_training_step_of_any_number_of_micro_batches_follows_its_rule(mode):
    """N = S = 3, M = 5: a read is fresh where i + 1 + j >= S in cdp_v2."""
    late = {
        "pipedream_2bw": [[1] * 3] * 5,
        "cdp_v2": [[0 if i + 1 + j >= 3 else 1 for j in range(3)] for i in range(5)],
        "matrix": [[1 + (2 * i + j) % 3 for j in range(3)] for i in range(5)],
    }[mode]
    batches = make_batches(STEPS, 5, (5,))
    mine, theirs = OPTIMIZERS["sgd"]
    expected = train(linear_tanh(3), F.cross_entropy, mine(), late, 5, batches, learning_rate)
    engine = Engine(
        linear_tanh(3), F.cross_entropy, theirs, late if mode == "matrix" else mode, workers=3,
        learning_rate_factor=learning_rate, micro_batches=5,
    )  # fmt: skip
    done = 0
    for piece in (7, 1, 12):
        for result in engine.run(batches[done : done + piece]):
            assert result.losses == pytest.approx(expected.losses[done], abs=1e-12)
            done += 1
        same(dict(engine.model().named_parameters()), expected.thetas[done], "parameter")
