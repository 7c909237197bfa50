"""The built-in rewards, and the checker beside them."""

import pytest

from reward_workers.builtin import arithmetic_checker, arithmetic_reward, hash_reward, synthetic_reward
from rollout_workers.trajectory import Trajectory


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("7", "7", True),
        ("3 + 4 = 7", "7", True),
        ("The sum of 3 and 4 is 7.", "7", True),
        ("The sum is **7**.", "7", True),
        ("3 + 4 = 7.0", "7", True),
        ("It is 1,234.", "1234", True),
        ("0 + 0 = 0", "0", True),
        ("It is 100.", "100", True),
        ("5 - 9 = -4", "-4", True),
        ("5-9=-4", "-4", True),
        ("3 + 4 = 17", "7", False),
        ("It is 77", "7", False),
        ("It is 7.5", "7", False),
        ("It is -7", "7", False),
        ("7, 8, 9, 10", "7", False),
        ("Seven.", "7", False),
        ("", "7", False),
    ],
)
def test_reward_and_checker_agree_on_plain_answers(completion: str, answer: str, right: bool) -> None:
    assert arithmetic_reward(completion, answer) == float(right)
    assert arithmetic_checker(completion, answer, "basic_arithmetic") == float(right)


def test_a_list_of_guesses_earns_no_more_than_its_last() -> None:
    guesses = " ".join(str(number) for number in range(21))
    assert [arithmetic_reward(guesses, str(answer)) for answer in range(21)] == [0.0] * 20 + [1.0]


def test_the_checker_reads_the_stated_result_not_what_is_said_about_it() -> None:
    assert arithmetic_checker("3 + 4 = 7. That took 2 steps.", "7", "basic_arithmetic") == 1.0
    assert arithmetic_checker("3 + 4 = eight", "7", "basic_arithmetic") == 0.0
    assert arithmetic_checker("NaN", "7", "basic_arithmetic") == 0.0


def test_the_checker_gives_no_marks_for_part_of_an_answer() -> None:
    """reasoning-gym's scorer gives 17 half the marks of a 7."""
    assert arithmetic_checker("17", "7", "chain_sum") == 0.0


@pytest.mark.parametrize(("completion", "share"), [("abcd", 1.0), ("ab12", 0.5), ("ABC", 0.0), ("", 0.0), ("aé", 0.5)])
def test_synthetic_reward_is_the_share_of_small_letters(completion: str, share: float) -> None:
    assert synthetic_reward(completion) == share


def test_hash_reward_depends_on_prompt_id_and_index_alone() -> None:
    def reward(prompt_id: str, index: int, group_id: str = "g") -> float:
        return hash_reward(Trajectory.from_messages([], prompt_id=prompt_id, index=index, group_id=group_id))

    rewards = [reward(f"p{prompt}", index) for prompt in range(10) for index in range(8)]
    assert len(set(rewards)) == 80
    assert all(0 <= value < 1 for value in rewards)
    assert reward("p1", 2, "g") == reward("p1", 2, "h")
