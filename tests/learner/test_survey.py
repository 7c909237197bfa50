"""What is found of a batch before it is learned does not depend on how the batch is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from learner_data import Payloads, batch_of, plans_of
from thread_ranks import Ranks

from learner import losses, selection
from learner.advantages import reinforce_pp
from learner.batch import RankPlan, Row
from learner.kl import k3, reward_penalty
from learner.objective import Objective, TokenReturns
from learner.selection import Total
from learner.survey import Survey
from learner.tensors import MicroBatchTensors, build_tensors

LONGEST = 12


def made_up_logprobs(batch: MicroBatchTensors, scale: float) -> torch.Tensor:
    """Of the token and its place alone: the same however the answer is packed."""
    out = torch.zeros(batch.response_mask.shape)
    values = -scale * (1 + (batch.target_ids[batch.prediction] * 7 + batch.offset) % 13).float()
    return out.index_put((batch.answer, batch.offset), values)


class Passes:
    def __init__(self) -> None:
        self.forwards = 0
        self.references = 0

    def forward(self, batch: MicroBatchTensors) -> tuple[torch.Tensor, torch.Tensor]:
        self.forwards += 1
        logprobs = made_up_logprobs(batch, 0.3)
        return logprobs, -logprobs / 2

    @staticmethod
    def of_reference(batch: MicroBatchTensors) -> torch.Tensor:
        return made_up_logprobs(batch, 0.4)

    def reference(self, batches: Iterable[MicroBatchTensors]) -> list[torch.Tensor]:
        self.references += 1
        return [self.of_reference(batch) for batch in batches]


def survey_of(
    objective: Objective,
    plan: RankPlan,
    payloads: Payloads,
    passes: Passes | None = None,
    total: Total = torch.as_tensor,
) -> Survey:
    passes = passes or Passes()
    return Survey(
        objective,
        plan,
        tensors=lambda micro_batch: build_tensors(micro_batch, payloads),
        forward=passes.forward,
        reference=passes.reference,
        total=total,
    )


def by_answer(survey: Survey, plan: RankPlan, values: str) -> dict[tuple[str, int], list[float]]:
    """Advantages or selected tokens, at the sampled tokens of each answer."""
    found = {}
    for update, micro_batches in enumerate(plan.updates):
        survey.begin(update, 0)
        for number in range(len(micro_batches)):
            batch, known = survey.batch((update, number)), survey.known((update, number))
            selected = known.selected.tokens if known.selected is not None else None
            tensor: Any = batch.advantages if values == "advantages" else selected
            for i, row in enumerate(batch.rows):
                found[row.group_id, row.index] = tensor[i][batch.response_mask[i]].tolist()
    return found


def updates_of(rows: Sequence[list[Row]], parts: int) -> list[Sequence[list[Row]]]:
    return [rows[i::parts] for i in range(parts)]


CUTS = {"whole": (1, 10_000, True), "single": (1, 1, False), "two_updates": (2, 30, True)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("returns", [TokenReturns(), TokenReturns(gamma=0.9, std="population", kl_coefficient=0.5)])
def test_advantages_per_token_are_those_of_the_whole_batch(cut: str, returns: TokenReturns) -> None:
    parts, max_tokens, share = CUTS[cut]
    rows, payloads = batch_of((3, 1, 4), seed=11)
    [plan] = plans_of(updates_of(rows, parts), ranks=1, max_tokens=max_tokens, share_prefixes=share)
    survey = survey_of(Objective(losses.reinforce, returns=returns), plan, payloads)
    found = by_answer(survey, plan, "advantages")

    flat = [row for group in rows for row in group]
    [one] = plans_of([rows], ranks=1, max_tokens=10_000, share_prefixes=False)
    mask = torch.zeros(len(flat), LONGEST, dtype=torch.bool)
    behaviour, ref = torch.zeros(len(flat), LONGEST), torch.zeros(len(flat), LONGEST)
    rewards, names = torch.zeros(len(flat), dtype=torch.float64), []
    for micro_batch in one.updates[0]:
        batch = build_tensors(micro_batch, payloads)
        for i, row in enumerate(batch.rows):
            at, width = len(names), batch.response_mask.shape[1]
            mask[at, :width] = batch.response_mask[i]
            ref[at, :width] = Passes.of_reference(batch)[i]
            own = batch.behaviour_logprobs[i]
            behaviour[at, :width] = torch.where(own.isfinite(), own, ref[at, :width])
            rewards[at] = batch.advantages[i, 0].double()
            names.append((row.group_id, row.index))
    penalty = reward_penalty(behaviour, ref, mask, coefficient=returns.kl_coefficient)
    expected = reinforce_pp(
        rewards,
        torch.zeros(len(flat)),
        response_mask=mask,
        token_rewards=penalty,
        gamma=returns.gamma,
        std=returns.std,
        eps=returns.eps,
    )
    assert found.keys() == set(names)
    for i, name in enumerate(names):
        assert found[name] == pytest.approx(expected[i][mask[i]].tolist(), rel=1e-5, abs=1e-6)
    assert len({round(value, 6) for values in found.values() for value in values}) > 3


@pytest.mark.parametrize("returns", [TokenReturns(), TokenReturns(gamma=0.9, kl_coefficient=0.5)])
def test_returns_are_whitened_over_all_ranks(returns: TokenReturns) -> None:
    rows, payloads = batch_of((3, 1, 4), seed=15)
    objective = Objective(losses.reinforce, returns=returns)

    def found_by(ranks: int) -> dict[tuple[str, int], list[float]]:
        plans = plans_of([rows], ranks=ranks, max_tokens=30, share_prefixes=True)
        parts = Ranks(ranks).run(
            lambda rank, total: by_answer(
                survey_of(objective, plans[rank], payloads, total=total), plans[rank], "advantages"
            )
        )
        return {answer: values for part in parts for answer, values in part.items()}

    alone, together = found_by(1), found_by(3)
    assert alone.keys() == together.keys()
    for answer, values in alone.items():
        assert together[answer] == pytest.approx(values, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("cut", ["single", "whole"])
def test_a_selection_is_of_the_whole_update(cut: str) -> None:
    _, max_tokens, share = CUTS[cut]
    rows, payloads = batch_of((3, 1, 4), seed=12)
    [plan] = plans_of([rows], ranks=1, max_tokens=max_tokens, share_prefixes=share)
    objective = Objective(losses.reinforce, selection=selection.top_entropy, selection_options={"fraction": 0.25})
    found = by_answer(survey_of(objective, plan, payloads), plan, "selected")
    entropies = {}
    for micro_batch in plan.updates[0]:
        batch = build_tensors(micro_batch, payloads)
        for i, row in enumerate(batch.rows):
            entropies[row.group_id, row.index] = (-made_up_logprobs(batch, 0.3)[i][batch.response_mask[i]] / 2).tolist()
    everything = torch.tensor([value for values in entropies.values() for value in values])
    threshold = everything.quantile(0.75).item()
    assert found == {name: [value < threshold for value in values] for name, values in entropies.items()}


def test_what_nobody_asks_for_costs_no_pass() -> None:
    rows, payloads = batch_of((2, 2), seed=13)
    [plan] = plans_of(updates_of(rows, 2), ranks=1, max_tokens=1000, share_prefixes=True)
    for objective, count in (
        (Objective(losses.ppo_clip), 0),
        (Objective(losses.ppo_clip, proximal="recompute"), 1),  # of the second update: the first pass sees the first
        (Objective(losses.ppo_clip, selection=selection.kl_cov), 2),
    ):
        passes = Passes()
        survey = survey_of(objective, plan, payloads, passes)
        for update in range(2):
            survey.begin(update, 0)
        assert passes.forwards == count
        assert passes.references == 0


@pytest.mark.parametrize(
    "objective",
    [
        Objective(losses.ppo_clip, kl=k3, kl_coefficient=0.1),
        Objective(losses.reinforce, returns=TokenReturns(kl_coefficient=0.1)),
    ],
    ids=["loss", "reward"],
)
def test_the_reference_is_asked_once_a_batch_and_serves_every_update_and_epoch(objective: Objective) -> None:
    rows, payloads = batch_of((2, 2, 3), seed=15)
    [plan] = plans_of(updates_of(rows, 3), epochs=2, ranks=1, max_tokens=20, share_prefixes=True)
    passes = Passes()
    survey = survey_of(objective, plan, payloads, passes)
    for _ in range(plan.epochs):
        for update, micro_batches in enumerate(plan.updates):
            survey.begin(update, 0)
            for number in range(len(micro_batches)):
                known, batch = survey.known((update, number)), survey.batch((update, number))
                assert known.ref_logprobs is not None
                torch.testing.assert_close(known.ref_logprobs, Passes.of_reference(batch), rtol=0, atol=0)
    assert passes.references == 1
    assert passes.forwards == 0


def test_the_first_updates_first_pass_is_the_proximal_policys() -> None:
    rows, payloads = batch_of((2,), seed=14)
    [plan] = plans_of([rows], ranks=1, max_tokens=1000, share_prefixes=True)
    survey = survey_of(Objective(losses.ppo_clip, proximal="recompute"), plan, payloads)
    first, second = torch.zeros(2, 3), torch.ones(2, 3)
    assert survey.known((0, 0)).proximal_logprobs is None
    survey.saw((0, 0), first)
    survey.saw((0, 0), second)
    assert survey.known((0, 0)).proximal_logprobs is first


def test_a_batch_of_which_no_answer_is_left_has_no_returns() -> None:
    """algorithm.mask_truncated may leave out all of them."""
    survey = survey_of(Objective(losses.reinforce, returns=TokenReturns()), RankPlan((), 0, 0), {})
    survey.begin(0, 0)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_one_answer_s_reference_spoils_no_other_answer(bad: float) -> None:
    """It reaches its own tokens, so that their update is skipped and names it."""
    rows, payloads = batch_of((3, 1, 4), seed=11)
    [plan] = plans_of([rows], ranks=1, max_tokens=10_000, share_prefixes=False)
    spoiled = rows[0][1].group_id, rows[0][1].index

    class Spoiled(Passes):
        @staticmethod
        def of_reference(batch: MicroBatchTensors) -> torch.Tensor:
            there = torch.tensor([(row.group_id, row.index) == spoiled for row in batch.rows])
            return torch.where(there[:, None], bad, made_up_logprobs(batch, 0.4))

    objective = Objective(losses.reinforce, returns=TokenReturns(kl_coefficient=0.5))
    found = by_answer(survey_of(objective, plan, payloads, Spoiled()), plan, "advantages")
    for answer, advantages in found.items():
        finite = torch.tensor(advantages).isfinite()
        assert finite.all() if answer != spoiled else not finite.any(), answer
    others = torch.cat([torch.tensor(values) for answer, values in found.items() if answer != spoiled])
    assert others.unique().numel() > 3
