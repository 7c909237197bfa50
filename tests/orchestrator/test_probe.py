"""The probe tells an engine that follows the learner from one that only says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from orchestrator.probe import CANARY_ROUNDS, Probe, ProbeReport, WeightsDiverged

TEXTS = [[1, 2, 3, 4], [5, 6, 7]]


class Learner:
    """A token's logprob moves by `sensitivity` times the weights."""

    def __init__(self, sensitivity: float = 1.0) -> None:
        self.weights = 0.0
        self.scales: list[float] = []
        self._sensitivity = sensitivity
        self._kept = 0.0

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [-1.0 - self._sensitivity * self.weights * np.arange(1, len(ids)) for ids in sequences]

    async def perturb(self, scale: float, seed: int) -> None:
        self.scales.append(scale)
        self._kept, self.weights = self.weights, self.weights + scale

    async def restore(self) -> None:
        self.weights = self._kept


class Engines:
    """Two engines; the second follows published weights by the share `follows`. Both differ by `noise` nats."""

    def __init__(self, learner: Learner, follows: float = 1.0, noise: float = 0.0) -> None:
        self.learner = learner
        self.follows = follows
        self.published = 0.0
        self._noise = np.random.default_rng(0)
        self._noise_nats = noise

    async def publish(self) -> None:
        self.published = self.learner.weights

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        def of(weights: float) -> list[np.ndarray]:
            exact = [-1.02 - weights * np.arange(1, len(ids)) for ids in sequences]  # a constant difference is fine
            return [values + self._noise_nats * self._noise.standard_normal(len(values)) for values in exact]

        return {"rollout-0": of(self.published), "rollout-1": of(self.follows * self.published)}


def make_probe(engines: Engines, dtype: str = "float32", max_gap: float | None = None) -> Probe:
    return Probe(TEXTS, engines.learner, engines, dtype=dtype, max_gap=max_gap)


async def canary(engines: Engines, dtype: str = "float32") -> ProbeReport:
    probe = make_probe(engines, dtype)
    await probe.begin()
    return await probe.canary(engines.publish, seed=0)


async def compare(engines: Engines, change: float, *, max_gap: float | None = None) -> ProbeReport:
    """Begin, train by `change`, publish, compare."""
    probe = make_probe(engines, max_gap=max_gap)
    await probe.begin()
    engines.learner.weights += change
    await engines.publish()
    return await probe.compare(1)


class TestCanary:
    def test_an_engine_that_follows(self) -> None:
        engines = Engines(Learner())
        report = asyncio.run(canary(engines))
        assert report.gap == pytest.approx(0, abs=1e-12)
        assert report.learner_change >= 0.3
        assert engines.learner.weights == 0.0
        assert engines.published == 0.0  # the perturbation is gone from the engines, too

    @pytest.mark.parametrize("follows", [0.0, 0.5, -1.0])
    def test_an_engine_with_a_stale_part(self, follows: float) -> None:
        engines = Engines(Learner(), follows)
        with pytest.raises(WeightsDiverged, match=r"canary: all weights were perturbed, .* does not compute"):
            asyncio.run(canary(engines))
        assert engines.learner.weights == 0.0

    def test_an_engine_that_keeps_the_perturbation(self) -> None:
        class Sticky(Engines):
            async def publish(self) -> None:
                self.published = self.published or self.learner.weights

        with pytest.raises(WeightsDiverged, match="the weights were restored, but an engine's logprobs are off"):
            asyncio.run(canary(Sticky(Learner())))

    def test_the_perturbation_grows_until_it_shows(self) -> None:
        engines = Engines(Learner(sensitivity=0.05))
        engines.follows = 1.0
        with pytest.raises(WeightsDiverged):  # these engines move twenty times as far as their learner
            asyncio.run(canary(engines))
        assert engines.learner.scales == pytest.approx([0.1 * 3**n for n in range(len(engines.learner.scales))])
        assert len(engines.learner.scales) > 2

    def test_a_learner_that_can_not_be_moved(self) -> None:
        engines = Engines(Learner(sensitivity=0.0))
        with pytest.raises(WeightsDiverged, match="is anything trainable"):
            asyncio.run(canary(engines))
        assert len(engines.learner.scales) == CANARY_ROUNDS

    def test_a_perturbation_whose_effect_grows_no_further_is_enough(self) -> None:
        """As of an adapter under the fixed head of a small random model."""

        class Limited(Learner):
            async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
                return [-1.0 - 0.2 * np.tanh(self.weights) * np.ones(len(ids) - 1) for ids in sequences]

        class Following(Engines):
            async def logprobs(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
                values = -1.0 - 0.2 * np.tanh(self.follows * self.published)
                return {"rollout-0": [np.full(len(ids) - 1, values) for ids in sequences]}

        report = asyncio.run(canary(Following(Limited())))
        assert 0.1 < report.learner_change < 0.2
        with pytest.raises(WeightsDiverged, match="does not compute"):
            asyncio.run(canary(Following(Limited(), follows=0.0)))

    def test_the_noise_it_measures_is_the_later_limit(self) -> None:
        async def scenario(follows_later: float) -> ProbeReport:
            engines = Engines(Learner(), noise=0.02)
            probe = make_probe(engines, "bfloat16")
            await probe.begin()
            await probe.canary(engines.publish, seed=0)
            engines.follows = follows_later
            engines.learner.weights += 0.2
            await engines.publish()
            return await probe.compare(1)

        assert asyncio.run(scenario(1.0)).gap < 0.1
        with pytest.raises(WeightsDiverged, match="version 1"):
            asyncio.run(scenario(0.0))


class TestCompare:
    def test_an_engine_that_follows(self) -> None:
        report = asyncio.run(compare(Engines(Learner()), 0.5))
        assert report.gap == pytest.approx(0, abs=1e-12)
        assert report.learner_change == pytest.approx(0.5 * np.mean([1, 2, 3, 1, 2]))

    def test_an_engine_with_a_stale_part(self) -> None:
        with pytest.raises(WeightsDiverged, match=r"version 1: .* it acknowledged the weights"):
            asyncio.run(compare(Engines(Learner(), follows=0.5), 0.5))

    def test_a_configured_limit_is_kept(self) -> None:
        assert asyncio.run(compare(Engines(Learner(), follows=0.5), 0.5, max_gap=10.0)).gap > 0.3

    def test_without_a_canary_the_limit_is_the_dtypes(self) -> None:
        async def scenario(dtype: str) -> None:
            engines = Engines(Learner())
            probe = make_probe(engines, dtype)
            await probe.begin()
            engines.published = 0.05  # nobody trained, and the engines moved by 0.09 nats
            await probe.compare(1)

        asyncio.run(scenario("bfloat16"))
        with pytest.raises(WeightsDiverged):
            asyncio.run(scenario("float32"))

    def test_no_engine_at_the_moment(self) -> None:
        class Gone(Engines):
            async def logprobs(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
                return {} if self.published else await super().logprobs(sequences)

        assert asyncio.run(compare(Gone(Learner()), 0.5)).gap == 0.0
        nobody = Gone(Learner())
        nobody.published = 1.0
        with pytest.raises(WeightsDiverged, match="no engine answered"):
            asyncio.run(make_probe(nobody).begin())
