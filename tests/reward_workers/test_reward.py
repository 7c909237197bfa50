"""What reward functions may look like, what they are given, and how their results make one verdict."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.reward import (
    RewardFunction,
    RewardFunctionError,
    RewardResult,
    RewardSet,
    Status,
    load_function,
    rows_checked_by,
)
from rollout_workers.trajectory import TrajectoryGroup

QUESTION = {"role": "user", "content": "2+3?"}
COMPLETIONS = ("5", "six")
GROUP = TrajectoryGroup.from_messages(
    [[QUESTION, {"role": "assistant", "content": text}] for text in COMPLETIONS],
    group_id="g",
    prompt_id="p",
    columns={"answer": "5", "level": 2},
)


def judge(
    function: Callable[..., Any], member: int | None = 0, text_prompt: str | None = None, **options: Any
) -> list[RewardResult]:
    """Call a function on GROUP as a reward process does."""
    reward = RewardFunction("fn", function, options=options)
    call = reward.call(GROUP, text_prompt, member)
    return call.results(reward.loaded(**call.arguments))


def seen_by(function: Callable[..., Any], member: int | None = 0, text_prompt: str | None = None) -> dict:
    """The arguments that a function would be called with."""
    return RewardFunction("fn", function).call(GROUP, text_prompt, member).arguments


class TestLoadFunction:
    def test_dotted_path(self) -> None:
        assert load_function("math.sqrt") is math.sqrt

    def test_callable_is_returned(self) -> None:
        assert load_function(len) is len

    def test_file_with_a_dataclass(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass P:\n    x: int\n\ndef f(completion): return P(3).x\n"
        )
        assert load_function(f"{file}:f")("") == 3
        assert load_function(f"{file}:f") is load_function(f"{file}:f")

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("sqrt", "expected package.module.function"),
            ("no_such_package.f", "no module 'no_such_package'"),
            ("json.no_such_module.f", "no module 'json.no_such_module'"),
            ("math.sqroot", r"has no 'sqroot'; it has .*'sqrt'"),
            ("math.pi", "is a float, not a function"),
            ("no_such_file.py:f", "no Python file 'no_such_file.py'"),
        ],
    )
    def test_errors_name_the_path(self, path: str, message: str) -> None:
        with pytest.raises(RewardFunctionError, match=message) as error:
            load_function(path)
        assert path in str(error.value)

    def test_an_import_that_fails_inside_the_module_is_its_own_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "needs_more.py").write_text("import no_such_package\ndef f(completion): return 0\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            load_function("needs_more.f")


class TestArguments:
    def test_one_trajectory(self) -> None:
        def reward(prompt, completion, messages, trajectory, answer, other=7): ...

        seen = seen_by(reward, member=1)
        assert seen["prompt"] == [QUESTION]
        assert seen["completion"] == "six"
        assert seen["messages"] == [QUESTION, {"role": "assistant", "content": "six"}]
        assert seen["trajectory"] is GROUP.trajectories[1]
        assert seen["answer"] == "5"
        assert "other" not in seen

    def test_text_prompt(self) -> None:
        assert seen_by(lambda prompt: 0, text_prompt="2+3?")["prompt"] == "2+3?"

    def test_kwargs_get_the_other_columns(self) -> None:
        assert seen_by(lambda completion, answer, **columns: 0) == {
            "completion": "5",
            "answer": "5",
            "level": 2,
        }

    def test_whole_group_with_columns_by_plural(self) -> None:
        assert seen_by(lambda group, answers: 0, member=None) == {"group": GROUP, "answers": ["5", "5"]}

    def test_trl_with_messages(self) -> None:
        seen = seen_by(lambda completions, answer, **kwargs: 0, member=None)
        assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
        assert seen["prompts"] == [[QUESTION], [QUESTION]]
        assert seen["answer"] == ["5", "5"]
        assert seen["level"] == [2, 2]
        assert len(seen["completion_ids"]) == 2

    def test_trl_with_text(self) -> None:
        seen = seen_by(lambda completions, prompts: 0, member=None, text_prompt="2+3?")
        assert seen == {"completions": ["5", "six"], "prompts": ["2+3?", "2+3?"]}

    def test_trl_logging(self) -> None:
        def reward(completions, log_metric, log_extra, **kwargs):
            log_metric("accuracy", 0.5)
            log_extra("parsed", [5, None])
            return [1.0, 0.0]

        first, second = judge(reward, member=None)
        assert first.metrics == second.metrics == {"accuracy": 0.5}
        assert first.detail == {"parsed": 5}
        assert second.detail == {"parsed": None}

    def test_options_reach_functions_and_constructors(self) -> None:
        class Scaled:
            def __init__(self, scale: float) -> None:
                self.scale = scale

            def __call__(self, completion: str, answer: str) -> float:
                return self.scale * (completion == answer)

        assert judge(lambda completion, scale: scale, scale=3.0)[0].value == 3.0
        assert judge(Scaled, scale=2.0)[0].value == 2.0
        assert judge(Scaled(4.0))[0].value == 4.0
        assert judge(functools.partial(lambda completion, scale: scale, scale=5.0))[0].value == 5.0

    def test_async_forms_are_recognised(self) -> None:
        async def plain(completion: str) -> float:
            return 1.0

        class Asynchronous:
            async def __call__(self, completion: str) -> float:
                return 1.0

        for function in (plain, Asynchronous, Asynchronous(), functools.partial(plain)):
            assert RewardFunction("fn", function).signature.is_async
        assert not RewardFunction("fn", lambda completion: 1.0).signature.is_async

    @pytest.mark.parametrize(
        ("function", "options", "message"),
        [
            (lambda answer: 0, {}, "must name what it judges"),
            (lambda completion, completions: 0, {}, "must name what it judges"),
            (lambda completion, /: 0, {}, "by position only"),
            (lambda completion: 0, {"scale": 1}, "no option scale"),
            (lambda completion: 0, {"completion": 1}, "no option completion"),
            (object, {}, "no __call__"),
        ],
    )
    def test_what_cannot_be_served_is_refused_by_name(
        self, function: Callable[..., Any], options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(RewardFunctionError, match=message) as error:
            RewardFunction("style", function, options=options)
        assert "'style'" in str(error.value)

    def test_a_column_that_no_row_has(self) -> None:
        rewards = RewardSet([RewardFunction("exact", lambda completion, awnser: 0)])
        with pytest.raises(RewardFunctionError, match=r"'exact' takes awnser.*completion.*answer, level"):
            rewards.check_columns({"answer", "level"})
        rewards.check_columns({"awnser"})

    def test_a_row_without_the_column(self) -> None:
        with pytest.raises(RewardFunctionError, match="'fn' takes gold"):
            judge(lambda completion, gold: 1.0)


def test_the_same_function_under_another_name() -> None:
    def judge(completion: str, strict: bool = False) -> float:
        return float(strict)

    one = RewardFunction("one", judge)
    assert one.same_as(RewardFunction("two", judge, weight=0.5, gate=1.0))
    assert not one.same_as(RewardFunction("one", judge, options={"strict": True}))
    assert not one.same_as(RewardFunction("one", lambda completion: 1.0))
    path = "reward_workers.builtin.synthetic_reward"
    assert RewardFunction("path", path).same_as(RewardFunction("function", load_function(path)))


class TestResults:
    @pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
    def test_numbers(self, value: Any) -> None:
        (result,) = judge(lambda completion: value)
        assert result == RewardResult(1.0)
        assert type(result.value) is float

    def test_none_is_unscored(self) -> None:
        assert judge(lambda completion: None)[0] == RewardResult(None, Status.UNSCORED)

    @pytest.mark.parametrize("value", [Decimal("0.5"), Fraction(1, 2), np.float16(0.5), np.longdouble(0.5)])
    def test_other_kinds_of_numbers(self, value: Any) -> None:
        (result,) = judge(lambda completion: value)
        assert (result.value, type(result.value)) == (0.5, float)

    @pytest.mark.parametrize(
        "value",
        [
            math.nan,
            math.inf,
            -math.inf,
            np.float64("nan"),
            10**400,
            -(10**400),
            Decimal("NaN"),
            Decimal("sNaN"),
            Fraction(10**400),
        ],
    )
    def test_not_finite(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"'fn' returned .*; a reward must be finite"):
            judge(lambda completion: value)

    @pytest.mark.parametrize("value", ["1", [1.0], {"score": 1}, 1j, object()])
    def test_wrong_type_names_the_function(self, value: Any) -> None:
        with pytest.raises(TypeError, match="reward function 'fn' must return a number"):
            judge(lambda completion: value)

    @pytest.mark.parametrize("values", [[1.0, None], (1, 0), np.array([1.0, 0.5])])
    def test_group(self, values: Any) -> None:
        assert [r.value for r in judge(lambda completions: values, member=None)] == list(values)

    @pytest.mark.parametrize("values", [[1.0], [], [1.0] * 3])
    def test_wrong_length_names_the_function(self, values: Any) -> None:
        with pytest.raises(ValueError, match=f"'fn' gave {len(values)} results for a group of 2"):
            judge(lambda completions: values, member=None)

    @pytest.mark.parametrize(
        "values", [1.0, "11", b"11", bytearray(2), {"a": 1, "b": 2}, {1, 0}, map(float, "10"), None]
    )
    def test_a_group_needs_a_list(self, values: Any) -> None:
        with pytest.raises(TypeError, match="'fn' judges whole groups"):
            judge(lambda completions: values, member=None)

    def test_detail_becomes_plain(self) -> None:
        class Mine:
            def __repr__(self) -> str:
                return "Mine()"

        given_detail = {"a": Mine(), "b": [np.float32(0.5), (1, None)], 3: {"x": True}}
        (result,) = judge(lambda completion: RewardResult(1.0, detail=given_detail))
        assert result.detail == {"a": "Mine()", "b": [0.5, [1, None]], "3": {"x": True}}


class TestNeeds:
    def test_one_trajectory_gets_its_verdict(self) -> None:
        function = RewardFunction("length", lambda completion, verdict: verdict.value, needs="right")
        function.check_columns(())
        verdicts = [RewardResult(0.25), RewardResult(None, Status.UNSCORED)]
        assert function.call(GROUP, None, 0, verdicts).arguments == {"completion": "5", "verdict": verdicts[0]}

    def test_a_group_gets_all(self) -> None:
        function = RewardFunction("length", lambda completions, verdicts, **columns: [], needs="right")
        verdicts = [RewardResult(0.25), RewardResult(0.5)]
        assert function.call(GROUP, None, None, verdicts).arguments["verdicts"] == verdicts

    def test_a_column_of_that_name_stays_a_column(self) -> None:
        group = TrajectoryGroup("g", "p", GROUP.trajectories, columns={"verdict": "guilty"})
        function = RewardFunction("fn", lambda completion, verdict: 0)
        assert function.call(group, None, 0).arguments["verdict"] == "guilty"

    def test_what_cannot_be_met_is_refused(self) -> None:
        def length(completion: str, verdict: RewardResult) -> float:
            return 0.0

        right = RewardFunction("right", lambda completion: 0)
        with pytest.raises(RewardFunctionError, match="'right' needs 'x' and does not name 'verdict'"):
            RewardFunction("right", lambda completion: 0, needs="x")
        with pytest.raises(RewardFunctionError, match=r"takes verdict, which nothing supplies .`needs` names"):
            RewardFunction("length", length).check_columns({"answer"})
        with pytest.raises(RewardFunctionError, match=r"'length' needs 'write', which is none of .* right"):
            RewardSet([right, RewardFunction("length", length, needs="write")])
        with pytest.raises(RewardFunctionError, match=r"'b' needs 'a', which is none of .* right"):
            RewardSet(
                [right, RewardFunction("a", length, needs="right"), RewardFunction("b", length, needs="a")],
            )
        rewards = RewardSet([RewardFunction("length", length, needs="right"), right], primary="right")
        with pytest.raises(RewardFunctionError, match="'length' needs 'right' beside it"):
            rewards.select(["length"])


def answer_is_digits(answer: str, scale: int = 1) -> None:
    if not answer.isdigit():
        raise ValueError(f"{answer!r} is no number (scale {scale})")


@rows_checked_by(answer_is_digits)
def exact(completion: str, answer: str, scale: int = 1) -> float:
    return scale * float(completion == answer)


class TestRows:
    def test_a_row_whose_gold_cannot_be_used(self) -> None:
        rewards = RewardSet([RewardFunction("exact", exact, options={"scale": 3})])
        rewards.check_row({"answer": "5", "level": 2})
        with pytest.raises(RewardFunctionError, match=r"'exact' can't judge it: 'five' is no number .scale 3"):
            rewards.check_row({"answer": "five"})
        with pytest.raises(RewardFunctionError, match="'exact' takes answer"):
            rewards.check_row({"level": 2})

    def test_only_the_named_functions_are_asked(self) -> None:
        rewards = RewardSet([RewardFunction("exact", exact), RewardFunction("any", lambda completion: 0)])
        rewards.check_row({"answer": "five"}, ["any"])
        with pytest.raises(RewardFunctionError, match="there is no reward function other"):
            rewards.check_row({"answer": "5"}, ["other"])

    def test_a_class_has_it_as_a_static_method(self) -> None:
        class Exact:
            def __call__(self, completion: str, answer: str) -> float:
                return 0.0

            @staticmethod
            def check_row(answer: str) -> None:
                raise ValueError(f"no {answer}")

        with pytest.raises(RewardFunctionError, match="no 5"):
            RewardFunction("exact", Exact).check_row({"answer": "5"})


class TestGates:
    def total(self, gate: float | None, right: float | None, length: float | None = -0.5, weight: float = 0.2) -> Any:
        def judged(value: float | None) -> RewardResult:
            return RewardResult(value, Status.UNSCORED if value is None else Status.SCORED)

        rewards = RewardSet(
            [
                RewardFunction("right", lambda completion: 0),
                RewardFunction("format", lambda completion: 0, weight, gate=0.5),
                RewardFunction("length", lambda completion: 0, 0.1),
            ]
        )
        return rewards.combine({"right": judged(right), "format": judged(gate), "length": judged(length)})

    def test_passed(self) -> None:
        verdict = self.total(gate=0.5, right=1.0)
        assert verdict.value == pytest.approx(1.0 + 0.1 - 0.05)
        assert verdict.metrics == {
            "right/weighted": 1.0,
            "format/weighted": pytest.approx(0.1),
            "length/weighted": pytest.approx(-0.05),
            "format/passed": 1.0,
        }

    def test_not_passed_nothing_but_the_gate_counts(self) -> None:
        verdict = self.total(gate=0.25, right=1.0)
        assert verdict.value == pytest.approx(0.05)
        assert verdict.components == {"right": 1.0, "format": 0.25, "length": -0.5}
        assert verdict.metrics["right/weighted"] == verdict.metrics["length/weighted"] == 0.0
        assert verdict.metrics["format/passed"] == 0.0

    def test_a_gate_without_weight_still_stops(self) -> None:
        assert self.total(gate=0.0, right=1.0, weight=0.0).value == 0.0
        assert self.total(gate=1.0, right=1.0, length=None, weight=0.0).value == 1.0

    def test_a_gate_that_does_not_judge_stops_nothing(self) -> None:
        verdict = self.total(gate=None, right=1.0, length=None)
        assert verdict.value == 1.0
        assert "format/passed" not in verdict.metrics

    def test_behind_a_gate_nothing_is_scored_that_would_not_be(self) -> None:
        verdict = self.total(gate=0.0, right=None, length=None, weight=0.0)
        assert (verdict.value, verdict.status) == (None, Status.UNSCORED)

    def test_only_gates_that_are_not_passed_count(self) -> None:
        rewards = RewardSet(
            [RewardFunction(name, lambda completion: 0, gate=1.0) for name in "ab"]
            + [RewardFunction("c", lambda completion: 0)]
        )
        verdict = rewards.combine({"a": RewardResult(0.5), "b": RewardResult(1.0), "c": RewardResult(1.0)})
        assert verdict.value == 0.5

    def test_steps_stop_with_their_function(self) -> None:
        rewards = RewardSet(
            [RewardFunction("a", lambda completion: 0, gate=1.0), RewardFunction("b", lambda completion: 0)]
        )
        b = RewardResult(1.0, step_values=(1, 0))
        assert rewards.combine({"a": RewardResult(1.0), "b": b}).step_values == (1, 0)
        assert rewards.combine({"a": RewardResult(0.0), "b": b}).step_values == (0, 0)

    def test_the_threshold_is_a_number(self) -> None:
        with pytest.raises(RewardFunctionError, match="must reach is nan"):
            RewardFunction("a", lambda completion: 0, gate=math.nan)


class TestRewardSet:
    def rewards(self, **weights: float) -> RewardSet:
        return RewardSet([RewardFunction(name, lambda completion: 0, weight) for name, weight in weights.items()])

    def test_weighted_sum(self) -> None:
        verdict = self.rewards(right=1.0, style=0.2).combine(
            {
                "right": RewardResult(1.0, metrics={"parsed": 1.0}),
                "style": RewardResult(0.5, detail={"why": "x"}),
            }
        )
        assert verdict.value == pytest.approx(1.1)
        assert verdict.components == {"right": 1.0, "style": 0.5}
        assert verdict.metrics == {"right/parsed": 1.0, "right/weighted": 1.0, "style/weighted": pytest.approx(0.1)}
        assert verdict.detail == {"style": {"why": "x"}}

    def test_d07_none_is_never_zero(self) -> None:
        rewards = self.rewards(right=1.0, style=1.0)
        none = RewardResult(None, Status.UNSCORED)
        assert rewards.combine({"right": none, "style": RewardResult(0.5)}).value == 0.5
        verdict = rewards.combine({"right": none, "style": none})
        assert (verdict.value, verdict.status) == (None, Status.UNSCORED)

    def test_a_component_of_weight_zero_scores_nothing(self) -> None:
        verdict = self.rewards(right=1.0, shown=0.0).combine(
            {"right": RewardResult(None, Status.UNSCORED), "shown": RewardResult(3.0)}
        )
        assert verdict.status is Status.UNSCORED
        assert verdict.components == {"right": None, "shown": 3.0}

    def test_overflow_is_an_error(self) -> None:
        verdict = self.rewards(a=1e200).combine({"a": RewardResult(1e200)})
        assert verdict.status is Status.ERRORED
        assert "finite" in verdict.detail["total"]["error"]

    def test_step_values(self) -> None:
        rewards = self.rewards(a=1.0, b=2.0, c=1.0)
        a, b, c = (
            RewardResult(1.0, step_values=(1, 0)),
            RewardResult(1.0, step_values=(0, 1)),
            RewardResult(1.0),
        )
        assert rewards.combine({"a": a, "b": b, "c": c}).step_values == (1, 2)
        assert rewards.combine({"c": c}).step_values is None
        assert rewards.combine({"a": a, "b": RewardResult(1.0, step_values=(1,))}).status is Status.ERRORED

    @given(
        st.dictionaries(
            st.sampled_from("abcde"),
            st.sampled_from([*Status]).flatmap(
                lambda status: st.just(status) if status is not Status.SCORED else st.floats(-1e6, 1e6, allow_nan=False)
            ),
            min_size=1,
        )
    )
    def test_a_number_or_a_status(self, parts: dict[str, Any]) -> None:
        results = {
            name: RewardResult(None, part) if isinstance(part, Status) else RewardResult(part)
            for name, part in parts.items()
        }
        verdict = self.rewards(a=1.0, b=2.0, c=0.5, d=1.0, e=1.0).combine(results)
        failed = {r.status for r in results.values()} - {Status.SCORED, Status.UNSCORED}
        numbers = [r.value for r in results.values() if r.value is not None]
        assert verdict.components == {name: r.value for name, r in results.items()}
        if failed:
            assert verdict.value is None
            assert verdict.status in failed
        elif numbers:
            weights = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0, "e": 1.0}
            expected = math.fsum(weights[n] * r.value for n, r in results.items() if r.value is not None)
            assert verdict.value == pytest.approx(expected, abs=1e-6)
        else:
            assert verdict.status is Status.UNSCORED

    def test_one_function_has_no_second_reward_curve(self) -> None:
        assert self.rewards(right=2.0).combine({"right": RewardResult(1.0)}).metrics == {}

    def test_of_callables(self) -> None:
        def right(completion: str) -> float:
            return 1.0

        assert [f.name for f in RewardSet.of(right).functions] == ["right"]
        rewards = RewardSet.of([right, lambda completion: 0])
        assert [f.name for f in rewards.functions] == ["right", "lambda"]
        assert rewards.primary == "right"

    def test_refusals(self) -> None:
        with pytest.raises(RewardFunctionError, match="at least one"):
            RewardSet([])
        with pytest.raises(RewardFunctionError, match="different names, got a, a"):
            RewardSet([RewardFunction("a", lambda completion: 0)] * 2)
        with pytest.raises(RewardFunctionError, match="weight 0"):
            self.rewards(a=0.0)
        with pytest.raises(RewardFunctionError, match="'b' is none of a"):
            RewardSet([RewardFunction("a", lambda completion: 0)], primary="b")
        with pytest.raises(RewardFunctionError, match="no reward function c; there are a, b"):
            self.rewards(a=1.0, b=1.0).select(["a", "c"])
        with pytest.raises(RewardFunctionError, match="its weight is nan"):
            self.rewards(a=math.nan)
        with pytest.raises(RewardFunctionError, match="letters, digits"):
            RewardFunction("a/b", lambda completion: 0)

    def test_unpickling_runs_none_of_the_users_code(self, tmp_path: Path) -> None:
        file = tmp_path / "loud.py"
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\ndef f(completion): return 1.0\n")
        payload = pickle.dumps(RewardSet([RewardFunction("loud", f"{file}:f")]))
        file.unlink()
        rewards = pickle.loads(payload)
        assert rewards.functions[0].signature.parameters == ("completion",)
        assert (tmp_path / "ran").read_text() == "x"

    def test_a_callable_travels(self) -> None:
        bonus = 2.0
        (function,) = pickle.loads(pickle.dumps(RewardSet.of(lambda completion: bonus))).functions
        assert function.loaded("x") == 2.0
