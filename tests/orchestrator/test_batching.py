"""From a batch to the learner's plan: advantages over all scored members, weights global to an update, fair cuts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import gdpo
from learner.batch import RankPlan, Row
from learner.tensors import build_tensors
from orchestrator.batching import LearningPlan, plan_learning
from orchestrator.config import Config, RewardFunctionConfig
from orchestrator.flight import Flight
from orchestrator.prompts import Prompt
from orchestrator.sampling_types import Batch, BatchGroup, Counts, Member, Tally
from rollout_workers.trajectory import RewardResult, Status, Trajectory, VersionSpan
from rollout_workers.worker import MemberReport, report_of

PROMPT_TOKENS = 5
Answers = Sequence[tuple[float | None, int]]  # (reward, or None if it failed; tokens) of each member


def make_config(**algorithm: object) -> Config:
    config = Config()
    config.algorithm.advantage = "dr_grpo"  # reward minus the mean of the group
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


def make_batch(
    groups: Sequence[Answers], stale: Sequence[tuple[int, int]] = (), truncated: Sequence[tuple[int, int]] = ()
) -> tuple[Batch, dict[str, Flight]]:
    """Members that failed, or that `stale` lists as (group, index), are not trainable."""
    batch_groups, flights = [], {}
    for number, answers in enumerate(groups):
        group_id = f"g{number}"
        flight = Flight(group_id, Prompt(f"p{number}", "main", (), {}, None, 0, "?"), len(answers), 0)
        members = []
        for index, (reward, length) in enumerate(answers):
            cut = (number, index) in truncated
            if reward is None:
                flight.reports[index] = MemberReport(index, error="lost")
                members.append(Member(index, Status.ERRORED))
                continue
            flight.reports[index] = MemberReport(index, ((0, length),), length, PROMPT_TOKENS, cut)
            members.append(Member(index, Status.SCORED, reward, reward, ((0, length),), length, cut))
        trainable = tuple(m.index for m in members if m.reward is not None and (number, m.index) not in stale)
        batch_groups.append(BatchGroup(group_id, f"p{number}", 0, tuple(members), trainable))
        flights[group_id] = flight
    return Batch(0, tuple(batch_groups), len(groups), Tally(), Counts(*[0] * 11)), flights


def plan(
    config: Config, groups: Sequence[Answers], *, ranks: int = 1, **marks: Sequence[tuple[int, int]]
) -> LearningPlan:
    batch, flights = make_batch(groups, **marks)
    return plan_learning(config, batch, flights, ranks=ranks, share_prefixes=True)


def rows_of(plans: Sequence[RankPlan], update: int) -> list[Row]:
    """The rows of all ranks in one optimizer update."""
    return [row for p in plans for micro in p.updates[update] for packed in micro for row in packed]


def weight_sum(rows: Sequence[Row]) -> float:
    return sum(row.token_weight * row.response_length for row in rows)


EVEN = [[(1.0, 4), (0.0, 6)], [(0.0, 3), (1.0, 3)], [(1.0, 2), (0.0, 8)], [(1.0, 5), (0.0, 5)]]


def conversation(index: int, sampled: int, between: int) -> Trajectory:
    """A prompt, an answer in two parts, and between them what a tool said."""
    mask = np.array([False] * PROMPT_TOKENS + [True] * (sampled - 1) + [False] * between + [True])
    spans = (VersionSpan(PROMPT_TOKENS, PROMPT_TOKENS + sampled - 1, 0), VersionSpan(len(mask) - 1, len(mask), 0))
    ids = np.where(np.arange(len(mask)) < PROMPT_TOKENS, 7, 10 + index).astype(np.int32)
    return Trajectory("g0", index, "p0", (), ids, mask, np.where(mask, -1.0, 0.0).astype(np.float32), spans, "stop")


def test_tokens_of_tools_are_in_the_rows_but_in_no_denominator() -> None:
    answers = [conversation(0, sampled=4, between=5), conversation(1, sampled=2, between=1)]
    batch, flights = make_batch([[(1.0, 4), (0.0, 2)]])
    flights["g0"].reports.update({answer.index: report_of(answer) for answer in answers})
    made = plan_learning(make_config(), batch, flights, ranks=1, share_prefixes=True)
    assert [(row.prompt_length, row.response_length, row.other_length) for row in made.rows] == [
        (PROMPT_TOKENS, 4, 5),
        (PROMPT_TOKENS, 2, 1),
    ]
    [[micro_batch]] = made.ranks[0].updates
    tensors = build_tensors(micro_batch, {0: answers})
    weights = tensors.token_weights.expand_as(tensors.response_mask)[tensors.response_mask]
    assert weights.tolist() == pytest.approx([1 / 6] * 6)  # token_mean: of sampled tokens


def test_advantages_by_group_id_and_index() -> None:
    made = plan(make_config(), EVEN)
    assert made.advantages["g0", 0] == 0.5
    assert made.advantages["g1", 0] == -0.5
    assert {(row.group_id, row.index): row.advantage for row in made.rows} == made.advantages


def test_f34_stale_members_stay_in_the_baseline() -> None:
    """One of four answers is too old: three train, four make the mean."""
    groups = [[(1.0, 4), (0.0, 4), (0.0, 4), (0.0, 4)]]
    made = plan(make_config(), groups, stale=[(0, 0)])
    assert [row.index for row in made.rows] == [1, 2, 3]
    assert [row.advantage for row in made.rows] == [-0.25] * 3
    assert made.advantages["g0", 0] == 0.75


def test_d18_a_member_left_out_shifts_no_group() -> None:
    """The rewards of the reported case, with the truncated third answer left out of the loss."""
    rewards = [1, 0, 0, 1, 1, 1, 0, 0]
    groups = [[(float(r), 4) for r in rewards[:4]], [(float(r), 4) for r in rewards[4:]]]
    made = plan(make_config(advantage="grpo", mask_truncated=True), groups, truncated=[(0, 2)])
    kept = [round(row.advantage, 4) for row in made.rows]
    assert kept == pytest.approx([0.86603, -0.86603, 0.86603, 0.86603, 0.86603, -0.86603, -0.86603], abs=1e-3)
    assert [(row.group_id, row.index) for row in made.rows[:3]] == [("g0", 0), ("g0", 1), ("g0", 3)]


def test_d37_an_answer_counts_once_in_its_baseline_however_long() -> None:
    made = plan(make_config(), [[(1.0, 300), (0.0, 100)]])
    assert [row.advantage for row in made.rows] == [0.5, -0.5]


def test_gdpo_takes_the_components_with_their_weights() -> None:
    """Of two components that both differ in the group, the one of weight 0 does not count; a skipped one is left out."""
    config = make_config(advantage="gdpo")
    for name, weight in {"right": 1.0, "short": 0.5, "watched": 0.0}.items():
        config.reward.functions[name] = RewardFunctionConfig(path="a.b", weight=weight)
    groups = [[(1.5, 4), (0.0, 4), (1.0, 4)], [(1.0, 4), (0.5, 4), (0.0, 4)]]
    parts = {
        ("g0", 0): {"right": 1.0, "short": 1.0, "watched": 9.0},
        ("g0", 1): {"right": 0.0, "short": 0.0, "watched": 0.0},
        ("g0", 2): {"right": 1.0, "short": None, "watched": 0.0},
        ("g1", 0): {"right": 1.0, "short": 0.0, "watched": 0.0},
        ("g1", 1): {"right": 0.0, "short": 1.0, "watched": 0.0},
        ("g1", 2): {"right": 0.0, "short": 0.0, "watched": 3.0},
    }
    batch, flights = make_batch(groups)
    for (group_id, index), components in parts.items():
        flights[group_id].results[index] = RewardResult(1.0, components=components)
    made = plan_learning(config, batch, flights, ranks=1, share_prefixes=True)
    expected = gdpo(
        torch.tensor([1.5, 0.0, 1.0, 1.0, 0.5, 0.0]),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        component_rewards=torch.tensor([[1, 1], [0, 0], [1, torch.nan], [1, 0], [0, 1], [0, 0]]),
        component_weights=torch.tensor([1.0, 0.5]),
    )
    assert [made.advantages[key] for key in parts] == pytest.approx(expected.tolist(), rel=1e-6)
    assert made.advantages["g0", 0] > made.advantages["g0", 2] > 0


def test_failed_members_are_in_neither_loss_nor_baseline_and_positions_skip_them() -> None:
    made = plan(make_config(), [[(None, 0), (1.0, 4), (0.0, 6)]])
    assert [(row.index, row.position, row.advantage) for row in made.rows] == [(1, 0, 0.5), (2, 1, -0.5)]
    assert ("g0", 0) not in made.advantages


def test_token_weights_are_global_to_an_update() -> None:
    made = plan(make_config(aggregation="token_mean", updates_per_batch=2), EVEN)
    assert len(made.ranks[0].updates) == 2
    for update, tokens in ((0, 16), (1, 20)):
        rows = rows_of(made.ranks, update)
        assert [row.token_weight for row in rows] == pytest.approx([1 / tokens] * 4)
    assert [sorted({row.group_id for row in rows_of(made.ranks, u)}) for u in (0, 1)] == [["g0", "g1"], ["g2", "g3"]]


def test_epochs_repeat_the_updates() -> None:
    made = plan(make_config(updates_per_batch=2, epochs_per_batch=3), EVEN)
    assert [(len(rank.updates), rank.epochs) for rank in made.ranks] == [(2, 3)]
    assert len(made.rows) == 8  # each answer once


def test_the_ranks_know_the_version_and_the_bound_of_staleness() -> None:
    config = make_config()
    config.staleness.max = 4
    batch, flights = make_batch(EVEN)
    made = plan_learning(config, dataclasses.replace(batch, version=9), flights, ranks=2, share_prefixes=True)
    assert [(rank.version, rank.max_staleness) for rank in made.ranks] == [(9, 4)] * 2


def test_uneven_updates_differ_by_one_group() -> None:
    made = plan(make_config(updates_per_batch=3), EVEN)
    sizes = [len({row.group_id for row in rows_of(made.ranks, update)}) for update in range(3)]
    assert sorted(sizes) == [1, 1, 2]


def test_nothing_left_to_learn_from() -> None:
    every = [(group, index) for group in range(4) for index in range(2)]
    made = plan(make_config(mask_truncated=True), EVEN, truncated=every)
    assert made.rows == []
    assert [rank.updates for rank in made.ranks] == [()]


def test_an_update_without_rows_is_left_out() -> None:
    made = plan(make_config(mask_truncated=True, updates_per_batch=4), EVEN, truncated=[(1, 0), (1, 1)])
    assert len(made.ranks[0].updates) == 3
    assert all(rows_of(made.ranks, update) for update in range(3))


@given(
    groups=st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.integers(1, 40)), min_size=2, max_size=5),
        min_size=1,
        max_size=6,
    ),
    ranks=st.integers(1, 4),
    updates=st.integers(1, 3),
    epochs=st.integers(1, 2),
    aggregation=st.sampled_from(["token_mean", "seq_mean_token_mean"]),
)
@settings(max_examples=60, deadline=None)
def test_every_answer_once_an_epoch_and_ranks_in_step(
    groups: list[Answers], ranks: int, updates: int, epochs: int, aggregation: str
) -> None:
    config = make_config(updates_per_batch=updates, epochs_per_batch=epochs, aggregation=aggregation)
    config.learner.max_tokens_per_microbatch = 64
    made = plan(config, groups, ranks=ranks)
    assert len(made.ranks) == ranks
    updates_made = range(len(made.ranks[0].updates))
    everyone = Counter((row.group_id, row.index) for update in updates_made for row in rows_of(made.ranks, update))
    assert everyone == Counter((f"g{g}", i) for g, answers in enumerate(groups) for i in range(len(answers)))
    assert {p.epochs for p in made.ranks} == {epochs}
    for update in updates_made:
        assert len({len(p.updates[update]) for p in made.ranks}) == 1  # ZeRO-3 gathers in lockstep
        assert weight_sum(rows_of(made.ranks, update)) == pytest.approx(1.0)
