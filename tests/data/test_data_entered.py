"""Data sets of installed packages, whose code can raise and return anything."""

from __future__ import annotations

import pytest
import torch

from cdp_repro import data
from cdp_repro.data import DatasetError, load_dataset
from cdp_repro.data.digits import load_digits
from cdp_repro.data.in_memory import Split


def _fails(root):
    raise FileNotFoundError(f"{root} is not there")


def digits_with(**attributes):
    dataset = load_digits()
    vars(dataset).update(attributes)
    return dataset


def test_a_data_set_that_is_entered_is_loaded_with_its_root(monkeypatch):
    roots = []
    monkeypatch.setitem(data._ENTERED, "mine", lambda root: roots.append(root) or load_digits())
    assert load_dataset("mine", root="here").classes == 10 and roots == ["here"]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (_fails, "dataset=mine cannot be loaded: FileNotFoundError: here is not there"),
        (lambda _: [], "dataset=mine is of the type list: its function must return a Dataset"),
        (lambda _: None, "dataset=mine is of the type NoneType"),
        (lambda _: digits_with(test_size=0), "dataset=mine has no test samples: a run needs at least 1 of each"),
        (lambda _: digits_with(test_size=None), "dataset=mine cannot be used: TypeError: "),
        (lambda _: digits_with(train_size=0), "dataset=mine has no training samples"),
        (
            lambda _: Split(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)),
            "dataset=mine cannot be loaded: ValueError: 4 images have 8 class numbers: give one for each image",
        ),
    ],
)
def test_one_that_cannot_be_used_is_refused(monkeypatch, load, message):
    monkeypatch.setitem(data._ENTERED, "mine", load)
    with pytest.raises(DatasetError, match=message):
        load_dataset("mine", root="here")
