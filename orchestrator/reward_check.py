"""What the rewards of a task give to answers of known quality: the judging behind `headway check-rewards`.

Contract:
- Each row's probes (`orchestrator.reward_probes`) are judged as one group, by the reward functions that judge the row in a
  run, in the killable processes of a run (`reward_workers.worker`), without second tries: a failure that a run would hide by
  trying again shows here. No engine, model or Ray is started.
- Probes have no tokens of a model. One token stands for each word or sign, so that rewards of length and repetition see
  lengths in proportion.
- A row's gold is what `check_rewards.gold_column` or `gold_template` makes it, else what its reward functions say
  (`gold_written_by`). Where several say something, the one counts that the whole set pays best; of equals the primary's.
- When a function ran out of time on `MAX_TIMED_OUT` answers, the rows that were not begun are left out, and counted.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
import string
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from orchestrator.config import CheckRewardsConfig, Config, ConfigError
from orchestrator.local_models import LocalModels
from orchestrator.prepare import Task
from orchestrator.prompts import Prompt, PromptSource
from orchestrator.reward_probes import Probe, holds_gold, normal, probes
from orchestrator.sources import Rows
from reward_workers.function import Gold, RewardFunctionError
from reward_workers.process import Job, ProcessLostError, RewardProcess
from reward_workers.reward import RewardFunction, RewardResult, RewardSet, Status
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory, VersionSpan

X = TypeVar("X")
Y = TypeVar("Y")

MAX_TIMED_OUT = 10  # answers
MAX_OTHERS = 1000  # golds of other rows to choose from
BRACES = "names of columns stand in braces, and a brace itself is doubled"
AT_ONCE = min(8, os.cpu_count() or 1)  # groups, as many as have a core: their latency is to be that of a run


@dataclass(frozen=True)
class Judged:
    """A probe and the verdicts on it: of the row's reward functions and of eval.checker, None where they don't judge it."""

    probe: Probe
    reward: RewardResult | None
    checker: RewardResult | None


@dataclass(frozen=True)
class RowCheck:
    """`echo_may_be_right`: the prompt holds a gold."""

    prompt_id: str
    judged: tuple[Judged, ...]
    echo_may_be_right: bool


@dataclass(frozen=True)
class SourceCheck:
    """One source. `judge` says whose verdicts its golds and probes are held against, the other ones are for comparison.

    `no_comparison` says why there are none. `skipped` counts drawn rows that were not judged.
    """

    key: str
    judge: str  # reward | checker
    rows: Sequence[RowCheck]
    skipped: int
    no_comparison: str = ""


@dataclass(frozen=True)
class Checked:
    """`latencies_s` are times of single calls by function, the checker's among them; `timed_out` answers by function."""

    task: Task
    sources: Sequence[SourceCheck]
    latencies_s: Mapping[str, Sequence[float]]
    timed_out: Mapping[str, int]


def drawn(source: PromptSource, config: Config) -> PromptSource:
    """`check_rewards.rows` rows of a source, in their order; the same ones for the same run.seed."""
    count = config.check_rewards.rows
    if count is None or count >= len(source):
        return source
    indices = sorted(random.Random(f"{config.run.seed}:{source.key}").sample(range(len(source)), count))
    rows = Rows(count, lambda i: source.rows.fetch(indices[i]), lambda i: source.rows.place(indices[i]))
    return dataclasses.replace(source, rows=rows, ids=tuple(source.ids[i] for i in indices))


def check_folder(config: Config) -> Path:
    """Where the results are, or will be."""
    folder = config.check_rewards.out or Path(config.run.dir) / (config.run.name or "") / "reward_check"
    return Path(folder).resolve()


def refuse_unknown_columns(task: Task, config: CheckRewardsConfig) -> None:
    """Raises ConfigError when no source has what `gold_column` or `gold_template` names."""
    sources = [*task.train, *task.evaluation]
    there = set[str]().union(*(source.columns for source in sources))
    named = {config.gold_column} if config.gold_column is not None else _columns_of(config.gold_template or "")
    if unknown := sorted(named - there):
        key = "gold_column" if config.gold_column is not None else "gold_template"
        raise ConfigError(
            f"check_rewards.{key}: no source has a column {', '.join(unknown)}; there are {', '.join(sorted(there))}"
        )


class RewardCheck:
    """`with RewardCheck(task, config, advance) as check: check.run()`; `advance` is called after each row."""

    def __init__(self, task: Task, config: Config, advance: Callable[[], None]) -> None:
        self._task = task
        self._config = config
        self._advance = advance
        self._latencies_s: dict[str, list[float]] = {}
        self._timed_out: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._models = LocalModels(
            [*task.rewards.models, *(task.checker.models if task.checker is not None else ())],
            device=config.placement.device,
            start_timeout_s=config.rollout.start_timeout_s,
            timeouts_s={name: item.timeout_s for name, item in config.reward.models.items()},
        )
        self._rewards = self._worker(task.rewards)
        self._checker = self._worker(task.checker) if task.checker is not None else None

    def _worker(self, rewards: RewardSet) -> RewardWorker:
        return _TimedWorker(self._latencies_s, rewards, timeout_s=self._config.reward.timeout_s, processes=AT_ONCE)

    def __enter__(self) -> RewardCheck:
        self._models.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for worker in (self._rewards, self._checker):
            if worker is not None:
                worker.close()
        self._models.__exit__(*raised)

    def run(self) -> Checked:
        """Judge everything. Raises ProcessStartError when functions can't be loaded, ConfigError for a gold that can't be made."""
        for worker in (self._rewards, self._checker):
            if worker is not None:
                worker.start()
        sources = [self._source(source, "reward") for source in self._task.train]
        sources += [self._source(source, "checker") for source in self._task.evaluation]
        return Checked(self._task, sources, self._latencies_s, dict(self._timed_out))

    def _source(self, source: PromptSource, judge: str) -> SourceCheck:
        prompts = list(source)
        golds = list(self._each(lambda prompt: self._gold(prompt, judge), prompts))
        known = [of_row[0] for of_row in golds if of_row]
        random.Random(self._config.run.seed).shuffle(known)
        others = {normal(gold): gold for gold in known[:MAX_OTHERS]}
        no_comparison = self._no_comparison(prompts, judge)

        def check(row: tuple[Prompt, Sequence[Gold]]) -> RowCheck | None:
            found = None if self._given_up else self._row(*row, others, judge, not no_comparison)
            self._advance()
            return found

        rows = [row for row in self._each(check, zip(prompts, golds, strict=True)) if row is not None]
        return SourceCheck(source.key, judge, rows, len(prompts) - len(rows), no_comparison)

    def _each(self, work: Callable[[X], Y], items: Iterable[X]) -> Iterator[Y]:
        """The work's results in order, `AT_ONCE` at a time. When it ends early, nothing more is begun."""
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="reward-check")
        try:
            yield from pool.map(work, items)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _given_up(self) -> bool:
        return any(count >= MAX_TIMED_OUT for count in self._timed_out.values())

    def _no_comparison(self, prompts: Sequence[Prompt], judge: str) -> str:
        """Why the other judge's verdicts can't be had; empty: they can."""
        rewards, checker = self._task.rewards, self._task.checker
        if self._config.eval.checker is None or checker is None:
            return "there is no eval.checker that could be independent of the reward"
        if any(f.name == rewards.primary and f.same_as(checker.functions[0]) for f in rewards.functions):
            return f"eval.checker is the reward {rewards.primary!r} itself"
        other = checker if judge == "reward" else rewards
        for prompt in prompts:
            try:
                other.check_row(prompt.columns)
            except RewardFunctionError as error:
                return f"row {prompt.prompt_id!r}: {error}"
        return ""

    def _row(
        self, prompt: Prompt, golds: Sequence[Gold], others: Mapping[str, Gold], judge: str, compare: bool
    ) -> RowCheck:
        draw = random.Random(f"{self._config.run.seed}:{prompt.prompt_id}")
        echo = prompt.text if prompt.text is not None else str(prompt.messages[-1].get("content") or "")
        made = probes(golds, echo, others, draw)
        draw.shuffle(made)  # a function of whole groups must not find the gold by its place
        nothing: list[RewardResult | None] = [None] * len(made)
        reward = self._judge("reward", prompt, made) if judge == "reward" or compare else nothing
        checker = self._judge("checker", prompt, made) if judge == "checker" or compare else nothing
        judged = tuple(Judged(*of_probe) for of_probe in zip(made, reward, checker, strict=True))
        return RowCheck(prompt.prompt_id, judged, holds_gold(echo, golds))

    def _judge(self, judge: str, prompt: Prompt, made: Sequence[Probe]) -> list[RewardResult]:
        worker, rewards = (
            (self._rewards, self._task.rewards) if judge == "reward" else (self._checker, self._task.checker)
        )
        assert worker is not None
        assert rewards is not None
        names = prompt.reward if judge == "reward" else None  # of a row of data.eval there are none
        trajectories = [_trajectory(prompt, index, probe) for index, probe in enumerate(made)]
        given = self._models.score([model.name for model in rewards.select_models(names)], trajectories)
        results = worker.score_group(trajectories, prompt.columns, names, prompt.text, given)
        with self._lock:
            for result in results:
                if result.status is Status.TIMED_OUT:
                    self._timed_out.update(name for name, detail in result.detail.items() if "error" in detail)
        return results

    # Golds

    def _gold(self, prompt: Prompt, judge: str) -> tuple[Gold, ...]:
        """The row's right answers, the preferred one first; none where none is known."""
        own = gold_of_columns(self._config.check_rewards, prompt)
        if own is not None:
            return (own,)
        rewards = self._task.rewards if judge == "reward" else self._task.checker
        assert rewards is not None
        functions = rewards.select_functions(prompt.reward if judge == "reward" else None)
        said: list[tuple[Gold, ...]] = []
        for function in sorted(functions, key=lambda f: f.name != rewards.primary):
            try:
                golds = function.golds(prompt.columns)
            except RewardFunctionError as error:
                raise ConfigError(f"row {prompt.prompt_id!r}: {error}") from error
            if golds and not any(normal(golds[0]) in map(normal, before) for before in said):
                said.append(golds)
        if len(said) < 2 or self._given_up:
            return said[0] if said else ()
        results = self._judge(judge, prompt, [Probe("gold", golds[0]) for golds in said])
        return said[max(range(len(said)), key=lambda i: _worth(results[i], rewards.primary))]


def _worth(result: RewardResult, primary: str) -> tuple[float, float]:
    values = (value_of(result, primary), result.value)
    return tuple(-math.inf if value is None else value for value in values)  # type: ignore[return-value]


def value_of(result: RewardResult, primary: str) -> float | None:
    """The correctness-like component; where the row's own functions are without it, their total stands in for it."""
    return result.components.get(primary, result.value)


def gold_of_columns(config: CheckRewardsConfig, prompt: Prompt) -> str | None:
    """The completion that `gold_column` or `gold_template` gives for a row; None where the row has not what it takes.

    Raises ConfigError for a template that is none, and for a gold that is no text.
    """
    if config.gold_column is not None:
        gold = prompt.columns.get(config.gold_column)
        if gold is not None and not isinstance(gold, str):
            raise ConfigError(
                f"check_rewards.gold_column={config.gold_column}: row {prompt.prompt_id!r} has a {type(gold).__name__} there; "
                "expected the text of a completion, or give check_rewards.gold_template"
            )
        return gold
    template = config.gold_template
    if template is None or any(prompt.columns.get(name) is None for name in _columns_of(template)):
        return None
    try:
        return template.format_map(prompt.columns)
    except (LookupError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"check_rewards.gold_template={template!r}: row {prompt.prompt_id!r}: {error}") from error


def _columns_of(template: str) -> set[str]:
    """The columns that a template names. Raises ConfigError for one that is none."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"check_rewards.gold_template={template!r}: {error}; {BRACES}") from error
    columns = {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}
    if "" in columns:
        raise ConfigError(f"check_rewards.gold_template={template!r}: empty braces; {BRACES}")
    return columns


def _trajectory(prompt: Prompt, index: int, probe: Probe) -> Trajectory:
    answer = probe.answer
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    words = [zlib.crc32(word.encode()) >> 1 for word in re.findall(r"\w+|[^\w\s]", probe.text)]
    return Trajectory(
        group_id=f"check-{prompt.prompt_id}",
        index=index,
        prompt_id=prompt.prompt_id,
        messages=(*prompt.messages, message),
        token_ids=np.asarray(words, dtype=np.int32),
        response_mask=np.ones(len(words), dtype=bool),
        behaviour_logprobs=np.zeros(len(words), dtype=np.float32),
        version_spans=(VersionSpan(0, len(words), 0),) if words else (),
        finish_reason="length" if probe.cut else "stop",
        metadata={"prompt_length_messages": len(prompt.messages)},
    )


class _TimedWorker(RewardWorker):
    """A reward worker without second tries that notes how long each call took, by function."""

    def __init__(self, latencies_s: dict[str, list[float]], rewards: RewardSet, **options: Any) -> None:
        super().__init__(rewards, retries=0, **options)
        self._latencies_s = latencies_s

    def _judge(self, process: RewardProcess, function: RewardFunction, *rest: Any) -> list[RewardResult]:
        of_function = self._latencies_s.setdefault(function.name, [])
        return super()._judge(cast(RewardProcess, _Stopwatch(process, of_function)), function, *rest)


class _Stopwatch:
    """A reward process's `run`, timed call by call; starting the process is not counted.

    It is asked for one call at a time: of several it would send results while the one before is still being read.
    """

    def __init__(self, process: RewardProcess, latencies_s: list[float]) -> None:
        self._process = process
        self._latencies_s = latencies_s

    def run(self, job: Job, subject: bytes) -> Iterator[tuple[int | None, list[RewardResult]]]:
        jobs = [job] if job.together else [dataclasses.replace(job, members=(member,)) for member in job.members]
        for part in jobs:
            self._process.start()
            began = time.monotonic()
            try:
                for result in self._process.run(part, subject):
                    self._latencies_s.append(time.monotonic() - began)
                    yield result
            except ProcessLostError:
                self._latencies_s.append(time.monotonic() - began)
                raise
