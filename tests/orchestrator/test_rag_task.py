"""Questions with notes: what answers them, what does not, and what is held out."""

from __future__ import annotations

import pytest

from orchestrator.rag_task import FACTS, PLACES, notes


def test_the_answer_stands_in_exactly_the_note_that_is_asked_for() -> None:
    for row in notes(size=300):
        (message,) = row["prompt"]
        shown, _, asked = message["content"].partition("\n\nQuestion: ")
        lines = shown.split("\n- ")[1:]
        assert len(lines) == len(set(row["numbers"])) == 3
        said = [
            number
            for fact, question in FACTS.items()
            for place in PLACES
            for number in row["numbers"]
            if asked.startswith(question.format(place=place) + "\n")
            and fact.format(place=place, number=number) in lines
        ]
        assert said == ([] if row["answer"] is None else [row["answer"]])


def test_rows_repeat_and_splits_have_no_question_in_common() -> None:
    def questions(split: str, seed: int) -> set[str]:
        rows = notes(split=split, size=200, seed=seed)
        return {row["prompt"][0]["content"].partition("Question: ")[2] for row in rows}

    assert list(notes(size=20)) == list(notes(size=20))
    assert not questions("train", 0) & questions("eval", 1)


def test_some_have_no_answer() -> None:
    assert 20 < sum(row["answer"] is None for row in notes(size=200)) < 60
    assert not [row for row in notes(size=100, unanswerable_share=0.0) if row["answer"] is None]


@pytest.mark.parametrize("options", [{"split": "test"}, {"facts": 0}, {"facts": 17}])
def test_bad_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        next(notes(**options))
