"""Warm zygotes for the threads of this process: borrowed for one grading, kept for the next.

Contract. A zygote serves one borrower at a time, is replaced after some thousand processes, and is ended instead of
returned when anything went wrong with it. What this machine enforces is found out once. A forked copy of this process
starts with an empty pool; when this process ends, however, its zygotes end with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator

from reward_workers.sandbox.host import Zygote
from reward_workers.sandbox.probes import Capabilities, probe

RECYCLE_AFTER = 1000  # processes of one zygote
SLOT_STRIDE = 37


class Pool:
    """Zygotes by what they have imported. `namespaces=False` leaves that layer out."""

    def __init__(self, *, namespaces: bool = True) -> None:
        self._namespaces = namespaces
        self._forget()
        os.register_at_fork(after_in_child=self._after_fork)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, ...], list[Zygote]] = {}
        self._capabilities: Capabilities | None = None
        self._slots = itertools.count(SLOT_STRIDE * os.getpid())  # neighbours by number share no user

    def _after_fork(self) -> None:
        for zygotes in self._idle.values():
            for zygote in zygotes:
                zygote.abandon()
        self._forget()

    def capabilities(self) -> Capabilities:
        """What is enforced here. Raises SandboxError when not even a probe can be run."""
        if self._capabilities is None:
            with self.borrow() as zygote:
                self._capabilities = probe(zygote)
        return self._capabilities

    @contextlib.contextmanager
    def borrow(self, preload: tuple[str, ...] = ()) -> Iterator[Zygote]:
        """A zygote that nobody else uses. Raises SandboxError when none can be started."""
        with self._lock:
            idle = self._idle.setdefault(preload, [])
            zygote = idle.pop() if idle else None
            slot = next(self._slots)
        if zygote is None:
            zygote = Zygote(preload=preload, namespaces=self._namespaces, slot=slot)
        sound = False
        try:
            yield zygote
            sound = True
        finally:
            with self._lock:
                idle = self._idle.setdefault(preload, [])
                keep = sound and zygote.spawned < RECYCLE_AFTER and len(idle) < (os.cpu_count() or 1)
                if keep:
                    idle.append(zygote)
            if not keep:
                zygote.close()

    def close(self) -> None:
        """End all idle zygotes; the pool can be used again."""
        with self._lock:
            zygotes = [zygote for idle in self._idle.values() for zygote in idle]
            self._idle.clear()
        for zygote in zygotes:
            zygote.close()


POOL = Pool()
