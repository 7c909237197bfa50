"""What the verdicts of a reward check come to: figures by probe, agreement with the checker, and findings.

Contract:
- An answer *pays* when its primary component covers at least the share `check_rewards.pays` of the way from the worst value in
  its row to the best value of a gold in its source, or its total that share of the way to the total of its own row's gold. A
  checker's verdict, and a reward's where a source has no gold at all, is held against `eval.pass_threshold` instead.
- A failure is not a zero: an answer without a value neither pays nor counts in a mean. It is a finding of its own.
- A finding is an error or a warning. `KINDS` says which it is if a wrong answer pays; `check_rewards.allow` lets one pass. An
  echo that pays is a warning where the prompt holds the gold, unless that is so in more than `ECHO_BY_CHANCE` of the rows:
  then it is no chance.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.config import Config
from orchestrator.reward_check import Checked, Judged, RowCheck, SourceCheck, value_of
from orchestrator.reward_probes import KINDS
from reward_workers.reward import VOID, RewardResult, RewardSet

ROUNDING = 1e-9
ECHO_BY_CHANCE = 0.2  # share of a source's rows
SHOWN_CHARACTERS = 160  # of an answer
HINT = (
    "say what a right answer is with check_rewards.gold_template, check_rewards.gold_column, or "
    "reward_workers.reward.gold_written_by on the reward function"
)


@dataclass(frozen=True)
class Case:
    """One answer worth a look: `value` is its primary component, `total` the whole reward."""

    prompt_id: str
    probe: str
    answer: str
    value: float | None
    total: float | None
    note: str = ""


@dataclass(frozen=True)
class Finding:
    level: Literal["error", "warning"]
    source: str
    what: str
    message: str
    cases: Sequence[Case] = ()


@dataclass(frozen=True)
class Figures:
    """Of the answers of one kind: how many, how many pay, mean total, mean and deviation by component, statuses."""

    answers: int
    paid: int
    mean: float | None
    components: Mapping[str, tuple[float, float]]
    statuses: Mapping[str, int]


@dataclass(frozen=True)
class Agreement:
    """`counts` of answers by (the reward pays, the checker calls it right)."""

    counts: Mapping[tuple[bool, bool], int]
    differing: Sequence[Case]

    @property
    def share(self) -> float:
        return (self.counts[True, True] + self.counts[False, False]) / sum(self.counts.values())


class Verdicts:
    """One source's answers with what pays among them."""

    def __init__(self, source: SourceCheck, rewards: RewardSet, config: Config) -> None:
        self.source = source
        self._primary = rewards.primary
        self._pays = config.check_rewards.pays
        self._threshold = config.eval.pass_threshold
        golds = [
            value
            for _, judged in self.answers()
            if judged.probe.kind == "gold" and judged.reward is not None
            if (value := value_of(judged.reward, self._primary)) is not None
        ]
        self._best_gold = max(golds, default=None)

    def answers(self) -> Iterable[tuple[RowCheck, Judged]]:
        return ((row, judged) for row in self.source.rows for judged in row.judged)

    def result(self, judged: Judged) -> RewardResult:
        """The verdict of the source's own judge."""
        result = judged.reward if self.source.judge == "reward" else judged.checker
        assert result is not None
        return result

    def value(self, judged: Judged) -> float | None:
        result = self.result(judged)
        return value_of(result, self._primary) if self.source.judge == "reward" else result.value

    def bar(self, row: RowCheck) -> float:
        """The primary component with which an answer to the row pays."""
        return self._reward_bar(row) if self.source.judge == "reward" else self._threshold

    def pays(self, row: RowCheck, judged: Judged) -> bool:
        return self.reward_pays(row, judged) if self.source.judge == "reward" else self.checker_pays(judged)

    def reward_pays(self, row: RowCheck, judged: Judged) -> bool:
        assert judged.reward is not None
        value, total = value_of(judged.reward, self._primary), judged.reward.value
        if value is None or total is None:
            return False
        return value >= self._reward_bar(row) - ROUNDING or total >= self._total_bar(row) - ROUNDING

    def checker_pays(self, judged: Judged) -> bool:
        assert judged.checker is not None
        return judged.checker.value is not None and judged.checker.value >= self._threshold - ROUNDING

    def worst_total(self, row: RowCheck) -> float:
        totals = [total for judged in row.judged if (total := self.result(judged).value) is not None]
        return min(totals, default=-math.inf)

    def _reward_bar(self, row: RowCheck) -> float:
        if self._best_gold is None:
            return self._threshold
        values = [value_of(judged.reward, self._primary) for judged in row.judged if judged.reward is not None]
        return self._between(min((value for value in values if value is not None), default=0.0), self._best_gold)

    def _total_bar(self, row: RowCheck) -> float:
        totals = [(j.probe.kind, j.reward.value) for j in row.judged if j.reward is not None]
        golds = [total for kind, total in totals if kind == "gold" and total is not None]
        if not golds:
            return math.inf
        return self._between(min(total for _, total in totals if total is not None), max(golds))

    def _between(self, worst: float, best: float) -> float:
        """Where nothing is better than the worst, nothing pays."""
        return worst + self._pays * (best - worst) if best > worst + ROUNDING else math.inf

    def case(self, row: RowCheck, judged: Judged, note: str = "") -> Case:
        answer = json.dumps(judged.probe.text[:SHOWN_CHARACTERS], ensure_ascii=False)
        answer += "…" if len(judged.probe.text) > SHOWN_CHARACTERS else ""
        return Case(row.prompt_id, judged.probe.kind, answer, self.value(judged), self.result(judged).value, note)

    def figures(self) -> dict[str, Figures]:
        """By kind of probe, in the order of `KINDS`."""
        by_kind: dict[str, list[tuple[RowCheck, Judged]]] = {kind: [] for kind in KINDS}
        for row, judged in self.answers():
            by_kind[judged.probe.kind].append((row, judged))
        return {kind: self._figures(answers) for kind, answers in by_kind.items() if answers}

    def _figures(self, answers: Sequence[tuple[RowCheck, Judged]]) -> Figures:
        results = [self.result(judged) for _, judged in answers]
        totals = [result.value for result in results if result.value is not None]
        by_name: dict[str, list[float]] = {}
        for result in results:
            for name, value in result.components.items():
                if value is not None:
                    by_name.setdefault(name, []).append(value)
        return Figures(
            answers=len(answers),
            paid=sum(self.pays(row, judged) for row, judged in answers),
            mean=statistics.fmean(totals) if totals else None,
            components={name: (statistics.fmean(v), statistics.pstdev(v)) for name, v in by_name.items()},
            statuses=dict(Counter(result.status.value for result in results)),
        )

    def agreement(self) -> Agreement | None:
        """Of reward and checker over all answers that both judged; None where there are none."""
        counts = {(paid, right): 0 for paid in (True, False) for right in (True, False)}
        differing = []
        for row, judged in self.answers():
            if judged.reward is None or judged.checker is None:
                continue
            if judged.reward.value is None or judged.checker.value is None:
                continue
            paid, right = self.reward_pays(row, judged), self.checker_pays(judged)
            counts[paid, right] += 1
            if paid != right:
                said = "reward pays, checker does not" if paid else "checker pays, reward does not"
                differing.append(self.case(row, judged, said))
        of_kind = Counter(case.probe for case in differing)
        differing.sort(key=lambda case: of_kind[case.probe])  # the rare ones first: they are no matter of principle
        return Agreement(counts, differing) if any(counts.values()) else None


def find(checked: Checked, config: Config) -> list[Finding]:
    """All findings, errors first."""
    found: list[Finding] = []
    for source in checked.sources:
        verdicts = Verdicts(source, checked.task.rewards, config)
        found += _failures(verdicts)
        found += _golds(verdicts, config)
        found += _paid(verdicts, config)
        found += _components(verdicts, checked.task.rewards)
        if source.skipped:
            slow = ", ".join(f"{name} ({count} answers)" for name, count in checked.timed_out.items())
            message = (
                f"{source.skipped} drawn rows were left out, because functions ran out of reward.timeout_s: {slow}"
            )
            found.append(Finding("error", source.key, "left_out", message))
    return sorted(found, key=lambda finding: finding.level)


def _failures(verdicts: Verdicts) -> list[Finding]:
    """Functions that gave no verdict though they should have one: errors, time-outs, golds that can't be read."""
    by_function: dict[tuple[str, str], list[Case]] = {}
    for row, judged in verdicts.answers():
        result = verdicts.result(judged)
        if result.status not in VOID:
            continue
        for name, detail in result.detail.items():
            if "error" in detail:
                key = (name, result.status.value)
                by_function.setdefault(key, []).append(verdicts.case(row, judged, str(detail["error"])))
    return [
        Finding("error", verdicts.source.key, status, f"{name} is {status} on {len(cases)} answers", cases)
        for (name, status), cases in by_function.items()
    ]


def _golds(verdicts: Verdicts, config: Config) -> list[Finding]:
    source, failed, refused, unknown, rows = verdicts.source, [], [], [], 0
    for row in source.rows:
        golds = [judged for judged in row.judged if judged.probe.kind == "gold"]
        unknown += [] if golds else [row.prompt_id]
        rows += bool(golds)
        for judged in golds:
            if note := _why_it_fails(verdicts, row, judged):
                failed.append(verdicts.case(row, judged, note))
            if source.judge == "reward" and judged.checker is not None and not verdicts.checker_pays(judged):
                refused.append(verdicts.case(row, judged, f"checker {judged.checker.value}"))
    found = []
    if failed:
        level: Literal["error", "warning"] = (
            "error" if len(failed) > config.check_rewards.max_gold_failures else "warning"
        )
        message = f"{len(failed)} golds of {rows} rows do not pay"
        found.append(Finding(level, source.key, "gold", message, failed))
    if refused:
        message = f"eval.checker calls {len(refused)} golds of {rows} rows wrong"
        found.append(Finding("warning", source.key, "gold_refused", message, refused))
    if unknown:
        message = f"no right answer is known for {len(unknown)} of {len(source.rows)} rows ({_few(unknown)}): {HINT}"
        found.append(Finding("warning", source.key, "no_gold", message))
    return found


def _why_it_fails(verdicts: Verdicts, row: RowCheck, judged: Judged) -> str:
    """Why a gold does not pay; empty if it does."""
    result, value, bar = verdicts.result(judged), verdicts.value(judged), verdicts.bar(row)
    if result.value is None or value is None:
        return f"it is {result.status.value}"
    if value < bar - ROUNDING:
        better = "no more than the worst answer does" if bar == math.inf else f"{value:.4g}, and {bar:.4g} is needed"
        return f"it earns {better}"
    if result.value <= verdicts.worst_total(row) + ROUNDING:
        return f"its total {result.value:.4g} is no more than the worst answer's"
    return ""


def _paid(verdicts: Verdicts, config: Config) -> list[Finding]:
    """Wrong answers that pay, by kind."""
    source, by_kind = verdicts.source, dict[str, list[Case]]()
    by_chance: list[Case] = []
    for row, judged in verdicts.answers():
        kind = judged.probe.kind
        wrong = KINDS[kind].level in ("error", "warning") and kind not in config.check_rewards.allow
        if wrong and verdicts.pays(row, judged):
            chance = kind == "echo" and row.echo_may_be_right
            (by_chance if chance else by_kind.setdefault(kind, [])).append(verdicts.case(row, judged))
    echoed = sum(judged.probe.kind == "echo" for _, judged in verdicts.answers())
    found = []
    if by_chance and len(by_chance) > ECHO_BY_CHANCE * echoed:
        by_kind.setdefault("echo", []).extend(by_chance)
    elif by_chance:
        message = f"the echo pays on {len(by_chance)} of {echoed} rows, whose prompts hold the gold"
        found.append(Finding("warning", source.key, "echo", message, by_chance))
    figures = verdicts.figures()
    for kind, cases in by_kind.items():
        level: Literal["error", "warning"] = "error" if KINDS[kind].level == "error" else "warning"
        message = (
            f"{kind} pays on {len(cases)} of {figures[kind].answers} rows: {KINDS[kind].meaning}. Where it may, say "
            f"check_rewards.allow=[{kind}]"
        )
        found.append(Finding(level, source.key, kind, message, cases))
    return found


def _components(verdicts: Verdicts, rewards: RewardSet) -> list[Finding]:
    """Functions that count and of which the probes show nothing, or nothing good."""
    if verdicts.source.judge != "reward":
        return []
    found = []
    for function in rewards.components:
        rows = [(row, _component(verdicts, row, function.name)) for row in verdicts.source.rows]
        values = [value for _, of_row in rows for _, value in of_row]
        if not function.weight or not values:
            continue
        if max(values) - min(values) <= ROUNDING:
            message = f"{function.name} gives {values[0]:.4g} to every answer: nothing here shows what it pays"
            found.append(Finding("warning", verdicts.source.key, "constant", message))
            continue
        worst = [row.prompt_id for row, of_row in rows if _gold_is_worst(of_row)]
        if function.weight > 0 and len(worst) > len(rows) / 2:
            message = f"{function.name} pays golds as little as the worst answer on {len(worst)} of {len(rows)} rows"
            found.append(Finding("warning", verdicts.source.key, "component", f"{message} ({_few(worst)})"))
    return found


def _component(verdicts: Verdicts, row: RowCheck, name: str) -> list[tuple[str, float]]:
    """(kind, value) of the row's answers in one component."""
    values = [(judged.probe.kind, verdicts.result(judged).components.get(name)) for judged in row.judged]
    return [(kind, value) for kind, value in values if value is not None]


def _gold_is_worst(of_row: Sequence[tuple[str, float]]) -> bool:
    golds = [value for kind, value in of_row if kind == "gold"]
    lowest, highest = min((v for _, v in of_row), default=0.0), max((v for _, v in of_row), default=0.0)
    return bool(golds) and highest > lowest + ROUNDING and max(golds) <= lowest + ROUNDING


def _few(prompt_ids: Sequence[str]) -> str:
    return ", ".join(prompt_ids[:3]) + (", …" if len(prompt_ids) > 3 else "")
