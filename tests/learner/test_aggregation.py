"""Aggregation: weights from lengths and from masks agree, and no split changes loss or gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import aggregation, losses

OPTIONS: dict[str, dict[str, Any]] = {"seq_sum_const": {"max_tokens": 9}}
batches = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=7, max_size=7), st.integers(0, 3)), min_size=1, max_size=10
)


@pytest.mark.parametrize("name", aggregation.__all__)
@settings(max_examples=25, deadline=None)
@given(rows=batches, cuts=st.sets(st.integers(1, 9)))
def test_any_split_adds_up_to_the_same_loss_and_gradient(
    name: str, rows: list[tuple[list[bool], int]], cuts: set[int]
) -> None:
    mask = torch.tensor([row for row, _ in rows])
    numbers = [group for _, group in rows]
    options = OPTIONS.get(name, {})
    lengths = [sum(row) for row, _ in rows]
    from_lengths = torch.tensor(aggregation.row_weights(name, lengths, numbers, **options), dtype=torch.float64)
    weights = getattr(aggregation, name)(mask.double(), torch.tensor(numbers), **options)
    assert torch.equal(weights, from_lengths[:, None] * mask)
    if name != "seq_sum_const":  # the others are means: their weights add up to 1
        assert weights.sum().item() == pytest.approx(1.0 if mask.any() else 0.0)

    generator = torch.Generator().manual_seed(len(rows))
    old = torch.randn(mask.shape, generator=generator, dtype=torch.float64) - 2
    drift = torch.randn(mask.shape, generator=generator, dtype=torch.float64) / 5
    advantage = torch.randn(len(rows), 1, generator=generator, dtype=torch.float64).expand_as(mask)
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    results = []
    for parts in ([0, len(rows)], edges):
        logprobs = (old + drift).requires_grad_()
        total = 0.0
        for start, end in itertools.pairwise(parts):
            part = slice(start, end)
            terms = losses.ppo_clip(logprobs[part], old[part], advantage[part], mask[part])
            loss = (weights[part] * terms.token_loss).sum()
            loss.backward()
            total += loss.item()
        results.append((total, logprobs.grad))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-15)


def test_empty_rows_and_groups_leave_the_denominator() -> None:
    lengths, groups = [2, 0, 4, 0], [0, 0, 1, 2]
    assert aggregation.row_weights("seq_mean_token_mean", lengths, groups) == [1 / 4, 0.0, 1 / 8, 0.0]
    assert aggregation.row_weights("prompt_mean", lengths, groups) == [1 / 4, 0.0, 1 / 8, 0.0]
    assert aggregation.row_weights("seq_sum_const", lengths, groups, max_tokens=8) == [
        1 / 32,
        0.0,
        1 / 32,
        0.0,
    ]


@pytest.mark.parametrize(
    ("name", "lengths", "options", "message"),
    [
        ("mean", [1], {}, "unknown aggregation 'mean'"),
        ("token_mean", [1, 2], {}, "equally many"),
        ("token_mean", [1], {"max_tokens": 4}, "max_tokens is 4 with token_mean"),
        ("token_mean", [-2], {}, "lengths must be at least 0, got -2"),
        ("seq_sum_const", [1], {}, "max_tokens is None"),
        ("seq_sum_const", [1], {"max_tokens": 0}, "max_tokens must be > 0, got 0"),
    ],
)
def test_bad_arguments_are_named(name: str, lengths: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregation.row_weights(name, lengths, [0], **options)


def test_a_mask_of_one_row_alone_is_named() -> None:
    with pytest.raises(ValueError, match=r"response_mask must be \[B, T\] and groups \[B\], got \[3\] and \[1\]"):
        aggregation.token_mean(torch.ones(3), torch.zeros(1))
