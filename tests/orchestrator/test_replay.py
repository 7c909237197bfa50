"""A replay against a journal whose losses were computed by hand: it finds the same figures, and whatever was altered."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from learner.batch import Coefficients
from learner.tally import Tally
from orchestrator import cli
from orchestrator.api import replay
from orchestrator.checkpoint import CheckpointStore
from orchestrator.compose import load
from orchestrator.config import Config, ConfigError
from orchestrator.journal import JOURNAL, TrajectoryRow, begin_lineage, write_trajectories
from orchestrator.replay import Replay, Scored, plan_of, replay_batch
from orchestrator.replay_journal import read_batch
from orchestrator.sinks import JsonlSink, Recorder
from rollout_workers.trajectory import RewardResult, Status, Trajectory, VersionSpan

PROMPT, VERSION = 3, 4
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
BASE = (
    "experiment=tiny",
    "algorithm=dr_grpo",
    "algorithm.aggregation=token_mean",
    "algorithm.aggregation_options={}",
    f"algorithm.loss_options={{clip_low:{CLIP_LOW},clip_high:{CLIP_HIGH}}}",
    "sampling.groups_per_batch=4",
    "sampling.answers_per_group=3",
    "staleness.max=2",
)
REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0, None], [0.25, 0.75, 0.5], [1.0, 1.0, 0.0]]


def config_of(*overrides: str) -> Config:
    return load([*BASE, *overrides])


@dataclasses.dataclass
class Answer:
    """An answer of the run, as the learner saw it: its logprobs are those of the pass that its loss was computed with."""

    trajectory: Trajectory
    learner: np.ndarray
    advantage: float | None
    reward: float | None
    in_loss: bool = True

    @property
    def trained(self) -> bool:
        return self.in_loss and self.reward is not None


def answers_of(seed: int = 0) -> list[list[Answer]]:
    rng = np.random.default_rng(seed)
    groups = []
    for number, rewards in enumerate(REWARDS):
        known = [reward for reward in rewards if reward is not None]
        groups.append([])
        for index, reward in enumerate(rewards):
            length = int(rng.integers(2, 7))
            mask = np.arange(PROMPT + length) >= PROMPT
            behaviour = np.where(mask, -rng.exponential(1.0, len(mask)), 0.0).astype(np.float32)
            learner = (behaviour + np.where(mask, rng.normal(0, 0.3, len(mask)), 0.0)).astype(np.float32)
            cut = PROMPT + int(rng.integers(1, length))  # the second part is of a newer version
            status = Status.SCORED if reward is not None else Status.ERRORED
            trajectory = Trajectory(
                group_id=f"g0-{number:06d}",
                index=index,
                prompt_id=f"p{number}",
                messages=({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}),
                token_ids=rng.integers(0, 99, len(mask)).astype(np.int32) * mask
                + np.arange(len(mask), dtype=np.int32) * ~mask,
                response_mask=mask,
                behaviour_logprobs=behaviour,
                version_spans=(VersionSpan(PROMPT, cut, VERSION - 1), VersionSpan(cut, PROMPT + length, VERSION)),
                finish_reason="stop",
                reward=RewardResult(reward, status),
            )
            advantage = None if reward is None else reward - sum(known) / len(known)
            groups[-1].append(Answer(trajectory, learner, advantage, reward))
    return groups


def loss_by_hand(groups: Sequence[Sequence[Answer]]) -> float:
    """PPO's clipped loss, mean over the tokens of one update."""
    terms = []
    for answer in (answer for group in groups for answer in group if answer.trained):
        assert answer.advantage is not None
        mask = answer.trajectory.response_mask
        for new, old in zip(answer.learner[mask], answer.trajectory.behaviour_logprobs[mask], strict=True):
            ratio = math.exp(float(new) - float(old))
            clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
            terms.append(-min(ratio * answer.advantage, clipped * answer.advantage))
    return sum(terms) / len(terms)


def write_run(
    folder: Path,
    config: Config,
    groups: Sequence[Sequence[Answer]],
    metrics: Mapping[str, float],
    *,
    shards: int = 1,
    entropy_coefficient: float | None = None,
) -> None:
    """A run's folder with the batch that improved VERSION; its groups are dealt out to the shards as clerks do."""
    lineage = begin_lineage(folder / JOURNAL, None)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    for shard in range(shards):
        rows = [
            TrajectoryRow(
                trajectory=answer.trajectory,
                epoch=0,
                optimizer_step_start=8,
                optimizer_step_end=8 + config.algorithm.updates_per_batch,
                learner_logprobs=answer.learner if answer.trained else None,
                trained=answer.trained,
                advantage=answer.advantage,
                temperature=1.0,
                sampling={},
                dispatched_at_version=VERSION - 1,
                entropy_coefficient=entropy_coefficient,
            )
            for group in groups[shard::shards]
            for answer in group
        ]
        write_trajectories(folder / JOURNAL, lineage, VERSION, shard, rows)
    with Recorder([JsonlSink(folder / "metrics.jsonl", lineage=lineage, resumed_from=None)]) as recorder:
        recorder.log(VERSION + 1, {"optimizer_step": 8 + config.algorithm.updates_per_batch, **metrics})
        recorder.log(VERSION + 1, {"eval/pass_at_1": 0.5})  # a record of its own


@pytest.fixture
def run(tmp_path: Path) -> Path:
    groups = answers_of()
    tokens = sum(a.trajectory.response_length for g in groups for a in g if a.reward is not None)
    metrics = {
        "actor/loss": loss_by_hand(groups),
        "batch/trained_tokens": tokens,
        "batch/answers": 11,
        "batch/groups": 4,
    }
    write_run(tmp_path / "run", config_of(), groups, metrics | {"actor/grad_norm": 1.0, "actor/entropy": 2.0})
    return tmp_path / "run"


def test_the_loss_comes_out_as_it_did_by_hand(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    replayed = replay(run, VERSION)
    assert replayed.differing == []
    loss = replayed["actor/loss"]
    assert loss.recorded is not None
    assert abs(loss.recorded) > 1e-3
    assert loss.replayed == pytest.approx(loss.recorded, rel=1e-6)
    assert replayed["advantage of each answer"].difference == 0
    assert replayed["batch/trained_tokens"].difference == 0
    assert sorted(run.rglob("*")) == before
    assert "actor/loss" in capsys.readouterr().out


def test_the_newest_batch_is_the_default(run: Path) -> None:
    assert replay(run).version == VERSION


def test_two_updates_of_a_batch_whose_groups_lie_in_several_shards(tmp_path: Path) -> None:
    groups, config = answers_of(1), config_of("algorithm.updates_per_batch=2")
    loss = (loss_by_hand(groups[:2]) + loss_by_hand(groups[2:])) / 2
    write_run(tmp_path, config, groups, {"actor/loss": loss}, shards=3)
    found = replay(tmp_path)["actor/loss"]
    assert found.replayed == pytest.approx(loss, rel=1e-6)
    assert not found.differs


def test_advantages_per_token_are_whitened_over_the_batch(tmp_path: Path) -> None:
    """REINFORCE++: of an answer's tokens each has its reward, less the mean over all tokens, over their deviation."""
    groups = answers_of(2)
    answers = [answer for group in groups for answer in group if answer.reward is not None]
    every = np.concatenate([[answer.reward] * answer.trajectory.response_length for answer in answers])
    for answer in answers:
        answer.advantage = (float(answer.reward or 0.0) - every.mean()) / every.std(ddof=1)
    loss = loss_by_hand(groups)
    for answer in answers:
        answer.advantage = None  # as the driver, which has none per answer, writes it
    config = config_of("algorithm.advantage=reinforce_pp")
    write_run(tmp_path, config, groups, {"actor/loss": loss})
    replayed = replay(tmp_path)
    assert replayed["actor/loss"].replayed == pytest.approx(loss, rel=1e-6)
    assert replayed["advantage of each answer"].note == "are per token, and in the loss alone"
    assert replayed.differing == []


def test_an_answer_left_out_of_the_loss_stays_in_its_groups_baseline(tmp_path: Path) -> None:
    groups = answers_of(3)
    groups[0][1].in_loss = False
    write_run(tmp_path, config_of(), groups, {"actor/loss": loss_by_hand(groups), "batch/answers": 10})
    replayed = replay(tmp_path)
    assert replayed.differing == []
    assert replayed["batch/answers"].replayed == 10
    assert replayed["advantage of each answer"].difference == 0
    assert replayed["actor/loss"].replayed == pytest.approx(loss_by_hand(groups), rel=1e-6)


def altered(folder: Path, **changes: object) -> Replay:
    """The replay of a run of which one answer was written down otherwise than it was."""
    groups = answers_of()
    metrics = {"actor/loss": loss_by_hand(groups)}
    groups[2][1] = dataclasses.replace(groups[2][1], **changes)  # type: ignore[arg-type]
    write_run(folder, config_of(), groups, metrics)
    return replay(folder)


def test_an_advantage_that_does_not_follow_from_the_rewards_is_named(tmp_path: Path) -> None:
    differing = altered(tmp_path, advantage=0.26)["advantage of each answer"]
    assert differing.differs
    assert differing.note == "g0-000002[1] by 0.01"


def test_a_logprob_that_was_not_the_one_of_the_loss_shows(tmp_path: Path) -> None:
    groups = answers_of()
    other = groups[2][1].learner.copy()
    other[-1] += 0.01
    found = altered(tmp_path, learner=other)
    assert [figure.name for figure in found.differing] == ["actor/loss"]


def test_another_objective_gives_another_loss(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"replay.run={run}", "algorithm.loss_options={clip_low: 0.01, clip_high: 0.01}"]
    assert cli.main(["replay", *overrides]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert cli.main(["replay", f"replay.run={run}"]) == 0


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["algorithm.kl_coefficient=0.1"], "holds a KL term: needs replay.forward=true"),
        (["algorithm.entropy_coefficient=0.1"], "holds an entropy bonus: needs replay.forward=true"),
        (["algorithm.selection=top_entropy"], "holds a selection of tokens: needs replay.forward=true"),
        (
            ["algorithm.advantage=reinforce_pp", "algorithm.kl_placement=reward", "algorithm.kl_coefficient=0.1"],
            "holds a KL penalty: needs replay.forward=true",
        ),
        (["algorithm.epochs_per_batch=2"], "the weights between the batch's updates are not kept"),
        (
            ["algorithm.updates_per_batch=2", "algorithm.proximal=recompute"],
            "the weights between the batch's updates are not kept",
        ),
    ],
)
def test_what_the_journal_can_not_give_is_said_not_guessed(run: Path, overrides: list[str], why: str) -> None:
    figure = replay(run, overrides=overrides)["actor/loss"]
    assert figure.replayed is None
    assert figure.difference is None
    assert not figure.differs
    assert figure.note == why


def test_a_coefficient_that_is_adapted_is_that_of_the_batch(tmp_path: Path) -> None:
    """Not the one that the run began with: here the batch had no bonus, or one of 0.3."""
    config = config_of("algorithm.entropy_target=0.5", "algorithm.entropy_coefficient=0.01")
    groups = answers_of()
    metrics = {"actor/loss": loss_by_hand(groups), "actor/entropy_coefficient": 0.0}
    write_run(tmp_path / "none", config, groups, metrics, entropy_coefficient=0.0)
    replayed = replay(tmp_path / "none")
    assert replayed.differing == []
    assert replayed["actor/loss"].replayed == pytest.approx(loss_by_hand(groups), rel=1e-6)
    write_run(tmp_path / "some", config, groups, metrics, entropy_coefficient=0.3)
    assert replay(tmp_path / "some")["actor/loss"].note == "holds an entropy bonus: needs replay.forward=true"
    plan = plan_of(config, read_batch(tmp_path / "some", VERSION))
    assert plan.ranks[0].coefficients == Coefficients(entropy=0.3)


def test_a_skipped_update_takes_the_learners_figures_with_it(tmp_path: Path) -> None:
    write_run(tmp_path, config_of(), answers_of(), {"actor/loss": 1.0, "actor/skipped_updates": 1})
    assert "left out" in replay(tmp_path)["actor/loss"].note


def test_without_a_record_there_is_nothing_to_compare_with(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    replayed = replay(run)
    assert replayed.differing == []
    assert replayed["batch/answers"].note == "not in metrics.jsonl"
    assert replayed["batch/answers"].replayed == 11


def test_of_a_resumed_run_the_surviving_record_counts(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    late = json.loads(lines[1]) | {"lineage": 1, "actor/loss": 7.0}
    opening = {"lineage": 1, "resumed_from": VERSION, "time": 0.0}
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(opening), json.dumps(late)]) + "\n")
    assert replay(run)["actor/loss"].recorded == 7.0


@pytest.mark.parametrize("overrides", [['replay.run="~/run"'], ['replay={run: "~/run"}'], {"replay": {"run": "~/run"}}])
def test_the_run_in_every_spelling(run: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    assert replay(overrides=overrides).differing == []


class TestForward:
    """A forward pass, made up."""

    @pytest.fixture
    def recorded(self, tmp_path: Path) -> tuple[Path, dict[tuple[str, int], np.ndarray]]:
        groups = answers_of()
        config = config_of("algorithm.entropy_coefficient=0.1")
        write_run(tmp_path, config, groups, {"actor/loss": -0.5, "actor/entropy": 2.0})
        passed = {
            (a.trajectory.group_id, a.trajectory.index): a.learner[a.trajectory.response_mask].copy()
            for group in groups
            for a in group
            if a.reward is not None
        }
        return tmp_path, passed

    def replay(self, folder: Path, logprobs: dict[tuple[str, int], np.ndarray], *overrides: str, loss: float) -> Replay:
        config = config_of("algorithm.entropy_coefficient=0.1", *overrides)
        batch = read_batch(folder, VERSION)
        plan = plan_of(config, batch)
        tally = Tally({"loss": (loss, 0.0, 0.0), "tokens": (10.0, 0.0, 0.0), "entropy": (20.0, 0.0, 0.0)})
        return replay_batch(folder, config, batch, plan, Scored(tally, logprobs))

    def test_gives_what_the_journal_lacks(self, recorded: tuple[Path, dict[tuple[str, int], np.ndarray]]) -> None:
        replayed = self.replay(*recorded, loss=-0.5)
        assert replayed.differing == []
        assert replayed["actor/loss"].replayed == -0.5
        assert replayed["actor/entropy"].difference == 0
        assert replayed["learner logprobs"].difference == 0
        assert self.replay(*recorded, loss=-0.51)["actor/loss"].differs

    def test_names_answers_that_came_out_otherwise(
        self, recorded: tuple[Path, dict[tuple[str, int], np.ndarray]]
    ) -> None:
        folder, passed = recorded
        passed["g0-000003", 2] += 0.25
        figure = self.replay(folder, passed, loss=-0.5)["learner logprobs"]
        assert figure.differs
        assert figure.note == "g0-000003[2] by 0.25"

    def test_compares_only_answers_that_saw_the_same_weights(
        self, recorded: tuple[Path, dict[tuple[str, int], np.ndarray]]
    ) -> None:
        folder, passed = recorded
        passed["g0-000003", 2] += 0.25  # of the second update
        replayed = self.replay(folder, passed, "algorithm.updates_per_batch=2", loss=-0.5)
        assert replayed["learner logprobs, first update"].difference == 0
        assert "not kept" in replayed["actor/loss"].note


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    import logging

    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


class TestRefused:
    def test_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"replay\.run: which run"):
            replay()
        with pytest.raises(ConfigError, match=r"replay\.run=.*is not the folder of a run"):
            replay(tmp_path)

    def test_a_batch_that_is_not_there(self, run: Path) -> None:
        with pytest.raises(ConfigError, match=f"replay.version=9: .* it has those of {VERSION} to {VERSION}"):
            replay(run, 9)

    def test_weights_that_are_not_kept(self, run: Path) -> None:
        store = CheckpointStore(run / "checkpoints", keep=2)
        for version in (2, 3):
            with store.saving(version):
                store.commit(version, {})
        message = (
            f"the weights of version {VERSION} are not kept. There are checkpoints of versions: 2, 3; and version 0"
        )
        with pytest.raises(ConfigError, match=f"replay.forward=true: {message}"):
            replay(run, forward=True)

    def test_a_key_that_is_none(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["replay", f"replay.run={run}", "replay.versoin=3"]) == 2
        assert "replay.versoin: there is no such key; did you mean replay.version?" in capsys.readouterr().err
