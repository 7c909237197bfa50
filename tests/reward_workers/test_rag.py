"""The checker of answers from notes."""

from __future__ import annotations

import pytest

from reward_workers.rag import grounded


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("The pool opens at 7.", "7", True),
        ("07", "7", True),
        ("7 or 8", "7", False),
        ("8", "7", False),
        ("It opens in the morning.", "7", False),
        ("Not in the notes.", "7", False),
        ("", "7", False),
        ("Not in the notes.", None, True),
        ("The notes don't say.", None, True),
        ("7, which is not in the notes", None, False),
        ("I like pools.", None, False),
        ("", None, False),
    ],
)
def test_right_is_what_the_notes_say_and_nothing_else(completion: str, answer: str | None, right: bool) -> None:
    assert grounded(completion, answer) == float(right)
