"""Held-out evaluation, tied to one policy version.

Every set is answered by the engines at exactly the version that is reported: a token of another version is an error,
not noise. The verdicts come from a checker that is not the training reward, on reward actors of its own. pass@1 is the
mean over prompts of the share of right answers, with a 95% Wilson interval over prompts; with several answers a prompt
there are pass@k and maj@k as well. Answers stand beside the numbers in `eval/`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.answers import ask
from orchestrator.clerks import ClerkFleet
from orchestrator.config import Config
from orchestrator.durable import whole_file
from orchestrator.estimates import majority_at_k, pass_at_k, wilson_interval
from orchestrator.fleet import RolloutFleet
from orchestrator.prompts import Prompt, PromptSource
from orchestrator.reward_fleet import RewardFleet
from rollout_workers.trajectory import RewardResult
from rollout_workers.worker import RolloutRequest, SamplingSettings


@dataclass(frozen=True)
class Answered:
    """One prompt's answers with their verdicts (None: the checker gave none)."""

    prompt: Prompt
    texts: Sequence[str]
    passed: Sequence[bool | None]
    votes: Sequence[str | None]  # the final answers that maj@k counts
    lengths: Sequence[int]
    truncated: Sequence[bool]


@dataclass(frozen=True)
class SetResult:
    name: str
    version: int
    pass_at_1: float
    interval: tuple[float, float]
    answered: Sequence[Answered]
    metrics: Mapping[str, float]

    @property
    def figure(self) -> str:
        """pass@1 for a person; a dash where no answer has a verdict."""
        if math.isnan(self.pass_at_1):
            return "pass@1 -"
        return f"pass@1 {self.pass_at_1:.3f} (95% {self.interval[0]:.3f} to {self.interval[1]:.3f})"


class EvaluationError(RuntimeError):
    """The evaluation could not be carried out at the version asked for."""


class Evaluator:
    def __init__(
        self,
        config: Config,
        sets: Sequence[PromptSource],
        rollouts: RolloutFleet,
        checker: RewardFleet,
        clerks: ClerkFleet,
        folder: Path,
    ) -> None:
        self._config = config
        self._sets = sets
        self._rollouts = rollouts
        self._checker = checker
        self._folder = folder
        in_flight = config.rollout.max_concurrent_answers * config.rollout.replicas
        self._slots = asyncio.Semaphore(max(1, in_flight // config.eval.answers_per_prompt))
        self._clerks = clerks

    async def run(self, version: int) -> list[SetResult]:
        """Evaluate every set at `version`, which all engines must hold. Writes the answers to `eval/`."""
        results = [await self._evaluate(source, version) for source in self._sets]
        for result in results:
            await asyncio.to_thread(self._write, result)
        return results

    async def _evaluate(self, source: PromptSource, version: int) -> SetResult:
        answered = await asyncio.gather(*(self._answer(prompt, version) for prompt in source))
        return summarise(source.name, version, answered)

    async def _answer(self, prompt: Prompt, version: int) -> Answered:
        e, r = self._config.eval, self._config.rollout
        request = RolloutRequest(
            group_id=f"eval-{version}-{prompt.prompt_id}",
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            messages=prompt.messages,
            indexes=tuple(range(e.answers_per_prompt)),
            sampling=SamplingSettings(
                e.temperature,
                e.max_response_tokens or r.max_response_tokens,
                # The same draws at every version and in every run: differences come from the weights.
                seed_base=0 if e.temperature > 0 else None,
            ),
            timeout_s=r.answer_timeout_s,
        )
        async with self._slots:
            generated = await ask(request, self._rollouts, self._clerks, retries=r.retries)
            for error in generated.errors:
                raise EvaluationError(f"evaluation of prompt {prompt.prompt_id} failed: {error}")
            for member in generated.members:
                if any(found != version for found, _ in member.token_versions):
                    raise EvaluationError(
                        f"evaluation at version {version}: {generated.replica} answered prompt {prompt.prompt_id} under "
                        f"versions {[v for v, _ in member.token_versions]}"
                    )
            verdicts = await self._checker.score(generated.payload, prompt.columns, None, prompt.text)
            texts = await self._clerks.completions(generated.payload)
        return Answered(
            prompt,
            texts,
            [None if v.value is None else v.value >= e.pass_threshold for v in verdicts],
            [_vote(verdict, text) for verdict, text in zip(verdicts, texts, strict=True)],
            [member.response_length for member in generated.members],
            [member.truncated for member in generated.members],
        )

    def _write(self, result: SetResult) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self._folder / f"v{result.version:06d}-{result.name}.jsonl") as file:
            for item in result.answered[: self._config.eval.samples]:
                for text, passed in zip(item.texts, item.passed, strict=True):
                    line = {
                        "prompt_id": item.prompt.prompt_id,
                        "prompt": item.prompt.messages[-1].get("content"),
                        "completion": text,
                        "passed": passed,
                    }
                    file.write((json.dumps(line, ensure_ascii=False, default=str) + "\n").encode())


def _vote(verdict: RewardResult, text: str) -> str | None:
    """What an answer votes for in maj@k: the final answer if the checker reports it as detail `answer`, else its text."""
    for detail in verdict.detail.values():
        if isinstance(detail, Mapping) and "answer" in detail:
            return None if detail["answer"] is None else str(detail["answer"])
    return text.strip()


def summarise(name: str, version: int, answered: Sequence[Answered]) -> SetResult:
    """Figures of one set. Answers without a verdict count in none of them but `unscored_ratio`, lengths and truncation.

    Where none has a verdict, `pass_at_1` is NaN, and no metric.
    """
    judged = [[(p, v) for p, v in zip(a.passed, a.votes, strict=True) if p is not None] for a in answered]
    verdicts = [([p for p, _ in pairs], [vote for _, vote in pairs]) for pairs in judged if pairs]
    rates = [sum(passed) / len(passed) for passed, _ in verdicts]
    low, high = wilson_interval(sum(rates), len(rates))
    answers = sum(len(a.passed) for a in answered)
    lengths = [length for a in answered for length in a.lengths]
    prefix = f"eval/{name}"
    metrics: dict[str, float] = {
        f"{prefix}/prompts": len(answered),
        f"{prefix}/unscored_ratio": sum(p is None for a in answered for p in a.passed) / answers,
        f"{prefix}/response_length_mean": sum(lengths) / len(lengths),
        f"{prefix}/truncated_ratio": sum(t for a in answered for t in a.truncated) / answers,
    }
    if rates:
        metrics |= {
            f"{prefix}/pass_at_1": _mean(rates),
            f"{prefix}/pass_at_1_low": low,
            f"{prefix}/pass_at_1_high": high,
        }
    if rates and max(len(a.passed) for a in answered) > 1:
        metrics[f"{prefix}/pass_at_k"] = _mean([pass_at_k(len(p), sum(p), len(p)) for p, _ in verdicts])
        metrics[f"{prefix}/maj_at_k"] = _mean([majority_at_k(votes, p, len(p)) for p, votes in verdicts])
    return SetResult(name, version, _mean(rates) if rates else math.nan, (low, high), answered, metrics)


def metrics_of(results: Sequence[SetResult]) -> dict[str, float]:
    """All sets' metrics; the first set's pass@1 also stands for the whole evaluation."""
    values: dict[str, float] = {}
    for result in results:
        values |= result.metrics
    for result in results[:1]:
        for name in ("pass_at_1", "pass_at_1_low", "pass_at_1_high"):
            if (value := result.metrics.get(f"eval/{result.name}/{name}")) is not None:
                values[f"eval/{name}"] = value
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(results: Sequence[SetResult]) -> list[tuple[str, Any]]:
    """Rows for a person: set, figure."""
    rows: list[tuple[str, Any]] = []
    for r in results:
        rows.append((r.name, f"{r.figure}, version {r.version}"))
        for key in ("pass_at_k", "maj_at_k", "response_length_mean", "truncated_ratio"):
            value = r.metrics.get(f"eval/{r.name}/{key}")
            if value is not None:
                rows.append(("", f"{key} {value:.3f}"))
    return rows
