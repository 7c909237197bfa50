"""How a verdict on different attempts comes about: a list of scores, one repair, comparisons in pairs, or an error.

Contract: attempts are never mixed up, whatever the judge replies: within a request they are known by random names, outside
by their position in the case. Either all of a case's attempts get a verdict or none does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from reward_workers.judge_chunks import align, plan, win_shares
from reward_workers.judge_client import Judge, JudgeCallError, TooLongError, Usage
from reward_workers.judge_prompt import LIST, PAIR, Sheet
from reward_workers.judge_reply import TIE, ReplyError, Verdict, read_better, read_scores

T = TypeVar("T")

_ENTRY = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "explanation": {"type": "string"}, "score": {"type": "number"}},
    "required": ["id", "explanation", "score"],
    "additionalProperties": False,
}
LIST_SCHEMA = {
    "type": "object",
    "properties": {"scores": {"type": "array", "items": _ENTRY}},
    "required": ["scores"],
    "additionalProperties": False,
}
PAIR_SCHEMA = {
    "type": "object",
    "properties": {"explanation": {"type": "string"}, "better": {"type": "string"}},
    "required": ["explanation", "better"],
    "additionalProperties": False,
}


class NoVerdictError(JudgeCallError):
    """The judge's replies could not be used, neither scores nor comparisons."""


@dataclass(frozen=True)
class Case:
    """What is to be judged, as lines for a judge's sheet: what all attempts begin with, and each one's own lines."""

    rubric: str
    tools: Sequence[str]
    context: Sequence[str]
    attempts: Sequence[Sequence[str]]


class Panel:
    """Judges cases with one judge; `usage` is added to."""

    def __init__(self, judge: Judge, usage: Usage, random_: random.Random) -> None:
        self._judge = judge
        self._usage = usage
        self._random = random_

    async def verdicts(self, case: Case) -> list[Verdict]:
        """One for each attempt, in order. Raises JudgeCallError, or JudgeUnusableError."""
        parts = plan(len(case.attempts), self._random)
        by_chunk = await _together(self._chunk(case, chunk) for chunk in parts.chunks)
        explanations: dict[int, list[str]] = {}
        for chunk in by_chunk:
            for attempt, verdict in chunk.items():
                explanations.setdefault(attempt, []).append(verdict.explanation)
        scores = align([{a: verdict.score for a, verdict in chunk.items()} for chunk in by_chunk], parts.anchors)
        return [Verdict(scores[a], "\n".join(explanations[a])) for a in range(len(case.attempts))]

    async def _chunk(self, case: Case, chunk: Sequence[int]) -> dict[int, Verdict]:
        try:
            return await self._scores(case, chunk)
        except (ReplyError, TooLongError) as error:
            shares = await self._compare(case, chunk)
            if shares is None:
                raise NoVerdictError(
                    f"judge {self._judge.name}: no usable scores after one repair, nor enough comparisons: {error}"
                ) from error
            return shares

    async def _scores(self, case: Case, chunk: Sequence[int]) -> dict[int, Verdict]:
        sheet = self._sheet(LIST, case, chunk)
        reply = await self._judge.ask(sheet.messages, self._usage, LIST_SCHEMA)
        try:
            found = read_scores(reply.text, sheet.names)
        except ReplyError as error:
            problem = f"{error}; it was cut off at the length limit, be brief" if reply.cut else str(error)
            self._usage.repairs += 1
            reply = await self._judge.ask(sheet.repaired(reply.text, problem), self._usage, LIST_SCHEMA)
            found = read_scores(reply.text, sheet.names)
        return {chunk[sheet.attempt[name]]: verdict for name, verdict in found.items()}

    async def _compare(self, case: Case, chunk: Sequence[int]) -> dict[int, Verdict] | None:
        """Every pair once; None if too few of the replies can be used."""
        pairs = list(itertools.combinations(chunk, 2))
        better = await _together(self._better(case, pair) for pair in pairs)
        outcomes = {pair: found for pair, found in zip(pairs, better, strict=True) if found is not None}
        shares = win_shares(outcomes, chunk)
        if shares is None:
            return None
        counts = {attempt: sum(attempt in pair for pair in outcomes) for attempt in chunk}
        return {
            attempt: Verdict(share, f"won {share * counts[attempt]:g} of {counts[attempt]} comparisons")
            for attempt, share in shares.items()
        }

    async def _better(self, case: Case, pair: Sequence[int]) -> int | str | None:
        sheet = self._sheet(PAIR, case, pair)
        self._usage.comparisons += 1
        try:
            reply = await self._judge.ask(sheet.messages, self._usage, PAIR_SCHEMA)
            name = read_better(reply.text, sheet.names)
        except (ReplyError, TooLongError):
            return None  # counted by what is missing
        return TIE if name == TIE else pair[sheet.attempt[name]]

    def _sheet(self, template: str, case: Case, chunk: Sequence[int]) -> Sheet:
        attempts = [case.attempts[attempt] for attempt in chunk]
        return Sheet(template, case.rubric, case.context, case.tools, attempts, self._random)


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
