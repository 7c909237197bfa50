"""The ticket-triage rewards: one category of an acceptable list, whatever the form; the checker asks for both."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.reward import RewardFunction, RewardFunctionError
from reward_workers.triage import CATEGORIES, category, checker


@pytest.mark.parametrize(
    ("completion", "labels", "reward", "checked"),
    [
        ('{"category": "billing"}', ["billing"], 1.0, 1.0),
        ('{"category": "billing"}', ["shipping", "billing"], 1.0, 1.0),
        ('{"category": "billing"}', ["shipping"], 0.0, 0.0),
        ("Category: Billing.", ["billing"], 1.0, 0.0),
        ('{"category": "billing", "why": "a refund"}', ["billing"], 1.0, 0.0),
        ('{"category": "Billing"}', ["billing"], 1.0, 0.0),
        ("billing or shipping", ["billing"], 0.0, 0.0),
        ("billing or shipping", ["billing", "shipping"], 0.0, 0.0),
        ('{"category": "accounting"}', ["account"], 0.0, 0.0),
        ('{"category": ["billing"]}', ["billing"], 1.0, 0.0),
        ('["category", "billing"]', ["billing"], 1.0, 0.0),
        ("[" * 100_000, ["billing"], 0.0, 0.0),
        ("", ["billing"], 0.0, 0.0),
    ],
)
def test_reward_and_checker(completion: str, labels: list[str], reward: float, checked: float) -> None:
    assert category(completion, labels).value == reward
    assert checker(completion, labels) == checked


@given(st.sets(st.sampled_from(CATEGORIES), min_size=2), st.sampled_from(CATEGORIES), st.text(max_size=20))
def test_a_list_of_guesses_never_pays(guesses: set[str], label: str, text: str) -> None:
    result = category(f"{text} {', '.join(guesses)}", [label])
    assert result.value == 0.0
    assert result.metrics == {"names_none": 0.0, "names_several": 1.0}


def test_how_it_is_missed_becomes_a_rate() -> None:
    assert category("shipment", ["shipping"]).metrics == {"names_none": 1.0, "names_several": 0.0}
    assert category("account", ["shipping"]).metrics == {"names_none": 0.0, "names_several": 0.0}


@pytest.mark.parametrize("function", [category, checker])
@pytest.mark.parametrize("labels", [[], ["refund"], "billing", None, list(CATEGORIES)])
def test_labels_that_say_nothing_are_refused(function: object, labels: object) -> None:
    with pytest.raises(RewardFunctionError, match="expected a list of some of billing, technical, shipping, account"):
        RewardFunction("category", function).check_row({"labels": labels})


def test_every_other_choice_of_labels_is_fine() -> None:
    for size in range(1, len(CATEGORIES)):
        for labels in itertools.combinations(CATEGORIES, size):
            RewardFunction("category", category).check_row({"labels": list(labels)})
