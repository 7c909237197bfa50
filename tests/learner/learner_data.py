"""Made-up answers for the learner's tests: groups of trajectories, and the rows that a plan is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from learner.aggregation import row_weights
from learner.batch import Row
from rollout_workers.trajectory import Trajectory, VersionSpan

VOCABULARY = 256

Payloads = dict[int, tuple[Trajectory, ...]]


def cases() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parent.parent / "data" / "reported_bugs.jsonl"
    return {case["id"]: case for case in map(json.loads, path.read_text().splitlines())}


def trajectory(
    group: int, index: int, prompt: Sequence[int], answer: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]
) -> Trajectory:
    """An answer whose `mask` says which of its tokens the policy sampled; version 3 wrote them."""
    full_mask = np.array([False] * len(prompt) + [bool(m) for m in mask])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], full_mask, [False]]).astype(int)))
    return Trajectory(
        group_id=f"g{group}",
        index=index,
        prompt_id=f"p{group}",
        messages=(),
        token_ids=np.array([*prompt, *answer], dtype=np.int32),
        response_mask=full_mask,
        behaviour_logprobs=np.where(full_mask, [*([0.0] * len(prompt)), *logprobs], 0.0).astype(np.float32),
        version_spans=tuple(VersionSpan(int(a), int(b), 3) for a, b in zip(edges[::2], edges[1::2], strict=True)),
        finish_reason="stop",
    )


def row(group: int, index: int, prompt: int, response: int, *, advantage: float = 0.0, weight: float = 0.0) -> Row:
    return Row(f"g{group}", index, group, index, prompt, response, advantage, weight)


def batch_of(
    sizes: Sequence[int], seed: int, *, tools: bool = True, first_group: int = 0
) -> tuple[list[list[Row]], Payloads]:
    """Groups of the given sizes with answers of many lengths, some holding text of a tool, some without a behaviour
    logprob here and there; behaviour logprobs are those of a policy near a uniform one. Groups and payloads are numbered from
    `first_group`.
    """
    rng = np.random.default_rng(seed)
    payloads: Payloads = {}
    rows: list[list[Row]] = []
    for group, size in enumerate(sizes, start=first_group):
        prompt = rng.integers(0, VOCABULARY, rng.integers(3, 8))
        answers = []
        for index in range(size):
            length = int(rng.integers(1, 10))
            mask = np.ones(length, dtype=int)
            if tools and length > 4 and index % 2:
                mask[1:3] = 0
            logprobs = -np.log(VOCABULARY) + rng.normal(0, 0.5, length)
            logprobs[rng.random(length) < 0.1] = np.nan
            answers.append(trajectory(group, index, prompt, rng.integers(0, VOCABULARY, length), mask, logprobs))
        payloads[group] = tuple(answers)
        rows.append(
            [
                row(group, a.index, len(prompt), len(a.token_ids) - len(prompt), advantage=float(rng.normal()))
                for a in answers
            ]
        )
    return weighted(rows, payloads), payloads


def weighted(rows: list[list[Row]], payloads: Payloads, aggregation: str = "token_mean") -> list[list[Row]]:
    """The rows with the token weights of one optimizer update."""
    import dataclasses

    flat = [r for group in rows for r in group]
    sampled = [payloads[r.payload][r.position].response_length for r in flat]
    weights = iter(row_weights(aggregation, sampled, [r.payload for r in flat]))
    return [[dataclasses.replace(r, token_weight=next(weights)) for r in group] for group in rows]
