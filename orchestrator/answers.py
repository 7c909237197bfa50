"""The answers to one request, outside of the training loop: what evaluation and the difficulty profile ask for.

The fleet makes one attempt; here, members that failed are asked for again, elsewhere if their actor was lost, as the sampling
queue has it done for groups that are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.clerks import ClerkFleet
from orchestrator.fleet import RolloutFleet
from rollout_workers.worker import MemberReport, RolloutRequest


@dataclass(frozen=True)
class Answers:
    """`payload` refers to the trajectories of the members that are `in_payload`, in the order of `members`; None for none."""

    members: tuple[MemberReport, ...]
    payload: Any
    replica: str

    @property
    def errors(self) -> list[str]:
        """Why members have no answer."""
        return [member.error for member in self.members if member.error is not None]


async def ask(request: RolloutRequest, rollouts: RolloutFleet, clerks: ClerkFleet, *, retries: int) -> Answers:
    """Have every member answered that can be, in at most `1 + retries` attempts; the rest are reported with their error.

    Raises FleetError when no actor is left or serves in time.
    """
    reports: dict[int, MemberReport] = {}
    payloads: list[Any] = []
    missing: Sequence[int] = request.indexes
    for attempt in range(1 + retries):
        generated = await rollouts.generate(replace(request, indexes=tuple(missing), attempt=attempt))
        reports |= {member.index: member for member in generated.members}
        if generated.payload is not None:
            payloads.append(generated.payload)
        missing = [index for index in missing if reports[index].error is not None]
        if not missing:
            break
    members = tuple(reports[index] for index in request.indexes)
    there = [member.index for member in members if member.in_payload]
    payload = None
    if there:
        payload = payloads[0] if len(payloads) == 1 else clerks.merged(payloads, there)
    return Answers(members, payload, generated.replica)
