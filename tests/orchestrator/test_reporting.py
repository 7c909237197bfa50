"""A batch's metrics: over which population each is taken, and that all of them are in the catalogue."""

from __future__ import annotations

import math
import time

import pytest
from fakes import manifest_of

from learner.tally import Tally as LearnTally
from learner.worker import LearnReport
from orchestrator.fleet import BroadcastReport
from orchestrator.flight import Flight
from orchestrator.metrics import find
from orchestrator.probe import ProbeReport
from orchestrator.prompts import Prompt
from orchestrator.reporting import BatchReport, learner_metrics
from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import QueueSettings
from rollout_workers.trajectory import RewardResult, Status
from rollout_workers.worker import MemberReport

BROADCAST = BroadcastReport(manifest_of(1, 0.0), pause_s=0.1, total_s=0.4)
LEARNED = LearnReport({}, {}, (2.0, 4.0), (1e-6, 2e-6), (), 5, 300, 2**31)


def fly(queue: SamplingQueue, report: BatchReport, number: int, rewards: list[float | None], length: int) -> Flight:
    """One group from dispatch to the queue's verdict, as the loop does it."""
    group_id = f"g{number}"
    flight = Flight(group_id, Prompt(f"p{number}", "main", (), {}, None, 0, "?"), len(rewards), queue.version)
    queue.dispatched(group_id, flight.prompt.prompt_id, 0)
    for index in range(len(rewards)):
        flight.reports[index] = MemberReport(index, ((queue.version, length),), length, 3, length > 8)
    flight.generated_at = time.time()
    flight.judge([RewardResult(r, Status.ERRORED if r is None else Status.SCORED, {"right": r}) for r in rewards])
    queue.generated(group_id)
    commands = queue.scored(group_id, flight.members("right"))
    report.scored(flight)
    if any(getattr(command, "outcome", None) == "filtered" for command in commands):
        report.consumed(flight)
    return flight


def test_a_batch() -> None:
    """Two groups train, one is filtered (its answers are long and all wrong), one failed."""
    queue = SamplingQueue(QueueSettings(groups_per_batch=2, answers_per_group=2, filter=True))
    report = BatchReport("right", queue.counts)
    trained = [fly(queue, report, 0, [1.0, 0.0], 4)]
    fly(queue, report, 1, [0.0, 0.0], 10)
    fly(queue, report, 2, [None, None], 4)
    trained.append(fly(queue, report, 3, [1.0, 0.0], 6))
    batch = queue.take_batch()
    assert batch is not None
    with report.phase("learn"):
        queue.acknowledged(1)
    for flight in trained:
        report.consumed(flight)
    values = report.values(queue, batch, [4, 4, 6, 6], [LEARNED], LearnTally(), BROADCAST, ProbeReport(0.01, 0.2))
    for name in values:
        find(name)
    # Over all scored groups, not only those that were kept.
    assert values["reward/mean"] == pytest.approx(2 / 6)
    assert values["reward/errored_ratio"] == pytest.approx(2 / 8)
    assert values["response_length/mean"] == pytest.approx((8 + 20 + 8 + 12) / 8)
    assert values["response_length/truncated_ratio"] == pytest.approx(2 / 8)
    assert values["group/scored"] == 3
    assert values["group/zero_variance_ratio"] == pytest.approx(1 / 3)
    assert (values["group/filtered"], values["group/failed"], values["group/all_wrong"]) == (1, 1, 1)
    assert (values["group/dispatched"], values["group/trained"]) == (4, 2)
    assert (values["batch/answers"], values["batch/trained_tokens"]) == (4, 20)
    assert values["batch/trained_response_length"] == 5
    assert values["weights/pause_s"] == 0.1
    assert values["actor/grad_norm"] == 3.0
    assert values["actor/lr"] == 2e-6
    assert values["staleness/stale_ratio"] == 0
    assert 0 <= values["perf/learner_busy_ratio"] <= 1
    # All three consumed groups reached the end: nothing that was scored is still on its way.
    assert values["bias/trained_to_dispatched_length"] == pytest.approx(1.0)


def test_the_next_batch_starts_anew() -> None:
    queue = SamplingQueue(QueueSettings(groups_per_batch=1, answers_per_group=2, filter=True))
    report = BatchReport("right", queue.counts)
    for number in range(2):
        fly(queue, report, number, [1.0, 0.0], 4)
        batch = queue.take_batch()
        assert batch is not None
        queue.acknowledged(number + 1)
        values = report.values(queue, batch, [4, 4], [LEARNED], LearnTally(), BROADCAST, ProbeReport(0.0, 0.0))
        assert (values["group/dispatched"], values["group/trained"], values["group/scored"]) == (1, 1, 1)


def test_a_resumed_run_reports_its_own_groups() -> None:
    settings = QueueSettings(groups_per_batch=1, answers_per_group=2, filter=True)
    before = SamplingQueue(settings)
    fly(before, BatchReport("right", before.counts), 0, [1.0, 0.0], 4)
    assert before.take_batch() is not None
    before.acknowledged(1)
    queue = SamplingQueue.restore(before.state(), settings)
    report = BatchReport("right", queue.counts)
    fly(queue, report, 1, [1.0, 0.0], 4)
    batch = queue.take_batch()
    assert batch is not None
    queue.acknowledged(2)
    values = report.values(queue, batch, [4, 4], [LEARNED], LearnTally(), BROADCAST, ProbeReport(0.0, 0.0))
    assert values["group/trained"] == 1


class TestLearnerMetrics:
    TALLY = LearnTally(
        {
            "tokens": (8.0, 0.0, 2.0),
            "entropy": (15.0, 0.0, 5.0),
            "ppo_kl": (1.0, 0.0, 0.0),
            "clipped": (3.0, 0.0, 2.0),
            "masked": (0.0, 0.0, 1.0),
            "correction": (8.0, 0.0, 3.0),
            "kl_ref": (4.0, 0.0, 0.0),
            "loss": (2.0, 0.0, 1.0),
            "mismatch_tokens": (4.0, 0.0, 1.0),  # each token once, in two epochs
            "mismatch_k1": (-0.1, 0.0, 0.2),
            "mismatch_k3": (0.1, 0.0, 0.4),
            "mismatch_log_ratio_squared": (0.5, 0.0, 0.5),
            "mismatch_ratio": (4.0, 0.0, 2.0),
            "mismatch_ratio_squared": (5.0, 0.0, 4.0),
            "mismatch_missing": (1.0, 0.0, 0.0),
        },
        {
            "mismatch_ratio": (1.5, -math.inf, 2.0),
            "mismatch_logprob_gap": (0.4, -math.inf, 0.7),
            "mismatch_probability_gap": (0.1, -math.inf, 0.2),
        },
    )

    def test_sums_are_divided_once(self) -> None:
        values = learner_metrics([LEARNED], self.TALLY)
        assert values["actor/entropy"] == 2.0
        assert values["actor/clip_ratio"] == 0.5
        assert values["actor/masked_ratio"] == 0.1
        assert values["actor/correction_mean"] == 1.1
        assert values["actor/kl_ref"] == 0.4
        assert values["actor/loss"] == 1.5  # per update
        assert values["mismatch/kl"] == pytest.approx(0.1)
        assert values["mismatch/kl_k1"] == pytest.approx(0.02)
        assert values["mismatch/m2"] == pytest.approx(0.2)
        assert values["mismatch/ess"] == pytest.approx(36 / (5 * 9))
        assert values["mismatch/ratio_mean"] == 1.2
        assert values["mismatch/ratio_max"] == 2.0
        assert values["mismatch/missing_ratio"] == 0.2
        for name in values:
            find(name)

    def test_a_staleness_has_the_figures_of_its_own_tokens(self) -> None:
        values = learner_metrics([LEARNED], self.TALLY)
        fresh = {name.removeprefix("mismatch/staleness_0/"): value for name, value in values.items() if "ss_0/" in name}
        assert fresh == pytest.approx(
            {"tokens": 4, "kl": 0.025, "ess": 16 / (4 * 5), "ratio_mean": 1, "ratio_max": 1.5}
            | {"actor/staleness_0/clip_ratio": 3 / 8, "actor/staleness_0/masked_ratio": 0}
        )
        assert values["mismatch/staleness_2/kl"] == 0.4
        assert values["actor/staleness_2/masked_ratio"] == 0.5
        assert not [name for name in values if "staleness_1" in name], "no token has this staleness"

    def test_what_the_objective_does_not_have_is_absent(self) -> None:
        sums = {
            name: values for name, values in self.TALLY.sums.items() if name not in ("masked", "correction", "kl_ref")
        }
        values = learner_metrics([LEARNED], LearnTally(sums, self.TALLY.maxima))
        assert not [name for name in values if "masked" in name or "correction" in name or "kl_ref" in name]

    def test_no_update_has_no_norm(self) -> None:
        assert learner_metrics([LearnReport({}, {}, (), (), (), 0, 0, 0)], LearnTally()) == {"actor/skipped_updates": 0}
