"""Made-up answers for the learner's tests: groups of trajectories, the rows that a plan is made of, and plans.

Batches improve version `VERSION`, and metrics tell stalenesses up to `MAX_STALENESS` apart.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from learner.aggregation import row_weights
from learner.batch import RankPlan, Row, plan_updates
from rollout_workers.trajectory import Trajectory, VersionSpan

VOCABULARY = 256
VERSION = 3
MAX_STALENESS = 2

Payloads = dict[int, tuple[Trajectory, ...]]


def cases() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parent.parent / "data" / "reported_bugs.jsonl"
    return {case["id"]: case for case in map(json.loads, path.read_text().splitlines())}


def trajectory(
    group: int,
    index: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    mask: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int] | None = None,
) -> Trajectory:
    """An answer whose `mask` says which of its tokens the policy sampled, and `versions` which version wrote each of its
    tokens: by default `VERSION` all of them.
    """
    full_mask = np.array([False] * len(prompt) + [bool(m) for m in mask])
    written_by = np.array([-1] * len(prompt) + list(versions or [VERSION] * len(answer)))
    written_by[~full_mask] = -1
    edges = [*np.flatnonzero(np.diff(written_by)) + 1, len(full_mask)]
    return Trajectory(
        group_id=f"g{group}",
        index=index,
        prompt_id=f"p{group}",
        messages=(),
        token_ids=np.array([*prompt, *answer], dtype=np.int32),
        response_mask=full_mask,
        behaviour_logprobs=np.where(full_mask, [*([0.0] * len(prompt)), *logprobs], 0.0).astype(np.float32),
        version_spans=tuple(
            VersionSpan(int(a), int(b), int(written_by[a])) for a, b in itertools.pairwise(edges) if written_by[a] >= 0
        ),
        finish_reason="stop",
    )


def row(group: int, index: int, prompt: int, response: int, *, advantage: float = 0.0, weight: float = 0.0) -> Row:
    return Row(f"g{group}", index, group, index, prompt, response, advantage, weight)


def batch_of(
    sizes: Sequence[int], seed: int, *, tools: bool = True, first_group: int = 0
) -> tuple[list[list[Row]], Payloads]:
    """Groups of the given sizes with answers of many lengths, some beginning as another of their group does, some holding text
    of a tool, some without a behaviour logprob here and there, most written by several versions; behaviour logprobs are those of
    a policy near a uniform one.
    Groups and payloads are numbered from `first_group`.
    """
    rng, version_rng, copy_rng = (np.random.default_rng(seeds) for seeds in (seed, [seed, 1], [seed, 2]))
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
            versions = sorted(version_rng.integers(VERSION - MAX_STALENESS, VERSION + 1, length).tolist())
            tokens = rng.integers(0, VOCABULARY, length)
            if answers:
                earlier = answers[copy_rng.integers(len(answers))].token_ids[len(prompt) :]
                alike = copy_rng.integers(0, min(length, len(earlier)) + 1)
                tokens[:alike] = earlier[:alike]
            answers.append(trajectory(group, index, prompt, tokens, mask, logprobs, versions))
        payloads[group] = tuple(answers)
        rows.append(
            [
                row(group, a.index, len(prompt), len(a.token_ids) - len(prompt), advantage=float(rng.normal()))
                for a in answers
            ]
        )
    return weighted(rows, payloads), payloads


def plans_of(updates: Sequence[Sequence[Sequence[Row]]], **cut: Any) -> list[RankPlan]:
    """`plan_updates` of a batch that improves `VERSION`."""
    return plan_updates(updates, version=VERSION, max_staleness=MAX_STALENESS, **cut)


def tokens_by_staleness(rows: Sequence[Row], payloads: Payloads) -> list[int]:
    """How many sampled tokens of the rows have each staleness, counted plainly."""
    counts = [0] * (MAX_STALENESS + 1)
    for r in rows:
        for span in payloads[r.payload][r.position].version_spans:
            counts[min(VERSION - span.version, MAX_STALENESS)] += span.end - span.start
    return counts


def weighted(rows: list[list[Row]], payloads: Payloads, aggregation: str = "token_mean") -> list[list[Row]]:
    """The rows with the token weights of one optimizer update."""
    import dataclasses

    flat = [r for group in rows for r in group]
    sampled = [payloads[r.payload][r.position].response_length for r in flat]
    weights = iter(row_weights(aggregation, sampled, [r.payload for r in flat]))
    return [[dataclasses.replace(r, token_weight=next(weights)) for r in group] for group in rows]
