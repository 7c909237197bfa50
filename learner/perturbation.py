"""Noise on the policy that can be taken back exactly: the start-up canary's proof that weights arrive at the engines.

Master weights, which the optimizer keeps, are not touched. Under ZeRO every rank shifts the shards that it holds.
"""

from __future__ import annotations

import torch

from learner.policy import Policy
from learner.shards import drop_gathered, local_values


class Perturbation:
    """Made, every trainable parameter is shifted by noise of `scale` times its root mean square (at least 0.01)."""

    def __init__(self, policy: Policy, *, zero_stage: int, scale: float, seed: int) -> None:
        self._policy = policy
        self._zero_stage = zero_stage
        self._originals: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in local_values(policy):
                self._originals.append(value.clone())
                size = max(float(value.float().pow(2).mean().sqrt()) if value.numel() else 0.0, 0.01)
                noise = torch.randn(value.shape, generator=generator) * (scale * size)
                value.add_(noise.to(value.device, value.dtype))
        drop_gathered(policy, zero_stage=zero_stage)

    def undo(self) -> None:
        """Bring back the exact values."""
        for value, original in zip(local_values(self._policy), self._originals, strict=True):
            value.copy_(original)
        drop_gathered(self._policy, zero_stage=self._zero_stage)
