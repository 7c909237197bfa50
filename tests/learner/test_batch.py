"""Cutting a batch into updates, ranks and micro-batches, and turning a micro-batch into tensors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import MAX_STALENESS, VERSION, batch_of, cases, plans_of, row, trajectory

from learner.batch import MicroBatch, Row, build_tensors, packed_length, text_tensors


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


# Tensors


def test_a_packed_row_has_the_prompt_once_and_each_answer_sees_only_the_prompt_and_itself() -> None:
    answers = (
        trajectory(0, 0, [7, 8], [1, 2, 3], [1, 1, 1], [-0.1, -0.2, -0.3]),
        trajectory(0, 1, [7, 8], [4, 5], [1, 1], [-0.4, -0.5]),
    )
    other = (trajectory(1, 0, [9], [6], [1], [-0.6]),)
    packed = (row(0, 0, 2, 3, advantage=1.5, weight=0.1), row(0, 1, 2, 2, advantage=-1.0, weight=0.2))
    alone = (row(1, 0, 1, 1, advantage=0.5, weight=0.3),)
    batch = build_tensors((packed, alone), {0: answers, 1: other})

    assert batch.input_ids.tolist() == [[7, 8, 1, 2, 3, 4, 5], [9, 6, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.attention_mask.shape == (2, 1, 7, 7)
    assert batch.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]
    assert batch.attention_mask.any(-1).all(), "a softmax over nothing is NaN"
    assert batch.attention_mask[1, 0, :2, 2:].sum() == 0, "no token sees padding"
    # Each token with the place of the hidden state that predicts it: an answer's first comes from the prompt's last.
    assert batch.source_row.tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.source_position.tolist() == [1, 2, 3, 1, 5, 0]
    assert batch.target_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.answer.tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.offset.tolist() == [0, 1, 2, 0, 1, 0]
    assert batch.response_mask.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    torch.testing.assert_close(
        batch.behaviour_logprobs, torch.tensor([[-0.1, -0.2, -0.3], [-0.4, -0.5, 0.0], [-0.6, 0.0, 0.0]])
    )
    assert batch.versions.tolist() == [[3, 3, 3], [3, 3, -1], [3, -1, -1]]
    assert batch.advantages.tolist() == [[1.5], [-1.0], [0.5]]
    torch.testing.assert_close(batch.token_weights, torch.tensor([[0.1], [0.2], [0.3]]))
    assert batch.rows == packed + alone
    assert batch.to(torch.device("cpu")) is batch


def test_no_shared_prompt_needs_no_square_mask() -> None:
    rows, payloads = batch_of([1, 1], seed=0)
    batch = build_tensors(tuple((group[0],) for group in rows), payloads)
    assert batch.attention_mask.shape == batch.input_ids.shape
    assert batch.attention_mask.sum(1).tolist() == [group[0].length for group in rows]


def test_d33_positions_count_real_tokens_whatever_is_padded() -> None:
    case = cases()["d33"]
    mask = case["input"]["attention_mask"]
    expected = [p for p, real in zip(case["expected"]["position_ids"], mask, strict=True) if real]
    short = (trajectory(0, 0, [1], [2] * (sum(mask) - 1), [1] * (sum(mask) - 1), [0.0] * (sum(mask) - 1)),)
    long = (trajectory(1, 0, [1], [2] * (len(mask) - 1), [1] * (len(mask) - 1), [0.0] * (len(mask) - 1)),)
    micro_batch = ((row(0, 0, 1, sum(mask) - 1),), (row(1, 0, 1, len(mask) - 1),))
    batch = build_tensors(micro_batch, {0: short, 1: long})
    real = batch.attention_mask[0].bool()
    assert int(real.sum()) == sum(mask)
    assert batch.position_ids[0][real].tolist() == expected


def test_d34_positions_of_a_packed_row_restart_with_each_answer() -> None:
    case = cases()["d34"]
    lengths = case["input"]["segment_lengths"]
    answers = tuple(trajectory(0, i, [9], [2] * n, [1] * n, [0.0] * n) for i, n in enumerate(lengths))
    packed = tuple(row(0, i, 1, n) for i, n in enumerate(lengths))
    batch = build_tensors((packed,), {0: answers})
    after_the_prompt = (batch.position_ids[0, 1:] - 1).tolist()
    assert after_the_prompt == case["expected"]["position_ids"]


@pytest.mark.parametrize("share", [True, False])
def test_e08_text_of_a_tool_is_attended_to_and_not_trained_on(share: bool) -> None:
    case = cases()["e08"]
    kinds = zip(case["input"]["roles"], case["input"]["lens"], strict=True)
    mask = [int(role == "model") for role, length in kinds for _ in range(length)]
    assert mask == case["expected"]["loss_mask"]
    length = len(mask)
    answers = tuple(trajectory(0, i, [1, 2], range(10, 10 + length), mask, [-1.0] * length) for i in range(2))
    rows = [row(0, i, 2, length) for i in range(2)]
    micro_batch = (tuple(rows),) if share else tuple((r,) for r in rows)
    batch = build_tensors(micro_batch, {0: answers})
    if share:
        last_answer = batch.attention_mask[0, 0, -1]
        assert last_answer[-length:].int().tolist() == case["expected"]["attention_mask"]
        first_answer = batch.attention_mask[0, 0, 2 + length - 1]
        assert first_answer[2 : 2 + length].int().tolist() == case["expected"]["attention_mask"]
    else:
        assert batch.attention_mask[:, 2:].tolist() == [case["expected"]["attention_mask"]] * 2
    sampled = [10 + i for i, m in enumerate(mask) if m]
    assert batch.target_ids.tolist() == sampled * 2
    assert batch.response_mask.shape == (2, sum(mask))


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), seed=st.integers(0, 999), share=st.booleans())
def test_every_sampled_token_is_asked_for_once_in_order(sizes: list[int], seed: int, share: bool) -> None:
    rows, payloads = batch_of(sizes, seed)
    micro_batch = tuple(tuple(g) for g in rows) if share else tuple((r,) for g in rows for r in g)
    batch = build_tensors(micro_batch, payloads)
    for number, r in enumerate(batch.rows):
        answer = payloads[r.payload][r.position]
        sampled = answer.response_mask
        of_answer = batch.answer == number
        assert batch.target_ids[of_answer].tolist() == answer.token_ids[sampled].tolist()
        kept = batch.response_mask[number]
        np.testing.assert_array_equal(batch.behaviour_logprobs[number][kept], answer.behaviour_logprobs[sampled])
        assert batch.versions[number][kept].tolist() == answer.token_versions[sampled].tolist()
        # The hidden state that predicts a token is that of the token before it in the text.
        before = np.flatnonzero(sampled) - 1
        source = batch.input_ids[batch.source_row[of_answer], batch.source_position[of_answer]]
        assert source.tolist() == answer.token_ids[before].tolist()


def test_an_empty_micro_batch_asks_for_nothing() -> None:
    batch = build_tensors((), {})
    assert batch.input_ids.shape == (1, 2)
    assert batch.rows == ()
    assert len(batch.target_ids) == len(batch.response_mask) == len(batch.token_weights) == 0


def test_texts_ask_for_every_token_but_the_first() -> None:
    batch = text_tensors([[5, 6, 7], [8, 9]])
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.target_ids.tolist() == [6, 7, 9]
    assert batch.response_mask.tolist() == [[True, True], [True, False]]


# Data that does not fit the plan


def test_another_answer_in_the_place_of_the_planned_one_is_refused() -> None:
    answer = trajectory(4, 2, [1], [2], [1], [0.0])
    with pytest.raises(ValueError, match=r"expects member 0 of group g0, its payload holds member 2 of group g4"):
        build_tensors(((row(0, 0, 1, 1),),), {0: (answer,)})


@pytest.mark.parametrize(("prompt", "response"), [(1, 3), (2, 1)])
def test_other_lengths_than_planned_are_refused(prompt: int, response: int) -> None:
    answer = trajectory(0, 0, [1], [2, 3], [1, 1], [0.0, 0.0])
    message = rf"member 0 of group g0: 3 tokens, the plan expects {prompt} of prompt and {response} of answer"
    with pytest.raises(ValueError, match=message):
        build_tensors(((row(0, 0, prompt, response),),), {0: (answer,)})


def test_answers_to_different_prompts_are_not_packed() -> None:
    answers = (trajectory(0, 0, [1], [2], [1], [0.0]), trajectory(0, 1, [3], [2], [1], [0.0]))
    with pytest.raises(ValueError, match="answers of group g0 do not share one prompt"):
        build_tensors(((row(0, 0, 1, 1), row(0, 1, 1, 1)),), {0: answers})
