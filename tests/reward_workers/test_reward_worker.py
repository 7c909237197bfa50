"""Reward workers with real processes: hangs, crashes, exits, retries, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reward_workers.process import ProcessStartError
from reward_workers.reward import RewardFunction, RewardFunctionError, RewardResult, RewardSet, Status
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory

# The functions below are local ones, so that they travel by value: a process need not import this file.


def group(*completions: str) -> list[Trajectory]:
    return [
        Trajectory.from_messages(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}],
            group_id="g",
            prompt_id="p",
            index=index,
        )
        for index, text in enumerate(completions)
    ]


def score(functions: Any, *completions: str, columns: Any = None, **settings: Any) -> list[RewardResult]:
    rewards = functions if isinstance(functions, RewardSet) else RewardSet.of(functions)
    with RewardWorker(rewards, **{"timeout_s": 5.0, "retries": 0, **settings}) as worker:
        return worker.score_group(group(*completions), columns or {})


def values(results: list[RewardResult]) -> list[float | None]:
    return [result.value for result in results]


def alive(pid: int) -> bool:
    try:
        # A child is dead when all its threads are; its main thread alone may be a zombie before its files are closed.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        pass
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def misbehave(completion: str) -> float | None:
    """Does what the completion says."""
    import ctypes

    if completion == "hang":
        time.sleep(1000)
    if completion == "hold":  # native code that keeps the interpreter lock
        ctypes.PyDLL(None).sleep(1000)
    if completion == "exit":
        os._exit(3)
    if completion == "leave":
        raise SystemExit("bye")
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "raise":
        raise RuntimeError("cannot judge this")
    if completion == "nan":
        return float("nan")
    return 1.0


@pytest.fixture(scope="module")
def worker() -> Iterator[RewardWorker]:
    with RewardWorker(RewardSet.of(misbehave), timeout_s=0.5, retries=0) as worker:
        yield worker


@pytest.mark.parametrize(
    ("bad", "status", "message"),
    [
        ("hang", Status.TIMED_OUT, "no result within 0.5 s"),
        ("hold", Status.TIMED_OUT, "no result within 0.5 s"),
        ("exit", Status.ERRORED, "exited with code 3"),
        ("leave", Status.ERRORED, "SystemExit: bye"),
        ("crash", Status.ERRORED, "killed by SIGSEGV"),
        ("raise", Status.ERRORED, "RuntimeError: cannot judge this"),
        ("nan", Status.ERRORED, "'misbehave' returned nan"),
    ],
)
def test_f20_one_bad_answer_costs_only_itself(worker: RewardWorker, bad: str, status: Status, message: str) -> None:
    results = worker.score_group(group("ok", bad, "ok"), {})
    assert values(results) == [1.0, None, 1.0]
    assert results[1].status is status
    assert results[1].components == {"misbehave": None}
    assert message in results[1].detail["misbehave"]["error"]
    assert values(worker.score_group(group("ok"), {})) == [1.0]


def test_other_components_are_kept() -> None:
    def length(completion: str) -> RewardResult:
        return RewardResult(float(len(completion)), metrics={"words": 1.0}, detail={"text": completion})

    (result,) = score([misbehave, length], "raise")
    assert (result.value, result.status) == (None, Status.ERRORED)
    assert result.components == {"misbehave": None, "length": 5.0}
    assert result.metrics == {"length/words": 1.0}
    assert result.detail["length"] == {"text": "raise"}
    assert "in misbehave" in result.detail["misbehave"]["traceback"]


def test_a_function_is_given_the_verdict_that_it_needs() -> None:
    def right(completion: str) -> RewardResult | None:
        return None if completion == "?" else RewardResult(float(completion == "7"), detail={"read": completion})

    def short(completion: str, verdict: RewardResult) -> float | None:
        return None if verdict.value is None else verdict.value / len(verdict.detail["read"])

    def best(trajectories: list, verdicts: list[RewardResult]) -> list[float]:
        highest = max(verdict.value or 0.0 for verdict in verdicts)
        return [float(verdict.value == highest) for verdict in verdicts]

    async def later(completion: str, verdict: RewardResult) -> float | None:
        return verdict.value

    needing = [RewardFunction(f.__name__, f, needs="right") for f in (short, best, later)]
    rewards = RewardSet([*needing, RewardFunction("right", right)], primary="right")
    results = score(rewards, "7", "eight", "?")
    assert [dict(result.components) for result in results] == [
        {"short": 1.0, "best": 1.0, "later": 1.0, "right": 1.0},
        {"short": 0.0, "best": 0.0, "later": 0.0, "right": 0.0},
        {"short": None, "best": 0.0, "later": None, "right": None},
    ]


def test_names_choose_functions_and_unknown_ones_are_refused() -> None:
    rewards = RewardSet.of([misbehave, lambda completion: 0.25])
    with RewardWorker(rewards) as worker:
        assert worker.score_group(group("x"), {}, ["lambda"])[0].components == {"lambda": 0.25}
        with pytest.raises(RewardFunctionError, match="no reward function other"):
            worker.score_group(group("x"), {}, ["other"])
        assert worker.score_group([], {}) == []


def test_whole_group_and_trl_style() -> None:
    def shortest(completions: list, answer: list, **kwargs: Any) -> list[float]:
        sizes = [len(messages[0]["content"]) for messages in completions]
        assert answer == ["7"] * len(sizes)
        return [float(size == min(sizes)) for size in sizes]

    assert values(score(shortest, "a", "bb", columns={"answer": "7"})) == [1.0, 0.0]


def test_wrong_length_errors_the_whole_group() -> None:
    def short(completions: list) -> list[float]:
        return [1.0]

    results = score(short, "a", "b")
    assert [result.status for result in results] == [Status.ERRORED] * 2
    assert "'short' gave 1 results for a group of 2" in results[0].detail["short"]["error"]


def test_a_row_without_the_column_is_an_error_and_not_a_zero() -> None:
    (result,) = score(lambda completion, answer: 1.0, "x")
    assert result.status is Status.ERRORED
    assert "takes answer, which nothing supplies" in result.detail["lambda"]["error"]


def test_a_group_function_that_dies_fails_the_group() -> None:
    results = score(lambda group: os._exit(1), "a", "b")
    assert [result.status for result in results] == [Status.ERRORED] * 2


def test_retries(tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    def flaky(completion: str) -> float:
        with marks.open("a") as file:
            file.write(completion + "\n")
        tried = marks.read_text().split().count(completion)
        if completion == "raises" and tried == 1:
            raise ConnectionError("try again")
        if completion == "dies" and tried == 1:
            os._exit(1)
        if completion == "never":
            raise ConnectionError("gone")
        return float(tried)

    results = score(flaky, "raises", "dies", "never", "fine", retries=1)
    assert values(results) == [2.0, 2.0, None, 1.0]
    assert marks.read_text().split().count("never") == 2


def test_async_calls_run_together_each_with_its_deadline() -> None:
    async def nap(completion: str) -> float:
        await asyncio.sleep(float(completion))
        return 1.0

    start = time.monotonic()
    results = score(nap, *["0.4"] * 8, "60", timeout_s=1.0)
    assert time.monotonic() - start < 3
    assert values(results) == [1.0] * 8 + [None]
    assert results[-1].status is Status.TIMED_OUT
    assert results[-1].detail["nap"]["error"] == "TimeoutError: no result within 1 s"


def test_async_whole_group() -> None:
    async def both(completions: list) -> list[float]:
        await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    assert values(score(both, "a", "b")) == [1.0, 1.0]


def test_async_calls_are_told_apart_when_one_takes_the_process_with_it() -> None:
    async def nap(completion: str) -> float:
        await asyncio.sleep(0.05)
        if completion == "block":
            time.sleep(1000)  # noqa: ASYNC251  the fault under test: it blocks the loop
        if completion == "exit":
            os._exit(4)
        return 1.0

    results = score(nap, "a", "block", "exit", "b", timeout_s=0.5)
    assert values(results) == [1.0, None, None, 1.0]
    assert [r.status for r in results[1:3]] == [Status.TIMED_OUT, Status.ERRORED]


def test_a_plain_function_may_return_a_coroutine_or_run_a_loop_of_its_own() -> None:
    async def later() -> float:
        return 1.0

    assert values(score([lambda completion: later()], "a")) == [1.0]
    assert values(score([lambda completion: asyncio.run(later())], "a")) == [1.0]


def test_a41_signals_work_when_the_caller_is_a_thread() -> None:
    def alarmed(completion: str) -> float:
        def ring(number: int, frame: Any) -> None:
            raise TimeoutError("rang")

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(10)
        except TimeoutError:
            return 0.5
        return 0.0

    with ThreadPoolExecutor(1) as pool:
        assert values(pool.submit(score, alarmed, "x").result()) == [0.5]


def test_deadline_counts_from_the_start_of_execution(tmp_path: Path) -> None:
    file = tmp_path / "slow_start.py"
    file.write_text("import time\ntime.sleep(1.0)\ndef f(completion):\n    time.sleep(0.3)\n    return 1.0\n")
    rewards = RewardSet([RewardFunction("slow", f"{file}:f")])
    assert values(score(rewards, "a", "b", timeout_s=0.6)) == [1.0, 1.0]


def test_a_class_is_made_once_per_process() -> None:
    class Counting:
        def __init__(self, start: int) -> None:
            self.count = start

        def __call__(self, completion: str) -> float:
            self.count += 1
            return float(self.count)

    rewards = RewardSet([RewardFunction("count", Counting, options={"start": 10})])
    assert values(score(rewards, "a", "b")) == [11.0, 12.0]


def test_a_slow_group_delays_no_other() -> None:
    def nap(completion: str) -> float:
        time.sleep(float(completion))
        return 1.0

    with RewardWorker(RewardSet.of(nap), timeout_s=20, processes=2) as worker, ThreadPoolExecutor(2) as pool:
        worker.score_group(group("0"), {})
        slow = pool.submit(worker.score_group, group("2"), {})
        for _ in range(3):
            worker.score_group(group("0"), {})
        assert not slow.done()
        assert values(slow.result(timeout=10)) == [1.0]
        assert len(worker.start()) == 2


def test_a_process_killed_while_idle_costs_nothing() -> None:
    with RewardWorker(RewardSet.of(misbehave), retries=0) as worker:
        (pid,) = worker.start()
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: not alive(pid))
        assert values(worker.score_group(group("ok"), {})) == [1.0]


def test_children_of_a_reward_function_go_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def forking(completion: str) -> float:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        note.write_text(str(child))
        os._exit(1)

    start = time.monotonic()
    (result,) = score(forking, "x", timeout_s=30)
    assert time.monotonic() - start < 10  # the fork does not hold the line open
    assert "exited with code 1" in result.detail["forking"]["error"]
    assert until(lambda: not alive(int(note.read_text())))


def test_close_ends_groups_in_flight_and_leaves_no_process() -> None:
    worker = RewardWorker(RewardSet.of(misbehave), timeout_s=60)
    (pid,) = worker.start()
    failures: list[BaseException] = []

    def run() -> None:
        with pytest.raises(ProcessStartError, match="closed") as error:
            worker.score_group(group("hold"), {})
        failures.append(error.value)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    worker.close()
    thread.join(timeout=5)
    assert len(failures) == 1
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        worker.score_group(group("ok"), {})


def test_processes_start_without_heavy_imports() -> None:
    def imported(completion: str) -> float:
        import sys

        return float(len({"torch", "vllm", "ray", "transformers"} & sys.modules.keys()))

    assert values(score(imported, "x")) == [0.0]


def test_a_function_that_cannot_be_loaded_is_an_error_at_start(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    file.write_text("def f(completion): return 1.0\n")
    rewards = RewardSet([RewardFunction("once", f"{file}:f")])
    file.write_text("import no_such_package\n")
    with RewardWorker(rewards) as worker, pytest.raises(ProcessStartError, match="no_such_package"):
        worker.start()


def test_f20_three_failed_starts_in_a_row_are_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "once.py"
    file.write_text("def f(completion): return 1.0\n")
    rewards = RewardSet([RewardFunction("once", f"{file}:f")])
    file.write_text("import os\nos._exit(9)\n")
    with RewardWorker(rewards) as worker, pytest.raises(ProcessStartError, match=r"3 times in a row.*code 9"):
        worker.start()
    assert caplog.text.count("failed to start") == 3


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_f21_f22_kill_the_process_then_the_actor() -> None:
    import ray

    def slow(completion: str) -> float:
        time.sleep(float(completion))
        return 1.0

    actor_class = ray.remote(RewardWorker)
    actor = actor_class.options(max_concurrency=2, max_restarts=1, num_cpus=0).remote(
        RewardSet.of(slow), timeout_s=10.0, retries=1, processes=2
    )
    (pid,) = ray.get(actor.start.remote(), timeout=60)

    # The process in the middle of a call: its call is tried again.
    reference = actor.score_group.remote(group("0", "1"), {})
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    assert values(ray.get(reference, timeout=30)) == [1.0, 1.0]

    # The actor in the middle of a group: the caller hears of it, no process outlives it, the next serves.
    (pid,) = ray.get(actor.start.remote(), timeout=30)
    actor_pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    reference = actor.score_group.remote(group("60"), {})
    time.sleep(0.5)
    os.kill(actor_pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(reference, timeout=30)
    assert until(lambda: not alive(pid))

    def serves() -> bool:
        try:
            return values(ray.get(actor.score_group.remote(group("0"), {}), timeout=30)) == [1.0]
        except ray.exceptions.RayActorError:  # while it restarts
            return False

    assert until(serves, 30)
    (pid,) = ray.get(actor.start.remote(), timeout=30)
    ray.get(actor.close.remote(), timeout=30)
    assert not alive(pid)
    ray.kill(actor)
