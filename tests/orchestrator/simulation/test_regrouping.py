"""Groups of another size are like groups of that size would have been."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.simulation.regrouping import Group, regrouped

LONGEST = 100_000


def recorded(groups: int, answers: int, seed: int = 0) -> list[Group]:
    """Lengths with a factor of the prompt and one of the answer; pass rates of the prompt."""
    rng = np.random.default_rng(seed)
    logs = 6 + 0.4 * rng.standard_normal((groups, 1)) + 0.6 * rng.standard_normal((groups, answers))
    rewards = rng.random((groups, answers)) < rng.beta(0.5, 0.5, size=(groups, 1))
    return [
        (np.rint(np.exp(row)).astype(int).tolist(), right.astype(float).tolist())
        for row, right in zip(logs, rewards, strict=True)
    ]


def test_the_same_size_stays_as_it_is() -> None:
    groups = recorded(20, 8)
    assert regrouped(groups, 8, LONGEST) == groups


@pytest.mark.parametrize("answers", [4, 16, 32])
def test_lengths_and_their_maximum_are_those_of_that_size(answers: int) -> None:
    made, real = regrouped(recorded(1500, 8), answers, LONGEST), recorded(3000, answers, seed=1)
    assert {len(lengths) for lengths, _ in made} == {len(rewards) for _, rewards in made} == {answers}
    for figure in (np.mean, np.max):
        assert np.mean([figure(lengths) for lengths, _ in made]) == pytest.approx(
            np.mean([figure(lengths) for lengths, _ in real]), rel=0.06
        )


@pytest.mark.parametrize("answers", [4, 16])
def test_groups_differ_about_as_often_as_those_of_that_size(answers: int) -> None:
    def share_equal(groups: list[Group]) -> float:
        return float(np.mean([len(set(rewards)) == 1 for _, rewards in groups]))

    made, real = regrouped(recorded(1500, 8), answers, LONGEST), recorded(3000, answers, seed=1)
    assert share_equal(made) == pytest.approx(share_equal(real), abs=0.05)


def test_no_answer_is_longer_than_allowed() -> None:
    made = regrouped(recorded(200, 4), 64, 700)
    own = {length for lengths, _ in recorded(200, 4) for length in lengths}
    assert max(length for lengths, _ in made for length in lengths if length not in own) <= 700


def test_answers_without_a_reward_stay_without() -> None:
    made = regrouped([([5, 6], [1.0, float("nan")])] * 3, 2 + 4, LONGEST)
    rewards = np.array([rewards for _, rewards in made])
    assert 0.2 < np.isnan(rewards).mean() < 0.8


def test_it_is_repeatable() -> None:
    groups = recorded(30, 8)
    assert regrouped(groups, 12, LONGEST) == regrouped(groups, 12, LONGEST)


def test_groups_of_one_answer() -> None:
    made = regrouped([([7], [1.0])], 3, LONGEST)
    assert made[0] == ([7, 7, 7], [1.0, 1.0, 1.0])
