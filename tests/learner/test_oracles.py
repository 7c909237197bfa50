"""Every entry of tests/data/golden_losses.json against the function it describes, in float64 and float32.

Each entry is a test of its own; a check must use every expected value of its entry, gradients included (taken
by autograd). Left out: `moe/rollout_routing_replay`, whose gate belongs to a model, not to a loss.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner import advantages, aggregation, corrections, entropy, kl, losses, mismatch, preference, selection
from learner.tally import Tally
from orchestrator import estimates
from orchestrator.staleness import StalenessPolicy
from reward_workers import shaping

DATA = Path(__file__).parent.parent / "data" / "golden_losses.json"
ENTRIES: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in json.loads(DATA.read_text())["entries"]}
LEFT_OUT = {"moe/rollout_routing_replay"}
DDOF = {0: "population", 1: "sample"}
AGGREGATION_OPTIONS = {"seq_sum_const": {"max_tokens": 8}}


class Case:
    """One entry in one dtype: its inputs as tensors, and which of its expected values were checked."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.inputs: Mapping[str, Any] = ENTRIES[name]["inputs"]
        self.expected: Mapping[str, Any] = ENTRIES[name]["expected"]
        self.unchecked = set(self.expected)
        exact = 1e-9 if "gspo" in name else 1e-12
        self.tolerance = exact if dtype == torch.float64 else 1e-5

    def tensor(self, key: str) -> Tensor:
        return torch.tensor(self.inputs[key], dtype=self.dtype)

    def variable(self, key: str) -> Tensor:
        return self.tensor(key).requires_grad_()

    def check(self, key: str, actual: Tensor | float | None) -> None:
        self.unchecked.discard(key)
        actual = torch.as_tensor(actual, dtype=None if isinstance(actual, Tensor) else self.dtype).detach()
        expected = torch.tensor(self.expected[key], dtype=torch.float64)
        assert actual.dtype == self.dtype or not actual.dtype.is_floating_point
        torch.testing.assert_close(actual.double(), expected, rtol=self.tolerance, atol=self.tolerance)


Check = Callable[[Case], None]
CHECKS: dict[str, Check] = {}


def oracle(*patterns: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(patterns, check))
        return check

    return register


def check_of(name: str) -> Check:
    found = [check for pattern, check in CHECKS.items() if fnmatch.fnmatchcase(name, pattern)]
    assert len(found) == 1, f"{name} has {len(found)} checks"
    return found[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", sorted(set(ENTRIES) - LEFT_OUT))
def test_oracle(name: str, dtype: torch.dtype) -> None:
    case = Case(name, dtype)
    check_of(name)(case)
    assert not case.unchecked, f"expected values that nothing was compared with: {sorted(case.unchecked)}"


def test_only_the_router_is_left_out() -> None:
    assert len(ENTRIES) == 129
    assert LEFT_OUT.issubset(ENTRIES)


# Advantages


def grouped(case: Case, key: str = "rewards") -> tuple[Tensor, Tensor]:
    """[P, G] -> rewards [N] and group numbers [N]."""
    table = case.tensor(key)
    numbers = torch.arange(table.shape[0])[:, None].expand_as(table)
    return table.flatten(), numbers.flatten()


@oracle("adv/grpo/*")
def _(case: Case) -> None:
    rewards, groups = grouped(case)
    result = advantages.grpo(rewards, groups, std=DDOF[case.inputs["ddof"]], eps=case.inputs["eps"])
    case.check("advantages", result.view(4, 4))
    assert (result.view(4, 4)[2] == 0).all()


@oracle("adv/dr_grpo")
def _(case: Case) -> None:
    case.check("advantages", advantages.dr_grpo(*grouped(case)).view(4, 4))


@oracle("adv/rloo")
def _(case: Case) -> None:
    result = advantages.rloo(*grouped(case))
    case.check("advantages", result.view(4, 4))
    centred = advantages.dr_grpo(*grouped(case))
    case.check("equals_scaled_dr_grpo_factor", (result.square().sum() / centred.square().sum()).sqrt())


@oracle("adv/lite_ppo_batch_std_raw/*")
def _(case: Case) -> None:
    options: dict[str, Any] = {"std": DDOF[case.inputs["ddof"]], "eps": case.inputs["eps"]}
    case.check("advantages", advantages.lite_ppo(*grouped(case), **options).view(4, 4))


@oracle("adv/reinforce_pp_baseline_scalar/*")
def _(case: Case) -> None:
    options: dict[str, Any] = {"std": DDOF[case.inputs["ddof"]], "eps": case.inputs["eps"]}
    case.check("advantages", advantages.reinforce_pp_baseline(*grouped(case), **options).view(4, 4))


@oracle("adv/maxrl")
def _(case: Case) -> None:
    case.check("advantages", advantages.maxrl(*grouped(case)).view(4, 4))


@oracle("adv/opo")
def _(case: Case) -> None:
    rewards, groups = grouped(case)
    result = advantages.opo(rewards, groups, lengths=case.tensor("lengths").flatten())
    case.check("advantages", result.view(4, 4))
    case.check("baseline", torch.where(result != 0, rewards - result, rewards).view(4, 4)[:, 0])


@oracle("adv/gdpo")
def _(case: Case) -> None:
    components = case.tensor("rewards").flatten(1).T
    groups = torch.arange(4).repeat_interleave(4)
    options: dict[str, Any] = {"std": DDOF[case.inputs["ddof"]], "eps": case.inputs["eps"]}
    weights = case.tensor("weights")
    result = advantages.gdpo(
        components.sum(1), groups, component_rewards=components, component_weights=weights, **options
    )
    case.check("advantages", result.view(4, 4))
    per_reward = torch.stack([advantages.grpo(column, groups, **options) for column in components.T])
    case.check("per_reward", per_reward.view(2, 4, 4))
    case.check("sum", (weights[:, None] * per_reward).sum(0).view(4, 4))


@oracle("adv/reinforce_pp/*", "kl/reward_shaping")
def _(case: Case) -> None:
    mask, score = case.tensor("mask"), case.tensor("score")
    penalty = kl.reward_penalty(case.tensor("lp"), case.tensor("ref"), mask, coefficient=case.inputs["beta"])
    per_token = penalty + advantages.at_last_token(score, mask)
    case.check("token_rewards", per_token)
    if "gamma" not in case.inputs:
        return
    gamma, std = case.inputs["gamma"], DDOF[case.inputs["ddof"]]
    result = advantages.reinforce_pp(
        score, torch.tensor([0, 1]), response_mask=mask, token_rewards=penalty, gamma=gamma, std=std
    )
    case.check("advantages", result)
    # Without a value model and with lam = 1 the generalised advantages are the returns.
    returns, _ = advantages.gae_and_returns(per_token, torch.zeros_like(per_token), mask, gamma=gamma, lam=1.0)
    case.check("returns", returns)


@oracle("gae/*")
def _(case: Case) -> None:
    rewards, values = case.tensor("rewards")[None], case.tensor("values")[None]
    mask = case.tensor("mask")[None] if "mask" in case.inputs else torch.ones_like(rewards)
    options: dict[str, Any] = {"gamma": case.inputs["gamma"], "lam": case.inputs["lam"]}
    result, returns = advantages.gae_and_returns(rewards, values, mask, **options)
    case.check("advantages", result[0])
    case.check("returns", returns[0])
    data: dict[str, Any] = {"values": values, "response_mask": mask, "token_rewards": rewards}
    zero = rewards.new_zeros(1)
    selectable = advantages.gae(zero, torch.tensor([0]), **data, **options, whitened=False)
    case.check("advantages", selectable[0])


@oracle("whiten/masked")
def _(case: Case) -> None:
    case.check("ddof0", advantages.whiten(case.tensor("x"), case.tensor("mask"), std="population"))
    case.check("ddof1", advantages.whiten(case.tensor("x"), case.tensor("mask"), std="sample"))


# Policy losses


def weights_of(case: Case, mask: Tensor, name: str | None = None) -> Tensor:
    name = name or case.inputs.get("agg", {}).get("mode") or case.name.rsplit("/", 1)[1]
    method = getattr(aggregation, name)
    return method(mask, torch.tensor([0, 0, 1, 1]), **AGGREGATION_OPTIONS.get(name, {}))


def per_token(case: Case) -> Tensor:
    """Advantages as the losses take them, [B, T], with a value that must not be read where the mask is 0."""
    if "token_advantages" in case.inputs:
        return case.tensor("token_advantages")
    rows = case.tensor("advantages")[:, None].expand_as(case.tensor("mask"))
    return rows.masked_fill(case.tensor("mask") == 0, torch.nan)


def check_loss(case: Case, logprobs: Tensor, token_loss: Tensor, weights: Tensor) -> None:
    loss = (weights * token_loss).sum()
    loss.backward()
    case.check("loss", loss)
    case.check("grad_lp", logprobs.grad)
    if "token_loss" in case.expected:
        case.check("token_loss", token_loss)


def terms_of(case: Case, method: str, logprobs: Tensor, old: str = "old", **options: Any) -> losses.LossTerms:
    terms = getattr(losses, method)(logprobs, case.tensor(old), per_token(case), case.tensor("mask"), **options)
    assert (terms.level == "sequence") == (method in losses.FIXED_AGGREGATION)
    return terms


def run_loss(case: Case, method: str, aggregate: str | None = None, **options: Any) -> losses.LossTerms:
    logprobs = case.variable("lp")
    terms = terms_of(case, method, logprobs, **options)
    check_loss(case, logprobs, terms.token_loss, weights_of(case, case.tensor("mask"), aggregate))
    return terms


def clip_options(case: Case) -> dict[str, Any]:
    return {"clip_low": case.inputs["eps_low"], "clip_high": case.inputs["eps_high"]}


@oracle("loss/ppo_grpo_clip0.2/*", "loss/dapo_clip_higher/*", "loss/dual_clip_c3/*")
def _(case: Case) -> None:
    run_loss(case, "ppo_clip", **clip_options(case), dual_clip=case.inputs["dual_clip_c"])
    everywhere = torch.ones_like(case.tensor("mask"))
    case.check("ratio", corrections.untruncated(case.tensor("lp"), case.tensor("old"), everywhere))
    # The entry's clip fraction is that of the ordinary clip, without the dual one.
    clipped = terms_of(case, "ppo_clip", case.tensor("lp"), **clip_options(case)).clipped
    case.check("clipfrac", entropy.masked_mean(clipped.to(case.dtype), case.tensor("mask")))


@oracle("loss/dapo_overlong_filter/*")
def _(case: Case) -> None:
    run_loss(case, "ppo_clip", **clip_options(case))


@oracle("invariance/token_mean_microbatch")
def _(case: Case) -> None:
    mask = case.tensor("mask")
    token_loss = terms_of(case, "ppo_clip", case.tensor("lp"), **clip_options(case)).token_loss
    weighted = weights_of(case, mask, "token_mean") * token_loss
    case.check("loss", weighted.sum())
    splits = [slice(*split) for split in case.inputs["splits"]]
    case.check("parts", torch.stack([weighted[split].sum() for split in splits]))
    means = [entropy.masked_mean(token_loss[split], mask[split]) for split in splits]
    case.check("wrong_mean_of_means", torch.stack(means).mean())


@oracle("loss/intellect2_two_sided/*")
def _(case: Case) -> None:
    run_loss(case, "two_sided_clip", **clip_options(case), delta=case.inputs["delta"])


@oracle("loss/grpo_k3_beta0.04/*", "loss/dsv32_unbiased_kl/*")
def _(case: Case) -> None:
    logprobs, mask = case.variable("lp"), case.tensor("mask")
    terms = terms_of(case, "ppo_clip", logprobs, **clip_options(case))
    if "unbiased" in case.name:
        divergence = kl.k3_unbiased(logprobs, case.tensor("ref"), old_logprobs=case.tensor("old"))
    else:
        divergence = kl.k3(logprobs, case.tensor("ref"))
    token_loss = terms.token_loss + case.inputs["beta"] * torch.where(mask > 0, divergence, 0.0)
    check_loss(case, logprobs, token_loss, weights_of(case, mask))


@oracle("loss/cispo_*")
def _(case: Case) -> None:
    bounds: dict[str, Any] = {"ratio_min": case.inputs["ratio_min"], "ratio_max": case.inputs["ratio_max"]}
    terms = run_loss(case, "cispo", **bounds)
    assert bool(terms.clipped.any()) == (bounds["ratio_max"] < 5)


@oracle("loss/sapo/*")
def _(case: Case) -> None:
    run_loss(case, "sapo", tau_pos=case.inputs["tau_pos"], tau_neg=case.inputs["tau_neg"])


@oracle("loss/gspo")
def _(case: Case) -> None:
    for method in ("gspo", "gspo_token"):  # equal in value and gradient for one advantage a row
        terms = run_loss(case, method, "seq_mean_token_mean", **clip_options(case))
        case.check("clipped_seq", terms.clipped.any(1))
    lp, old, mask = (case.tensor(key) for key in ("lp", "old", "mask"))
    case.check("seq_ratio", corrections.geometric_ratio(lp, old, mask))


@oracle("loss/gspo_token_per_token_adv")
def _(case: Case) -> None:
    run_loss(case, "gspo_token", "seq_mean_token_mean", **clip_options(case))


@oracle("loss/luspo")
def _(case: Case) -> None:
    run_loss(case, "luspo", "seq_mean_token_mean", **clip_options(case))


@oracle("loss/gmpo")
def _(case: Case) -> None:
    terms = run_loss(case, "gmpo", "seq_mean_token_mean", log_clip=case.inputs["log_eps"])
    case.check("geo_ratio", (terms.token_loss / -per_token(case))[:, 0])


@oracle("loss/vespo")
def _(case: Case) -> None:
    terms = run_loss(case, "vespo", "token_mean")
    lp, old, mask = (case.tensor(key) for key in ("lp", "old", "mask"))
    case.check("seq_weight", corrections.sequence_ratio(lp, old, mask))
    case.check("phi", (terms.token_loss / -(per_token(case) * lp))[:, 0])


@oracle("loss/dppo_binary_*")
def _(case: Case) -> None:
    method = "dppo_" + case.name.split("/")[1].rsplit("_", 1)[1]
    options: dict[str, Any] = {
        "threshold_low": case.inputs["threshold_low"],
        "threshold_high": case.inputs["threshold_high"],
    }
    terms = run_loss(case, method, **options, ratio_max=case.inputs["trunc"])
    mask = case.tensor("mask").bool()
    case.check("valid_mask", mask & ~terms.clipped)
    case.check("binary_kl", torch.where(mask, losses.binary_kl(case.tensor("lp"), case.tensor("old")), 0.0))


@oracle("value_loss/clipped")
def _(case: Case) -> None:
    values, mask = case.variable("v"), case.tensor("mask")
    terms = losses.value_clip(values, case.tensor("v_old"), case.tensor("returns"), mask, clip=case.inputs["eps"])
    loss = (aggregation.token_mean(mask, torch.tensor([0, 1])) * terms.token_loss).sum()
    loss.backward()
    case.check("loss", loss)
    case.check("grad_v", values.grad)
    case.check("clipfrac", entropy.masked_mean(terms.clipped.to(case.dtype), mask))


# Off-policy corrections


def policies(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.tensor("old"), case.tensor("roll"), case.tensor("mask")


@oracle("mismatch/token_ratio")
def _(case: Case) -> None:
    case.check("rho", corrections.untruncated(*policies(case)))
    case.check("rho_seq", corrections.sequence_ratio(*policies(case)))
    case.check("rho_geo", corrections.geometric_ratio(*policies(case)))


@oracle("mismatch/token_tis_C2")
def _(case: Case) -> None:
    case.check("w", corrections.token_tis(*policies(case), cap=case.inputs["C"]))


@oracle("mismatch/icepop_0.5_5")
def _(case: Case) -> None:
    bounds: dict[str, Any] = {"low": case.inputs["alpha"], "high": case.inputs["beta"]}
    case.check("w", corrections.icepop(*policies(case), **bounds))


@oracle("mismatch/token_mask_0.5_2")
def _(case: Case) -> None:
    bounds: dict[str, Any] = {"low": case.inputs["lo"], "high": case.inputs["hi"]}
    case.check("w", corrections.token_mask(*policies(case), **bounds))


@oracle("mismatch/seq_tis_C2", "mismatch/seq_mis_C2")
def _(case: Case) -> None:
    method = corrections.sequence_tis if "tis" in case.name else corrections.sequence_mis
    weights = method(*policies(case), cap=case.inputs["C"])
    case.check("w", weights)
    case.check("w_seq", weights[:, 0])


@oracle("mismatch/seq_mask_0.5_2")
def _(case: Case) -> None:
    bounds: dict[str, Any] = {"low": case.inputs["lo"], "high": case.inputs["hi"]}
    case.check("w_seq", corrections.sequence_mask(*policies(case), **bounds)[:, 0])


@oracle("mismatch/geo_rs")
def _(case: Case) -> None:
    bounds: dict[str, Any] = {"low": case.inputs["lo"], "high": case.inputs["hi"]}
    case.check("keep", corrections.geometric_mask(*policies(case), **bounds)[:, 0])


@oracle("mismatch/seq_mean_k2_k3")
def _(case: Case) -> None:
    case.check("k2", corrections.sequence_k2(*policies(case)))
    k3 = corrections.sequence_k3(*policies(case))
    case.check("k3", k3)
    kept = corrections.sequence_k3_mask(*policies(case), max_k3=0.01)[:, 0]
    assert kept.tolist() == (k3 <= 0.01).tolist() == [0, 1, 1, 0]


@oracle("mismatch/batch_normalised_tis")
def _(case: Case) -> None:
    weights = corrections.token_tis(*policies(case), cap=case.inputs["C"])
    case.check("w", corrections.batch_normalised(weights, case.tensor("mask")))


@oracle("mismatch/ess")
def _(case: Case) -> None:
    mask = case.tensor("mask")
    size = corrections.effective_sample_size(corrections.token_tis(*policies(case), cap=case.inputs["C"]), mask)
    case.check("ess", size)
    case.check("ess_norm", size / mask.sum())


def mismatch_metrics(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """As the live path computes them: quantities per token, summed in a tally, divided once."""
    kept = mask.bool()
    logprobs, behaviour_logprobs = logprobs[kept], behaviour_logprobs[kept]
    tally = Tally.of(
        torch.zeros(len(logprobs), dtype=torch.int64),
        stalenesses=1,
        sums=mismatch.sums(logprobs, behaviour_logprobs, behaviour_logprobs.isfinite()),
        maxima=mismatch.maxima(logprobs, behaviour_logprobs),
    )
    return mismatch.metrics(tally)


@oracle("mismatch/kl_metrics")
def _(case: Case) -> None:
    metrics = mismatch_metrics(*policies(case))
    case.check("k1", metrics["kl_k1"])
    case.check("k3", metrics["kl"])
    case.check("max_abs_logp_diff", metrics["logprob_gap_max"])
    case.check("max_abs_prob_diff", metrics["probability_gap_max"])


@oracle("metric/m2po_second_moment")
def _(case: Case) -> None:
    case.check("m2", mismatch_metrics(case.tensor("lp"), case.tensor("roll"), case.tensor("mask"))["m2"])


@oracle("loss/decoupled_ppo_*")
def _(case: Case) -> None:
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "token_tis_C2": ("token_tis", {"cap": 2.0}),
        "icepop_0.5_5": ("icepop", {"low": 0.5, "high": 5.0}),
        "seq_tis_C2": ("sequence_tis", {"cap": 2.0}),
        "seq_mis_C2": ("sequence_mis", {"cap": 2.0}),
        "raw_w": ("untruncated", {}),
    }
    name, options = methods[case.name.split("/")[1].removeprefix("decoupled_ppo_")]
    weights = getattr(corrections, name)(*policies(case), **options)
    if "weights" in case.inputs:
        torch.testing.assert_close(weights, case.tensor("weights"), rtol=case.tolerance, atol=case.tolerance)
    logprobs = case.variable("lp")
    terms = terms_of(case, "ppo_clip", logprobs, **clip_options(case))
    check_loss(case, logprobs, weights * terms.token_loss, weights_of(case, case.tensor("mask")))


@oracle("loss/bypass_ppo_vs_rollout/*")
def _(case: Case) -> None:
    run_loss(case, "ppo_clip", old="roll", **clip_options(case))


@oracle("loss/reinforce_token_tis_C2/*")
def _(case: Case) -> None:
    run_loss(case, "cispo", old="roll", ratio_max=case.inputs["C"])
    # The same, composed: a plain policy gradient times a frozen weight.
    logprobs, mask = case.variable("lp"), case.tensor("mask")
    weights = corrections.token_tis(logprobs, case.tensor("roll"), mask, cap=case.inputs["C"])
    terms = terms_of(case, "reinforce", logprobs, old="roll")
    check_loss(case, logprobs, weights * terms.token_loss, weights_of(case, mask))


@oracle("areal/prox_approx")
def _(case: Case) -> None:
    share = corrections.proximal_share(*(case.tensor(key) for key in ("v_behave", "v_prox", "v_theta")))
    case.check("alpha", share)
    lp, roll = case.variable("lp"), case.tensor("roll")
    case.check("loglinear", corrections.interpolate_loglinear(lp, roll, share))
    case.check("linear", corrections.interpolate_linear(lp, roll, share))
    assert not corrections.interpolate_loglinear(lp, roll, share).requires_grad


@oracle("mask/prime_ipo_prob_diff_*")
def _(case: Case) -> None:
    lp, roll, mask = (case.tensor(key) for key in ("lp", "roll", "mask"))
    case.check("keep", corrections.probability_gap_mask(lp, roll, mask, max_gap=case.inputs["eps"]))


@oracle("mask/dsv32_off_policy_seq")
def _(case: Case) -> None:
    current, behaviour, mask = case.tensor("lp"), case.tensor("old"), case.tensor("mask")
    weights = corrections.negative_sequence_mask(
        current, behaviour, mask, advantages=per_token(case), max_kl=case.inputs["delta"]
    )
    case.check("keep", weights[:, 0])
    case.check("mean_kl", corrections.geometric_ratio(behaviour, current, mask).log())


@oracle("areal/staleness_admission")
def _(case: Case) -> None:
    groups_per_batch, version = case.inputs["B"], case.inputs["version"]
    policy = StalenessPolicy(max_staleness=case.inputs["eta"], groups_per_batch=groups_per_batch)
    # Of the first N - 1 requests, version * B are trained.
    untrained = [number - 1 - version * groups_per_batch for number in case.inputs["N"]]
    case.check("allow", torch.tensor([policy.room(count) > 0 for count in untrained]))


# Divergences and entropy


@oracle("kl/token_estimators")
def _(case: Case) -> None:
    mask = case.tensor("mask")
    for name in ("k1", "k2", "k3"):
        lp = case.variable("lp")
        values = torch.where(mask > 0, getattr(kl, name)(lp, case.tensor("ref")), 0.0)
        values.sum().backward()
        case.check(name, values)
        case.check(f"grad_{name}", lp.grad)
        case.check(f"mean_{name}", entropy.masked_mean(values, mask))


def expected_gradient(case: Case, method: Callable[[Tensor, Tensor], Tensor], *, as_loss: bool) -> Tensor:
    """Exact expectation over actions of the gradient that sampling would give, with respect to the logits."""
    logits = case.variable("z")
    logprobs, ref = logits.log_softmax(0), case.tensor("z_ref").log_softmax(0)
    estimate = method(logprobs, ref)
    terms = estimate if as_loss else estimate.detach() * logprobs
    (logprobs.detach().exp() * terms).sum().backward()
    assert logits.grad is not None
    return logits.grad


@oracle("kl/expected_gradients_categorical")
def _(case: Case) -> None:
    logits, ref = case.variable("z"), case.tensor("z_ref").log_softmax(0)
    reverse = kl.categorical_kl(logits.log_softmax(0), ref)
    forward = kl.categorical_kl(ref, logits.log_softmax(0))
    case.check("reverse_kl_P_Q", reverse)
    case.check("forward_kl_Q_P", forward)
    case.check("grad_reverse_kl", torch.autograd.grad(reverse, logits, retain_graph=True)[0])
    case.check("grad_forward_kl", torch.autograd.grad(forward, logits)[0])
    p = logits.detach().softmax(0)
    for name in ("k1", "k2", "k3"):
        method = getattr(kl, name)
        case.check(f"E_{name}", (p * method(p.log(), ref)).sum())
        case.check(f"E_grad_{name}_as_loss", expected_gradient(case, method, as_loss=True))
    case.check("E_grad_k1_in_reward", expected_gradient(case, kl.k1, as_loss=False))
    case.check("E_grad_k3_in_reward", expected_gradient(case, kl.k3, as_loss=False))


@oracle("kl/adaptive_controller")
def _(case: Case) -> None:
    options: dict[str, Any] = {
        "target": case.inputs["target"],
        "samples": case.inputs["n"],
        "horizon": case.inputs["horizon"],
    }
    betas = [kl.adaptive_coefficient(case.inputs["beta"], value, **options) for value in case.inputs["kl"]]
    case.check("beta", torch.tensor(betas, dtype=case.dtype))


@oracle("entropy/categorical")
def _(case: Case) -> None:
    logits = case.variable("logits")
    values = entropy.categorical(logits)
    values.sum().backward()
    case.check("entropy", values)
    case.check("grad_logits", logits.grad)
    case.check("mean", entropy.masked_mean(values, torch.ones_like(values)))


@oracle("entropy/top20_mask")
def _(case: Case) -> None:
    values = case.tensor("entropy")
    keep = entropy.top_fraction_mask(values, torch.ones_like(values), fraction=case.inputs["top_fraction"])
    case.check("keep", keep)
    # The same as the ranks find it, of all their tokens.
    zeros = torch.zeros(values.numel())
    of_rank = selection.Tokens(values.flatten().float(), zeros, zeros, zeros)
    marked = selection.top_entropy(of_rank, lambda own: own, fraction=case.inputs["top_fraction"])
    case.check("keep", ~marked.tokens.view_as(values))
    case.check(
        "threshold",
        entropy.top_fraction_threshold(values, torch.ones_like(values), fraction=case.inputs["top_fraction"]),
    )


@oracle("entropy/bonus_loss")
def _(case: Case) -> None:
    values = case.tensor("entropy")
    bonus = case.inputs["alpha"] * entropy.masked_mean(values, torch.ones_like(values))
    case.check("loss", case.inputs["pg"] - bonus)


@oracle("entropy/skywork_adaptive_coef")
def _(case: Case) -> None:
    coefficient, seen = case.inputs["coef"], []
    for value in case.inputs["H_sequence"]:
        coefficient = entropy.adaptive_coefficient(
            coefficient, value, target=case.inputs["target"], step=case.inputs["delta"], maximum=1.0
        )
        seen.append(coefficient)
    case.check("coef", torch.tensor(seen, dtype=case.dtype))


@oracle("entropy/cov_per_token")
def _(case: Case) -> None:
    mask = case.tensor("mask").bool()
    values = entropy.covariance(case.tensor("lp"), per_token(case), mask)
    case.check("cov", values[mask])
    case.check("argsort_desc", (-values[mask]).argsort(stable=True))
    assert (values[~mask] == 0).all()


@oracle("distill/kl_forms")
def _(case: Case) -> None:
    teacher, student = case.tensor("teacher").log(), case.tensor("student").log()
    case.check("forward", kl.categorical_kl(teacher, student))
    case.check("reverse", kl.categorical_kl(student, teacher))
    case.check("jsd_0.5", kl.jensen_shannon(teacher, student, share=0.5))


@oracle("distill/opd_sampled_reverse_kl")
def _(case: Case) -> None:
    lp, teacher, mask = case.variable("lp"), case.tensor("teacher"), case.tensor("mask")
    result = kl.distillation_advantages(per_token(case), lp, teacher, mask, coefficient=case.inputs["lambda"])
    case.check("advantages", result)
    assert not result.requires_grad
    gap = torch.where(mask > 0, kl.k1(lp, teacher), 0.0)
    case.check("d", gap)
    case.check("mean_reverse_kl", entropy.masked_mean(gap, mask))


# Preferences and reward models


@oracle("rm/bradley_terry")
def _(case: Case) -> None:
    chosen, rejected = case.variable("chosen"), case.variable("rejected")
    pair_losses = preference.bradley_terry(chosen, rejected)
    pair_losses.mean().backward()
    case.check("losses", pair_losses)
    case.check("loss", pair_losses.mean())
    case.check("grad_chosen", chosen.grad)
    case.check("grad_rejected", rejected.grad)
    case.check("prob", (-pair_losses).exp())
    case.check("accuracy", (chosen > rejected).to(case.dtype).mean())


@oracle("rm/bt_margin")
def _(case: Case) -> None:
    pair_losses = preference.bradley_terry(case.tensor("chosen"), case.tensor("rejected"), margin=case.tensor("margin"))
    case.check("losses", pair_losses)
    case.check("loss", pair_losses.mean())


@oracle("rm/bt_centered")
def _(case: Case) -> None:
    pair_losses = preference.bradley_terry(case.tensor("chosen"), case.tensor("rejected"), centring=case.inputs["eta"])
    case.check("loss", pair_losses.mean())


@oracle("rm/instructgpt_K4")
def _(case: Case) -> None:
    scores = case.tensor("ranked_rewards_best_first")
    case.check("loss", preference.ranked_bradley_terry(scores))
    case.check("n_pairs", len(scores) * (len(scores) - 1) // 2)


def pair(case: Case) -> list[Tensor]:
    return [case.tensor(key) for key in ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")]


@oracle("dpo/sigmoid")
def _(case: Case) -> None:
    chosen, rejected = case.variable("policy_chosen"), case.variable("policy_rejected")
    ref_chosen, ref_rejected = case.tensor("ref_chosen"), case.tensor("ref_rejected")
    beta = case.inputs["beta"]
    pair_losses = preference.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=beta)
    pair_losses.mean().backward()
    case.check("losses", pair_losses)
    case.check("loss", pair_losses.mean())
    case.check("grad_policy_chosen", chosen.grad)
    case.check("grad_policy_rejected", rejected.grad)
    margin = preference.preference_margin(chosen, rejected, ref_chosen, ref_rejected)
    case.check("h", margin)
    case.check("accuracy", (margin > 0).to(case.dtype).mean())
    case.check("reward_chosen", beta * kl.k1(chosen, ref_chosen))
    case.check("reward_rejected", beta * kl.k1(rejected, ref_rejected))


@oracle("dpo/cdpo_label_smoothing")
def _(case: Case) -> None:
    options: dict[str, Any] = {"beta": case.inputs["beta"], "label_smoothing": case.inputs["e"]}
    case.check("losses", preference.dpo(*pair(case), **options))


@oracle("dpo/robust")
def _(case: Case) -> None:
    options: dict[str, Any] = {"beta": case.inputs["beta"], "label_smoothing": case.inputs["e"]}
    case.check("losses", preference.robust_dpo(*pair(case), **options))


@oracle("dpo/ipo")
def _(case: Case) -> None:
    case.check("losses", preference.ipo(*pair(case), beta=case.inputs["beta"]))


@oracle("dpo/hinge")
def _(case: Case) -> None:
    case.check("losses", preference.slic_hinge(*pair(case), beta=case.inputs["beta"]))


@oracle("dpo/length_normalised", "dpo/simpo")
def _(case: Case) -> None:
    lengths: dict[str, Any] = {
        "chosen_lengths": case.tensor("len_chosen"),
        "rejected_lengths": case.tensor("len_rejected"),
    }
    if case.name == "dpo/simpo":
        options = {"beta": case.inputs["beta"], "gamma": case.inputs["gamma"]}
        chosen, rejected, _, _ = pair(case)
        case.check("losses", preference.simpo(chosen, rejected, **lengths, **options))
    else:
        case.check("losses", preference.length_normalised_dpo(*pair(case), **lengths, beta=case.inputs["beta"]))


# Rewards, evaluation, monitoring: plain numbers


@oracle("reward/soft_overlong_*")
def _(case: Case) -> None:
    options: dict[str, Any] = {"max_tokens": case.inputs["L_max"], "cache_tokens": case.inputs["L_cache"]}
    penalties = [shaping.soft_overlong_penalty(length, **options) for length in case.inputs["lengths"]]
    case.check("penalty", torch.tensor(penalties, dtype=case.dtype))


@oracle("reward/cosine_length")
def _(case: Case) -> None:
    for key in ("correct", "wrong"):
        rewards = [
            shaping.cosine_length(length, correct=key == "correct", max_tokens=case.inputs["L_max"])
            for length in case.inputs["lengths"]
        ]
        case.check(key, torch.tensor(rewards, dtype=case.dtype))


@oracle("reward/kimi_k15_length")
def _(case: Case) -> None:
    rewards = shaping.kimi_length(case.inputs["lengths"], case.inputs["correct"])
    case.check("length_reward", torch.tensor(rewards, dtype=case.dtype))


@oracle("filter/dapo_dynamic_sampling")
def _(case: Case) -> None:
    keep = [estimates.rewards_differ(group) for group in case.inputs["correct"]]
    case.check("keep", torch.tensor(keep))
    case.check("frac_zero_std", 1 - sum(keep) / len(keep))


@oracle("filter/scalerl_no_positive_resampling")
def _(case: Case) -> None:
    threshold = case.inputs["threshold"]
    keep = [estimates.worth_resampling(rate, threshold=threshold) for rate in case.inputs["pass_rate"]]
    case.check("keep", torch.tensor(keep))


@oracle("verifier/confusion")
def _(case: Case) -> None:
    confusion = estimates.Confusion.of(case.inputs["truth"], case.inputs["verdict"])
    case.check("recall", confusion.recall)
    case.check("precision", confusion.precision)
    case.check("fnr", confusion.false_negative_rate)
    case.check("fpr", confusion.false_positive_rate)


@oracle("hacking/proxy_gold_gap")
def _(case: Case) -> None:
    onset = estimates.divergence_onset(case.inputs["proxy"], case.inputs["gold"])
    assert onset is not None
    case.check("onset_index", onset)
    case.check("gap", case.tensor("proxy") - case.tensor("gold"))


@oracle("eval/pass_at_k")
def _(case: Case) -> None:
    table = [
        [estimates.pass_at_k(case.inputs["n"], correct, k) for k in case.inputs["k"]] for correct in case.inputs["c"]
    ]
    case.check("pass_at_k", torch.tensor(table, dtype=case.dtype))


@oracle("eval/scalerl_sigmoid")
def _(case: Case) -> None:
    names = {"start": "R0", "asymptote": "A", "exponent": "B", "midpoint": "Cmid"}
    options: dict[str, Any] = {name: case.inputs[key] for name, key in names.items()}
    rates = [estimates.scaling_curve(compute, **options) for compute in case.inputs["C"]]
    case.check("R", torch.tensor(rates, dtype=case.dtype))


@oracle("lora/tinker_lr_rule")
def _(case: Case) -> None:
    for family in ("qwen", "llama"):
        rates = [
            estimates.suggested_learning_rate(hidden, family=family, lora=True) for hidden in case.inputs["hidden"]
        ]
        case.check(f"{family}_lora", torch.tensor(rates, dtype=case.dtype))
    full, lora = (estimates.suggested_learning_rate(4096, family="qwen", lora=choice) for choice in (False, True))
    case.check("full_ft_factor", full / lora)


@oracle("numerics/fp32_vs_bf16_lm_head")
def _(case: Case) -> None:
    """What the learner's logprobs lose when the head's logits are rounded to bfloat16."""
    tokens = torch.tensor(case.inputs["tokens"])[:, None]
    logits = case.tensor("logits")
    rounded = logits.bfloat16().to(case.dtype)
    case.check("logits_bf16", rounded)
    case.check("lp_exact", logits.log_softmax(-1).gather(1, tokens)[:, 0])
    case.check("lp_bf16_logits", rounded.log_softmax(-1).gather(1, tokens)[:, 0])
