"""The rollout actor's side of the shared-memory transport: buckets wait here until the engine loads them.

The engine runs in a child process of the actor. Each bucket is written to an anonymous memory file
(`memfd`), which the child opens through this process's /proc entry: it has no name in any file system, so
nothing is left behind however either process ends.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from rollout_workers.weights.bucket import Bucket


class Spool:
    """Buckets of one weight version, prepared while the engine still generates."""

    def __init__(self) -> None:
        self._files: list[tuple[int, Bucket]] = []

    def add(self, bucket: Bucket) -> None:
        handle = os.memfd_create("headway-weights", os.MFD_CLOEXEC)
        try:
            view = memoryview(bucket.data.data)
            written = 0
            while written < len(view):
                written += os.write(handle, view[written : written + 2**30])
        except OSError:
            os.close(handle)
            raise
        # Only the layout is kept: the array belongs to Ray's object store.
        self._files.append((handle, Bucket(bucket.slots, bucket.data[:0])))

    def update_infos(self) -> list[dict[str, Any]]:
        """One `update_info` per bucket for `SharedMemoryEngine.receive_weights`."""
        return [
            {"path": f"/proc/{os.getpid()}/fd/{handle}", "slots": [asdict(slot) for slot in bucket.slots]}
            for handle, bucket in self._files
        ]

    def clear(self) -> None:
        for handle, _ in self._files:
            os.close(handle)
        self._files.clear()
