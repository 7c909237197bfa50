"""The loss of a micro-batch put together from its parts, and what is counted of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from learner_data import batch_of, cases, row, trajectory

from learner import corrections, kl, losses
from learner.batch import MicroBatchTensors, Row, build_tensors
from learner.objective import MAX_LOG_RATIO, Objective, Tally, micro_batch_loss

PPO = Objective(losses.ppo_clip, {"clip_low": 0.2, "clip_high": 0.28})
LOGPROBS = [[-0.5, -1.0, -2.0], [-0.3, -0.1, 0.0]]
BEHAVIOUR = [[-0.6, -1.5, -1.9], [-0.3, -0.4, 0.0]]


@pytest.fixture
def batch() -> MicroBatchTensors:
    """Two answers, of three and two tokens; advantages 1 and -2; every token weighs a fifth."""
    answers = (
        trajectory(0, 0, [1], [2, 3, 4], [1, 1, 1], BEHAVIOUR[0]),
        trajectory(0, 1, [1], [5, 6], [1, 1], BEHAVIOUR[1][:2]),
    )
    rows = (row(0, 0, 1, 3, advantage=1.0, weight=0.2), row(0, 1, 1, 2, advantage=-2.0, weight=0.2))
    return build_tensors((rows,), {0: answers})


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(LOGPROBS, requires_grad=True), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])


def test_the_loss_is_the_weighted_sum_of_its_terms(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    ref = logprobs.detach() - 0.5
    objective = replace(PPO, kl=kl.k3, kl_coefficient=0.1, entropy_coefficient=0.01)
    loss, tally = micro_batch_loss(objective, batch, logprobs, entropy, ref_logprobs=ref)
    expected, divergence = 0.0, math.exp(-0.5) - 1 + 0.5
    for i, (advantage, count) in enumerate([(1.0, 3), (-2.0, 2)]):
        for t in range(count):
            ratio = math.exp(LOGPROBS[i][t] - BEHAVIOUR[i][t])
            policy = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            expected += 0.2 * (policy + 0.1 * divergence - 0.01 * float(entropy[i, t]))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert tally.sums["loss"] == pytest.approx(expected, rel=1e-6)
    assert tally.sums["kl_ref"] == pytest.approx(5 * divergence, rel=1e-5)


def test_what_is_counted(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    _, tally = micro_batch_loss(PPO, batch, logprobs, entropy)
    log_ratios = [a - b for i, n in ((0, 3), (1, 2)) for a, b in zip(LOGPROBS[i][:n], BEHAVIOUR[i][:n], strict=True)]
    ratios = [math.exp(d) for d in log_ratios]
    assert tally.sums["tokens"] == 5
    assert tally.sums["entropy"] == pytest.approx(15.0)
    assert tally.sums["ppo_kl"] == pytest.approx(-sum(log_ratios), rel=1e-5)
    assert tally.sums["clipped"] == 1  # exp(0.5) with a positive advantage; exp(0.3) with a negative one is not
    assert tally.sums["mismatch_kl"] == pytest.approx(sum(r - 1 - d for r, d in zip(ratios, log_ratios, strict=True)))
    assert tally.sums["ratio"] == pytest.approx(sum(ratios))
    assert tally.sums["ratio_squared"] == pytest.approx(sum(r * r for r in ratios))
    assert tally.sums["missing_logprobs"] == 0
    assert tally.maxima == {"ratio_max": pytest.approx(max(ratios))}


def test_what_stands_outside_the_mask_is_never_read(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    objective = replace(PPO, kl=kl.k3, kl_coefficient=0.1, entropy_coefficient=0.01)
    loss, tally = micro_batch_loss(objective, batch, logprobs, entropy, ref_logprobs=torch.zeros(2, 3))
    loss.backward()
    bad_logprobs = logprobs.detach().clone()
    bad_logprobs[1, 2] = torch.nan
    bad_logprobs.requires_grad_()
    bad_entropy, bad_ref = entropy.clone(), torch.zeros(2, 3)
    bad_entropy[1, 2] = bad_ref[1, 2] = torch.nan
    bad_loss, bad_tally = micro_batch_loss(objective, batch, bad_logprobs, bad_entropy, ref_logprobs=bad_ref)
    bad_loss.backward()
    assert torch.equal(loss, bad_loss)
    assert tally == bad_tally
    assert logprobs.grad is not None
    assert bad_logprobs.grad is not None
    inside = batch.response_mask
    assert torch.equal(logprobs.grad[inside], bad_logprobs.grad[inside])


def test_d36_a_logprob_that_the_engine_could_not_give_is_a_ratio_of_one() -> None:
    case = cases()["d36"]
    rollout = [math.nan if value is None else value for value in case["input"]["rollout"]]
    answer = trajectory(0, 0, [1], [2, 3, 4], [1, 1, 1], rollout)
    batch = build_tensors(((row(0, 0, 1, 3, advantage=1.0, weight=1 / 3),),), {0: (answer,)})
    logprobs = torch.tensor([case["input"]["learner"]], requires_grad=True)
    loss, tally = micro_batch_loss(PPO, batch, logprobs, torch.zeros(1, 3))
    loss.backward()
    assert tally.sums["ratio"] == pytest.approx(sum(case["expected"]["ratios"]))
    assert tally.sums["ratio_squared"] == pytest.approx(3)
    assert tally.maxima["ratio_max"] == pytest.approx(1)
    assert tally.sums["missing_logprobs"] == 1
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.full((1, 3), -1 / 3))  # that token learns as well


def test_a_correction_belongs_to_a_recomputed_policy(batch: MicroBatchTensors) -> None:
    """With the behaviour policy as the denominator old and behaviour are one, and the correction is 1."""
    logprobs, entropy = tensors()
    corrected = replace(PPO, correction=corrections.token_tis, correction_options={"cap": 1.1})
    assert (
        micro_batch_loss(PPO, batch, logprobs, entropy)[0] == micro_batch_loss(corrected, batch, logprobs, entropy)[0]
    )

    proximal = torch.tensor(LOGPROBS)
    loss, tally = micro_batch_loss(corrected, batch, logprobs, entropy, proximal_logprobs=proximal)
    expected = 0.0
    for i, (advantage, count) in enumerate([(1.0, 3), (-2.0, 2)]):
        for t in range(count):
            expected -= 0.2 * advantage * min(math.exp(LOGPROBS[i][t] - BEHAVIOUR[i][t]), 1.1)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert tally.sums["ppo_kl"] == 0.0
    assert tally.sums["mismatch_kl"] > 0  # the engine's mismatch is seen all the same


def test_counted_ratios_cannot_overflow(batch: MicroBatchTensors) -> None:
    _, entropy = tensors()
    _, tally = micro_batch_loss(PPO, batch, torch.full((2, 3), 1000.0), entropy)
    assert tally.maxima["ratio_max"] == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert all(math.isfinite(value) for value in tally.sums.values())


def test_tallies_add_up_over_any_split() -> None:
    rows, payloads = batch_of([3, 2], seed=6)
    flat = [r for group in rows for r in group]

    def count(*parts: list[Row]) -> Tally:
        total = Tally()
        for part in parts:
            batch = build_tensors(tuple((r,) for r in part), payloads)
            logprobs = torch.full(batch.response_mask.shape, -5.5)
            total.merge(micro_batch_loss(PPO, batch, logprobs, logprobs.abs())[1])
        return total

    whole, split = count(flat), count(flat[:1], flat[1:4], flat[4:])
    assert whole.sums == pytest.approx(split.sums, rel=1e-5)
    assert whole.maxima == pytest.approx(split.maxima)


def test_the_maximum_of_nothing_is_absent() -> None:
    tally = Tally()
    tally.merge(Tally({"tokens": 2.0}, {}))
    tally.merge(Tally({"tokens": 3.0, "loss": 1.0}, {"ratio_max": 0.5}))
    tally.merge(Tally({}, {"ratio_max": 0.25}))
    assert tally == Tally({"tokens": 5.0, "loss": 1.0}, {"ratio_max": 0.5})
