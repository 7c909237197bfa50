"""The gradient is one and the same for every cut of a batch, ZeRO stage and number of ranks: that of the formula.

For each stage and number of ranks one job takes the gradients of all of `matrix_process.CUTS`, in which every two of these
meet: rows in a micro-batch (so accumulation), padded or shared prompts, even or uneven groups, a rank without data.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import matrix_process
import pytest
import torch
from matrix_process import CUTS, TEMPERATURE, batch, plans_of
from plain_reference import Gradients, make_policy, reference_gradients
from rank_jobs import run_processes

TOLERANCE = 1e-5  # of each tensor's norm


@cache
def expected(model: str, groups: str) -> Gradients:
    rows, payloads = batch(groups)
    _, gradients = reference_gradients(
        make_policy(model), [row for group in rows for row in group], payloads, temperature=TEMPERATURE
    )
    return gradients


def test_every_two_properties_meet() -> None:
    values = [(cut.rows_a_micro_batch, cut.layout, cut.groups, cut.empty) for cut in CUTS]
    for a, b in itertools.combinations(range(4), 2):
        pairs = {(value[a], value[b]) for value in values}
        assert len(pairs) == len({value[a] for value in values}) * len({value[b] for value in values})
    accumulated = {len(plan.updates[0]) for cut in CUTS for plan in plans_of(cut, 1)}
    assert {1, 4} <= accumulated


@pytest.mark.engine
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_cut_has_the_gradient_of_the_formula(wide_path: str, tmp_path: Path, zero_stage: int, ranks: int) -> None:
    job = {"zero_stage": zero_stage, "ranks": ranks, "model": wide_path, "folder": str(tmp_path)}
    run_processes(matrix_process.main, job)
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert len(found) == len(CUTS)
    for cut, gradients in zip(CUTS, found, strict=True):
        reference = expected(wide_path, cut.groups)
        assert gradients.keys() == reference.keys()
        for name, gradient in reference.items():
            difference, size = float((gradients[name] - gradient).norm()), float(gradient.norm())
            assert difference <= TOLERANCE * size, f"{cut}: {name} is off by {difference:.2e} of {size:.2e}"
