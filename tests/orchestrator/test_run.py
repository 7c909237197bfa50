"""The loop, driven with fake engines, judges and learner: the real queue, fleets, frontier, journal and checkpoints."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from fakes import (
    FakeEngine,
    FakeLearner,
    FakeRun,
    Killed,
    fake_config,
    hash_reward,
    index_reward,
    patch_ray,
    reward_fleet,
)

from orchestrator.evaluation import EvaluationError
from orchestrator.fleet import FleetError
from orchestrator.journal import read_outcomes, read_trajectories
from orchestrator.run import NoProgress, Starved
from rollout_workers.trajectory import RewardResult, Status, Trajectory
from rollout_workers.worker import RolloutRequest


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)
    monkeypatch.setattr("orchestrator.run.prefix_sharing", lambda prepared: True)


def outcomes(folder: Path) -> list[tuple[str, int, str]]:
    """Prompt id, epoch and outcome of the surviving lineage."""
    table = read_outcomes(folder).to_pylist()
    return [(row["prompt_id"], row["epoch"], row["outcome"]) for row in table]


def test_synchronous_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_config()).execute()
    assert run.values("staleness/stale_ratio") == [0, 0, 0, 0]
    assert run.values("staleness/max") == [0, 0, 0, 0]
    assert run.most_untrained == 2
    assert [len(batch) for batch in run.learner.batches] == [2, 2, 2, 2]
    assert run.run.queue.counts.dispatched == 8  # nothing is generated for batches that will never be
    assert run.learner.optimizer_step == 4
    assert (tmp_path / "model" / "weights").read_text() == str(run.learner.weights)
    trained = read_trajectories(tmp_path).to_pylist()
    assert len(trained) == 16
    assert all(row["trained"] for row in trained)
    assert {row["policy_version"] for row in trained} == {0, 1, 2, 3}
    assert {(row["optimizer_step_start"], row["optimizer_step_end"]) for row in trained} == {
        (n, n + 1) for n in range(4)
    }


def test_a_lora_run_leaves_its_adapter_beside_the_merged_model(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_config("model.lora.rank=4")).execute()
    assert (tmp_path / "adapter" / "weights").read_text() == str(run.learner.weights)
    assert sorted(path.name for path in tmp_path.glob("*.part")) == []


def test_f19_a_fresh_start_loads_nothing_and_generates_before_any_broadcast(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_config("rollout.weights.canary=false")).execute()
    assert run.learner.loaded == []
    first_update = next(i for i, (what, _) in enumerate(run.engines[0].log) if what == "update")
    assert run.engines[0].log[:first_update] == [("generate", 0)] * 2
    assert run.engines[0].log[first_update] == ("update", 1)


def test_engines_sleep_while_the_learner_works_where_they_share_a_gpu(tmp_path: Path) -> None:
    config = fake_config(
        "placement.mode=shared", "placement.device=gpu", "rollout.weights.canary=false", "run.batches=2"
    )
    log = FakeRun(tmp_path, config).execute().engines[0].log
    batch = ["generate", "generate", "sleep", "wake", "update"]
    assert [what for what, _ in log] == batch * 2


@pytest.mark.parametrize("bound", [1, 2])
def test_f33_ahead_as_far_as_allowed_and_no_further(tmp_path: Path, bound: int) -> None:
    """Answers of all lengths: what was begun early is trained late, within the bound, and nothing stalls."""

    def delay_s(request: RolloutRequest) -> float:
        return 0.03 if sum(request.prompt_id.encode()) % 3 == 0 else 0.002

    config = fake_config(f"staleness.max={bound}", "run.batches=10", "data.epochs=null")
    run = FakeRun(
        tmp_path, config, engine=lambda index: FakeEngine(delay_s), learner=FakeLearner(learn_s=0.01)
    ).execute()
    assert len(run.learner.batches) == 10
    assert max(run.values("staleness/max")) <= bound
    assert max(run.values("staleness/stale_ratio")) > 0
    assert 2 < run.most_untrained <= 2 * (bound + 1)


def test_filtered_groups_are_replaced_one_for_one(tmp_path: Path) -> None:
    config = fake_config("run.batches=6", "sampling.max_dispatches_per_batch=100")
    run = FakeRun(tmp_path, config, rule=hash_reward).execute()
    counts = run.run.queue.counts
    assert counts.filtered > 0
    assert counts.trained == 12
    assert counts.dispatched == counts.trained + counts.filtered
    assert run.most_untrained == 2
    assert [len(batch) for batch in run.learner.batches] == [2] * 6
    # The population that is reported holds the filtered ones too.
    assert sum(run.values("group/scored")) == counts.dispatched
    assert sum(run.values("group/filtered")) == counts.filtered


def test_equal_rewards_train_where_filtering_is_off(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_config("sampling.filter=false"), rule=lambda trajectory: 1.0).execute()
    assert run.run.queue.counts.trained == 8
    assert run.values("group/zero_variance_ratio") == [1.0] * 4


def test_no_progress_is_an_error_with_a_dump(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_config("run.watchdog_s=0.2"), engine=lambda index: FakeEngine(lambda request: 60.0))
    with pytest.raises(NoProgress) as caught:
        run.execute()
    message = str(caught.value)
    assert "run.watchdog_s=0" in message
    assert "version 0" in message
    assert "generating=2" in message
    for request in run.engines[0].requests:
        assert f"{request.group_id}: prompt {request.prompt_id}, generating" in message


class TestStarved:
    """Five prompts, one epoch, groups of two: two batches and a half."""

    def start(self, folder: Path, action: str) -> FakeRun:
        config = fake_config(f"sampling.on_starved={action}", "data.epochs=1", "run.batches=10")
        return FakeRun(folder, config, prompts=5)

    def test_shrink(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, "shrink").execute()
        assert [len(batch) for batch in run.learner.batches] == [2, 2, 1]
        assert (tmp_path / "model").exists()

    def test_stop(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, "stop").execute()
        assert [len(batch) for batch in run.learner.batches] == [2, 2]
        assert (tmp_path / "model").exists()

    def test_error(self, tmp_path: Path) -> None:
        with pytest.raises(Starved, match="1 of 2 groups are ready and the prompts are exhausted"):
            self.start(tmp_path, "error").execute()

    def test_all_filtered_ends_instead_of_looping(self, tmp_path: Path) -> None:
        config = fake_config("sampling.max_dispatches_per_batch=3")
        run = FakeRun(tmp_path, config, rule=lambda trajectory: 1.0).execute()
        assert run.learner.batches == []
        assert run.run.queue.counts.filtered == 6
        assert [fate for _, _, fate in outcomes(tmp_path)] == ["filtered"] * 6

    @pytest.mark.parametrize("action", ["shrink", "stop", "error"])
    @pytest.mark.parametrize("every", [0, 1, 99])
    def test_what_became_of_the_last_prompts_is_written_down(self, tmp_path: Path, action: str, every: int) -> None:
        """Nine prompts, about half of them filtered: some are so after the last batch."""
        overrides = (
            "data.epochs=1",
            "run.batches=9",
            f"sampling.on_starved={action}",
            f"checkpoint.every_batches={every}",
        )
        run = FakeRun(tmp_path, fake_config(*overrides), prompts=9, rule=hash_reward)
        with pytest.raises(Starved) if action == "error" else nullcontext():
            run.execute()
        fates = Counter(fate for _, _, fate in outcomes(tmp_path))
        counts = run.run.queue.counts
        assert (fates["trained"], fates["filtered"]) == (counts.trained, counts.filtered)

    def test_a_resumed_run_that_only_filters_decides_each_time_anew(self, tmp_path: Path) -> None:
        """What it decided is in no checkpoint: the next resume asks those prompts again, and its outcomes replace these."""

        def start(batches: int, resume: bool) -> None:
            config = fake_config("data.epochs=1", f"run.batches={batches}", "checkpoint.every_batches=2")
            rule = index_reward if batches == 2 else lambda trajectory: 1.0
            FakeRun(tmp_path, config, prompts=8, rule=rule, resume=resume).execute()

        start(2, resume=False)
        for _ in range(2):
            start(9, resume=True)
            found = outcomes(tmp_path)
            assert Counter(fate for _, _, fate in found) == {"trained": 4, "filtered": 4}
            assert len({prompt for prompt, _, _ in found}) == 8


@pytest.mark.parametrize(("bound", "dies_at"), [(0, 3), (0, 4), (2, 3), (2, 5)])
def test_a_resumed_run_consumes_every_prompt_once(tmp_path: Path, bound: int, dies_at: int) -> None:
    """Killed between checkpoints, resumed twice: each prompt of the epoch has one outcome in the surviving lineage."""
    config = fake_config(f"staleness.max={bound}", "data.epochs=1", "run.batches=99", "checkpoint.every_batches=2")

    def unreliable(trajectory: Trajectory) -> float | RewardResult:
        if trajectory.prompt_id.endswith("3"):
            return RewardResult(None, Status.ERRORED)
        return hash_reward(trajectory)

    def start(**changes: object) -> FakeRun:
        return FakeRun(tmp_path, config, prompts=40, rule=unreliable, **changes)  # type: ignore[arg-type]

    with pytest.raises(Killed):
        start(learner=FakeLearner(learn_s=0.005, dies_at=dies_at)).execute()
    with pytest.raises(Killed):
        start(learner=FakeLearner(learn_s=0.005, dies_at=1), resume=True).execute()
    resumed = start(resume=True).execute()
    checkpointed = dies_at - dies_at % 2
    assert [path.name for path in resumed.learner.loaded] == [f"v{checkpointed:06d}"]
    # The checkpoint's version reaches the engines before the first answer (f19).
    assert resumed.engines[0].log[0] == ("update", checkpointed)
    found = outcomes(tmp_path)
    assert Counter((prompt, epoch) for prompt, epoch, _ in found) == Counter(
        {(prompt, 0): 1 for prompt in {p.prompt_id for p in resumed.run.prompts._cursors["main"].source}}
    )
    assert len(found) == 40
    fates = Counter(fate for _, _, fate in found)
    counts = resumed.run.queue.counts
    assert fates == Counter(
        {f: n for f in ("trained", "filtered", "failed", "stale") if (n := getattr(counts, f)) and f != "stale"}
    )
    assert resumed.learner.optimizer_step == resumed.run.version == math.ceil(fates["trained"] / 2)


def test_f04_resume_at_the_boundary_of_an_epoch(tmp_path: Path) -> None:
    """Two epochs of three batches, stopped after the first: the second runs in full."""
    first = fake_config("data.epochs=2", "run.batches=3", "checkpoint.every_batches=3")
    FakeRun(tmp_path, first, prompts=6).execute()
    second = fake_config("data.epochs=2", "run.batches=6", "checkpoint.every_batches=3")
    resumed = FakeRun(tmp_path, second, prompts=6, resume=True).execute()
    assert len(resumed.learner.batches) == 3
    assert resumed.run.version == 6
    assert Counter(epoch for _, epoch, _ in outcomes(tmp_path)) == {0: 6, 1: 6}
    assert resumed.values("group/trained") == [2, 2, 2]  # not all that the lineage ever trained


class TestEvaluationAndCheckpoints:
    def test_f32_the_last_version_is_evaluated_and_saved_once(self, tmp_path: Path) -> None:
        config = fake_config(
            "run.batches=5", "eval.every_batches=2", "eval.at_start=false", "checkpoint.every_batches=3"
        )
        run = FakeRun(tmp_path, config, held_out=3).execute()
        assert run.versions_of("eval/held_out/pass_at_1") == [2, 4, 5]
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["v000003", "v000005"]

    def test_f31_a_resume_repeats_no_evaluation(self, tmp_path: Path) -> None:
        def start(dies_at: int | None, resume: bool) -> FakeRun:
            config = fake_config("run.batches=6", "eval.every_batches=2", "checkpoint.every_batches=2")
            return FakeRun(tmp_path, config, held_out=3, learner=FakeLearner(dies_at=dies_at), resume=resume)

        run = start(2, False)
        with pytest.raises(Killed):
            run.execute()
        assert run.versions_of("eval/pass_at_1") == [0, 2]
        for _ in range(2):
            again = start(0, True)
            with pytest.raises(Killed):
                again.execute()
            assert again.versions_of("eval/pass_at_1") == []
        assert start(None, True).execute().versions_of("eval/pass_at_1") == [4, 6]
        # The run has ended, and so has its evaluation.
        assert start(None, True).execute().versions_of("eval/pass_at_1") == []

    def test_f31_the_last_evaluation_is_in_the_last_checkpoint(self, tmp_path: Path) -> None:
        config = fake_config("run.batches=2", "checkpoint.every_batches=1")
        assert FakeRun(tmp_path, config, held_out=3).execute().versions_of("eval/pass_at_1") == [0, 2]
        assert FakeRun(tmp_path, config, held_out=3, resume=True).execute().versions_of("eval/pass_at_1") == []

    def test_an_evaluation_without_verdicts_leaves_no_older_pass_rate(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        verdicts: list[RewardResult] = [RewardResult(1.0)] * 4  # of the first evaluation

        class Checked(FakeRun):
            def _prepared(self):  # type: ignore[no-untyped-def]
                self.checker = reward_fleet(
                    [lambda t: verdicts.pop() if verdicts else RewardResult(None, Status.ERRORED)]
                )
                return super()._prepared()

        config = fake_config("run.batches=1", "eval.at_start=true", "eval.answers_per_prompt=2")
        with caplog.at_level(logging.INFO):
            run = Checked(tmp_path, config, held_out=2).execute()
        assert run.versions_of("eval/pass_at_1") == [0]
        assert "version 0, held_out: pass@1 1.000 (95% " in caplog.text
        assert "version 1, held_out: pass@1 -" in caplog.text
        shown = [state.metrics for state in run.console.states if state.version == 0 and state.phase == "learn"]
        assert all(metrics["eval/pass_at_1"] == 1.0 for metrics in shown)
        last = run.console.states[-1].metrics
        assert last["eval/held_out/unscored_ratio"] == 1.0
        assert not [name for name in last if "pass_at_1" in name]

    def test_answers_of_another_version_are_refused(self, tmp_path: Path) -> None:
        class Forgetful(FakeEngine):
            async def generate(self, request: RolloutRequest):  # type: ignore[no-untyped-def]
                self.version = 7
                return await super().generate(request)

        with pytest.raises(
            EvaluationError, match=r"evaluation at version 0: rollout-0 answered prompt .* versions \[7\]"
        ):
            FakeRun(tmp_path, fake_config(), held_out=1, engine=lambda index: Forgetful()).execute()


class TestFailures:
    def test_a_lost_engine_costs_nothing_but_time(self, tmp_path: Path) -> None:
        config = fake_config("rollout.replicas=2", "data.epochs=1", "run.batches=99", "staleness.max=1")
        run = FakeRun(tmp_path, config, prompts=16)

        def delay_s(request: RolloutRequest) -> float:
            if len(run.learner.batches) == 2 and not run.actors[0].dead:
                run.actors[0].kill()
            return 0.002

        run.engine = lambda index: FakeEngine(delay_s)
        run.execute()
        assert len(run.engines) == 3
        # The third one was given the weights before it wrote anything.
        assert run.engines[2].log[0][0] == "update"
        assert [fate for _, _, fate in outcomes(tmp_path)] == ["trained"] * 16
        assert run.values("rollout/rollout-0/restarts")[-1] == 1

    @pytest.mark.parametrize("published", [0, 2])
    def test_the_only_engine_is_lost_during_an_evaluation(self, tmp_path: Path, published: int) -> None:
        """Nobody but the loop can give the new one its weights."""
        run = FakeRun(tmp_path, fake_config("eval.every_batches=2"), held_out=2)

        def delay_s(request: RolloutRequest) -> float:
            if request.group_id.startswith(f"eval-{published}-") and len(run.actors) == 1:
                run.actors[0].kill()
            return 0.002

        run.engine = lambda index: FakeEngine(delay_s)
        run.execute()
        assert len(run.engines) == 2
        assert run.versions_of("eval/pass_at_1") == [0, 2, 4]

    def test_no_engine_is_left(self, tmp_path: Path) -> None:
        run = FakeRun(tmp_path, fake_config("rollout.max_restarts=1"), held_out=2)

        def delay_s(request: RolloutRequest) -> float:
            run.actors[-1].kill()
            return 0.0

        run.engine = lambda index: FakeEngine(delay_s)
        with pytest.raises(FleetError, match=r"no rollout actor is left: rollout-0 was lost 2 times"):
            run.execute()

    def test_members_that_failed_are_asked_for_again(self, tmp_path: Path) -> None:
        """Alone; the group's other members are kept."""
        run = FakeRun(
            tmp_path,
            fake_config(),
            engine=lambda index: FakeEngine(fails=lambda request, i: i == 1 and request.attempt == 0),
        ).execute()
        assert run.run.queue.counts.trained == 8
        assert Counter(request.indexes for request in run.engines[0].requests) == {(0, 1): 8, (1,): 8}
        assert run.values("rollout/retries") == [2.0] * 4

    def test_members_that_always_fail_cost_their_group_after_so_many_retries(self, tmp_path: Path) -> None:
        def fails(request: RolloutRequest, index: int) -> bool:
            return index == 1 and sum(request.prompt_id.encode()) % 4 == 0

        config = fake_config("rollout.retries=2", "sampling.max_dispatches_per_batch=100")
        run = FakeRun(tmp_path, config, engine=lambda index: FakeEngine(fails=fails)).execute()
        failed = [prompt for prompt, _, fate in outcomes(tmp_path) if fate == "failed"]
        assert failed
        attempts = Counter(r.prompt_id for r in run.engines[0].requests if r.prompt_id in failed)
        assert set(attempts.values()) == {3}

    def test_unscored_groups_fail_and_are_counted(self, tmp_path: Path) -> None:
        def broken(trajectory: Trajectory) -> float | RewardResult:
            if sum(trajectory.prompt_id.encode()) % 4 == 0:
                return RewardResult(None, Status.ERRORED, detail={"reward": {"error": "no"}})
            return index_reward(trajectory)

        run = FakeRun(tmp_path, fake_config("rollout.retries=1"), rule=broken).execute()
        counts = run.run.queue.counts
        assert counts.failed > 0
        assert counts.trained == 8
        failed = [prompt for prompt, _, fate in outcomes(tmp_path) if fate == "failed"]
        assert all(sum(prompt.encode()) % 4 == 0 for prompt in failed)

    def test_a_batch_of_truncated_answers_only(self, tmp_path: Path) -> None:
        """With algorithm.mask_truncated nothing is left to learn from: no update, and no division by it."""
        run = FakeRun(
            tmp_path, fake_config("algorithm.mask_truncated=true"), engine=lambda index: FakeEngine(truncated=True)
        ).execute()
        assert run.run.version == 4
        assert run.learner.optimizer_step == 0
        assert run.values("actor/grad_norm") == []
        assert not any(row["trained"] for row in read_trajectories(tmp_path).to_pylist())

    def test_the_first_cause_is_raised(self, tmp_path: Path) -> None:
        def buggy(trajectory: Trajectory) -> float:
            raise ZeroDivisionError("in a judge")

        with pytest.raises(ZeroDivisionError, match="in a judge"):
            FakeRun(tmp_path, fake_config(), rule=buggy).execute()

    def test_cancelled(self, tmp_path: Path) -> None:
        """Ctrl-C reaches the loop as a cancellation and leaves no task behind."""

        async def interrupted() -> None:
            run = FakeRun(tmp_path, fake_config(), engine=lambda index: FakeEngine(lambda request: 60.0))
            task = asyncio.create_task(run._execute())
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(interrupted())
