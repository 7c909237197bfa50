"""The second and third proof that weights arrive: a canary at the start, and a probe at every version.

Both compare *changes* of logprobs on fixed texts, the engine's with the learner's, because two correct implementations
in bfloat16 differ by a constant noise but must move together. A checksum can't see an engine that keeps a packed copy
of an old tensor; this can.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

logger = logging.getLogger(__name__)

CANARY_CHANGE_NATS = 0.3  # mean |change| that the perturbation is to cause, far above any noise
# Enough where it grows no further: the logits of a small random model have a limit that layers below its head can't move.
CANARY_LEAST_CHANGE_NATS = 0.1
CANARY_GROWS = 1.1  # times the change of a perturbation a third as large
CANARY_ROUNDS = 6
CANARY_MAX_GAP = 0.35  # of the learner's mean change; an engine with an old head misses most of it
RELATIVE_GAP = 0.25  # of the learner's mean change, on top of the noise
NOISE_MARGIN = 4.0  # times the noise that the canary measured
NOISE_WITHOUT_CANARY_NATS = {"bfloat16": 0.25, "float32": 0.01}


class WeightsDiverged(RuntimeError):
    """An engine's logprobs do not follow the learner's: it does not serve the weights it acknowledged."""


@dataclass(frozen=True)
class ProbeReport:
    """Nats. `gap` is the largest of any engine: mean |engine's change - learner's change| per token."""

    gap: float
    learner_change: float


class Learner(Protocol):
    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]: ...
    async def perturb(self, scale: float, seed: int) -> None: ...
    async def restore(self) -> None: ...


class Engines(Protocol):
    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]: ...


class Probe:
    """Call `begin` once engines and learner hold the same weights, then `compare` after every publish."""

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        learner: Learner,
        engines: Engines,
        *,
        dtype: str,
        max_gap: float | None,
    ) -> None:
        self._sequences = sequences
        self._learner = learner
        self._engines = engines
        self._max_gap = NOISE_WITHOUT_CANARY_NATS[dtype] if max_gap is None else max_gap
        self._measured = max_gap is not None
        self._learner_base = np.zeros(0)
        self._difference = np.zeros(0)

    async def begin(self) -> None:
        """Take the present logprobs as the base of all later changes."""
        self._learner_base = np.concatenate(await self._learner.logprobs(self._sequences))
        engines = await self._engines.logprobs(self._sequences)
        if not engines:
            raise WeightsDiverged("no engine answered the probe texts: there is nothing to compare the learner with")
        # All engines serve the same weights, and a replaced one must be comparable too: one base for all.
        self._difference = np.mean([np.concatenate(values) for values in engines.values()], axis=0) - self._learner_base

    async def canary(self, publish: Callable[[], Awaitable[object]], seed: int) -> ProbeReport:
        """Perturb the learner, publish, see every engine move as the learner did; restore, publish, see it return.

        Raises WeightsDiverged naming the engine that did not. The noise found sets the limit of later probes.
        """
        scale, before = 0.1, 0.0
        for _ in range(CANARY_ROUNDS):
            await self._learner.perturb(scale, seed)
            change = np.concatenate(await self._learner.logprobs(self._sequences)) - self._learner_base
            moved_by = float(np.abs(change).mean())
            if moved_by >= CANARY_CHANGE_NATS or CANARY_LEAST_CHANGE_NATS <= moved_by < CANARY_GROWS * before:
                break
            await self._learner.restore()
            scale, before = scale * 3, moved_by
        else:
            raise WeightsDiverged(
                f"the canary could not move the learner's own logprobs by {CANARY_CHANGE_NATS} nats (last by {before:.3f}); is "
                "anything trainable?"
            )
        try:
            await publish()
            moved = await self._report()
        finally:
            await self._learner.restore()
        await publish()
        returned = await self._report()
        limit = CANARY_MAX_GAP * moved.learner_change
        if moved.gap > limit:
            raise WeightsDiverged(
                f"canary: all weights were perturbed, the learner's logprobs moved by {moved.learner_change:.3f} nats on "
                f"average, and an engine's by something else (gap {moved.gap:.3f}, limit {limit:.3f}): it does not compute "
                "with all the weights it received"
            )
        if returned.gap > limit:
            raise WeightsDiverged(
                f"canary: the weights were restored, but an engine's logprobs are off by {returned.gap:.3f} nats"
            )
        if not self._measured:
            self._max_gap = NOISE_MARGIN * moved.gap + 1e-3
        logger.info(
            "canary: learner moved %.3f nats, gap %.4f; restored, gap %.5f; probes may differ by %.4f",
            moved.learner_change,
            moved.gap,
            returned.gap,
            self._max_gap,
        )
        return moved

    async def compare(self, version: int) -> ProbeReport:
        """Raises WeightsDiverged when an engine's logprobs parted from the learner's at `version`."""
        report = await self._report()
        limit = self._max_gap + RELATIVE_GAP * report.learner_change
        if report.gap > limit:
            raise WeightsDiverged(
                f"version {version}: since the start the learner's logprobs on the probe texts moved by "
                f"{report.learner_change:.4f} nats on average, an engine's by something else (gap {report.gap:.4f}, limit "
                f"{limit:.4f}); it acknowledged the weights but does not compute with them"
            )
        return report

    async def _report(self) -> ProbeReport:
        texts = self._sequences
        of_learner, of_engines = await asyncio.gather(self._learner.logprobs(texts), self._engines.logprobs(texts))
        learner = np.concatenate(of_learner)
        gaps = [np.abs(np.concatenate(v) - learner - self._difference).mean() for v in of_engines.values()]
        # None: every engine was lost just now, and is probed once it is back.
        return ProbeReport(float(max(gaps, default=0.0)), float(np.abs(learner - self._learner_base).mean()))
