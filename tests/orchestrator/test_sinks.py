"""Records: one line each, all or nothing; what a resume took back is left out; W&B is never in the way."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.metrics import UnknownMetricError
from orchestrator.sinks import JsonlSink, Recorder, WandbError, WandbSink, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def recorder(path: Path, lineage: int = 0, resumed_from: int | None = None) -> Recorder:
    sink = JsonlSink(path, lineage=lineage, resumed_from=resumed_from)
    return Recorder([sink], lineage=lineage, clock=lambda: 12.5)


def test_every_log_is_one_record_with_its_bookkeeping(path: Path) -> None:
    with recorder(path) as rec:
        returned = rec.log(1, {"reward/mean": np.float32(0.5), "group/filtered": np.int64(3)})
        rec.log(1, {"eval/arithmetic/pass_at_1": 0.25})
        on_disk = read_metrics(path)  # before it is closed: nothing is held back
    assert on_disk == [
        {"policy_version": 1, "time": 12.5, "lineage": 0, "reward/mean": 0.5, "group/filtered": 3},
        {"policy_version": 1, "time": 12.5, "lineage": 0, "eval/arithmetic/pass_at_1": 0.25},
    ]
    assert returned == on_disk[0]


def test_what_is_not_finite_becomes_null_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recorder(path) as rec:
        rec.log(2, {"actor/loss": math.nan, "actor/grad_norm": math.inf, "actor/lr": 1e-6})
    (record,) = read_metrics(path)
    assert record["actor/loss"] is None
    assert record["actor/grad_norm"] is None
    assert record["actor/lr"] == 1e-6
    assert "policy_version 2" in caplog.text
    assert "actor/loss, actor/grad_norm" in caplog.text


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"reward/mean": 1.0, "actor/los": 1.0}, UnknownMetricError, "actor/los"),
        ({"policy_version": 3}, UnknownMetricError, "policy_version"),
        ({"reward/mean": "0.5"}, TypeError, "'reward/mean'.*str"),
        ({"reward/mean": True}, TypeError, "bool"),
        ({"reward/mean": None}, TypeError, "NoneType"),
        ({"reward/mean": [1.0]}, TypeError, "list"),
    ],
)
def test_a_refused_value_writes_nothing(path: Path, values, error, text) -> None:
    with recorder(path) as rec, pytest.raises(error, match=text):
        rec.log(1, values)
    assert read_metrics(path) == []


def test_a_negative_version_is_refused(path: Path) -> None:
    with recorder(path) as rec, pytest.raises(ValueError, match="-1"):
        rec.log(-1, {})


def test_f11_resumed_records_replace_those_beyond_the_checkpoint(path: Path) -> None:
    with recorder(path) as rec:
        for version in range(151):
            rec.log(version, {"actor/loss": float(version)})
    with recorder(path, lineage=1, resumed_from=100) as rec:
        for version in (101, 102):
            rec.log(version, {"actor/loss": -float(version)})
    records = read_metrics(path)
    assert [record["policy_version"] for record in records] == list(range(103))
    assert [record["actor/loss"] for record in records[-3:]] == [100.0, -101.0, -102.0]
    assert len(path.read_text().splitlines()) == 151 + 2 + 2  # nothing was removed from the file


def test_a_start_from_nothing_takes_back_all_that_was_before(path: Path) -> None:
    with recorder(path) as rec:
        rec.log(0, {"eval/pass_at_1": 0.1})
    with recorder(path, lineage=1, resumed_from=None) as rec:
        rec.log(0, {"eval/pass_at_1": 0.2})
    assert [record["eval/pass_at_1"] for record in read_metrics(path)] == [0.2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6))
def test_any_history_of_resumes_leaves_each_version_once(tmp_path_factory, crashes) -> None:
    """Each crash happens after some versions; the next start goes back to a checkpoint at or before it."""
    path = tmp_path_factory.mktemp("history") / "metrics.jsonl"
    version, expected = 0, []
    for lineage, (trained, lost) in enumerate([*crashes, (2, 0)]):
        with recorder(path, lineage, version if lineage else None) as rec:
            for _ in range(trained):
                version += 1
                rec.log(version, {"optimizer_step": lineage})
                expected.append((version, lineage))
        version = max(0, version - lost)
        if lineage < len(crashes):
            expected = [(v, born) for v, born in expected if v <= version]
    assert [(r["policy_version"], r["optimizer_step"]) for r in read_metrics(path)] == expected


def test_half_a_line_is_cut_off_when_the_file_is_opened(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recorder(path) as rec:
        rec.log(1, {"actor/loss": 1.0})
    with path.open("ab") as file:
        file.write(b'{"policy_version": 2, "ti')
    assert [record["policy_version"] for record in read_metrics(path)] == [1]
    with recorder(path, lineage=1, resumed_from=1) as rec:
        rec.log(2, {"actor/loss": 2.0})
    assert [record["policy_version"] for record in read_metrics(path)] == [1, 2]
    assert "half a line" in caplog.text
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_bad_line_is_named(path: Path) -> None:
    recorder(path).close()
    with path.open("a") as file:
        file.write('{"no": "record"}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)


def test_an_error_closes_the_sinks_as_failed() -> None:
    class Sink:
        failed: bool | None = None

        def write(self, record) -> None: ...

        def close(self, failed: bool) -> None:
            self.failed = failed

    sink = Sink()
    with pytest.raises(RuntimeError), Recorder([sink]):
        raise RuntimeError
    assert sink.failed is True


def test_the_file_is_written_without_w_and_b_being_imported() -> None:
    code = "import sys, orchestrator.sinks; sys.exit('wandb' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- Weights & Biases, the real thing, offline


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def wandb_sink(run_dir: Path, mode="auto", **options) -> WandbSink:
    return WandbSink(run_dir, project="p", run_id="abc123", name="n", config={"seed": 1}, mode=mode, **options)


def logged(folder: Path) -> list[dict[str, object]]:
    """The history rows in an offline run's log."""
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in offline_records(folder)
        if record.HasField("history")
    ]


def offline_records(folder: Path) -> list:
    """What a finished offline run's log holds. W&B's own process may write the end of it after the run was closed."""
    (file,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 30
    while not (records := parsed(file.read_bytes())) or not records[-1].HasField("exit"):
        assert time.monotonic() < deadline, f"the log does not end: {records}"
        time.sleep(0.02)
    return records


def parsed(content: bytes) -> list:
    """LevelDB's framing, W&B's protobuf records."""
    from wandb.proto import wandb_internal_pb2

    position, records, partial = 7, [], b""
    while position + 7 <= len(content):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        if position + 7 + length > len(content):
            break  # it is still being written
        partial += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(partial))
            partial = b""
    return records


def test_f11_w_and_b_gets_every_point_on_its_own_axis_under_one_id(tmp_path: Path, no_account: None) -> None:
    for lineage, versions in enumerate([(0, 1, 2, 3), (2, 3, 4)]):
        with Recorder([wandb_sink(tmp_path)], lineage=lineage) as rec:
            for version in versions:
                rec.log(version, {"reward/mean": version / 10, "actor/loss": math.nan})
        time.sleep(1.1 * (lineage == 0))  # W&B names its folders by the second
    folders = sorted((tmp_path / "wandb").glob("offline-run-*-abc123"))
    assert len(folders) == 2
    for folder, versions in zip(folders, [[0, 1, 2, 3], [2, 3, 4]], strict=True):
        rows = logged(folder)
        assert [row["policy_version"] for row in rows] == versions
        assert [row["reward/mean"] for row in rows] == [version / 10 for version in versions]
        assert all("actor/loss" not in row for row in rows)


def test_sample_answers_become_a_table(tmp_path: Path, no_account: None) -> None:
    sink = wandb_sink(tmp_path)
    sink.log_table(3, "eval/samples", ["prompt", "answer", "right"], [("2+2", "4", True), ("1+1", "3", False)])
    sink.close(failed=False)
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/eval/samples_*.table.json")
    assert json.loads(table.read_text())["data"] == [["2+2", "4", True], ["1+1", "3", False]]


def test_an_alert_is_kept_offline(tmp_path: Path, no_account: None) -> None:
    sink = wandb_sink(tmp_path)
    sink.alert("The reward parts", "it pays 'a' & <b>\nsecond line")
    sink.alert("The reward parts", "again")
    sink.close(failed=False)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abc123")
    alerts = [record.alert for record in offline_records(folder) if record.HasField("alert")]
    assert [(alert.title, alert.text, alert.level) for alert in alerts] == [
        ("The reward parts", "it pays 'a' & <b>\nsecond line", "WARN"),
        ("The reward parts", "again", "WARN"),
    ]


def test_disabled_writes_nothing(tmp_path: Path, no_account: None) -> None:
    with Recorder([wandb_sink(tmp_path, mode="disabled")]) as rec:
        rec.log(0, {"reward/mean": 1.0})
    assert not list(tmp_path.rglob("*.wandb"))


def test_the_environment_decides_what_auto_is(tmp_path: Path, no_account: None, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = wandb_sink(tmp_path)
    sink.close(failed=False)
    assert sink.mode == "disabled"


@pytest.mark.engine
def test_a_server_that_does_not_answer_is_an_error_that_says_how_to_do_without(tmp_path: Path, no_account) -> None:
    """In a process of its own: W&B keeps the server's address for the life of a process."""
    code = f"""
from pathlib import Path
from orchestrator.sinks import WandbSink
WandbSink(Path({str(tmp_path)!r}), project="p", run_id="a", name="n", config={{}}, start_timeout_s=3.0)
"""
    environment = os.environ | {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert WandbError.__name__ in done.stderr
    assert "logging.wandb=disabled" in done.stderr


class _Stuck:
    """W&B's run object, hanging in every call until it is let go."""

    def __init__(self) -> None:
        self.called, self.let_go = threading.Event(), threading.Event()

    def log(self, values: object) -> None:
        self.called.set()
        self.let_go.wait()

    def finish(self, exit_code: int) -> None:
        self.let_go.wait()


def test_a_w_and_b_that_hangs_holds_up_neither_the_loop_nor_the_end(
    tmp_path: Path, no_account, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(WandbSink, "QUEUE_LENGTH", 4)
    sink = wandb_sink(tmp_path, mode="disabled", finish_timeout_s=0.1)
    stuck = _Stuck()
    monkeypatch.setattr(sink, "_run", stuck)
    started = time.monotonic()
    for version in range(50):
        sink.write({"policy_version": version})
        stuck.called.wait(10.0)
    assert time.monotonic() - started < 1.0
    sink.close(failed=False)
    assert time.monotonic() - started < 2.0
    stuck.let_go.set()
    assert "W&B takes no more records" in caplog.text
    assert "W&B did not finish within 0.1 s" in caplog.text
    assert "missed 45 records" in caplog.text


def test_a_w_and_b_that_fails_is_reported_once_and_training_goes_on(
    tmp_path: Path, no_account, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = wandb_sink(tmp_path, mode="disabled")

    def refuse(values: object) -> None:
        raise RuntimeError("service gone")

    monkeypatch.setattr(sink._run, "log", refuse)
    with caplog.at_level(logging.ERROR):
        for version in range(3):
            sink.write({"policy_version": version})
        sink.close(failed=False)
    assert caplog.text.count("W&B refused a record") == 1
    assert "service gone" in caplog.text
