"""The loss of a micro-batch put together from its parts, and what is counted of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from learner_data import MAX_STALENESS, VERSION, batch_of, cases, row, trajectory

from learner import corrections, kl, losses
from learner.batch import Coefficients, Row
from learner.objective import PROXIMAL, Objective, TokenReturns, micro_batch_loss
from learner.tally import Tally
from learner.tensors import MicroBatchTensors, build_tensors

PPO = Objective(losses.ppo_clip, {"clip_low": 0.2, "clip_high": 0.28})
LOGPROBS = [[-0.5, -1.0, -2.0], [-0.3, -0.1, 0.0]]
BEHAVIOUR = [[-0.6, -1.5, -1.9], [-0.3, -0.4, 0.0]]
FRESH = [[VERSION] * 3, [VERSION] * 2]
MIXED = [[VERSION - 2, VERSION - 1, VERSION], [VERSION - 1, VERSION - 1]]


def answers(versions: Sequence[Sequence[int]] = FRESH, behaviour: Sequence[Sequence[float]] = BEHAVIOUR) -> Any:
    """Two answers, of three and two tokens; advantages 1 and -2; every token weighs a fifth."""
    written = (
        trajectory(0, 0, [1], [2, 3, 4], [1, 1, 1], behaviour[0], versions[0]),
        trajectory(0, 1, [1], [5, 6], [1, 1], behaviour[1][:2], versions[1]),
    )
    rows = (row(0, 0, 1, 3, advantage=1.0, weight=0.2), row(0, 1, 1, 2, advantage=-2.0, weight=0.2))
    return build_tensors((rows,), {0: written})


@pytest.fixture
def batch() -> MicroBatchTensors:
    return answers()


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(LOGPROBS, requires_grad=True), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])


def loss_of(
    objective: Objective, batch: MicroBatchTensors, logprobs: torch.Tensor, entropy: torch.Tensor, **data: Any
) -> tuple[torch.Tensor, Tally]:
    options = {"version": VERSION, "max_staleness": MAX_STALENESS} | data
    return micro_batch_loss(objective, batch, logprobs, entropy, **options)


def test_the_loss_is_the_weighted_sum_of_its_terms(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    ref = logprobs.detach() - 0.5
    objective = replace(PPO, kl=kl.k3, kl_coefficient=0.1, entropy_coefficient=0.01)
    loss, tally = loss_of(objective, batch, logprobs, entropy, ref_logprobs=ref)
    expected, divergence = 0.0, math.exp(-0.5) - 1 + 0.5
    for i, (advantage, count) in enumerate([(1.0, 3), (-2.0, 2)]):
        for t in range(count):
            ratio = math.exp(LOGPROBS[i][t] - BEHAVIOUR[i][t])
            policy = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            expected += 0.2 * (policy + 0.1 * divergence - 0.01 * float(entropy[i, t]))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert tally.total("loss") == pytest.approx(expected, rel=1e-6)
    assert tally.total("kl_ref") == pytest.approx(5 * divergence, rel=1e-5)


def test_a_batchs_coefficients_take_the_place_of_the_objectives(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    ref = logprobs.detach() - 0.5
    given = replace(PPO, kl=kl.k3, kl_coefficient=0.1, entropy_coefficient=0.01)
    adapted = given.with_coefficients(Coefficients(kl=0.3, entropy=0.02))
    assert adapted == replace(PPO, kl=kl.k3, kl_coefficient=0.3, entropy_coefficient=0.02)
    assert given.with_coefficients(Coefficients()) == given
    once, twice = (loss_of(o, batch, logprobs, entropy, ref_logprobs=ref)[0].item() for o in (given, adapted))
    assert twice - once == pytest.approx(0.2 * (5 * 0.2 * (math.exp(-0.5) - 0.5) - 0.01 * 15), rel=1e-5)
    charged = replace(PPO, returns=TokenReturns(gamma=0.9, kl_coefficient=0.1))
    assert charged.with_coefficients(Coefficients(kl=0.3)).returns == TokenReturns(gamma=0.9, kl_coefficient=0.3)
    assert PPO.with_coefficients(Coefficients(kl=0.3)) == PPO, "there is no KL term"


def test_what_is_counted(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    _, tally = loss_of(PPO, batch, logprobs, entropy)
    log_ratios = [a - b for i, n in ((0, 3), (1, 2)) for a, b in zip(LOGPROBS[i][:n], BEHAVIOUR[i][:n], strict=True)]
    ratios = [math.exp(d) for d in log_ratios]
    assert tally.total("tokens") == 5
    assert tally.total("entropy") == pytest.approx(15.0)
    assert tally.total("ppo_kl") == pytest.approx(-sum(log_ratios), rel=1e-5)
    assert tally.total("clipped") == 1  # exp(0.5) with a positive advantage; exp(0.3) with a negative one is not
    k3 = sum(r - 1 - d for r, d in zip(ratios, log_ratios, strict=True))
    assert tally.total("mismatch_k3") == pytest.approx(k3, rel=1e-5)
    assert tally.total("mismatch_ratio") == pytest.approx(sum(ratios))
    assert tally.total("mismatch_missing") == 0
    assert tally.largest("mismatch_ratio") == pytest.approx(max(ratios))
    assert not tally.sums.keys() & {"kl_ref", "correction", "masked"}, "there is none"


def test_what_is_counted_is_split_by_the_staleness_of_each_token() -> None:
    logprobs, entropy = tensors()
    objective = replace(
        PPO, proximal="recompute", correction=corrections.icepop, correction_options={"low": 0.8, "high": 1.3}
    )
    _, tally = loss_of(objective, answers(MIXED), logprobs, entropy)
    assert tally.sums["tokens"] == tally.sums["mismatch_tokens"] == (1, 3, 1)
    assert tally.sums["entropy"] == pytest.approx((3, 2 + 4 + 5, 1))
    of_stale = [math.exp(d) for d in (0.5, 0.0, 0.3)]
    assert tally.sums["mismatch_ratio"] == pytest.approx((math.exp(-0.1), sum(of_stale), math.exp(0.1)), rel=1e-5)
    assert tally.maxima["mismatch_ratio"] == pytest.approx((math.exp(-0.1), max(of_stale), math.exp(0.1)), rel=1e-5)
    assert tally.sums["masked"] == (0, 2, 0)
    assert tally.sums["correction"] == pytest.approx((math.exp(-0.1), 1.0, math.exp(0.1)), rel=1e-5)
    assert sum(tally.sums["loss"]) == pytest.approx(tally.total("loss"))


def test_what_is_staler_than_the_last_staleness_counts_there() -> None:
    logprobs, entropy = tensors()
    _, tally = loss_of(PPO, answers(MIXED), logprobs, entropy, max_staleness=1)
    assert tally.sums["tokens"] == (1, 4)
    _, tally = loss_of(PPO, answers(MIXED), logprobs, entropy, version=VERSION + 7, max_staleness=1)
    assert tally.sums["tokens"] == (0, 5)
    assert tally.maxima["mismatch_ratio"][0] == -math.inf


def test_the_mismatch_is_that_of_the_first_pass_and_before_the_first_update(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    _, again = loss_of(PPO, batch, logprobs, entropy, first_pass=False)
    assert again.total("tokens") == 5
    assert not [name for name in again.sums | again.maxima if name.startswith("mismatch")]
    before = torch.tensor(BEHAVIOUR) + 0.25
    _, tally = loss_of(replace(PPO, proximal="recompute"), batch, logprobs, entropy, proximal_logprobs=before)
    assert tally.total("mismatch_ratio") == pytest.approx(5 * math.exp(0.25))


def test_what_stands_outside_the_mask_is_never_read(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    objective = replace(PPO, kl=kl.k3, kl_coefficient=0.1, entropy_coefficient=0.01)
    loss, tally = loss_of(objective, batch, logprobs, entropy, ref_logprobs=torch.zeros(2, 3))
    loss.backward()
    bad_logprobs = logprobs.detach().clone()
    bad_logprobs[1, 2] = torch.nan
    bad_logprobs.requires_grad_()
    bad_entropy, bad_ref = entropy.clone(), torch.zeros(2, 3)
    bad_entropy[1, 2] = bad_ref[1, 2] = torch.nan
    bad_loss, bad_tally = loss_of(objective, batch, bad_logprobs, bad_entropy, ref_logprobs=bad_ref)
    bad_loss.backward()
    assert torch.equal(loss, bad_loss)
    assert tally == bad_tally
    assert logprobs.grad is not None
    assert bad_logprobs.grad is not None
    inside = batch.response_mask
    assert torch.equal(logprobs.grad[inside], bad_logprobs.grad[inside])


@pytest.mark.parametrize("estimator", kl.__all__)
def test_nan_outside_the_mask_has_no_gradient_either(batch: MicroBatchTensors, estimator: str) -> None:
    """A torch.where on the result would hide it from the loss, and 0 * NaN would come back as the gradient."""
    objective = replace(PPO, kl=getattr(kl, estimator), kl_coefficient=0.1, entropy_coefficient=0.01)
    results = []
    for filler in (0.0, math.nan, math.inf):
        logprobs, entropy, ref = (
            x.detach().masked_fill(~batch.response_mask, filler) for x in (*tensors(), torch.zeros(2, 3))
        )
        logprobs.requires_grad_()
        entropy.requires_grad_()
        loss, _ = loss_of(objective, batch, logprobs, entropy, ref_logprobs=ref)
        results.append((loss.detach(), *torch.autograd.grad(loss, (logprobs, entropy))))
        assert (results[-1][1][~batch.response_mask] == 0).all()
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


NASTY = [-math.inf, -1e4, math.nan]
ESTIMATORS = [kl.k3, kl.k3_unbiased, kl.k2]


@pytest.mark.parametrize("loss", losses.__all__)
@pytest.mark.parametrize("proximal", PROXIMAL)
def test_nasty_batches_have_finite_losses_and_gradients(loss: str, proximal: str) -> None:
    """Whatever the engine reported, however far the policy went: with each correction that the pair may have."""
    for correction in (None, *corrections.__all__):
        if correction is not None and refused(loss, correction, proximal):
            continue
        for index, value in enumerate(NASTY):
            batch = answers(MIXED, [[value, NASTY[index - 1], -0.1], [NASTY[index - 2], value]])
            batch = replace(batch, advantages=torch.tensor([[0.0], [-1e6]]) if index % 2 else batch.advantages)
            logprobs = torch.tensor([[-1e4, -0.1, NASTY[index - 2]], [-1e-6, -1e4, 0.0]]).nan_to_num(
                nan=-1.0, neginf=-math.inf
            )
            logprobs.requires_grad_()
            weigh = None if correction is None else getattr(corrections, correction)
            objective = Objective(
                getattr(losses, loss), proximal=proximal, correction=weigh, kl=ESTIMATORS[index], kl_coefficient=0.1
            )
            given = {"ref_logprobs": torch.full((2, 3), -0.5)}
            if proximal == "recompute":
                given["proximal_logprobs"] = torch.full((2, 3), -0.2).masked_fill(batch.versions == VERSION, -math.inf)
            total, tally = loss_of(objective, batch, logprobs, torch.zeros(2, 3), **given)
            total.backward()
            assert total.isfinite()
            assert logprobs.grad is not None
            assert logprobs.grad.isfinite().all()
            assert all(math.isfinite(value) for values in tally.sums.values() for value in values)


@pytest.mark.parametrize("part", ["loss", "correction", "kl"])
def test_a_function_that_gives_another_shape_is_named(part: str, batch: MicroBatchTensors) -> None:
    """One number a row would be added to every token of every row without an error."""

    def one_a_row(*tensors: torch.Tensor, **_: Any) -> Any:
        rows = tensors[0].sum(1)
        return losses.LossTerms(rows, rows.bool()) if part == "loss" else rows

    objective = replace(PPO, **{part: one_a_row})
    logprobs, entropy = tensors()
    with pytest.raises(ValueError, match=r"one_a_row returned \[2\], expected one number a token, \[2, 3\]"):
        loss_of(objective, batch, logprobs, entropy, ref_logprobs=torch.zeros(2, 3))


def test_d36_a_logprob_that_the_engine_could_not_give_is_a_ratio_of_one() -> None:
    case = cases()["d36"]
    rollout = [math.nan if value is None else value for value in case["input"]["rollout"]]
    answer = trajectory(0, 0, [1], [2, 3, 4], [1, 1, 1], rollout)
    batch = build_tensors(((row(0, 0, 1, 3, advantage=1.0, weight=1 / 3),),), {0: (answer,)})
    logprobs = torch.tensor([case["input"]["learner"]], requires_grad=True)
    loss, tally = loss_of(PPO, batch, logprobs, torch.zeros(1, 3))
    loss.backward()
    assert tally.total("mismatch_ratio") == pytest.approx(sum(case["expected"]["ratios"]))
    assert tally.total("mismatch_ratio_squared") == pytest.approx(3)
    assert tally.largest("mismatch_ratio") == pytest.approx(1)
    assert tally.total("mismatch_missing") == 1
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.full((1, 3), -1 / 3))  # that token learns as well


@pytest.mark.parametrize("proximal", PROXIMAL)
def test_a_missing_behaviour_logprob_has_no_mismatch_to_correct(proximal: str) -> None:
    """Also in a later update, when the policy has moved from where it was."""
    unknown = answers(MIXED, [[math.nan] * 3, [math.nan] * 2])
    logprobs, entropy = tensors()
    before = torch.tensor(LOGPROBS) - 0.1 if proximal == "recompute" else None
    objective = replace(PPO, proximal=proximal, correction=corrections.untruncated)
    _, tally = loss_of(objective, unknown, logprobs, entropy, proximal_logprobs=before)
    assert tally.total("correction") == 5.0
    assert tally.total("mismatch_ratio") == 5.0
    assert tally.total("mismatch_missing") == 5.0
    assert tally.total("ppo_kl") == pytest.approx(-0.5 if proximal == "recompute" else 0.0)


def test_the_importance_weight_completes_the_ratio_to_a_recomputed_policy(batch: MicroBatchTensors) -> None:
    logprobs, entropy = tensors()
    corrected = Objective(
        losses.ppo_clip, proximal="recompute", correction=corrections.token_tis, correction_options={"cap": 1.1}
    )
    loss, tally = loss_of(corrected, batch, logprobs, entropy, proximal_logprobs=torch.tensor(LOGPROBS))
    expected = 0.0
    for i, (advantage, count) in enumerate([(1.0, 3), (-2.0, 2)]):
        for t in range(count):
            expected -= 0.2 * advantage * min(math.exp(LOGPROBS[i][t] - BEHAVIOUR[i][t]), 1.1)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert tally.total("ppo_kl") == 0.0
    assert tally.total("mismatch_k3") > 0  # the engine's mismatch is seen all the same
    assert loss_of(corrected, batch, logprobs, entropy)[0] == loss, "before any update this pass is the proximal one"


def test_a_proximal_policy_lies_between_behaviour_and_current_by_versions() -> None:
    """Two versions old: two thirds of the way; one: half; written by the version that learns: not at all."""
    logprobs, entropy = tensors()
    seen: list[torch.Tensor] = []

    def loss(logprobs: Any, old: torch.Tensor, advantages: Any, mask: torch.Tensor) -> losses.LossTerms:
        seen.append(old)
        return losses.reinforce(logprobs, old, advantages, mask)

    _, tally = loss_of(Objective(loss, proximal="interpolate"), answers(MIXED), logprobs, entropy)
    way = torch.tensor([[2 / 3, 1 / 2, 0], [1 / 2, 1 / 2, 0]])
    behaviour = torch.tensor(BEHAVIOUR)
    expected = behaviour + way * (torch.tensor(LOGPROBS) - behaviour)
    kept = answers().response_mask
    torch.testing.assert_close(seen[0][kept], expected[kept])
    assert not seen[0].requires_grad
    assert tally.sums["ppo_kl"] == pytest.approx((0.1, -0.25 - 0.15, -0.1 / 3), abs=1e-6)


def test_interpolated_and_recomputed_are_one_while_the_policy_has_not_moved() -> None:
    entropy = tensors()[1]
    results = []
    for proximal in ("interpolate", "recompute"):
        logprobs = torch.tensor(BEHAVIOUR, requires_grad=True)
        objective = replace(PPO, proximal=proximal, correction=corrections.token_tis)
        loss, tally = loss_of(objective, answers(MIXED), logprobs, entropy)
        loss.backward()
        results.append((loss, logprobs.grad, tally))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def refused(loss: str, correction: str, proximal: str) -> bool:
    """What a configuration may not combine; see orchestrator.algorithm."""
    return proximal not in losses.FIXED_PROXIMAL.get(loss, PROXIMAL) or (
        proximal == "behaviour" and correction not in corrections.MASKS
    )


@pytest.mark.parametrize("loss", losses.__all__)
@pytest.mark.parametrize("correction", corrections.__all__)
def test_every_loss_goes_with_every_correction(loss: str, correction: str) -> None:
    """Composed, they are what they are on their own, with the policies that each is to compare."""
    method, weigh = getattr(losses, loss), getattr(corrections, correction)
    behaviour, recomputed = torch.tensor(BEHAVIOUR), torch.tensor(LOGPROBS) + 0.2
    for proximal in PROXIMAL:
        if refused(loss, correction, proximal):
            continue
        for versions in (FRESH, MIXED):
            batch = answers(versions)
            logprobs, entropy = tensors()
            objective = Objective(method, proximal=proximal, correction=weigh)
            given = recomputed if proximal == "recompute" else None
            actual, tally = loss_of(objective, batch, logprobs, entropy, proximal_logprobs=given)
            actual.backward()

            alone, mask = torch.tensor(LOGPROBS, requires_grad=True), batch.response_mask
            stale = VERSION - batch.versions
            between = behaviour + stale / (stale + 1) * (alone.detach() - behaviour)
            old = {"behaviour": behaviour, "recompute": recomputed, "interpolate": between}[proximal]
            advantages = batch.advantages.expand(2, 3)
            data = {"advantages": advantages} if correction == "negative_sequence_mask" else {}
            compared = alone.detach() if proximal == "behaviour" else old
            weights = weigh(compared, behaviour, mask, **data)
            expected = (0.2 * weights * method(alone, old, advantages, mask).token_loss).sum()
            expected.backward()
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(logprobs.grad, alone.grad)
            assert tally.total("masked") == int((weights[mask] == 0).sum())
            assert tally.total("correction") == pytest.approx(float(weights[mask].sum()))
            assert all(math.isfinite(value) for values in tally.sums.values() for value in values)


@pytest.mark.parametrize("proximal", PROXIMAL)
@pytest.mark.parametrize("estimator", kl.__all__)
def test_every_kl_estimator_goes_with_every_proximal_policy(estimator: str, proximal: str) -> None:
    """The one that weighs with a ratio takes it against the policy that wrote the tokens, whatever the loss does."""
    logprobs, entropy = tensors()
    ref = torch.tensor(LOGPROBS) - 0.5
    objective = replace(PPO, proximal=proximal, kl=getattr(kl, estimator), kl_coefficient=1.0)
    loss, tally = loss_of(objective, answers(MIXED), logprobs, entropy, ref_logprobs=ref)
    without, _ = loss_of(replace(objective, kl=None), answers(MIXED), logprobs, entropy)
    mask = answers().response_mask
    d = torch.full((2, 3), 0.5)
    ratio = (torch.tensor(LOGPROBS) - torch.tensor(BEHAVIOUR)).exp()
    k3 = (-d).exp() - 1 + d
    expected = {"k1": d, "k2": d**2 / 2, "k3": k3, "k3_unbiased": ratio * k3}[estimator][mask].sum()
    torch.testing.assert_close(loss - without, 0.2 * expected)
    assert tally.total("kl_ref") == pytest.approx(float(expected), rel=1e-5)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_counted_ratios_cannot_overflow(batch: MicroBatchTensors) -> None:
    _, entropy = tensors()
    _, tally = loss_of(PPO, batch, torch.full((2, 3), 1000.0), entropy)
    assert tally.largest("mismatch_ratio") == pytest.approx(math.exp(losses.MAX_LOG_RATIO))
    assert all(math.isfinite(value) for values in tally.sums.values() for value in values)


def test_tallies_add_up_over_any_split() -> None:
    rows, payloads = batch_of([3, 2], seed=6)
    flat = [r for group in rows for r in group]

    def count(*parts: list[Row]) -> Tally:
        total = Tally()
        for part in parts:
            batch = build_tensors(tuple((r,) for r in part), payloads)
            logprobs = torch.full(batch.response_mask.shape, -5.5)
            total.merge(loss_of(PPO, batch, logprobs, logprobs.abs())[1])
        return total

    whole, split = count(flat), count(flat[:1], flat[1:4], flat[4:])
    assert whole.sums.keys() == split.sums.keys()
    for name, values in whole.sums.items():
        assert split.sums[name] == pytest.approx(values, rel=1e-5)
    assert whole.maxima == split.maxima
