"""One dispatched group on its way, as the driver knows it: metadata and references, never token data."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.fleet import Generated
from orchestrator.journal import Outcome
from orchestrator.prompts import Prompt
from orchestrator.sampling_types import Member
from rollout_workers.trajectory import RewardResult, Status
from rollout_workers.worker import MemberReport


@dataclass
class Flight:
    """`payload` refers to the trajectories of the answered members, ordered by member index, once all are written.

    Until then `payloads` are those of each request, oldest first: of a member that is in several, the last one counts.
    `partials` are the payloads that interrupted members go on from.
    """

    group_id: str
    prompt: Prompt
    size: int
    dispatched_at_version: int
    dispatched_at: float = field(default_factory=time.time)
    generated_at: float | None = None
    scored_at: float | None = None
    generating_s: float = 0.0  # spent in requests
    attempt: int = 0  # rounds of resampling so far
    payload: Any = None
    reference: Any = None  # to what reference actors found of the payload, where there are such
    payloads: list[Any] = field(default_factory=list)
    partials: tuple[Any, ...] = ()
    interrupted: bool = False  # some payload holds unfinished answers
    overdue: bool = False  # sampling.early_stop.after_s has passed
    reviewed: bool = False  # whether to stop it early was decided
    control: int | None = None  # tokens it had when it could have been stopped early, and was not
    reports: dict[int, MemberReport] = field(default_factory=dict)
    results: dict[int, RewardResult] = field(default_factory=dict)
    checked: dict[int, float | None] = field(default_factory=dict)  # by reward.watch, late or never

    @property
    def answered(self) -> list[int]:
        """Members whose answer is there whole, in the payload's order."""
        return sorted(i for i, report in self.reports.items() if report.in_payload and not report.parked)

    @property
    def parked(self) -> list[int]:
        """Members that were interrupted."""
        return sorted(index for index, report in self.reports.items() if report.parked)

    @property
    def missing(self) -> list[int]:
        """Members whose generation failed."""
        return sorted(index for index, report in self.reports.items() if report.error is not None)

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return sum(report.response_length for report in self.reports.values())

    def draw(self, purpose: str) -> float:
        """A number from 0 to 1 that depends on the group and the purpose alone."""
        digest = hashlib.sha256(f"{purpose}/{self.group_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    def add(self, generated: Generated) -> None:
        """What came of one request."""
        self.reports |= {member.index: member for member in generated.members}
        if generated.payload is not None:
            self.payloads.append(generated.payload)
        parked = any(member.parked and member.in_payload for member in generated.members)
        self.partials = (generated.payload,) if parked else ()
        self.interrupted = self.interrupted or parked

    def position(self, index: int) -> int:
        return self.answered.index(index)

    def judge(self, results: Sequence[RewardResult]) -> None:
        self.results = dict(zip(self.answered, results, strict=True))
        self.scored_at = time.time()

    def component(self, index: int, name: str) -> float | None:
        """One reward function's value of a scored member; None where there is none."""
        result = self.results.get(index)
        return None if result is None or result.value is None else result.components.get(name)

    def members(self, filter_on: str) -> list[Member]:
        """What the queue is told. A member without an answer is errored; a failure is never a number."""
        members = []
        for index in range(self.size):
            report, result = self.reports[index], self.results.get(index)
            if result is None:
                members.append(Member(index, Status.ERRORED))
                continue
            members.append(
                Member(
                    index,
                    result.status,
                    result.value,
                    result.components.get(filter_on, result.value),
                    report.token_versions,
                    report.response_length,
                    report.truncated,
                )
            )
        return members

    def outcome(self, fate: str, reason: str) -> Outcome:
        return Outcome(
            group_id=self.group_id,
            prompt_id=self.prompt.prompt_id,
            epoch=self.prompt.epoch,
            outcome=fate,
            reward_values=[self._value(index) for index in range(self.size)],
            response_lengths=[self._length(index) for index in range(self.size)],
            dispatched_at_version=self.dispatched_at_version,
            dispatched_at=self.dispatched_at,
            settled_at=time.time(),
            reason=reason,
        )

    def _value(self, index: int) -> float | None:
        result = self.results.get(index)
        return None if result is None else result.value

    def _length(self, index: int) -> int:
        report = self.reports.get(index)
        return 0 if report is None else report.response_length

    def journal_row(
        self, index: int, *, payload: int, trained: bool, advantage: float | None, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The fields of a journal row that the driver knows (`orchestrator.payloads.write_shard` adds the tokens)."""
        return {
            "payload": payload,
            "index": index,
            "reward": self.results[index],
            "epoch": self.prompt.epoch,
            "trained": trained,
            "advantage": advantage,
            "dispatched_at_version": self.dispatched_at_version,
            "dispatched_at": self.dispatched_at,
            "generated_at": self.generated_at,
            "scored_at": self.scored_at,
            "checker_value": self.checked.get(index),
            **extra,
        }
