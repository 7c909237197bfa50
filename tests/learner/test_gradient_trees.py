"""Conversations that share first turns: computed once, they have the gradient that they have apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import Payloads, row, trajectory, weighted
from plain_reference import Gradients, make_policy, reference_gradients, take_gradients
from test_gradient_invariance import TOLERANCE, accumulate, assert_same_metrics

from learner import attention
from learner.batch import Row
from learner.policy import Policy
from learner.tensors import build_tensors

Turn = tuple[list[int], bool]  # ids, and whether the policy wrote them


@pytest.fixture(autouse=True)
def node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the narrow rows of tests; other tests of gradients have them with a whole mask."""
    monkeypatch.setattr(attention, "WHOLE_MASK_BELOW_TOKENS", 0)


@pytest.fixture(scope="module")
def policies(tiny_path: str) -> dict[str, Policy]:
    frugal = {"gradient_checkpointing": True, "chunk_tokens": 5}
    return {
        "full": make_policy(tiny_path),
        "frugal": make_policy(tiny_path, **frugal),
        "lora": make_policy(tiny_path, lora_rank=4, **frugal),
    }


def conversations(seed: int) -> tuple[list[list[Row]], Payloads]:
    """Groups of answers of several turns that branch anywhere, are beginnings of others or equal to them, each with a mask,
    logprobs and versions of its own: an answer takes over some turns of an earlier one, perhaps part of the next, and goes on.
    """
    rng = np.random.default_rng(seed)
    groups: list[list[Row]] = []
    payloads: Payloads = {}
    for group in range(rng.integers(1, 3)):
        prompt = rng.integers(3, 6, rng.integers(1, 6)).tolist()
        histories: list[list[Turn]] = [[]]
        answers = []
        for index in range(rng.integers(2, 7)):
            earlier = histories[rng.integers(len(histories))]
            kept = int(rng.integers(0, len(earlier) + 1))
            turns = earlier[:kept]
            if kept < len(earlier) and rng.random() < 0.5:
                text, sampled = earlier[kept]
                turns = [*turns, (text[: rng.integers(0, len(text) + 1)], sampled)]
            for _ in range(rng.integers(0, 3)):
                turns = [*turns, (rng.integers(3, 6, rng.integers(1, 5)).tolist(), bool(rng.random() < 0.7))]
            histories.append(turns)
            tokens = [token for text, _ in turns for token in text]
            # Not every token of the policy's own turns counts: holes in the mask.
            mask = [int(sampled and rng.random() < 0.8) for text, sampled in turns for _ in text]
            logprobs = rng.choice([-4.0, -5.5, -6.5, np.nan], len(tokens)).tolist()
            versions = sorted(rng.integers(1, 4, len(tokens)).tolist())
            answers.append(trajectory(group, index, prompt, tokens, mask, logprobs, versions))
        payloads[group] = tuple(answers)
        # All positive, since equal answers must not cancel: the bound is of what is left.
        groups.append(
            [
                row(group, a.index, len(prompt), len(a.token_ids) - len(prompt), advantage=float(rng.uniform(0.5, 2)))
                for a in answers
            ]
        )
    return weighted(groups, payloads), payloads


def assert_close(actual: Gradients, expected: Gradients) -> None:
    """To `TOLERANCE` of each tensor's norm, or of a hundredth of all: of a first token's query only rounding is left."""
    whole = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in expected.values()))
    for name, gradient in expected.items():
        size, difference = float(gradient.norm()), float((actual[name] - gradient).norm())
        assert difference <= TOLERANCE * max(size, whole / 100), f"{name}: {difference:.2e} of {size:.2e}, {whole:.2e}"


@pytest.mark.parametrize("kind", ["full", "frugal", "lora"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_a_tree_has_the_gradient_of_its_answers_apart(policies: dict[str, Policy], kind: str, seed: int) -> None:
    groups, payloads = conversations(seed)
    policy = policies[kind]
    rows = [r for group in groups for r in group]
    loss, expected = reference_gradients(policy, rows, payloads, temperature=0.7)
    tallies = []
    for micro_batch in (tuple((r,) for r in rows), tuple(tuple(group) for group in groups)):
        tallies.append(accumulate(policy, [micro_batch], payloads, temperature=0.7))
        assert_close(take_gradients(policy), expected)
        assert tallies[-1].total("loss") == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert_same_metrics(*tallies)


def test_the_conversations_are_what_they_are_to_be() -> None:
    found = set()
    for seed in range(40):
        groups, payloads = conversations(seed)
        tensors = build_tensors(tuple(tuple(group) for group in groups), payloads)
        texts = [tuple(a.token_ids) for answers in payloads.values() for a in answers]
        found |= {
            # As many leaves as different ends; a prompt with answers has one node more.
            "deep" if any(int(ends.diff().ne(0).sum()) > len(ends.unique()) for ends in tensors.subtree_end) else "",
            "predicted for several" if len(tensors.target_ids) < len(tensors.prediction) else "",
            "nothing sampled" if not tensors.response_mask.any(1).all() else "",
            "equal" if len(set(texts)) < len(texts) else "",
        }
    assert found == {"deep", "predicted for several", "nothing sampled", "equal", ""}
