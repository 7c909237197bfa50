"""Reported faults of advantages and losses: each case of kind d in tests/data/reported_bugs.jsonl, by its id.

Cases of the trainer's batches (d33, d34 position ids, d36 missing logprobs) are tested with those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner import advantages, aggregation, corrections, entropy, kl, losses
from orchestrator import estimates

DATA = Path(__file__).parent.parent / "data" / "reported_bugs.jsonl"
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, DATA.read_text().splitlines())}


def given(case_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[case_id]["input"], CASES[case_id]["expected"]


def rewards_of(values: list[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values], dtype=torch.float64)


def one_group(values: list[float | None]) -> tuple[Tensor, Tensor]:
    return rewards_of(values), torch.zeros(len(values), dtype=torch.int64)


def close(actual: Tensor | float, expected: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64).detach(),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=atol,
    )


def test_d01_a_group_without_variance_still_feels_the_kl_term() -> None:
    inputs, expected = given("d01")
    result = advantages.grpo(*one_group(inputs["rewards"]))
    close(result, expected["advantages"], atol=0)
    logprobs = torch.full((4, 1), inputs["logp"], requires_grad=True)
    ref, mask = torch.full((4, 1), inputs["logp_ref"]), torch.ones(4, 1)
    terms = losses.ppo_clip(logprobs, logprobs.detach(), result.float()[:, None], mask)
    weights = aggregation.token_mean(mask, torch.zeros(4))
    policy_loss, divergence = (weights * terms.token_loss).sum(), (weights * kl.k3(logprobs, ref)).sum()
    close(policy_loss, expected["policy_loss"], atol=0)
    close(divergence, expected["kl_k3"])
    loss = policy_loss + inputs["beta"] * divergence
    close(loss, expected["loss"])
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.ne(0).all()
    # Masking such groups takes the KL term with them.
    nothing = torch.zeros(4, 1)
    close((aggregation.token_mean(nothing, torch.zeros(4)) * terms.token_loss).sum(), 0.0, atol=0)


@pytest.mark.parametrize("std", ["sample", "population"])
def test_d02_a_group_of_one_has_advantage_zero(std: str) -> None:
    inputs, expected = given("d02")
    close(advantages.grpo(*one_group(inputs["rewards"]), std=std), expected["advantages"], atol=0)


def test_d03_uneven_groups_stay_apart() -> None:
    inputs, expected = given("d03")
    result = advantages.grpo(rewards_of(inputs["rewards"]), torch.tensor(inputs["group"]))
    close(result, expected["advantages"])


def test_d04_leave_one_out_does_not_divide_by_a_vanished_deviation() -> None:
    inputs, expected = given("d04")
    result = advantages.rloo(*one_group(inputs["rewards"]), normalise=True, eps=inputs["eps"])
    close(result[0], expected["advantages[0]"])
    close(result[1:], [-0.57735] * 3)
    assert result.abs().max() <= 10


def test_d06_groups_of_the_same_prompt_are_told_apart_by_number() -> None:
    inputs, expected = given("d06")
    rewards = rewards_of(inputs["group_A_rewards"] + inputs["group_B_rewards"])
    assert expected["advantages"] == "all 0"
    assert (advantages.rloo(rewards, torch.tensor([0] * 16 + [1] * 16)) == 0).all()


def test_d07_an_unscored_answer_is_in_no_mean() -> None:
    inputs, expected = given("d07")
    result = advantages.grpo(*one_group(inputs["rewards"]), eps=inputs["eps"])
    close(result, expected["advantages"])


@pytest.mark.parametrize("name", sorted(advantages.GROUP_RELATIVE - {"gdpo", "opo"}))
def test_d08_a_single_scored_answer_has_advantage_zero(name: str) -> None:
    inputs, expected = given("d08")
    close(getattr(advantages, name)(*one_group(inputs["rewards"])), expected["advantages"], atol=0)


def test_d09_a_missing_value_does_not_poison_a_mean() -> None:
    inputs, expected = given("d09")
    for values in (inputs["values"], rewards_of(inputs["values"]).tolist()):
        mean, count = estimates.mean_and_count(values)
        assert mean == pytest.approx(expected["mean"])
        assert count == expected["count"]


def test_d11_token_mean_and_sequence_mean() -> None:
    inputs, expected = given("d11")
    for name in ("token_mean", "seq_mean_token_mean"):
        weights = aggregation.row_weights(name, inputs["len"], [0, 0])
        loss = sum(
            weight * length * loss
            for weight, length, loss in zip(weights, inputs["len"], inputs["per_token_loss"], strict=True)
        )
        assert loss == pytest.approx(expected[name])


def test_d13_no_normaliser_knows_the_number_of_ranks() -> None:
    inputs, expected = given("d13")
    rows = inputs["global_sequences"]
    mask = torch.ones(rows, 3, dtype=torch.float64)
    weighted = aggregation.seq_mean_token_mean(mask, torch.arange(rows)) * inputs["per_token_loss"]
    ranks = weighted.chunk(inputs["dp_size"])
    close(sum(rank.sum() for rank in ranks), expected["effective_loss"], atol=1e-12)


def test_d14_accumulated_micro_batches_add_up_without_another_division() -> None:
    inputs, expected = given("d14")
    rows = inputs["grad_accum"]
    mask = torch.ones(rows, 5, dtype=torch.float64)
    weights = aggregation.token_mean(mask, torch.arange(rows))
    parameter = torch.ones((), dtype=torch.float64, requires_grad=True)
    for row in range(rows):
        (weights[row] * inputs["true_grad"] * parameter).sum().backward()
    assert parameter.grad is not None
    close(parameter.grad, expected["grad"], atol=1e-12)


def test_d15_the_normaliser_counts_the_tokens_of_one_optimizer_step() -> None:
    inputs, expected = given("d15")
    lengths = [inputs["tokens_per_micro"]] * inputs["grad_accum"]
    weights = aggregation.row_weights("token_mean", lengths, [0] * len(lengths))
    loss = sum(w * n * inputs["per_token_loss"] for w, n in zip(weights, lengths, strict=True))
    assert loss == pytest.approx(expected["loss_per_optimizer_step"])


def test_d18_a_dropped_answer_does_not_shift_the_groups() -> None:
    inputs, expected = given("d18")
    size, dropped = inputs["G"], inputs["dropped_index"]
    numbers = [index // size for index in range(len(inputs["rewards"]))]
    # Its reward stays in the baseline: only the row leaves the loss.
    everyone = advantages.grpo(rewards_of(inputs["rewards"]), torch.tensor(numbers), eps=1e-6)
    kept = [advantage for index, advantage in enumerate(everyone.tolist()) if index != dropped]
    close(torch.tensor(kept, dtype=torch.float64), expected["kept_advantages"])


def test_d19_k3_of_a_hopeless_token_is_finite_with_a_finite_gradient() -> None:
    inputs, expected = given("d19")
    logprobs = torch.tensor([inputs["logp"]], dtype=torch.float32, requires_grad=True)
    value = kl.k3(logprobs, torch.tensor([inputs["logp_ref"]]), cap=inputs["output_cap"])
    value.sum().backward()
    close(value, [expected["kl"]], atol=0)
    assert logprobs.grad is not None
    close(logprobs.grad, [expected["grad"]], atol=0)


def test_d20_estimator_values() -> None:
    inputs, expected = given("d20")
    d = torch.tensor(inputs["d"], dtype=torch.float64)
    for name in ("k1", "k2", "k3"):
        close(getattr(kl, name)(d, torch.zeros_like(d)), expected[name], atol=1e-6)


def test_d21_what_each_estimator_really_pulls_towards() -> None:
    inputs, expected = given("d21")
    ref = torch.tensor(inputs["ref"], dtype=torch.float64).log()
    p = torch.tensor(inputs["p"], dtype=torch.float64)

    def gradient(term: Any) -> Tensor:
        """Of the expectation over actions, with respect to the logit of action 0."""
        logits = p.log().requires_grad_()
        (p * term(logits.log_softmax(0), ref)).sum().backward()
        assert logits.grad is not None
        return logits.grad[0]

    close(kl.categorical_kl(p.log(), ref), expected["true_reverse_kl"], atol=1e-6)
    close(gradient(kl.k1), expected["k1_in_loss"], atol=1e-6)
    close(gradient(kl.k2), expected["k2_in_loss"], atol=1e-6)
    close(gradient(kl.k3), expected["k3_in_loss"], atol=1e-6)
    in_reward = gradient(lambda lp, ref_lp: kl.k1(lp, ref_lp).detach() * lp)
    close(in_reward, expected["true_grad"], atol=1e-6)
    unbiased = gradient(lambda lp, ref_lp: kl.k3_unbiased(lp, ref_lp, old_logprobs=lp))
    close(unbiased, expected["true_grad"], atol=1e-6)


def test_d25_a_long_answer_is_judged_by_its_geometric_mean() -> None:
    inputs, expected = given("d25")
    behaviour = torch.zeros(1, inputs["tokens"], dtype=torch.float64)
    old, mask = behaviour + inputs["per_token_log_mismatch"], torch.ones_like(behaviour)
    close(corrections.geometric_ratio(old, behaviour, mask), [expected["geometric_mean_ratio"]], atol=1e-6)
    assert (corrections.geometric_mask(old, behaviour, mask, low=0.95, high=1.05) == 1).all()
    assert corrections.sequence_ratio(old, behaviour, mask).item() == pytest.approx(torch.e**-20)
    assert (corrections.sequence_mask(old, behaviour, mask) == 0).all()


def test_d26_the_dual_clip_is_for_negative_advantages_only() -> None:
    inputs, expected = given("d26")
    signs, ratios = torch.tensor(inputs["cases"], dtype=torch.float64).T
    terms = losses.ppo_clip(
        ratios.log()[None],
        torch.zeros(1, 4, dtype=torch.float64),
        signs[None],
        torch.ones(1, 4),
        clip_low=inputs["eps"],
        clip_high=inputs["eps"],
        dual_clip=inputs["c"],
    )
    close(terms.token_loss[0], expected["loss"], atol=1e-9)
    assert terms.clipped[0].tolist() == [True, False, True, True]


def test_d27_a_dual_clip_below_one_is_refused() -> None:
    inputs, _ = given("d27")
    empty = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"dual_clip must be > 1, got 0\.9"):
        losses.ppo_clip(empty, empty, empty, empty, dual_clip=inputs["clip_ratio_c"])


def test_d28_a_padding_sentinel_is_in_no_entropy() -> None:
    inputs, expected = given("d28")
    logprobs, mask = torch.tensor(inputs["logprobs"]), torch.tensor(inputs["mask"])
    close(entropy.sampled(logprobs, mask), expected["entropy_mean"], atol=0)
    close(entropy.sampled(logprobs, mask) * mask.sum(), expected["entropy_sum"], atol=0)


def test_d37_a_rollout_in_segments_counts_once_in_its_baseline() -> None:
    inputs, expected = given("d37")
    rollouts = inputs["rollouts"]
    result = advantages.dr_grpo(*one_group([rollout["reward"] for rollout in rollouts]))
    segments = torch.tensor([rollout["segments"] for rollout in rollouts])
    close(result.repeat_interleave(segments), expected["advantages"])


def test_d38_a_constant_length_norm_still_means_over_answers() -> None:
    inputs, expected = given("d38")
    lengths = [int(total) for total in inputs["seq_token_sums"]]  # a loss of 1 per token
    weights = aggregation.row_weights("seq_sum_const", lengths, [0, 1], max_tokens=inputs["L"])
    parts = [weight * length for weight, length in zip(weights, lengths, strict=True)]
    assert sum(parts) == pytest.approx(expected["loss"])


def test_d39_three_ways_to_centre_a_group() -> None:
    inputs, expected = given("d39")
    group = one_group(inputs["rewards"])
    for name, result in {
        "grpo_ddof1": advantages.grpo(*group),
        "mean_only": advantages.dr_grpo(*group),
        "rloo": advantages.rloo(*group),
    }.items():
        close(result[[0, -1]], expected[name], atol=1e-5)


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo", "reinforce_pp_baseline", "lite_ppo", "maxrl"])
def test_d40_equal_groups_stay_at_zero_side_by_side(name: str) -> None:
    inputs, _ = given("d40")
    rewards = rewards_of([reward for group in inputs["groups"] for reward in group])
    numbers = torch.arange(len(inputs["groups"])).repeat_interleave(8)
    assert (getattr(advantages, name)(rewards, numbers) == 0).all()
