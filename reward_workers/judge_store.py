"""What judging leaves on disk: verdicts, what was spent, agreement with a verifier, and slots for calls under way.

Contract: everything here is shared by all processes of one machine that name the same folder, and outlives them; so a
budget holds for a whole run, resumed ones included, and for all runs that share the folder. Verdicts are JSON text (they
may be thrown away when there are too many); the ledger is never thrown away. A slot is a lock of the kernel: a process
that is killed gives its slots back. The folder must be on a disk of the machine itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakKeyDictionary

from reward_workers.judge_agreement import Agreement

SLOT_POLL_S = 0.02
NANO = 10**9  # the ledger counts whole billionths of a dollar, so that adding up is exact
SPENT = "spent_nano_usd"
PAIRS, AGREED = "pairs", "agreed"


class JudgeStore:
    """A folder, made where there is none. Raises OSError or sqlite3.Error when it can't be used."""

    def __init__(self, folder: Path, slots: int) -> None:
        from diskcache import Cache

        self._verdicts = Cache(str(folder / "verdicts"))
        self._ledger = Cache(str(folder / "ledger"), eviction_policy="none", cull_limit=0)
        self._slots = [folder / "slots" / str(number) for number in range(slots)]
        (folder / "slots").mkdir(exist_ok=True)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def verdict(self, key: str) -> Any:
        """What was kept under the key; None if nothing is."""
        text = self._verdicts.get(key)
        return None if text is None else json.loads(text)

    def keep(self, key: str, verdict: Any) -> None:
        self._verdicts.set(key, json.dumps(verdict))

    def spend(self, usd: float) -> None:
        self._ledger.incr(SPENT, math.ceil(usd * NANO), default=0)

    @property
    def spent_usd(self) -> float:
        return float(self._ledger.get(SPENT, 0)) / NANO

    def agree(self, new: Agreement, window_pairs: float) -> Agreement:
        """Adds to the running agreement, of which about the last `window_pairs` pairs count; returns it."""
        with self._ledger.transact():
            old = Agreement(self._ledger.get(PAIRS, 0.0), self._ledger.get(AGREED, 0.0))
            running = old * max(0.0, 1 - new.pairs / window_pairs) + new
            self._ledger.set(PAIRS, running.pairs)
            self._ledger.set(AGREED, running.agreed)
        return running

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Held for one call; waits while all slots of the machine are taken, in turn within a process."""
        # One waiter of a process looks for a free slot at a time: hundreds that did would keep a core busy.
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with turn:
            while (file := self._free_slot()) is None:  # noqa: ASYNC110  other processes set no event
                await asyncio.sleep(SLOT_POLL_S)
        with file:  # closing it gives the lock back
            yield

    def _free_slot(self) -> TextIO | None:
        for path in self._slots:
            file = path.open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                return file
        return None
