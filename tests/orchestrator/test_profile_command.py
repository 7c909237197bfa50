"""`headway profile-difficulty` as a whole, with engines and judges that are fakes: files, resumption, exit codes."""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, LocalActor, patch_ray, reward_fleet, rollout_fleet

import orchestrator.cluster
from orchestrator import cli
from orchestrator.api import profile_difficulty
from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.compose import load
from orchestrator.prepare import Prepared, prepare
from rollout_workers.trajectory import RewardResult, Status, Trajectory
from rollout_workers.worker import RolloutRequest

pytestmark = pytest.mark.thorough

ANSWERS = 4


def rule(trajectory: Trajectory) -> RewardResult:
    """The prompt «Say 3.» is answered right in 3 of 4 answers, and so on; «Say 9.» can't be judged."""
    number = int(str(trajectory.messages[0]["content"])[4:-1])
    if number == 9:
        return RewardResult(None, Status.UNPARSEABLE_ANSWER, detail={"letters": {"error": "gold is no number"}})
    value = float(trajectory.index < number)
    return RewardResult(value, components={"letters": value})


class FakeCluster:
    """What the profile needs of a cluster. `asked` counts requests by prompt, over all starts."""

    starts = 0
    asked: Counter[str]
    rule: Callable[[Trajectory], RewardResult]

    def __init__(self, prepared: Prepared, *, on_change: Callable[[], None], training: bool) -> None:
        assert not training
        assert prepared.checker is None

    async def __aenter__(self) -> FakeCluster:
        FakeCluster.starts += 1

        def delay(request: RolloutRequest) -> float:
            FakeCluster.asked[request.prompt_id] += 1
            return 0.0

        self.rollouts = rollout_fleet(lambda index: FakeEngine(delay_s=delay))
        await self.rollouts.start(0)
        self.rewards = reward_fleet([FakeCluster.rule])
        self.clerks = ClerkFleet([LocalActor(Clerk())], 5.0)
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass

    def link_logs(self, folder: Path) -> None:
        assert folder.is_dir()


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    patch_ray(monkeypatch)
    monkeypatch.setattr(orchestrator.cluster, "Cluster", FakeCluster)
    FakeCluster.starts, FakeCluster.asked = 0, Counter()
    FakeCluster.rule = staticmethod(rule)
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


class Shell:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = folder / "out"
        self._capsys = capsys
        self.files = {name: folder / f"{name}.jsonl" for name in ("low", "high")}
        for name, numbers in {"low": (0, 1, 2, 9), "high": (2, 3, 4)}.items():
            lines = [json.dumps({"id": n, "prompt": f"Say {n}.", "letter": "e"}) + "\n" for n in numbers]
            self.files[name].write_text("".join(lines))

    def profile(self, *overrides: str) -> tuple[int, str]:
        """Exit code and what went to stderr."""
        sources = [f"data.train.{name}.path={path}" for name, path in self.files.items()]
        arguments = ["experiment=tiny", "data=files", *sources, "logging.console=plain", f"profile.out={self.out}"]
        code = cli.main(["profile-difficulty", *arguments, f"profile.answers_per_prompt={ANSWERS}", *overrides])
        return code, self._capsys.readouterr().err

    def copy(self, name: str) -> list[int] | None:
        """Ids in a copy."""
        path = self.out / "data" / f"{name}.jsonl"
        return [json.loads(line)["id"] for line in path.read_text().splitlines()] if path.exists() else None

    @property
    def measured(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "pass_rates.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def test_pass_rates_copies_and_the_way_on(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        code, _ = shell.profile()
    assert code == 0
    assert shell.copy("low") == [1, 2]
    assert shell.copy("high") == [2, 3]
    low = shell.summary["sources"]["low"]
    assert low["before"]["shares"] == {
        "all wrong": pytest.approx(1 / 3),
        "below band": 0.0,
        "in band": pytest.approx(2 / 3),
        "above band": 0.0,
        "all right": 0.0,
    }
    assert [failed["prompt_id"] for failed in low["no_pass_rate"]] == ["low:9"]
    assert "unparseable_answer: gold is no number" in low["no_pass_rate"][0]["reason"]
    assert "1 prompts have no pass rate" in caplog.text
    command = next(line for line in caplog.text.splitlines() if line.startswith("  headway train "))
    (override,) = shlex.split(command)[2:]
    assert override == shell.summary["train_on"]
    prepared = prepare(load(["experiment=tiny", "data=files", override]))
    assert [source.ids for source in prepared.train] == [("low:1", "low:2"), ("high:2", "high:3")]


def test_python_has_the_same_entry(shell: Shell) -> None:
    overrides = {"experiment": "tiny", "profile.out": shell.out, "profile.answers_per_prompt": ANSWERS}
    copies = profile_difficulty(data={"mine": shell.files["high"]}, overrides=overrides)
    assert {name: source.path for name, source in copies.items()} == {"mine": str(shell.out / "data" / "mine.jsonl")}


def test_another_band_starts_no_engine_again(shell: Shell) -> None:
    assert shell.profile()[0] == 0
    # What has no pass rate would be tried again: it is left out of this one's data.
    shell.files["low"].write_text("".join(line + "\n" for line in shell.files["low"].read_text().splitlines()[:3]))
    assert shell.profile("profile.band=[0,0.25]")[0] == 0
    assert FakeCluster.starts == 1
    assert shell.copy("low") == [0, 1]
    assert shell.copy("high") is None
    assert "high" not in shell.summary["train_on"]


def test_a_profile_that_was_ended_goes_on(shell: Shell) -> None:
    def stop(trajectory: Trajectory) -> RewardResult:
        if len(FakeCluster.asked) == 4:
            raise KeyboardInterrupt
        return rule(trajectory)

    one_at_a_time = "rollout.max_concurrent_answers=4"
    FakeCluster.rule = staticmethod(stop)
    code, message = shell.profile(one_at_a_time)
    assert code == 130
    assert message.endswith("headway: interrupted\n")
    assert not (shell.out / "summary.json").exists()
    finished = [line["prompt_id"] for line in shell.measured if line["rate"] is not None]
    assert 0 < len(finished) <= 3
    FakeCluster.rule = staticmethod(rule)
    assert shell.profile(one_at_a_time)[0] == 0
    assert shell.copy("low") == [1, 2]
    assert [FakeCluster.asked[prompt_id] for prompt_id in finished] == [1] * len(finished)
    rated = Counter(line["prompt_id"] for line in shell.measured if line["rate"] is not None)
    assert sorted(rated) == ["high:2", "high:3", "high:4", "low:0", "low:1", "low:2"]
    assert set(rated.values()) == {1}


def test_what_has_no_pass_rate_is_tried_again(shell: Shell) -> None:
    assert shell.profile()[0] == 0
    assert shell.profile()[0] == 0
    assert FakeCluster.starts == 2
    assert FakeCluster.asked["low:9"] == 2
    assert {count for prompt_id, count in FakeCluster.asked.items() if prompt_id != "low:9"} == {1}


def test_a_limit_measures_the_first_of_a_runs_order(shell: Shell) -> None:
    assert shell.profile("profile.limit=3")[0] == 0
    assert len(FakeCluster.asked) == 3
    left = sum(source["not_measured"] for source in shell.summary["sources"].values())
    assert left == 4
    assert shell.profile()[0] == 0  # and the rest later
    assert len(FakeCluster.asked) == 7


def test_other_settings_are_refused(shell: Shell) -> None:
    assert shell.profile()[0] == 0
    before = (shell.out / "summary.json").read_bytes()
    code, message = shell.profile("rollout.temperature=0.5")
    assert code == 2
    assert "measured otherwise: rollout.temperature was 1.0, is 0.5" in message
    assert FakeCluster.starts == 1
    assert (shell.out / "summary.json").read_bytes() == before


def test_where_nothing_can_be_measured_it_fails(shell: Shell) -> None:
    shell.files["high"].write_text(json.dumps({"id": 9, "prompt": "Say 9.", "letter": "e"}))
    shell.files["low"].write_text(json.dumps({"id": 9, "prompt": "Say 9.", "letter": "e"}))
    code, message = shell.profile()
    assert code == 1
    assert "headway: ProfileError: none of 2 prompts has a pass rate" in message
    assert f"The traceback is in {shell.out / 'logs' / 'driver.log'}" in message
    assert not (shell.out / "summary.json").exists()


def test_a_second_process_is_kept_out(shell: Shell) -> None:
    import fcntl

    shell.out.mkdir()
    with (shell.out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, message = shell.profile()
    assert code == 2
    assert f"profile.out={shell.out}: another process is working on" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("profile.bnd=[0,1]", "profile.bnd: there is no such key; did you mean profile.band?"),
        ("profile.band=[0.5]", "profile.band=[0.5]: expected [low, high]"),
        ("profile.answers_per_prompt=1", "profile.answers_per_prompt=1: expected at least 2"),
        ("profile.limit=0", "profile.limit=0: expected at least 1"),
        ("data.train={}", "data.train: no source of prompts"),
        ("model.path=./no/model", "model.path=./no/model: no such folder"),
    ],
)
def test_mistakes_are_found_before_anything_starts(shell: Shell, override: str, message: str) -> None:
    code, said = shell.profile(override)
    assert code == 2
    assert said.startswith("headway: ")
    assert message in said
    assert FakeCluster.starts == 0
    assert not shell.out.exists()
