"""Noise on the policy that can be taken back exactly: the start-up canary's proof that weights arrive at the engines.

Master weights, which the optimizer keeps, are not touched. Under ZeRO every rank shifts the shards that it holds.
"""

from __future__ import annotations

import torch

from learner.policy import Policy


class Perturbation:
    """Made, every trainable parameter is shifted by noise of `scale` times its root mean square (at least 0.01)."""

    def __init__(self, policy: Policy, *, zero_stage: int, scale: float, seed: int) -> None:
        self._policy = policy
        self._zero_stage = zero_stage
        self._originals: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in self._local_values():
                self._originals.append(value.clone())
                size = max(float(value.float().pow(2).mean().sqrt()) if value.numel() else 0.0, 0.01)
                noise = torch.randn(value.shape, generator=generator) * (scale * size)
                value.add_(noise.to(value.device, value.dtype))
        self._drop_gathered()

    def undo(self) -> None:
        """Bring back the exact values."""
        for value, original in zip(self._local_values(), self._originals, strict=True):
            value.copy_(original)
        self._drop_gathered()

    def _local_values(self) -> list[torch.Tensor]:
        """What this rank holds of each trainable parameter: its shard under ZeRO-3, else all of it."""
        return [getattr(p, "ds_tensor", p.data) for p in self._policy.parameters() if p.requires_grad]

    def _drop_gathered(self) -> None:
        """ZeRO-3 keeps small parameters gathered: let go of those copies, so that the shards are gathered anew."""
        if self._zero_stage == 3:
            import deepspeed

            persistent = [p for p in self._policy.parameters() if getattr(p, "ds_persist", False)]
            with deepspeed.zero.GatheredParameters(persistent):
                pass
