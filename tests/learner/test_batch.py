"""Cutting a batch into updates, ranks and micro-batches."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import MAX_STALENESS, VERSION, plans_of, row

from learner.batch import MicroBatch, Row, packed_length


@st.composite
def updates_of_rows(draw: st.DrawFn) -> list[list[list[Row]]]:
    """Optimizer updates of groups of rows; groups may be empty, and answers very long."""
    numbers = iter(range(10_000))

    def group() -> list[Row]:
        number, prompt = next(numbers), draw(st.integers(1, 40))
        lengths = draw(st.lists(st.integers(0, 60), max_size=6))
        return [row(number, index, prompt, length) for index, length in enumerate(lengths)]

    return [[group() for _ in range(draw(st.integers(0, 5)))] for _ in range(draw(st.integers(1, 3)))]


def padded_tokens(micro_batch: MicroBatch) -> int:
    return len(micro_batch) * max((packed_length(packed) for packed in micro_batch), default=0)


@settings(max_examples=150, deadline=None)
@given(updates=updates_of_rows(), ranks=st.integers(1, 5), max_tokens=st.integers(1, 300), share=st.booleans())
def test_a_plan_keeps_its_promises(updates: list[list[list[Row]]], ranks: int, max_tokens: int, share: bool) -> None:
    plans = plans_of(updates, ranks=ranks, max_tokens=max_tokens, share_prefixes=share)

    assert len(plans) == ranks
    assert all(len(plan.updates) == len(updates) for plan in plans)
    for number, groups in enumerate(updates):
        mine = [plan.updates[number] for plan in plans]
        assert len({len(micro_batches) for micro_batches in mine}) == 1, "ranks would not stay in step"
        assert len(mine[0]) >= 1, "an update without a micro-batch takes no optimizer step"
        micro_batches = [micro_batch for of_rank in mine for micro_batch in of_rank]
        seen = Counter(r for micro_batch in micro_batches for packed in micro_batch for r in packed)
        assert seen == Counter(r for group in groups for r in group), "every row exactly once"
        for micro_batch in micro_batches:
            alone = len(micro_batch) == 1 and len(micro_batch[0]) == 1
            assert padded_tokens(micro_batch) <= max_tokens or alone
            for packed in micro_batch:
                assert len({r.group_id for r in packed}) == 1, "a packed row has one prompt"
                assert share or len(packed) == 1
                assert list(packed) == sorted(packed, key=lambda r: r.index)
    for plan in plans:
        used = {r.payload for update in plan.updates for micro in update for packed in micro for r in packed}
        assert set(plan.payloads) == used
        assert len(plan.payloads) == len(used)
    assert plans == plans_of(updates, ranks=ranks, max_tokens=max_tokens, share_prefixes=share)


def test_every_rank_is_told_what_the_batch_improves_and_how_often() -> None:
    for plan in plans_of([[[row(0, 0, 5, 3)]]], ranks=2, epochs=3, max_tokens=50, share_prefixes=True):
        assert (plan.version, plan.max_staleness, plan.epochs, len(plan.updates)) == (VERSION, MAX_STALENESS, 3, 1)


def test_rows_are_spread_by_length() -> None:
    rows = [[row(g, 0, 10, 40)] for g in range(2)] + [[row(g, 0, 10, 15)] for g in range(2, 6)]
    plans = plans_of([rows], ranks=2, max_tokens=50, share_prefixes=True)
    loads = [sum(packed_length(p) for update in plan.updates for micro in update for p in micro) for plan in plans]
    assert loads == [100, 100]


def test_a_group_shares_its_prompt_as_far_as_the_budget_goes() -> None:
    group = [row(0, index, 100, 10) for index in range(8)]
    whole = plans_of([[group]], ranks=1, max_tokens=180, share_prefixes=True)[0].updates[0]
    assert [[len(packed) for packed in micro] for micro in whole] == [[8]]
    halves = plans_of([[group]], ranks=1, max_tokens=140, share_prefixes=True)[0].updates[0]
    assert [[len(packed) for packed in micro] for micro in halves] == [[4], [4]]
    apart = plans_of([[group]], ranks=1, max_tokens=140, share_prefixes=False)[0].updates[0]
    assert [[len(packed) for packed in micro] for micro in apart] == [[1]] * 8


def test_payloads_are_named_in_order_of_first_use() -> None:
    rows = [[row(g, 0, 5, length)] for g, length in enumerate([3, 9, 6])]
    plan = plans_of([rows, rows], ranks=1, max_tokens=14, share_prefixes=True)[0]
    assert plan.payloads == (1, 2, 0)
