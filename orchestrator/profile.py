"""The difficulty profile: the pass rate of every training prompt under the starting policy, measured before training.

Contract:
- A prompt's pass rate is what a run's first group would say of it (`orchestrator.difficulty`): the mean of the values that
  the filter looks at, over `profile.answers_per_prompt` answers sampled as a run samples them.
- A failure is not a zero: a prompt with fewer scored answers than `sampling.min_scored_fraction` asks for has no pass rate,
  and a reason.
- Each prompt is written down when it is finished, so that a profile which was ended goes on in the same folder. What is
  there counts only under the same model, reward and sampling (anything else is refused), and for a prompt only with the same
  content. Prompts without a pass rate are tried again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ray.exceptions import ObjectLostError, RayTaskError

from orchestrator.answers import ask
from orchestrator.clerks import ClerkFleet
from orchestrator.config import Config, ConfigError
from orchestrator.difficulty import pass_rate
from orchestrator.durable import cut_off_half_line, write_json
from orchestrator.fleet import RolloutFleet
from orchestrator.prepare import Prepared
from orchestrator.prompts import Prompt, PromptSource, PromptStream
from orchestrator.reward_fleet import RewardFleet, RewardsLost
from orchestrator.sources import content_hash
from rollout_workers.trajectory import RewardResult
from rollout_workers.worker import RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)

RATES = "pass_rates.jsonl"
SETTINGS = "settings.json"


class ProfileError(RuntimeError):
    """No prompt could be measured; the message says why the first one could not."""


@dataclass(frozen=True)
class Measured:
    """One prompt's outcome: `rate` is None, with a `reason`, where too few of the `values` are there."""

    prompt_id: str
    content: str  # hash of what was asked and judged
    rate: float | None
    values: tuple[float | None, ...]  # of each answer
    reason: str = ""


class RateLog:
    """`pass_rates.jsonl` of a folder, a line for each finished prompt; of several lines on one, the last counts.

    Raises ConfigError, naming the keys, when the folder's lines were measured with other `settings`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RATES
        cut_off_half_line(path)
        self._measured = {measured.prompt_id: measured for measured in _read(path)}
        settings = json.loads(json.dumps(settings, default=str))  # as they will be read back
        if self._measured:
            _refuse_others(folder, json.loads((folder / SETTINGS).read_bytes()), settings)
        write_json(folder / SETTINGS, settings)
        self._file = path.open("ab", buffering=0)  # a line is one write: a kill leaves it whole or half, never mixed

    def add(self, measured: Measured) -> None:
        self._file.write((json.dumps(dataclasses.asdict(measured), ensure_ascii=False) + "\n").encode())
        self._measured[measured.prompt_id] = measured

    def get(self, prompt: Prompt) -> Measured | None:
        """What came of the prompt; None if it was not measured as it is now."""
        measured = self._measured.get(prompt.prompt_id)
        return measured if measured is not None and measured.content == content_of(prompt) else None

    def has_rate(self, prompt: Prompt) -> bool:
        measured = self.get(prompt)
        return measured is not None and measured.rate is not None

    def __len__(self) -> int:
        """Prompts with a line."""
        return len(self._measured)

    def __enter__(self) -> RateLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _read(path: Path) -> Iterator[Measured]:
    """The whole lines of a file, which need not exist."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            yield Measured(**{**fields, "values": tuple(fields["values"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: is not a line of a difficulty profile ({error})") from error


def content_of(prompt: Prompt) -> str:
    """A hash of what is asked and what judges it: a prompt of the same id may have been edited."""
    return content_hash({"messages": list(prompt.messages), "columns": prompt.columns, "reward": prompt.reward})


def _refuse_others(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        named = "; ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed)
        raise ConfigError(
            f"profile.out={folder}: holds pass rates that were measured otherwise: {named}; set that back, or choose "
            "another folder"
        )


def settings_of(prepared: Prepared) -> dict[str, Any]:
    """What a pass rate depends on besides its prompt, by configuration key."""
    config = prepared.config
    settings: dict[str, Any] = {
        "model.path": config.model.path,
        "model.dtype": config.model.dtype,
        "model.chat_template_kwargs": config.model.chat_template_kwargs,
        "rollout.temperature": config.rollout.temperature,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.engine_options": config.rollout.engine_options,
        "profile.answers_per_prompt": config.profile.answers_per_prompt,
        "sampling.min_scored_fraction": config.sampling.min_scored_fraction,
        "sampling.filter_on": prepared.filter_on,
    }
    for f in prepared.rewards.functions:
        settings[f"reward.functions.{f.name}.path"] = f.function if isinstance(f.function, str) else f.name
        settings[f"reward.functions.{f.name}.weight"] = f.weight
        settings[f"reward.functions.{f.name}.options"] = dict(f.options)
    for model in prepared.rewards.models:
        settings[f"reward.models.{model.name}"] = dataclasses.asdict(config.reward.models[model.name])
    return settings


def for_profile(config: Config) -> Config:
    """The configuration that the parts see: groups of `profile.answers_per_prompt`, no batch, nothing held out or watched."""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval={}),
        eval=dataclasses.replace(config.eval, max_response_tokens=None),
        reward=dataclasses.replace(config.reward, watch=dataclasses.replace(config.reward.watch, share=0)),
        sampling=dataclasses.replace(
            config.sampling, groups_per_batch=1, answers_per_group=config.profile.answers_per_prompt
        ),
    )


def profile_folder(config: Config) -> Path:
    """Where the results are, or will be."""
    return Path(config.profile.out or Path(config.run.dir) / (config.run.name or "") / "difficulty").resolve()


def in_order(sources: Sequence[PromptSource], config: Config) -> Iterator[Prompt]:
    """The prompts to measure: the first `profile.limit` of a run's first epoch, or all of it."""
    stream = PromptStream(sources, seed=config.data.seed, shuffle=config.data.shuffle, epochs=1)
    for _ in range(count(sources, config)):
        prompt = stream.next()
        assert prompt is not None
        stream.done(prompt.prompt_id, prompt.epoch)
        yield prompt


def count(sources: Sequence[PromptSource], config: Config) -> int:
    """How many prompts `in_order` yields."""
    total = sum(map(len, sources))
    return total if config.profile.limit is None else min(total, config.profile.limit)


class Profiler:
    """Measures prompts with the fleets of a cluster; at most as many at a time as the engines can hold."""

    def __init__(
        self, config: Config, rollouts: RolloutFleet, rewards: RewardFleet, clerks: ClerkFleet, *, filter_on: str
    ) -> None:
        self._config = config
        self._rollouts = rollouts
        self._rewards = rewards
        self._clerks = clerks
        self._filter_on = filter_on
        answers = config.profile.answers_per_prompt
        self._at_once = max(1, config.rollout.max_concurrent_answers * config.rollout.replicas // answers)
        self._needed = max(1, math.ceil(config.sampling.min_scored_fraction * answers - 1e-9))

    async def run(self, prompts: Iterator[Prompt], finished: Callable[[Measured], None]) -> None:
        """Measure every prompt; `finished` hears of each, in the order they finish.

        Raises FleetError when no engine is left, or too large a share of the verdicts are failures.
        """
        workers = [asyncio.ensure_future(self._work(prompts, finished)) for _ in range(self._at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()

    async def _work(self, prompts: Iterator[Prompt], finished: Callable[[Measured], None]) -> None:
        for prompt in prompts:  # shared by all workers: each takes the next one
            finished(await self._measure(prompt))

    async def _measure(self, prompt: Prompt) -> Measured:
        r, size = self._config.rollout, self._config.profile.answers_per_prompt
        request = RolloutRequest(
            group_id=f"profile-{prompt.prompt_id}",
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            messages=prompt.messages,
            indexes=tuple(range(size)),
            sampling=SamplingSettings(
                r.temperature,
                r.max_response_tokens,
                seed_base=self._config.run.seed if self._config.run.deterministic else None,
            ),
            timeout_s=r.answer_timeout_s,
        )
        answers = await ask(request, self._rollouts, self._clerks, retries=r.retries)
        values: dict[int, float | None] = {}
        reasons = answers.errors
        if answers.payload is not None:
            names = judges(prompt, self._filter_on)
            try:
                results = await self._rewards.score(answers.payload, prompt.columns, names, prompt.text)
            except (RewardsLost, ObjectLostError, RayTaskError) as error:
                reasons.append(str(getattr(error, "cause", None) or error))
            else:
                there = [member.index for member in answers.members if member.in_payload]
                for index, result in zip(there, results, strict=True):
                    values[index] = result.components.get(self._filter_on, result.value)
                    if values[index] is None:
                        reasons.append(_why_not(result))
        return self._measured(prompt, tuple(values.get(index) for index in range(size)), reasons)

    def _measured(self, prompt: Prompt, values: tuple[float | None, ...], reasons: Sequence[str]) -> Measured:
        scored = sum(value is not None for value in values)
        if scored >= self._needed:
            return Measured(prompt.prompt_id, content_of(prompt), pass_rate(values), values)
        reason = f"{scored} of {len(values)} answers were scored, {self._needed} are needed"
        if reasons:
            reason += f"; {reasons[0]}"
        logger.warning("prompt %s has no pass rate: %s", prompt.prompt_id, reason)
        return Measured(prompt.prompt_id, content_of(prompt), None, values, reason)


def judges(prompt: Prompt, filter_on: str) -> tuple[str, ...]:
    """The functions that give what the filter looks at: its own, else the row's, whose total stands in for it."""
    return (filter_on,) if prompt.reward is None or filter_on in prompt.reward else prompt.reward


def _why_not(result: RewardResult) -> str:
    """Why a verdict has no value."""
    errors = [str(part["error"]) for part in result.detail.values() if isinstance(part, dict) and "error" in part]
    return f"{result.status.value}: {errors[0]}" if errors else result.status.value
