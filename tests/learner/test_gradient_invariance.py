"""The gradient and the metrics of an update do not depend on how the batch is cut, and the gradient is the right one.

What is right is what `plain_reference` computes, which knows nothing of plans. Everything is float32 on the CPU; the bound is
1e-5 of each tensor's norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import (
    MAX_STALENESS,
    VERSION,
    Payloads,
    batch_of,
    cases,
    plans_of,
    row,
    tokens_by_staleness,
    trajectory,
    weighted,
)
from plain_reference import Correction, Gradients, make_policy, reference_gradients, take_gradients

from learner import corrections, kl, losses
from learner.batch import MicroBatch, RankPlan, Row
from learner.objective import Objective, micro_batch_loss
from learner.policy import Policy
from learner.tally import Tally
from learner.tensors import build_tensors

TOLERANCE = 1e-5
SIZES = (3, 1, 4, 2)  # uneven groups
OBJECTIVE = Objective(losses.ppo_clip, {"clip_low": 0.2, "clip_high": 0.28})


@pytest.fixture(scope="module")
def policy(tiny_path: str) -> Policy:
    return make_policy(tiny_path)


@pytest.fixture(scope="module")
def reference_policy(tiny_path: str) -> Policy:
    """Another policy, as the frozen reference of a KL term."""
    other = make_policy(tiny_path)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return other


def accumulate(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    payloads: Payloads,
    *,
    temperature: float,
    objective: Objective = OBJECTIVE,
    proximal: Policy | None = None,
    reference: Policy | None = None,
) -> Tally:
    """Forward and backward of the micro-batches as a rank does it, without an optimizer."""
    tally = Tally()
    for micro_batch in micro_batches:
        batch = build_tensors(micro_batch, payloads)
        logprobs, entropy = policy(batch, temperature)
        with torch.no_grad():
            others = [None if other is None else other(batch, temperature)[0] for other in (proximal, reference)]
        loss, counted = micro_batch_loss(
            objective,
            batch,
            logprobs,
            entropy,
            version=VERSION,
            max_staleness=MAX_STALENESS,
            proximal_logprobs=others[0],
            ref_logprobs=others[1],
        )
        (loss if batch.rows else logprobs.sum() + loss).backward()
        tally.merge(counted)
    return tally


def cut(rows: list[list[Row]], *, ranks: int = 1, max_tokens: int = 10_000, share: bool = True) -> list[RankPlan]:
    return plans_of([rows], ranks=ranks, max_tokens=max_tokens, share_prefixes=share)


def all_micro_batches(plans: Sequence[RankPlan]) -> list[MicroBatch]:
    return [micro_batch for plan in plans for update in plan.updates for micro_batch in update]


def assert_same_metrics(actual: Tally, expected: Tally) -> None:
    assert actual.sums.keys() == expected.sums.keys()
    for name, values in expected.sums.items():
        assert actual.sums[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    for name, values in expected.maxima.items():
        assert actual.maxima[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def assert_same(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size, difference = float(gradient.norm()), float((actual[name] - gradient).norm())
        assert difference <= TOLERANCE * size, f"{name}: difference {difference:.2e} of {size:.2e}"


CUTS = {
    "shared_prefixes": {},
    "one_answer_a_row": {"share": False},
    "many_micro_batches": {"max_tokens": 30},
    "one_row_a_micro_batch": {"max_tokens": 1, "share": False},
    "three_ranks": {"ranks": 3, "max_tokens": 40},
    "ranks_without_data": {"ranks": 13, "max_tokens": 10_000},
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_cut_has_the_gradient_of_the_formula(policy: Policy, name: str, temperature: float) -> None:
    rows, payloads = batch_of(SIZES, seed=1)
    loss, expected = reference_gradients(
        policy, [r for group in rows for r in group], payloads, temperature=temperature
    )
    assert all(gradient.any() for gradient in expected.values()), "a tensor without gradient compares nothing"
    plans = cut(rows, **CUTS[name])
    if name == "ranks_without_data":
        assert any(plan.payloads == () for plan in plans)
    tally = accumulate(policy, all_micro_batches(plans), payloads, temperature=temperature)
    assert_same(take_gradients(policy), expected)
    assert tally.total("loss") == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert tally.total("clipped") > 0, "no ratio was clipped: the clip is not tested"
    assert tally.total("mismatch_missing") > 0
    counts = tokens_by_staleness([r for group in rows for r in group], payloads)
    assert min(counts) > 0, "a staleness does not occur"
    assert tally.sums["tokens"] == tally.sums["mismatch_tokens"] == tuple(counts)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    seed=st.integers(0, 2**16),
    max_tokens=st.integers(1, 200),
    ranks=st.integers(1, 4),
    share=st.booleans(),
    aggregation=st.sampled_from(["token_mean", "seq_mean_token_mean", "prompt_mean"]),
    objective=st.sampled_from(
        [
            OBJECTIVE,
            replace(OBJECTIVE, proximal="interpolate", correction=corrections.icepop),
            replace(OBJECTIVE, correction=corrections.sequence_k3_mask, correction_options={"max_k3": 0.1}),
        ]
    ),
)
def test_any_cut_of_any_batch_gives_one_gradient(
    policy: Policy,
    sizes: list[int],
    seed: int,
    max_tokens: int,
    ranks: int,
    share: bool,
    aggregation: str,
    objective: Objective,
) -> None:
    rows, payloads = batch_of(sizes, seed)
    rows = weighted(rows, payloads, aggregation)

    def learn(plans: Sequence[RankPlan]) -> tuple[Gradients, Tally]:
        tally = accumulate(policy, all_micro_batches(plans), payloads, temperature=1.3, objective=objective)
        return take_gradients(policy), tally

    expected, counted = learn(cut(rows, share=False))
    gradients, tally = learn(cut(rows, ranks=ranks, max_tokens=max_tokens, share=share))
    assert_same(gradients, expected)
    assert_same_metrics(tally, counted)


def row_ratio(log_ratios: list[float]) -> float:
    return math.exp(sum(log_ratios))


def row_k3(log_ratios: list[float]) -> float:
    return sum(math.exp(d) - 1 - d for d in log_ratios) / len(log_ratios)


def row_kl(log_ratios: list[float]) -> float:
    return -sum(log_ratios) / len(log_ratios)


# Each with options under which it acts on some answers of the batch and not on others, and what it does, plainly.
CORRECTIONS: dict[str, tuple[dict[str, float], Correction]] = {
    "token_tis": ({"cap": 1.1}, lambda d, _: [min(math.exp(x), 1.1) for x in d]),
    "icepop": ({"low": 0.8, "high": 1.3}, lambda d, _: [math.exp(x) if 0.8 <= math.exp(x) <= 1.3 else 0 for x in d]),
    "sequence_tis": ({"cap": 1.1}, lambda d, _: [min(row_ratio(d), 1.1)] * len(d)),
    "sequence_mis": ({"cap": 1.1}, lambda d, _: [row_ratio(d) if row_ratio(d) <= 1.1 else 0] * len(d)),
    "sequence_mask": (
        {"low": 0.3, "high": 1.5},
        lambda d, _: [row_ratio(d) if 0.3 <= row_ratio(d) <= 1.5 else 0] * len(d),
    ),
    "geometric_mask": (
        {"low": 0.9, "high": 1.1},
        lambda d, _: [float(0.9 <= math.exp(-row_kl(d)) <= 1.1)] * len(d),
    ),
    "sequence_k3_mask": ({"max_k3": 0.1}, lambda d, _: [float(row_k3(d) <= 0.1)] * len(d)),
    "negative_sequence_mask": (
        {"max_kl": 0.1},
        lambda d, advantage: [float(not (advantage < 0 and row_kl(d) > 0.1))] * len(d),
    ),
}


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("proximal", ["recompute", "interpolate"])
def test_a_correction_sees_whole_answers_however_they_are_packed(
    policy: Policy, reference_policy: Policy, name: str, proximal: str
) -> None:
    options, plain = CORRECTIONS[name]
    rows, payloads = batch_of((3, 1, 4, 2, 5), seed=8)
    anchor = reference_policy if proximal == "recompute" else None
    weights: list[float] = []

    def correction(log_ratios: list[float], advantage: float) -> list[float]:
        weights.extend(plain(log_ratios, advantage))
        return weights[-len(log_ratios) :]

    loss, expected = reference_gradients(
        policy,
        [r for group in rows for r in group],
        payloads,
        temperature=1.0,
        proximal=anchor,
        interpolate=proximal == "interpolate",
        correction=correction,
    )
    limit = options.get("cap", 0.0) if name.endswith("tis") else 0.0
    assert 0 < weights.count(limit) < len(weights), "the correction does nothing, or leaves nothing"
    objective = replace(OBJECTIVE, proximal=proximal, correction=getattr(corrections, name), correction_options=options)
    for kind in ("one_row_a_micro_batch", "three_ranks"):
        tally = accumulate(
            policy,
            all_micro_batches(cut(rows, **CUTS[kind])),
            payloads,
            temperature=1.0,
            objective=objective,
            proximal=anchor,
        )
        assert_same(take_gradients(policy), expected)
        assert tally.total("loss") == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert tally.total("masked") == weights.count(0.0)
        assert tally.total("correction") == pytest.approx(sum(weights), rel=1e-5)


def test_all_terms_together(tiny_path: str, reference_policy: Policy) -> None:
    """Policy loss, KL to a reference and an entropy bonus, in packed rows and small chunks of logits."""
    policy = make_policy(tiny_path, chunk_tokens=5, entropy_gradient=True)
    rows, payloads = batch_of(SIZES, seed=2)
    terms = {"kl_coefficient": 0.3, "entropy_coefficient": 0.05}
    loss, expected = reference_gradients(
        policy,
        [r for group in rows for r in group],
        payloads,
        temperature=0.7,
        reference=reference_policy,
        **terms,
    )
    objective = replace(OBJECTIVE, kl=kl.k3, **terms)
    tally = accumulate(
        policy,
        all_micro_batches(cut(rows, ranks=2, max_tokens=50)),
        payloads,
        temperature=0.7,
        objective=objective,
        reference=reference_policy,
    )
    assert_same(take_gradients(policy), expected)
    assert tally.total("loss") == pytest.approx(loss, rel=1e-5)
    assert tally.total("kl_ref") > 0


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_lora_and_gradient_checkpointing_keep_the_gradient(tiny_path: str, lora_rank: int) -> None:
    rows, payloads = batch_of(SIZES, seed=3)
    policy = make_policy(tiny_path, lora_rank=lora_rank)
    _, expected = reference_gradients(policy, [r for group in rows for r in group], payloads, temperature=1.0)
    assert all(gradient.any() for gradient in expected.values()), "a tensor without gradient compares nothing"
    if lora_rank:
        assert expected
        assert all(".lora_" in name for name in expected)
    frugal = make_policy(tiny_path, lora_rank=lora_rank, gradient_checkpointing=True, chunk_tokens=7)
    accumulate(frugal, all_micro_batches(cut(rows, max_tokens=60)), payloads, temperature=1.0)
    assert_same(take_gradients(frugal), expected)


def assert_nothing_counted(tally: Tally) -> None:
    assert {value for values in tally.sums.values() for value in values} == {0.0}
    assert {value for values in tally.maxima.values() for value in values} == {-math.inf}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_an_empty_micro_batch_touches_every_parameter_with_nothing(tiny_path: str, lora_rank: int) -> None:
    """A rank without data must take part in every collective."""
    policy = make_policy(tiny_path, lora_rank=lora_rank)
    tally = accumulate(policy, [()], {}, temperature=1.0)
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} was not reached"
            assert not parameter.grad.any()
    assert_nothing_counted(tally)


def test_a_micro_batch_with_nothing_sampled_gives_nothing(policy: Policy) -> None:
    """All-masked answers (a truncated multi-turn answer, say) give no loss, no gradient and no NaN."""
    answers = tuple(trajectory(0, i, [1, 2], [3, 4, 5], [0, 0, 0], [float("nan")] * 3) for i in range(2))
    rows = [row(0, i, 2, 3, advantage=1.0) for i in range(2)]
    tally = accumulate(policy, all_micro_batches(cut([rows])), {0: answers}, temperature=1.0)
    assert_nothing_counted(tally)
    assert not any(gradient.any() for gradient in take_gradients(policy).values())


# Reported faults of the trainer's side, by their id in tests/data/reported_bugs.jsonl.

Losses = losses.LossTerms


def constant_loss(value: float) -> Objective:
    """Every sampled token has the same loss, which is proportional to one parameter: its logprob."""

    def loss(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Losses:
        return Losses(torch.where(mask, value * logprobs, 0.0), torch.zeros_like(mask))

    return Objective(loss)


def summed(objective: Objective, plans: Sequence[RankPlan], payloads: Payloads) -> tuple[float, float]:
    """Loss of the whole update, and its gradient in a parameter that every token's loss is proportional to."""
    parameter = torch.ones((), requires_grad=True)
    total = 0.0
    for micro_batch in all_micro_batches(plans):
        batch = build_tensors(micro_batch, payloads)
        logprobs = torch.ones_like(batch.behaviour_logprobs) * parameter
        loss, tally = micro_batch_loss(
            objective, batch, logprobs, torch.zeros_like(logprobs), version=VERSION, max_staleness=MAX_STALENESS
        )
        if batch.rows:
            loss.backward()
        total += tally.total("loss")
    return total, float(parameter.grad) if parameter.grad is not None else 0.0


def test_d13_ranks_do_not_enter_the_denominator() -> None:
    case = cases()["d13"]
    count, ranks = case["input"]["global_sequences"], case["input"]["dp_size"]
    rows, payloads = batch_of([4] * (count // 4), seed=4, tools=False)
    rows = weighted(rows, payloads, "seq_mean_token_mean")
    loss, _ = summed(constant_loss(case["input"]["per_token_loss"]), cut(rows, ranks=ranks, max_tokens=20), payloads)
    assert loss == pytest.approx(case["expected"]["effective_loss"])


def test_d14_accumulation_does_not_divide_again() -> None:
    case = cases()["d14"]
    rows, payloads = batch_of([1] * case["input"]["grad_accum"], seed=5, tools=False)
    plans = cut(rows, max_tokens=1, share=False)
    assert len(plans[0].updates[0]) == case["input"]["grad_accum"]
    _, gradient = summed(constant_loss(case["input"]["true_grad"]), plans, payloads)
    assert gradient == pytest.approx(case["expected"]["grad"])


def test_d15_the_normaliser_counts_one_optimizer_step() -> None:
    case = cases()["d15"]
    tokens, count = case["input"]["tokens_per_micro"], case["input"]["grad_accum"]
    steps = case["input"]["steps_per_generation"] // count
    payloads = {g: (trajectory(g, 0, [1], [2] * tokens, [1] * tokens, [0.0] * tokens),) for g in range(steps * count)}
    updates = [
        weighted([[row(g, 0, 1, tokens)] for g in range(step * count, (step + 1) * count)], payloads)
        for step in range(steps)
    ]
    plan = plans_of(updates, ranks=1, max_tokens=tokens + 1, share_prefixes=True)[0]
    for update in plan.updates:
        assert len(update) == count
        loss, _ = summed(constant_loss(case["input"]["per_token_loss"]), [replace(plan, updates=(update,))], payloads)
        assert loss == pytest.approx(case["expected"]["loss_per_optimizer_step"])
