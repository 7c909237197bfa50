"""What the learner should compute, written out plainly: no plans, no packing, no chunks.

One answer at a time goes through the Hugging Face model as it is, prompt and answer, and each sampled token adds its term of
PPO's clipped objective, weighted by its correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from learner_data import VERSION, Payloads

from learner.batch import Row
from learner.policy import Policy, PolicySettings

Gradients = dict[str, torch.Tensor]
# From the answer's log(proximal / behaviour), token by token, and its advantage to the weights of its tokens.
Correction = Callable[[list[float], float], list[float]]


def make_policy(path: str, **changes: Any) -> Policy:
    policy = Policy(PolicySettings(path, "float32", **changes))
    if policy.is_lora:
        # A fresh adapter's B is 0 and gives A no gradient.
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def take_gradients(policy: Policy) -> Gradients:
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in policy.named_parameters()
        if p.requires_grad
    }
    policy.zero_grad(set_to_none=True)
    return gradients


def answer_distributions(policy: Policy, token_ids: Any, temperature: float) -> torch.Tensor:
    """Log-distributions of tokens 1… of one text, [T-1, V], by the model as it is."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)[None]
    logits = policy.model(input_ids=ids).logits[0, :-1]
    return torch.log_softmax(logits / temperature, dim=-1)


@torch.no_grad()
def frozen_distributions(policy: Policy, token_ids: Any, temperature: float) -> torch.Tensor:
    return answer_distributions(policy, token_ids, temperature)


def reference_gradients(
    policy: Policy,
    rows: Sequence[Row],
    payloads: Payloads,
    *,
    temperature: float,
    proximal: Policy | None = None,
    interpolate: bool = False,
    correction: Correction = lambda log_ratios, advantage: [1.0] * len(log_ratios),
    reference: Policy | None = None,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
) -> tuple[float, Gradients]:
    """Loss and gradients. The ratio is against `proximal`, or a policy between behaviour and current, or behaviour."""
    total = 0.0
    for r in rows:
        answer = payloads[r.payload][r.position]
        distributions = answer_distributions(policy, answer.token_ids, temperature)
        frozen = frozen_distributions(policy if proximal is None else proximal, answer.token_ids, temperature)
        loss = torch.zeros(())
        sampled = [t for t in range(1, len(answer.token_ids)) if answer.response_mask[t]]
        old, log_ratios = [], []
        for t in sampled:
            own, behaviour = float(frozen[t - 1, answer.token_ids[t]]), float(answer.behaviour_logprobs[t])
            behaviour = own if math.isnan(behaviour) else behaviour
            stale = VERSION - int(answer.token_versions[t])
            between = behaviour + stale / (stale + 1) * (own - behaviour)
            old.append(own if proximal is not None else between if interpolate else behaviour)
            log_ratios.append(old[-1] - behaviour)
        weights = correction(log_ratios, r.advantage)
        for t, old_logprob, weight in zip(sampled, old, weights, strict=True):
            logprob = distributions[t - 1, answer.token_ids[t]]
            ratio = torch.exp(logprob - old_logprob)
            surrogate = torch.minimum(ratio * r.advantage, ratio.clamp(0.8, 1.28) * r.advantage)
            entropy = -(distributions[t - 1].exp() * distributions[t - 1]).sum()
            loss = loss - r.token_weight * (weight * surrogate + entropy_coefficient * entropy)
            if reference is not None:
                ref = frozen_distributions(reference, answer.token_ids, temperature)[t - 1, answer.token_ids[t]]
                k3 = torch.exp(ref - logprob) - (ref - logprob) - 1
                loss = loss + r.token_weight * kl_coefficient * k3
        if sampled:
            loss.backward()
        total += float(loss.detach())
    return total, take_gradients(policy)
