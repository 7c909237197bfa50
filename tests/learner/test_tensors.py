"""Turning a micro-batch into tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import batch_of, cases, row, trajectory

from learner.tensors import MicroBatchTensors, build_tensors, text_tensors


def seen(batch: MicroBatchTensors) -> torch.Tensor:
    """bool [B, T, T]: whether a token (second index) sees another (third)."""
    place = torch.arange(batch.input_ids.shape[1])
    return (place <= place[:, None]) & (place[:, None] < batch.subtree_end[:, None, :])


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
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3], [0, 1, 2, 3, 4, 4, 4]]
    assert seen(batch)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]
    assert seen(batch).any(-1).all(), "a softmax over nothing is NaN"
    assert not seen(batch)[1, :2, 2:].any(), "no token sees padding"
    # Each token with the place of the hidden state that predicts it: an answer's first comes from the prompt's last.
    assert batch.source_row.tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.source_position.tolist() == [1, 2, 3, 1, 5, 0]
    assert batch.target_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.prediction.tolist() == [0, 1, 2, 3, 4, 5]
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


def test_what_answers_share_beyond_the_prompt_stands_once_and_is_predicted_once() -> None:
    """Four answers: two conversations with one first turn and one tool's text, one that ends there, and a copy."""
    first, tool = [1, 2], [9, 9]
    answers = (
        trajectory(0, 0, [7], [*first, *tool, 3, 4], [1, 1, 0, 0, 1, 1], [-0.1, -0.2, 0, 0, -0.3, -0.4]),
        trajectory(0, 1, [7], [*first, *tool, 3, 5], [1, 1, 0, 0, 1, 1], [-0.5, -0.6, 0, 0, -0.7, -0.8]),
        trajectory(0, 2, [7], first, [1, 1], [-0.9, -1.0]),
        trajectory(0, 3, [7], [*first, *tool, 3, 4], [0, 1, 0, 0, 1, 0], [0, -1.1, 0, 0, -1.2, 0]),
    )
    packed = tuple(row(0, i, 1, len(answer.token_ids) - 1) for i, answer in enumerate(answers))
    batch = build_tensors((packed,), {0: answers})
    assert batch.input_ids.tolist() == [[7, 1, 2, 9, 9, 3, 4, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 6]]
    assert seen(batch)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 0, 1],
    ]
    assert batch.target_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.source_position.tolist() == [0, 1, 4, 5, 5]
    assert batch.prediction.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 1, 2]
    assert batch.response_mask.sum(1).tolist() == [4, 4, 2, 2]
    expected = [[-0.1, -0.2, -0.3, -0.4], [-0.5, -0.6, -0.7, -0.8], [-0.9, -1.0, 0, 0], [-1.1, -1.2, 0, 0]]
    torch.testing.assert_close(batch.behaviour_logprobs, torch.tensor(expected))


def test_rows_of_one_answer_are_plainly_causal() -> None:
    rows, payloads = batch_of([1, 1], seed=0)
    batch = build_tensors(tuple((group[0],) for group in rows), payloads)
    width = max(group[0].length for group in rows)
    assert min(group[0].length for group in rows) < width, "nothing is padded"
    assert batch.subtree_end.tolist() == [[width] * width] * 2
    assert batch.position_ids.tolist() == [list(range(width))] * 2, "a position that restarts is another text's first"


def test_d33_positions_count_real_tokens_whatever_is_padded() -> None:
    case = cases()["d33"]
    mask = case["input"]["attention_mask"]
    expected = [p for p, real in zip(case["expected"]["position_ids"], mask, strict=True) if real]
    short = (trajectory(0, 0, [1], [2] * (sum(mask) - 1), [1] * (sum(mask) - 1), [0.0] * (sum(mask) - 1)),)
    long = (trajectory(1, 0, [1], [2] * (len(mask) - 1), [1] * (len(mask) - 1), [0.0] * (len(mask) - 1)),)
    micro_batch = ((row(0, 0, 1, sum(mask) - 1),), (row(1, 0, 1, len(mask) - 1),))
    batch = build_tensors(micro_batch, {0: short, 1: long})
    assert batch.position_ids[0, : sum(mask)].tolist() == expected


def test_d34_positions_of_a_packed_row_restart_with_each_answer() -> None:
    case = cases()["d34"]
    lengths = case["input"]["segment_lengths"]
    answers = tuple(trajectory(0, i, [9], [i] * n, [1] * n, [0.0] * n) for i, n in enumerate(lengths))
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
    texts = [[50 * i + 10 + t for t in range(length)] for i in range(2)]
    answers = tuple(trajectory(0, i, [1, 2], text, mask, [-1.0] * length) for i, text in enumerate(texts))
    rows = [row(0, i, 2, length) for i in range(2)]
    micro_batch = (tuple(rows),) if share else tuple((r,) for r in rows)
    batch = build_tensors(micro_batch, {0: answers})
    assert batch.input_ids.shape == ((1, 2 + 2 * length) if share else (2, 2 + length))
    last_of_first = seen(batch)[0, 2 + length - 1]
    last_of_second = seen(batch)[-1, -1]
    assert last_of_first[2 : 2 + length].int().tolist() == case["expected"]["attention_mask"]
    assert last_of_second[-length:].int().tolist() == case["expected"]["attention_mask"]
    assert batch.target_ids.tolist() == [token for text in texts for token, m in zip(text, mask, strict=True) if m]
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
        asked = batch.prediction[of_answer]
        assert batch.target_ids[asked].tolist() == answer.token_ids[sampled].tolist()
        kept = batch.response_mask[number]
        np.testing.assert_array_equal(batch.behaviour_logprobs[number][kept], answer.behaviour_logprobs[sampled])
        assert batch.versions[number][kept].tolist() == answer.token_versions[sampled].tolist()
        # The hidden state that predicts a token is that of the token before it in the text.
        before = np.flatnonzero(sampled) - 1
        source = batch.input_ids[batch.source_row[asked], batch.source_position[asked]]
        assert source.tolist() == answer.token_ids[before].tolist()


def test_an_empty_micro_batch_asks_for_nothing() -> None:
    batch = build_tensors((), {})
    assert batch.input_ids.shape == (1, 2)
    assert batch.rows == ()
    assert len(batch.target_ids) == len(batch.prediction) == len(batch.response_mask) == len(batch.token_weights) == 0


def test_texts_ask_for_every_token_but_the_first() -> None:
    batch = text_tensors([[5, 6, 7], [8, 9]])
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.subtree_end.tolist() == [[3, 3, 3]] * 2
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
