"""RULER: rewards from an LLM that compares the attempts of one group, for tasks that no verifier can check.

Contract: a score says how good an attempt is beside the others of its group, from 0 to 1. Attempts are anonymous and
shuffled in each request, scores come back by name, equal attempts are judged once and score the same. A judge that can't be
used (unknown model, credentials) raises JudgeUnusableError; one that fails on a group gives every attempt of it a status and
the reason instead of a score, never a zero. Groups of more than 8 different attempts are judged in overlapping chunks.

The idea is OpenPipe's (https://art.openpipe.ai/fundamentals/ruler); the rubric, the frames and the fallbacks are ours.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from reward_workers.judge_agreement import agreement
from reward_workers.judge_client import Complete, Judge, JudgeCallError, JudgeOptions, JudgeUnusableError, Usage
from reward_workers.judge_panel import Case, Panel
from reward_workers.judge_prompt import DEFAULT_RUBRIC, LIST, PAIR, common_lines, line_of, rubric_text
from reward_workers.judge_reply import Verdict
from rollout_workers.trajectory import Message, RewardResult, Status, TrajectoryGroup

__all__ = ["DEFAULT_RUBRIC", "Judge", "JudgeUnusableError", "RulerReward", "TrajectoryScore", "ruler", "ruler_reward"]
__all__ += ["ruler_score_group"]

DEFAULT_JUDGE = "openai/o3"
FEW = 4  # in smaller groups a score has little to be relative to
AGREEMENT_WINDOW_PAIRS = 500.0
AGREEMENT_MIN_PAIRS = 50.0


class JudgeDivergedError(RuntimeError):
    """The judge no longer orders answers as the verifier does: it is being gamed, or it was never any good."""


@dataclass(frozen=True)
class TrajectoryScore:
    """The verdict on `message_lists[index]`. `score` is None exactly when `status` is not `scored`; then
    `explanation` says what went wrong."""

    index: int
    score: float | None
    explanation: str
    status: Status = Status.SCORED


async def ruler(
    message_lists: Sequence[Sequence[Message]],
    judge: str | Judge | Complete = DEFAULT_JUDGE,
    rubric: str | Path = DEFAULT_RUBRIC,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    deadline_s: float = 300.0,
    **options: Unpack[JudgeOptions],
) -> list[TrajectoryScore]:
    """Score attempts at one task against each other; one score for each list of OpenAI messages, in order.

    `judge` is a LiteLLM model, a `Judge`, or a coroutine function from messages to text; `options` are those of `Judge` for
    the first and the last. `rubric` is a text or a `.md` or `.txt` file; a file with a list of principles is a constitution.
    `tools` are the OpenAI tool definitions that the attempts had. `deadline_s` is for the whole group, retries included.

    Raises JudgeUnusableError for a judge that can't be used, ValueError for messages that are none.
    """
    scores, _ = await _judge_group(message_lists, _judge_of(judge, options), rubric_text(rubric), tools, deadline_s)
    return scores


async def ruler_score_group(
    group: TrajectoryGroup,
    judge: str | Judge | Complete = DEFAULT_JUDGE,
    rubric: str | Path = DEFAULT_RUBRIC,
    *,
    independent_weight: float = 0.0,
    tools: Sequence[Mapping[str, Any]] | None = None,
    deadline_s: float = 300.0,
    **options: Unpack[JudgeOptions],
) -> TrajectoryGroup:
    """The group with the judge's scores as rewards; everything else is as it was.

    The reward before is kept as metric and component `independent_reward`; the new one is the score plus
    `independent_weight` times it. Components hold the score as `ruler_score`, the detail the explanation. A trajectory that
    the judge gives no score is errored or timed out; one whose independent reward is missing while that has a weight is
    unscored. Other arguments and errors are those of `ruler`.
    """
    messages = [trajectory.messages for trajectory in group.trajectories]
    scores, usage = await _judge_group(messages, _judge_of(judge, options), rubric_text(rubric), tools, deadline_s)
    shared = _metrics(usage, len(scores))
    judged = []
    for trajectory, score in zip(group.trajectories, scores, strict=True):
        result = _result(score, shared)
        before = trajectory.reward.value if trajectory.reward is not None else None
        old = trajectory.reward or RewardResult(None, Status.UNSCORED)
        value, status = result.value, result.status
        if value is not None and independent_weight:
            value = None if before is None else value + independent_weight * before
            status = Status.SCORED if value is not None else Status.UNSCORED
        kept = {} if before is None else {"independent_reward": before}
        metrics = {**old.metrics, **kept, **result.metrics}
        if score.score is not None:
            metrics["ruler_score"] = score.score
        judged.append(
            trajectory.with_reward(
                RewardResult(
                    value,
                    status,
                    {**old.components, **kept, "ruler_score": score.score},
                    metrics,
                    {**old.detail, **result.detail},
                )
            )
        )
    return dataclasses.replace(group, trajectories=tuple(judged))


class RulerReward:
    """The whole-group reward function of a run: `reward.functions.judge.path=reward_workers.judge.ruler_reward`.

    Its options are `judge`, `rubric`, `deadline_s` (shorter than `reward.timeout_s`, so that a slow judge ends as a status of
    its own) and those of `Judge`. With `reward.functions.judge.needs=VERIFIER` its order of the answers is compared with
    that function's wherever that gives values (it may have weight 0, and None for rows that it can't check). When the
    running agreement falls below `min_agreement`, groups become errors that say so, and `reward.max_error_ratio` stops the
    run; 0 only measures. A data column `tools` is shown to the judge.

    Raises JudgeUnusableError and RewardFunctionError for what can't be used.
    """

    def __init__(
        self,
        judge: str = DEFAULT_JUDGE,
        rubric: str = DEFAULT_RUBRIC,
        *,
        deadline_s: float = 240.0,
        min_agreement: float = 0.6,
        **options: Unpack[JudgeOptions],
    ) -> None:
        if options.get("budget_usd") is not None and options.get("cache_dir") is None:
            raise JudgeUnusableError("budget_usd needs cache_dir: the processes of a run share their costs through it")
        self._rubric = rubric_text(rubric)
        self._judge = _judge_of(judge, options)
        self._deadline_s = deadline_s
        self._min_agreement = min_agreement

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Before a run starts: that the judge exists, takes the credentials and answers. Raises JudgeUnusableError."""
        cls(**options)._judge.check()

    async def __call__(
        self, group: TrajectoryGroup, verdicts: Sequence[RewardResult] | None = None
    ) -> list[RewardResult]:
        messages = [trajectory.messages for trajectory in group.trajectories]
        tools = group.columns.get("tools")
        scores, usage = await _judge_group(messages, self._judge, self._rubric, tools, self._deadline_s)
        shared = _metrics(usage, len(scores))
        if verdicts is not None:
            shared |= self._agreement([score.score for score in scores], [verdict.value for verdict in verdicts])
        return [_result(score, shared) for score in scores]

    def _agreement(self, scores: Sequence[float | None], verified: Sequence[float | None]) -> dict[str, float]:
        """Metrics of this group's agreement; raises JudgeDivergedError when the running one is too low."""
        here = agreement(scores, verified)
        if not here.pairs:
            return {}
        running = self._judge.store.agree(here, AGREEMENT_WINDOW_PAIRS)
        if running.pairs >= AGREEMENT_MIN_PAIRS and (running.rate or 0.0) < self._min_agreement:
            raise JudgeDivergedError(
                f"the judge {self._judge.name} agrees with the verifier on {running.rate:.0%} of the last {running.pairs:.0f} "
                f"pairs of answers that the verifier tells apart; min_agreement={self._min_agreement}. Look at its "
                "explanations in the journal: it is being gamed, or the rubric does not say what the verifier checks"
            )
        return {"verifier_agreement": here.rate or 0.0}


ruler_reward = RulerReward  # as a configuration names it


def _judge_of(judge: str | Judge | Complete, options: JudgeOptions) -> Judge:
    if unknown := sorted(options.keys() - JudgeOptions.__annotations__.keys()):
        known = ", ".join(JudgeOptions.__annotations__)
        raise JudgeUnusableError(f"the judge has no option {', '.join(unknown)}; it takes {known}")
    if isinstance(judge, Judge):
        if options:
            raise JudgeUnusableError(
                f"{', '.join(options)}: options of a judge that was given ready-made; give them to Judge"
            )
        return judge
    try:
        return _shared_judge(
            judge, json.dumps(options | {"cache_dir": _text(options.get("cache_dir"))}, sort_keys=True)
        )
    except TypeError as error:
        raise JudgeUnusableError(
            f"options that are no plain values can only be given to Judge itself: {error}"
        ) from error


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


@functools.lru_cache(maxsize=8)
def _shared_judge(model: str | Complete, options: str) -> Judge:
    """One judge for all calls that name the same one: they share its slots, its budget and its connections."""
    return Judge(model, **json.loads(options))


async def _judge_group(
    message_lists: Sequence[Sequence[Message]],
    judge: Judge,
    rubric: str,
    tools: Sequence[Mapping[str, Any]] | None,
    deadline_s: float,
) -> tuple[list[TrajectoryScore], tuple[Usage, float]]:
    """Scores in order, and what they took: usage and seconds."""
    began = time.monotonic()
    usage = Usage()
    lists = [_lines(index, messages) for index, messages in enumerate(message_lists)]
    if not lists:
        return [], (usage, 0.0)
    if len(lists) < FEW:
        judge.warn_once(
            f"groups of fewer than {FEW} attempts are judged: scores are relative within a group, and in so small ones they "
            "say little"
        )
    # In one order whatever the group's: the same attempts find the same verdicts in the cache.
    distinct = sorted(set(lists))
    shared = common_lines(distinct)
    case = Case(
        rubric, [line_of(tool) for tool in tools or ()], distinct[0][:shared], [lines[shared:] for lines in distinct]
    )
    try:
        async with asyncio.timeout(deadline_s):
            verdicts = await _verdicts(case, judge, usage)
    except TimeoutError:
        scores = [
            TrajectoryScore(i, None, f"judge {judge.name} did not finish within {deadline_s:g} s", Status.TIMED_OUT)
            for i in range(len(lists))
        ]
    except JudgeCallError as error:
        failed = f"{type(error).__name__}: {error}"
        scores = [TrajectoryScore(i, None, failed, Status.ERRORED) for i in range(len(lists))]
    else:
        by_lines = dict(zip(distinct, verdicts, strict=True))
        scores = [TrajectoryScore(i, by_lines[own].score, by_lines[own].explanation) for i, own in enumerate(lists)]
    return scores, (usage, time.monotonic() - began)


async def _verdicts(case: Case, judge: Judge, usage: Usage) -> list[Verdict]:
    """From the cache, or from the judge and into the cache."""
    asked = [judge.identity, LIST, PAIR, case.rubric, case.tools, case.context, case.attempts]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    if judge.keeps_verdicts and (kept := judge.store.verdict(key)) is not None:
        usage.cached = True
        return [Verdict(score, explanation) for score, explanation in kept]
    verdicts = await Panel(judge, usage, random.SystemRandom()).verdicts(case)
    if judge.keeps_verdicts:
        judge.store.keep(key, [(verdict.score, verdict.explanation) for verdict in verdicts])
    return verdicts


def _lines(index: int, messages: Sequence[Message]) -> tuple[str, ...]:
    if isinstance(messages, str) or not messages:
        raise ValueError(f"message_lists[{index}]: expected a list of message dicts, got {messages!r:.60}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message_lists[{index}][{number}]: expected a message dict, got {message!r:.60}")
    return tuple(line_of(message) for message in messages)


def _result(score: TrajectoryScore, shared: Mapping[str, float]) -> RewardResult:
    """A failure's explanation is its `error`, where alarms look for it."""
    if score.score is None:
        return RewardResult(None, score.status, metrics=shared, detail={"error": score.explanation})
    return RewardResult(score.score, metrics=shared, detail={"explanation": score.explanation})


def _metrics(used: tuple[Usage, float], size: int) -> dict[str, float]:
    """What judging the group took. Costs, calls and tokens are each answer's share, so that their sum over answers is right."""
    usage, seconds = used
    totals = {
        "cost_usd": usage.cost_usd,
        "calls": usage.calls,
        "retries": usage.retries,
        "unpriced_calls": usage.unpriced_calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "repairs": usage.repairs,
        "comparisons": usage.comparisons,
    }
    return {name: total / max(size, 1) for name, total in totals.items()} | {"seconds": seconds, "cached": usage.cached}
