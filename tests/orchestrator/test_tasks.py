"""The built-in tasks: disjoint splits, settable difficulty, and configuration groups that load."""

import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.compose import load
from orchestrator.models import resolve_model
from orchestrator.prepare import prepare
from orchestrator.prompts import load_sources, refuse_long_prompts
from orchestrator.tasks import TRIAGE_EXAMPLES, arithmetic, synthetic, triage
from reward_workers import triage as triage_rewards
from reward_workers.builtin import arithmetic_checker, arithmetic_reward
from rollout_workers.chat import ChatTemplate


def test_the_default_task_has_a_held_out_split_and_answers_that_are_right() -> None:
    train, held_out = list(arithmetic()), list(arithmetic(split="eval", seed=1))
    assert len(train) > 80
    assert len(held_out) > 20
    for row in train + held_out:
        left, _, right = row["id"].split()
        assert row["prompt"] == [{"role": "user", "content": f"Calculate {row['id']}. Answer briefly."}]
        assert row["answer"] == str(int(left) + int(right))
        assert arithmetic_reward(f"{row['id']} = {row['answer']}", row["answer"]) == 1.0
        assert arithmetic_checker(f"It is {row['answer']}.", row["answer"], row["dataset"]) == 1.0


@given(seeds=st.tuples(st.integers(0, 50), st.integers(0, 50)), digits=st.integers(1, 3), terms=st.integers(2, 4))
@settings(max_examples=15, deadline=None)
def test_no_question_is_in_both_splits_whatever_the_seeds(seeds: tuple[int, int], digits: int, terms: int) -> None:
    options: dict[str, Any] = {"size": 60, "max_digits": digits, "max_terms": terms, "operators": ("+", "-")}
    train = [row["id"] for row in arithmetic(split="train", seed=seeds[0], **options)]
    held_out = [row["id"] for row in arithmetic(split="eval", seed=seeds[1], **options)]
    assert len(set(train)) == len(train) == 60
    # Not in another order of the same terms either.
    assert not {tuple(sorted(row.split())) for row in train} & {tuple(sorted(row.split())) for row in held_out}


def test_difficulty_and_instruction_are_settable_and_rows_are_repeatable() -> None:
    options: dict[str, Any] = {"size": 20, "min_digits": 3, "max_digits": 3, "min_terms": 4, "max_terms": 4}
    rows = list(arithmetic(instruction="{expression} =", **options))
    assert rows == list(arithmetic(instruction="{expression} =", **options))
    assert rows != list(arithmetic(instruction="{expression} =", seed=1000, **options))
    assert len(rows) == 20
    for row in rows:
        assert row["prompt"][0]["content"] == f"{row['id']} ="
        assert row["answer"] == str(sum(int(term) for term in row["id"].split(" + ")))


def test_unknown_splits_and_operators_are_refused() -> None:
    with pytest.raises(ValueError, match="split=test: expected train or eval"):
        list(arithmetic(split="test"))
    with pytest.raises(ValueError, match="split=test: expected train or eval"):
        list(synthetic(split="test"))
    with pytest.raises(ValueError, match=r"operators=\['\*'\]: expected some of"):
        list(arithmetic(operators=["*"]))


def test_synthetic_requests_differ_and_splits_are_disjoint() -> None:
    train, held_out = list(synthetic(size=100)), list(synthetic(split="eval", size=30, seed=1))
    prompts = [row["prompt"] for row in train + held_out]
    assert len(prompts) == len(set(prompts)) == 130
    assert not {row["id"] for row in train} & {row["id"] for row in held_out}


def test_tickets_have_acceptable_labels_and_are_held_out_by_their_text() -> None:
    train, held_out = list(triage(seed=3)), list(triage(split="eval", seed=1))
    assert (len(train), len(held_out)) == (110, 26)
    assert not {row["id"] for row in train} & {row["id"] for row in held_out}
    assert {label for row in held_out for label in row["labels"]} == set(triage_rewards.CATEGORIES)
    assert sum(len(row["labels"]) > 1 for row in train + held_out) == 16
    assert list(triage(seed=3)) == train != list(triage())
    assert list(triage(seed=3, size=5)) == train[:5]
    for row in train + held_out:
        triage_rewards.check_labels(row["labels"])
        assert row["prompt"][-1] == {"role": "user", "content": row["id"]}
        assert row["id"] not in [ticket for ticket, _ in TRIAGE_EXAMPLES]
    with pytest.raises(ValueError, match="split=test: expected train or eval"):
        list(triage(split="test"))


def test_the_examples_that_a_ticket_comes_with_earn_the_full_reward() -> None:
    rewards = prepare(load(["experiment=triage", "model=tiny", "rollout.max_prompt_tokens=512"])).rewards
    shown = next(triage())["prompt"][1:-1]
    assert {message["role"] for message in shown[::2]} == {"user"}
    labels = [dict(TRIAGE_EXAMPLES)[message["content"]] for message in shown[::2]]
    assert sorted(labels) == sorted(triage_rewards.CATEGORIES)
    for message, label in zip(shown[1::2], labels, strict=True):
        (format_reward,) = rewards.select(["format"])
        assert triage_rewards.category(message["content"], [label]).value == 1.0
        assert triage_rewards.checker(message["content"], [label]) == 1.0
        assert format_reward.loaded(message["content"], **format_reward.options).value == 1.0


@pytest.mark.parametrize("name", ["arithmetic", "synthetic", "triage"])
def test_groups_compose_to_sources_and_rewards_that_exist(name: str) -> None:
    config = load([f"data={name}", f"reward={name}", "model=tiny"])
    assert config.model.dtype == "float32"
    template = ChatTemplate.from_pretrained(resolve_model(config.model.path))
    ids: dict[str, set[str]] = {}
    for kind, sources in (("train", config.data.train), ("eval", config.data.eval)):
        (source,) = load_sources(sources, kind)
        longest = refuse_long_prompts(source, template, max_prompt_tokens=512)  # the tiny model's tokens are short
        assert longest < 128 or name == "triage"
        ids[kind] = set(source.ids)
    assert len(ids["eval"]) >= 20
    assert not ids["train"] & ids["eval"]
    assert config.reward.primary in config.reward.functions
    for function in config.reward.functions.values():
        module, _, attribute = function.path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_the_default_model_is_smollm2() -> None:
    assert load([]).model.path == "builtin:smollm2_135m"
