"""The reward worker: judges groups in killable processes. The body of a Ray actor, and usable without Ray.

Contract:
- Every group that goes in comes out with one `RewardResult` per trajectory, in order and in bounded time,
  whatever the reward functions do: hang, crash, exit, hold the interpreter lock. A failure is a status with
  its cause in `detail[function]["error"]`, never a number.
- A call that failed is tried `retries` times more. A call that took its process with it costs only itself:
  the process is replaced, and the calls after it go on.
- Several threads may score at once (an actor's `max_concurrency`); each has a process of its own, so a slow
  group delays no other.
- `close` leaves no process, and neither does the death of this one.

As an actor: `ray.remote(RewardWorker).options(max_concurrency=n).remote(rewards, processes=n)`.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from reward_workers.process import KILL_TIMEOUT_S, Job, ProcessLostError, RewardProcess, Subject
from reward_workers.reward import FAILED, RewardFunction, RewardResult, RewardSet
from rollout_workers.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


class RewardWorker:
    """Judges groups with a set of reward functions.

    `timeout_s` is for one call of one function, from the start of its execution. `processes` is how many are
    kept warm; more exist while more groups than that are in flight.
    """

    def __init__(
        self,
        rewards: RewardSet,
        *,
        timeout_s: float = 30.0,
        retries: int = 1,
        processes: int = 1,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._rewards = rewards
        self._payload = pickle.dumps(rewards)
        self._timeout_s = timeout_s
        self._retries = retries
        self._warm = processes
        self._start_timeout_s = start_timeout_s
        self._changed = threading.Condition()  # guards the three below
        self._idle: list[RewardProcess] = []
        self._busy: set[RewardProcess] = set()
        self._closed = False
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="reward-spawner")

    def start(self) -> list[int]:
        """Start one process and load the functions in it. Raises ProcessStartError when that fails.

        Returns the numbers of the running processes: none where there are no functions.
        """
        if not self._rewards.functions:
            return []
        with self._process() as process:
            process.start()
        with self._changed:
            return [pid for process in {*self._idle, *self._busy} if (pid := process.pid) is not None]

    def score_group(
        self,
        trajectories: Sequence[Trajectory],
        columns: Mapping[str, Any],
        names: Collection[str] | None = None,
        text_prompt: str | None = None,
        given: Mapping[str, Sequence[RewardResult] | RewardResult] | None = None,
    ) -> list[RewardResult]:
        """One verdict per trajectory of one group, in order.

        `columns` are the data row's, `names` the components that judge it (None: all), `text_prompt` is its prompt where
        that was a string. `given` are the verdicts of the reward models among them, who judge elsewhere: one per
        trajectory, or one that stands for all. Raises RewardFunctionError for an unknown name, ValueError for
        trajectories of different groups and verdicts that are missing, ProcessStartError when no process can be started.
        """
        functions = self._rewards.select_functions(names)
        if missing := [m.name for m in self._rewards.select_models(names) if m.name not in (given or {})]:
            raise ValueError(
                f"no verdicts of the reward models {', '.join(missing)}: they score on actors of their own"
            )
        if not trajectories:
            return []
        first = trajectories[0]
        group = TrajectoryGroup(first.group_id, first.prompt_id, tuple(trajectories), columns=dict(columns))
        size = len(trajectories)
        results = {
            name: [verdicts] * size if isinstance(verdicts, RewardResult) else list(verdicts)
            for name, verdicts in (given or {}).items()
        }
        if functions:
            self._judge_all(functions, pickle.dumps(Subject(group, text_prompt)), size, results)
        return [
            self._rewards.combine({name: of_members[member] for name, of_members in results.items()})
            for member in range(size)
        ]

    def _judge_all(
        self,
        functions: Sequence[RewardFunction],
        subject: bytes,
        size: int,
        results: dict[str, list[RewardResult]],
    ) -> None:
        """Add each function's results for the group to those that there are."""
        with self._process() as process:
            for f in sorted(functions, key=lambda f: f.needs is not None):  # a needed function needs none itself
                needed = results[f.needs] if f.needs is not None else None
                results[f.name] = self._judge(process, f, subject, size, needed)

    def deadline_s(self, group_size: int) -> float:
        """How long a group may take before its worker counts as lost.

        Every call overruns every time it is tried, and each overrun costs a new process.
        """
        calls = group_size * len(self._rewards.functions) * (1 + self._retries)
        return self._start_timeout_s + calls * (self._timeout_s + self._start_timeout_s)

    def close(self) -> None:
        """Kill every process. Groups in flight end with a ProcessStartError; later ones are refused."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.retire()
        for process in idle:
            process.kill()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, timeout=2 * KILL_TIMEOUT_S):
                logger.error("%d groups do not end although their processes were killed", len(self._busy))
        self._spawner.shutdown()

    def __enter__(self) -> RewardWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _judge(
        self,
        process: RewardProcess,
        function: RewardFunction,
        subject: bytes,
        size: int,
        needed: Sequence[RewardResult] | None,
    ) -> list[RewardResult]:
        """One function's results for the `size` trajectories of a group, in order; `needed` are those it needs."""
        calls = (None,) if function.signature.whole_group else tuple(range(size))
        together = function.signature.is_async
        tries: Counter[int | None] = Counter()
        results: dict[int | None, list[RewardResult]] = {}

        def settle(call: int | None, of_members: list[RewardResult]) -> None:
            """Take a call's results, unless it failed and may be tried again."""
            tries[call] += 1
            errors = [result.detail.get("error") for result in of_members if result.status in FAILED]
            last = tries[call] > self._retries
            if errors:
                who = "the group" if call is None else f"trajectory {call}"
                level, then = (logging.WARNING, "given up") if last else (logging.INFO, "to be tried again")
                logger.log(level, "reward function %r failed on %s, %s: %s", function.name, who, then, errors[0])
            if last or not errors:
                results[call] = of_members

        while waiting := [call for call in calls if call not in results]:
            verdicts = None if needed is None else tuple(needed)
            job = Job(function.name, tuple(waiting), self._timeout_s, together, verdicts)
            try:
                for call, of_members in process.run(job, subject):
                    waiting.remove(call)
                    settle(call, of_members)
            except ProcessLostError as lost:
                if together and len(waiting) > 1:
                    together = False  # one of them did it: alone, each shows itself
                    continue
                failed = RewardResult(None, lost.status, detail={"error": str(lost)})
                settle(waiting[0], [failed] * (size if waiting[0] is None else 1))
        return [result for call in calls for result in results[call]]

    @contextlib.contextmanager
    def _process(self) -> Iterator[RewardProcess]:
        """A process for one group: a warm one, or one that starts at its first call. Never waits for one."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the reward worker is closed")
            process = (
                self._idle.pop() if self._idle else RewardProcess(self._payload, self._spawner, self._start_timeout_s)
            )
            self._busy.add(process)
        whole = False
        try:
            yield process
            whole = True
        finally:
            with self._changed:
                keep = whole and not self._closed and len(self._idle) < self._warm
                if keep:
                    self._idle.append(process)
            if not keep:
                process.kill()
            with self._changed:
                self._busy.remove(process)
                self._changed.notify_all()
