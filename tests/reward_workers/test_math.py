"""grade_math: what pays and what does not, for any number, list, truncation and input; statuses; options."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reward_workers.function import RewardFunction
from reward_workers.math import grade_math
from reward_workers.reward import RewardSet, Status
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory

checked = settings(deadline=None, max_examples=150, derandomize=True)

small = st.integers(-10_000, 10_000)
BASES = [*range(2, 11), 16]  # a lone letter with another index, A_{12}, is a symbol
rationals = st.builds(Fraction, st.integers(-500, 500), st.integers(1, 60))


def value(completion: str, answer: Any, **options: Any) -> float | None:
    """The verdict without computer algebra, which none of these needs."""
    return grade_math(completion, answer, symbolic=False, **options).value


def box(text: str) -> str:
    return f"\\boxed{{{text}}}"


@st.composite
def notations(draw: st.DrawFn, number: Fraction) -> str:
    """One of the ways in which people write a rational number."""
    top, bottom = abs(number.numerator), number.denominator
    minus = draw(st.sampled_from(["-", "−", "–"])) if number < 0 else draw(st.sampled_from(["", "", "+"]))
    forms = [f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", f"\\dfrac{{{top}}}{{{bottom}}}"]
    if bottom == 1:
        forms = [f"{top}", f"{top:,}", f"{top}.0", f"{top:,}".replace(",", "{,}"), f"{top:,}".replace(",", "\\,")]
        forms += [
            "".join(chr(0xFF10 + int(d)) for d in str(top)),
            f"00{top}",
            f"\\text{{{top}}}",
            f"\\left({top}\\right)",
        ]
    elif top > bottom:
        forms += [f"{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}", f"{top // bottom} {top % bottom}/{bottom}"]
    places = next((n for n in range(7) if bottom and 10**n % bottom == 0), None)
    if places:
        digits = f"{top * 10**places // bottom:0{places + 1}d}"
        forms += [
            f"{digits[:-places]}.{digits[-places:]}",
            f"{digits} \\times 10^{{-{places}}}",
            f"{digits}*10^-{places}",
        ]
    around = draw(
        st.sampled_from(
            ["{}", "${}$", "\\({}\\)", "{}.", " {} ", "\\mathbf{{{}}}" if bottom == 1 and top < 999 else "{}"]
        )
    )
    return around.format(minus + draw(st.sampled_from(forms)))


class TestNumbers:
    @checked
    @given(st.data(), rationals, rationals)
    def test_are_equal_in_any_notation_exactly_when_they_are_equal(
        self, data: st.DataObject, a: Fraction, b: Fraction
    ) -> None:
        one, same, other = (data.draw(notations(n)) for n in (a, a, b))
        assert value(box(one), same) == 1
        assert value(box(other), same) == float(a == b)

    @checked
    @given(st.integers(0, 10**12), st.integers(0, 10**12))
    def test_large_ones(self, a: int, b: int) -> None:
        assert value(box(f"{a:,}"), str(a)) == 1
        assert value(box(str(b)), f"{a:,}") == float(a == b)

    @checked
    @given(st.integers(1, 400), st.integers(1, 400))
    def test_tiny_ones_are_not_rounded(self, m: int, n: int) -> None:
        assert value(box(f"\\frac{{1}}{{2^{{{m}}}}}"), f"$\\frac{{1}}{{2^{{{n}}}}}$") == float(m == n)
        assert value(box(f"1/{m}!"), f"\\frac{{1}}{{{n}!}}") == float(m == n or {m, n} == {0, 1})

    @checked
    @given(st.decimals(-1000, 1000, places=2), st.decimals(-1000, 1000, places=2))
    def test_in_german_style(self, a: Any, b: Any) -> None:
        german = f"{a:,}".translate(str.maketrans(",.", ".,"))
        assert value(box(german), str(a).replace(".", ","), decimal_comma=True) == 1
        assert value(box(german), str(b).replace(".", ","), decimal_comma=True) == float(a == b)

    @checked
    @given(small, st.sampled_from(BASES), st.sampled_from(BASES))
    def test_a_base_is_part_of_the_answer(self, n: int, base: int, other: int) -> None:
        def written(number: int, radix: int) -> str:
            digits = ""
            while number:
                number, rest = divmod(number, radix)
                digits = "0123456789ABCDEF"[rest] + digits
            return digits or "0"

        n = abs(n)
        gold = f"{written(n, base)}_{{{base}}}"
        assert value(box(gold), gold) == 1
        if base != 10:
            assert value(box(str(n)), gold) == 0
            assert value(box(str(n)), gold, any_base=True) == 1
        assert value(box(f"{written(n, other)}_{other}"), gold) == float(base == other)

    @checked
    @given(small)
    def test_wherever_they_are_stated(self, n: int) -> None:
        for text in (
            f"So it is \\boxed{{{n}}}.",
            f"The answer is {n}.",
            f"**Final Answer:** {n}",
            f"2 and 3 give it.\n#### {n}",
            f"<think>{n + 1}</think>\nThe answer is ${n}$.",
            f"<answer>{n}</answer>",
            f"The total is {n} clips, altogether.",
            f"```\n{n}\n```",
            f"\\[\n\\boxed{{{n}}}\n\\]",
        ):
            assert value(text, str(n)) == 1, text
            assert value(text, str(n + 2)) == 0, text


class TestLists:
    @checked
    @given(st.lists(small, min_size=1, max_size=12, unique=True), st.randoms(use_true_random=False))
    def test_have_no_order(self, numbers: list[int], source: Any) -> None:
        shuffled = source.sample(numbers, len(numbers))
        gold = "\\{" + ", ".join(map(str, numbers)) + "\\}"
        assert value(box(", ".join(map(str, shuffled))), gold) == 1
        assert value(box(", ".join(map(str, [*shuffled, 99_999]))), gold) == 0
        assert value(box(", ".join(map(str, shuffled[1:])) or "99999"), gold) == 0

    @checked
    @given(st.lists(small, min_size=2, max_size=4), st.lists(small, min_size=2, max_size=4))
    def test_tuples_have(self, a: list[int], b: list[int]) -> None:
        gold = f"({', '.join(map(str, a))})"
        assert value(box(f"({', '.join(map(str, b))})"), gold) == float(a == b)

    @checked
    @given(st.integers(-50, 50), st.integers(1, 50), st.booleans(), st.booleans())
    def test_intervals_are_inequalities_both_ways(self, low: int, width: int, closed: bool, other: bool) -> None:
        high = low + width
        interval = f"{'[' if closed else '('}{low}, {high})"
        sign = "\\le" if other else "<"
        inequality = f"{low} {sign} x < {high}"
        assert value(box(interval), inequality) == float(closed == other)
        assert value(box(inequality), interval) == float(closed == other)


class TestWhatDoesNotPay:
    @checked
    @given(st.lists(st.integers(0, 99), min_size=2, max_size=8, unique=True), st.data())
    def test_lists_of_guesses(self, guesses: list[int], data: st.DataObject) -> None:
        right = str(data.draw(st.sampled_from(guesses)))
        words = [str(g) for g in guesses]
        join = data.draw(st.sampled_from([", ", " or ", " and ", " ", ", or ", "; ", "\n", ", maybe ", " / "]))
        boxes = join.join(map(box, words))
        for text in (
            boxes,
            box(join.replace("\n", " ").join(words)),
            join.join(words),
            f"The answer is {join.replace(chr(10), ' ').join(words)}.",
            " ".join(f"The answer is {w}." for w in words),
            "\n".join(f"#### {w}" for w in words),
            " ".join(f"<answer>{w}</answer>" for w in words),
        ):
            assert value(text, right) == 0, text

    @checked
    @given(st.lists(st.sampled_from("ABCDE"), min_size=2, max_size=5, unique=True), st.data())
    def test_lists_of_letters(self, letters: list[str], data: st.DataObject) -> None:
        right = data.draw(st.sampled_from(letters))
        for text in (" ".join(map(box, letters)), box(", ".join(letters)), f"The answer is {' or '.join(letters)}."):
            assert value(text, right) == 0, text

    @checked
    @given(st.integers(100_000, 999_999), st.data())
    def test_answers_that_were_cut_off(self, n: int, data: st.DataObject) -> None:
        for text in (
            f"We multiply and add. \\boxed{{{n}}}",
            f"We multiply and add. $$\\boxed{{x = {n}}}$$",
            f"<think>It must be {n}.</think> \\boxed{{{n}}}",
            f"We multiply and add. The final answer is {n}",
            f"We multiply and add.\n#### {n}",
            f"<answer>{n}</answer>",
        ):
            assert value(text, str(n)) == 1
            last = text.rindex(str(n)) + 6  # where the answer is stated, but its box may be open
            whole = text[last:].find("}") + 1 or (len(text) - last if "<answer>" in text else 0)
            cut = data.draw(st.integers(0, last + whole - 1))
            assert value(text[:cut], str(n)) == 0, text[:cut]

    @checked
    @given(small)
    def test_questions(self, n: int) -> None:
        question = f"Tom has {n} apples and gives none away. How many apples does he have: is it {n}?"
        assert value(question, str(n)) == 0
        assert value(f"Tom has {n} apples and gives none away.", str(n), prompt=question) == 0
        assert value(f"He has {n}.", str(n), prompt=question) == 1

    @checked
    @given(st.integers(2, 500), st.integers(2, 500), st.sampled_from(["+", "-", "\\cdot", "\\times", "*", "/"]))
    def test_calculations_that_are_not_done(self, a: int, b: int, sign: str) -> None:
        left = a * b if sign == "/" else a
        result = {"+": a + b, "-": a - b, "/": a}.get(sign, a * b)
        assert value(box(f"{left} {sign} {b}"), str(result)) == 0
        assert value(box(f"{left} {sign} {b}"), str(result), allow_unevaluated=True) == 1
        assert value(box(f"{left} {sign} {b} = {result}"), str(result)) == 1

    def test_unfinished_thoughts(self) -> None:
        assert value(r"<think>So \boxed{7}", "7") == 0
        assert value(r"So \boxed{7}", "7", opened_thinking=True) == 0
        assert value(r"So 8</think>\boxed{7}", "7", opened_thinking=True) == 1

    def test_numbers_in_running_text_where_marks_are_required(self) -> None:
        assert value("That makes 7.", "7") == 1
        assert value("That makes 7.", "7", require_mark=True) == 0
        assert value("The answer is 7.", "7", require_mark=True) == 1


HOSTILE = {
    "boxes": "\\boxed{" * 140_000,
    "braces": "\\boxed{" + "{" * 9_000 + "7" + "}" * 9_000 + "}",
    "brackets": "\\boxed{" + "(" * 4_000 + "7" + ")" * 4_000 + "}",
    "fractions": "\\boxed{" + "\\frac{1}{1+" * 400 + "1" + "}" * 400 + "}",
    "tower": "\\boxed{" + "9^{" * 300 + "9" + "}" * 300 + "}",
    "power": r"\boxed{10**10**10}",
    "digits": "\\boxed{" + "7" * 900_000 + "}",
    "factorials": r"\boxed{((9!)!)!}",
    "expansion": r"\boxed{(a+b+c+d+e+f+g+h)^{40}}",
    "product": "\\boxed{" + "".join(f"(x+y_{i}+1)" for i in range(90)) + "}",
    "chain": "\\boxed{" + "2*" * 4_000 + "2}",
    "sum": "\\boxed{" + "1/3+" * 2_400 + "1}",
    "list": "\\boxed{" + "1," * 4_900 + "1}",
    "ticks": "`" * 1_000_000,
    "thoughts": "<think>" * 140_000,
    "statements": "the answer is \\( " * 60_000,
    "dollars": "answer: $" * 100_000,
    "spaces": "The answer is" + " " * 1_000_000,
    "nulls": "\\boxed{\x00\ud800}",
    "exponent": r"\boxed{1e9999}",
    "root": "\\boxed{\\sqrt{" + "7" * 3_000 + "}}",
    "binomial": r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    "choose": r"\boxed{\binom{(a+b+c)^{20}}{8}}",
    "points": "\\boxed{\\mathbb{R}\\setminus\\{" + ",".join(map(str, range(900))) + "\\}}",
    "union": "\\boxed{" + r"(0,1)\cup" * 900 + "(1,2)}",
    "unequal": "\\boxed{" + r"x\neq 1," * 900 + "}",
    "reversed": "\\boxed{]" + "," * 9_000 + "[}",
    "floors": "\\boxed{" + r"\lfloor " * 58 + "8" + r"\rfloor " * 58 + "}",
    "words": "\\boxed{" + "one " * 2_000 + "}",
    "ratio": "\\boxed{1" + ":2" * 4_000 + "}",
    "italics": "_a_" * 100_000,
    "sentence": "<answer>" + "She " * 100_000 + "has 7</answer>",
    "Chinese": "答案是" * 100_000,
    "Spanish": "respuesta " * 100_000,
    "denials": "not " * 250_000 + "6",
    "spaces in a box": "\\boxed{6" + " " * 9_990 + "x}",
    "endless digits": "\\boxed{0." + "12" * 4_990 + "}",
    "clauses": "\\boxed{n" + r", k \in" * 1_400 + "}",
    "bars": "\\boxed{" + "|" * 9_000 + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("answer", ["7", "x^2+1", r"\{1, 2\}", "(1, 2)", "Monday", "A", r"\frac{\sqrt{2}}{3}"])
def test_hostile_text_is_judged_in_bounded_time(name: str, answer: str) -> None:
    start = time.monotonic()
    assert value(HOSTILE[name], answer, allow_unevaluated=True) == 0
    assert time.monotonic() - start < 10


@given(st.text(max_size=300), st.text(max_size=40))
@settings(checked, max_examples=400)
def test_any_text_gets_a_verdict_or_a_status(completion: str, answer: str) -> None:
    result = grade_math(completion, answer, symbolic=False)
    assert result.value in (0.0, 1.0, None)
    assert (result.value is None) == (result.status is Status.UNPARSEABLE_ANSWER)


ALPHABET = [
    "\\frac",
    "\\sqrt",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "^",
    "_",
    "1",
    "2",
    "x",
    "y",
    "+",
    "-",
    "*",
    "/",
    ",",
    "=",
    "<",
    "\\pm ",
    "\\text{",
    " ",
]
ALPHABET += [
    "\\{",
    "\\}",
    "\\pi ",
    "e",
    "i",
    "!",
    "|",
    "\\cup ",
    ".",
    "%",
    "\\sin ",
    "\\log_",
    ":",
    "&",
    "\\\\",
    "0.",
    "\\infty ",
    " or ",
    "cm",
]


@given(st.lists(st.sampled_from(ALPHABET), max_size=25), st.lists(st.sampled_from(ALPHABET), max_size=25))
@settings(checked, max_examples=1_000)
def test_any_notation_gets_a_verdict_or_a_status(stated: list[str], gold: list[str]) -> None:
    result = grade_math(box("".join(stated)), "".join(gold), symbolic=False)
    assert result.value in (0.0, 1.0) or result.status is Status.UNPARSEABLE_ANSWER
    same = grade_math(box("".join(gold)), "".join(gold), symbolic=False)
    assume(same.status is Status.SCORED)
    assert same.value == 1 or same.detail["answer"] is None or "restates" in same.detail


class TestGold:
    @pytest.mark.parametrize(
        "answer",
        ["\\text{}", r"\left(", r"\quad", r"\pm", "<answer></answer>", "nan", 7 + 0j, b"7", {}],
    )
    def test_that_states_nothing_is_a_status(self, answer: Any) -> None:
        assert grade_math(r"\boxed{7}", answer).status is Status.UNPARSEABLE_ANSWER

    @pytest.mark.parametrize(
        "answer", ["", "  ", "???", r"\frac{1}{", r"\boxed{7", r"\frac", "{1", "1}", None, True, [7], float("nan")]
    )
    def test_that_cannot_be_read_is_a_status(self, answer: Any) -> None:
        result = grade_math(r"\boxed{7}", answer)
        assert (result.value, result.status) == (None, Status.UNPARSEABLE_ANSWER)
        assert result.detail["error"]

    @pytest.mark.parametrize(
        "answer", ["7", 7, 7.0, "$7$", r"\boxed{7}", "3 + 4 = 7\n#### 7", "Answer: 7", r"So it is $\boxed{7}$."]
    )
    def test_may_come_as_data_sets_write_it(self, answer: Any) -> None:
        assert value(r"\boxed{7}", answer) == 1
        assert value(r"\boxed{8}", answer) == 0

    @pytest.mark.parametrize(
        ("completion", "answer"),
        [
            ("0.5", 0.5),
            ("-7", -7),
            ("12345678901234567890", 12345678901234567890),
            ("1e-7", 1e-7),
            ("1e22", 1e22),
            ("0.30000000000000004", 0.1 + 0.2),
            ("7", np.int64(7)),
            ("0.5", np.float32(0.5)),
            ("1/3", Fraction(1, 3)),
            ("2.50", Decimal("2.5")),
        ],
    )
    def test_may_be_any_kind_of_number(self, completion: str, answer: Any) -> None:
        assert value(f"\\boxed{{{completion}}}", answer) == 1
        assert value("\\boxed{77}", answer) == 0

    def test_counts_however_long_where_it_is_written_the_same(self) -> None:
        assert value("\\boxed{" + "1" * 20_000 + "}", "1" * 20_000) == 1
        assert value("\\boxed{" + "1" * 20_000 + "}", "1" * 19_999 + "2") == 0

    def test_does_not_change_what_is_found(self) -> None:
        text = "The answer is 5. No: \\boxed{7}"
        assert {grade_math(text, gold).detail["answer"] for gold in ("5", "7", "x", "A", "Monday")} == {"7"}


class TestDetail:
    @checked
    @given(st.data(), rationals)
    def test_equal_numbers_vote_alike(self, data: st.DataObject, number: Fraction) -> None:
        results = [grade_math(box(data.draw(notations(number))), "12345", symbolic=False) for _ in range(3)]
        assert len({r.detail["answer"] for r in results}) == 1

    def test_no_answer_votes_for_nothing(self) -> None:
        result = grade_math("I do not know.", "7")
        assert result.value == 0
        assert result.detail["answer"] is None
        assert result.detail["source"] == "no answer"


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"percent": "both"}, ValueError),
            ({"units": 3}, ValueError),
            ({"tolerance": "0.1"}, TypeError),
            ({"tolerance": -1}, ValueError),
            ({"tolerance": float("nan")}, ValueError),
            ({"timeout_s": 0}, ValueError),
            ({"require_mark": "yes"}, TypeError),
            ({"choices": "ABC"}, TypeError),
            ({"prompt": 5}, TypeError),
            ({"prompt": ["What?"]}, TypeError),
            ({"free_constants": [1]}, TypeError),
        ],
    )
    def test_are_checked(self, options: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error, match=next(iter(options))):
            grade_math("7", "7", **options)

    def test_the_prompt_may_be_an_array_of_messages(self) -> None:
        prompt = np.array([{"role": "user", "content": "How much is 3 + 4? It is 3 + 4."}], dtype=object)
        assert value("7", "7", prompt=prompt) == 1
        assert value("It is 3 + 4.", "7", prompt=prompt) == 0

    def test_may_be_missing_in_a_row(self) -> None:
        assert value("7", "7", tolerance=None, choices=None, prompt="") == 1


def test_as_a_reward_of_a_run() -> None:
    function = RewardFunction(
        "math", "reward_workers.math.grade_math", options={"symbolic": False, "require_mark": True}
    )
    members = [
        Trajectory.from_messages(
            [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": text}],
            group_id="g",
            index=index,
        )
        for index, text in enumerate(["The answer is 7.", "7", "The answer is 8."])
    ]
    with RewardWorker(RewardSet([function]), timeout_s=20) as worker:
        right = worker.score_group(members, {"answer": "7", "tolerance": None})
        near = worker.score_group(members, {"answer": "7", "tolerance": 1})
        unread = worker.score_group(members, {"answer": ""})
    assert [r.value for r in right] == [1, 0, 0]
    assert [r.value for r in near] == [1, 0, 1]
    assert {r.status for r in unread} == {Status.UNPARSEABLE_ANSWER}
    assert right[0].detail["math"]["answer"] == "7"
    json.dumps([dict(r.detail) for r in right])
