"""The memory of pass rates, and the sampler's decisions. How the prompt stream uses them is tested in test_prompts.py."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from fakes import FakeLearner, FakeRun, Killed, fake_config, patch_ray
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.compose import load
from orchestrator.config import ConfigError
from orchestrator.difficulty import DifficultySampler, PassRate, PassRates, draw_weight, variance_chance
from orchestrator.journal import read_outcomes
from orchestrator.metrics import find
from rollout_workers.trajectory import Trajectory

values = st.lists(st.none() | st.floats(-3, 3), max_size=8)


class TestPassRates:
    def test_the_first_group_counts_whole_the_newest_by_its_weight(self) -> None:
        rates = PassRates(memory=0.25)
        rates.observe("a", 0, [1, 0, 1, 0])
        assert rates.get("a") == PassRate(0.5, visits=1, epoch=0)
        rates.observe("a", 1, [1, 1])
        assert rates.get("a") == PassRate(0.25 * 1 + 0.75 * 0.5, visits=2, epoch=1)
        assert rates.get("b") is None

    def test_a_group_without_values_changes_nothing(self) -> None:
        rates = PassRates(0.5)
        rates.observe("a", 0, [None, None])
        rates.observe("a", 0, [])
        assert len(rates) == 0
        rates.observe("a", 0, [1.0, None])
        rates.observe("a", 5, [None])
        assert rates.get("a") == PassRate(1.0, 1, 0)

    def test_values_outside_the_unit_interval_are_held_to_it(self) -> None:
        rates = PassRates(1.0)
        rates.observe("a", 0, [-5.0, -1.0])
        rates.observe("b", 0, [1.5, 1.5, 0.0])
        rates.observe("c", 0, [3.0, -2.0])
        assert [rates.get(name) for name in "abc"] == [(0.0, 1, 0), (1.0, 1, 0), (0.5, 1, 0)]

    def test_a_late_group_of_an_older_epoch_does_not_set_the_epoch_back(self) -> None:
        rates = PassRates(0.5)
        rates.observe("a", 3, [1.0])
        rates.observe("a", 2, [0.0])
        assert rates.get("a") == PassRate(0.5, 2, 3)

    @given(
        before=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), values), max_size=12),
        after=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), values), max_size=6),
        memory=st.floats(0.01, 1),
    )
    @settings(max_examples=60, deadline=None)
    def test_a_restored_memory_goes_on_as_the_old_one(
        self, before: list[tuple[str, int, list[float]]], after: list[tuple[str, int, list[float]]], memory: float
    ) -> None:
        rates = PassRates(memory)
        for group in before:
            rates.observe(*group)
        restored = PassRates(memory)
        restored.observe("forgotten", 0, [1.0])
        restored.restore(json.loads(json.dumps(rates.state())))
        for group in after:
            rates.observe(*group)
            restored.observe(*group)
        assert restored.state() == rates.state()
        assert restored.metrics() == rates.metrics()
        assert all(0 <= rate <= 1 for rate, _, _ in rates.state()["prompts"].values())

    def test_the_state_is_compact(self) -> None:
        rates = PassRates(0.3)
        for group in range(3000):
            rates.observe(f"mine:{group % 1000}", group // 1000, [1 / 3, group % 7 / 7])
        assert len(rates) == 1000
        assert len(json.dumps(rates.state())) < 30 * 1000

    def test_metrics(self) -> None:
        rates = PassRates(0.5)
        assert rates.metrics() == {"data/known_prompts": 0}
        for name, value in {"a": 1.0, "b": 0.96, "c": 0.5, "d": 0.0}.items():
            rates.observe(name, 0, [value])
        found = rates.metrics()
        assert found == {
            "data/known_prompts": 4,
            "data/pass_rate_mean": pytest.approx(0.615),
            "data/all_right_ratio": 0.5,
            "data/all_wrong_ratio": 0.25,
            "data/between_ratio": 0.25,
        }
        for name in found:
            find(name)


class TestWeight:
    def test_the_chance_of_variance(self) -> None:
        assert variance_chance(0.5, 2) == 0.5
        assert variance_chance(0.18, 8) == pytest.approx(0.80, abs=0.01)
        assert variance_chance(0.0, 8) == variance_chance(1.0, 8) == 0.0

    def test_unknown_prompts_and_those_at_one_half_are_always_drawn(self) -> None:
        for answers in (2, 8, 16):
            assert draw_weight(None, answers_per_group=answers, retest_share=0.1) == 1.0
            assert draw_weight(PassRate(0.5, 3, 0), answers_per_group=answers, retest_share=0.1) == 1.0

    def test_each_further_group_without_variance_lowers_the_weight_to_the_share_of_retests(self) -> None:
        for rate in (0.0, 1.0):
            weights = [
                draw_weight(PassRate(rate, n, 0), answers_per_group=8, retest_share=0.1) for n in (1, 2, 3, 5, 20, 99)
            ]
            assert weights[:3] == [
                pytest.approx(0.57, abs=0.01),
                pytest.approx(0.37, abs=0.01),
                pytest.approx(0.27, abs=0.01),
            ]
            assert weights == sorted(weights, reverse=True)
            assert weights[-2:] == [0.1, 0.1]

    @given(st.floats(0, 1), st.integers(1, 1000), st.integers(2, 64), st.floats(0.001, 1))
    def test_bounds_and_symmetry(self, rate: float, visits: int, answers: int, share: float) -> None:
        weight = draw_weight(PassRate(rate, visits, 0), answers_per_group=answers, retest_share=share)
        mirrored = draw_weight(PassRate(1 - rate, visits, 0), answers_per_group=answers, retest_share=share)
        assert share <= weight <= 1 + 1e-12
        assert mirrored == pytest.approx(weight, abs=1e-9)


class TestSampler:
    def sampler(self, rate: float, visits: int = 20, seed: int = 0, **options: float) -> DifficultySampler:
        rates = PassRates(0.5)
        rates.restore({"prompts": {f"s:{i}": [rate, visits, 0] for i in range(2000)}})
        return DifficultySampler(rates, seed, 8, options.get("retest_share", 0.1))

    def share_drawn(self, sampler: DifficultySampler, epoch: int = 0) -> float:
        return sum(sampler(f"s:{i}", epoch) for i in range(2000)) / 2000

    def test_prompts_are_drawn_by_their_weight(self) -> None:
        for rate, visits in ((1.0, 20), (0.0, 20), (1.0, 1), (0.05, 2), (0.5, 1)):
            weight = draw_weight(PassRate(rate, visits, 0), answers_per_group=8, retest_share=0.1)
            assert self.share_drawn(self.sampler(rate, visits)) == pytest.approx(weight, abs=0.04)
        assert self.share_drawn(self.sampler(1.0, retest_share=0.4)) == pytest.approx(0.4, abs=0.04)

    def test_other_epochs_and_seeds_retest_other_prompts(self) -> None:
        sampler, other = self.sampler(1.0), self.sampler(1.0, seed=1)
        drawn = [
            {i for i in range(2000) if s(f"s:{i}", epoch)} for s, epoch in ((sampler, 0), (sampler, 1), (other, 0))
        ]
        for a, b in ((0, 1), (0, 2)):
            assert len(drawn[a] & drawn[b]) / 2000 == pytest.approx(0.01, abs=0.01)

    def test_a_decision_is_a_function_of_what_is_remembered(self) -> None:
        """Also across processes: a changed hash would make a resumed run decide otherwise."""
        drawn = [i for i in range(60) if self.sampler(1.0)(f"s:{i}", 3)]
        assert drawn == [i for i in range(60) if self.sampler(1.0)(f"s:{i}", 3)]
        assert drawn == [4, 7, 15, 17, 35, 48, 58]

    def test_unknown_prompts_are_drawn(self) -> None:
        sampler = self.sampler(0.0)
        assert all(sampler(f"new:{i}", 0) for i in range(500))

    def test_off_by_default(self) -> None:
        rates = PassRates(0.5)
        assert DifficultySampler.from_config(load(), rates) is None
        on = ["sampling.difficulty.sampler=true", "sampling.difficulty.retest_share=0.2", "data.seed=7"]
        assert DifficultySampler.from_config(load([*on, "sampling.answers_per_group=4"]), rates) == DifficultySampler(
            rates, 7, 4, 0.2
        )

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("sampling.difficulty.memory=0", "sampling.difficulty.memory=0.0: expected more than 0"),
            ("sampling.difficulty.memory=1.5", "sampling.difficulty.memory=1.5: expected at most 1"),
            ("sampling.difficulty.retest_share=0", "sampling.difficulty.retest_share=0.0: expected more than 0"),
            ("sampling.difficulty.retest_share=2", "sampling.difficulty.retest_share=2.0: expected at most 1"),
        ],
    )
    def test_settings_that_would_not_work_are_refused(self, override: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load([override])
        assert str(caught.value) == message

    def test_groups_of_one_have_no_variance_to_draw_by(self) -> None:
        overrides = [
            "sampling.difficulty.sampler=true",
            "sampling.answers_per_group=1",
            "algorithm.advantage=reinforce_pp",
        ]
        with pytest.raises(ConfigError, match=r"sampling\.difficulty\.sampler=true with sampling\.answers_per_group=1"):
            load(overrides)


def three_kinds(trajectory: Trajectory) -> float:
    """By prompt: all answers right, all wrong, or every other one right."""
    kind = hashlib.sha256(trajectory.prompt_id.encode()).digest()[0] % 3
    return (0.0, 1.0, float(trajectory.index % 2))[kind]


def test_a_run_with_the_sampler_resumes_with_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between checkpoints and resumed: each prompt is used or skipped once an epoch in the surviving lineage."""
    patch_ray(monkeypatch)
    monkeypatch.setattr("orchestrator.run.prefix_sharing", lambda prepared: True)
    sampler = ["sampling.difficulty.sampler=true", "sampling.difficulty.retest_share=0.05"]
    config = fake_config("data.epochs=5", "run.batches=99", "checkpoint.every_batches=2", "staleness.max=1", *sampler)

    def start(dies_at: int | None, resume: bool) -> FakeRun:
        learner = FakeLearner(dies_at=dies_at)
        return FakeRun(tmp_path, config, prompts=30, rule=three_kinds, learner=learner, resume=resume)

    for resume, dies_at in ((False, 5), (True, 3)):
        with pytest.raises(Killed):
            start(dies_at, resume).execute()
    run = start(None, resume=True).execute()
    used = Counter((row["prompt_id"], row["epoch"]) for row in read_outcomes(tmp_path).to_pylist())
    assert set(used.values()) == {1}
    epochs = Counter(prompt_id for prompt_id, _ in used)
    assert len(epochs) == 30
    memory = run.run.pass_rates.state()["prompts"]
    teaching = {prompt_id for prompt_id, (rate, _, _) in memory.items() if rate == 0.5}
    assert 5 < len(teaching) < 25
    assert {epochs[prompt_id] for prompt_id in teaching} == {5}  # at one half: never skipped
    others = [epochs[prompt_id] for prompt_id in epochs if prompt_id not in teaching]
    assert sum(others) / len(others) < 4
    # Groups that were judged and not used yet when a checkpoint was taken are written, and seen, once more.
    extra = [visits - epochs[prompt_id] for prompt_id, (_, visits, _) in memory.items()]
    assert min(extra) == 0
    assert sum(extra) <= 2 * 4  # two resumes, at most capacity each
    assert run.run.prompts.exhausted
    assert run.values("data/known_prompts")[-1] == 30
    assert run.values("data/epoch")[-1] > 4
    assert sum(run.values("data/skipped")) > 0
