"""One rollout actor as its fleet knows it: its state, what it was asked, and when an error means that it is gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from rollout_workers.engine import EngineDied

LOST = (RayActorError, ObjectLostError)


@dataclass(frozen=True, eq=False)
class Call:
    """A request that a replica was sent. `ended` is done when it has answered, or will not."""

    group_id: str
    answers: int
    ended: asyncio.Future[None]


@dataclass
class Replica:
    name: str
    index: int
    handle: Any = None
    state: str = "starting"  # starting | awaiting_weights | serving | dead
    acknowledged: int | None = None  # the version that the present actor said it serves, in a broadcast
    calls: set[Call] = field(default_factory=set, repr=False)  # of the present actor
    restarts: int = 0
    answers: int = 0
    revival: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def outstanding(self) -> int:
        """Answers it still owes."""
        return sum(call.answers for call in self.calls)


def reason_of_loss(error: RayError) -> str:
    """Why the actor that was called counts as lost; raises the error itself where it means something else."""
    # First: Ray makes a task's error an instance of its cause's class as well.
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, EngineDied):
            return str(error.cause)
        raise error
    if isinstance(error, LOST):
        return str(error).splitlines()[0]
    raise error


def is_of_an_argument(error: RayError) -> bool:
    """The actor that was called lives, but an object that it was given is gone."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, RayError)
