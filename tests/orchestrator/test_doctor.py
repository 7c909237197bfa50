"""What the doctor concludes: every check passes for a chain that is right, and fails for the fault that it is there for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeEngine, FakeLearner, LocalActor, Reference, patch_ray, reward_fleet, rollout_fleet
from hypothesis import given
from hypothesis import strategies as st

import orchestrator.cluster
from learner.batch import RankPlan, packed_length
from learner.policy import Policy, PolicySettings
from learner.settings import LearnerSettings
from learner.tally import Tally
from learner.worker import LearnerRank
from orchestrator import cli, doctor_checks
from orchestrator.algorithm import objective
from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.compose import load
from orchestrator.config import Config
from orchestrator.doctor_answers import fullest, longest_answers, own_behaviour, update_on
from orchestrator.doctor_checks import Check, Verdict
from orchestrator.doctor_command import for_doctor
from orchestrator.memory import Memory
from orchestrator.models import resolve_model
from orchestrator.placement import plan
from orchestrator.replay import Figure, Replay
from rollout_workers.chat import ChatTemplate
from rollout_workers.trajectory import RewardResult, Status, Trajectory, VersionSpan

TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(resolve_model("builtin:tiny"))


@pytest.fixture(scope="module")
def chat(tiny: str) -> ChatTemplate:
    return ChatTemplate.from_pretrained(tiny)


# Logprobs


def draws(seed: int, *, tokens: int = 400, vocabulary: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, vocabulary] of a policy, and tokens drawn from it at TEMPERATURE."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (tokens, vocabulary))
    return logits, np.array([rng.choice(vocabulary, p=np.exp(row)) for row in log_softmax(logits / TEMPERATURE)])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def logprobs_at(temperature: float, logits: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    return log_softmax(logits / temperature)[np.arange(len(drawn)), drawn].astype(np.float32)


def in_answers(values: np.ndarray) -> list[np.ndarray]:
    """Of several answers, one of them of a single token."""
    return np.split(values, [1, 120, 250])


@given(seed=st.integers(0, 50), noise=st.sampled_from([0.0, 1e-5, 0.03]))
def test_two_right_implementations_agree(seed: int, noise: float) -> None:
    logits, drawn = draws(seed)
    engine = logprobs_at(TEMPERATURE, logits, drawn)
    learner = engine + np.random.default_rng(seed).normal(0, noise, len(engine)).astype(np.float32)
    dtype = "bfloat16" if noise > 1e-3 else "float32"
    assert doctor_checks.logprobs(in_answers(engine), in_answers(learner), dtype=dtype).passed
    assert doctor_checks.shift(in_answers(engine), in_answers(learner)).passed
    asked = {
        f * TEMPERATURE: in_answers(logprobs_at(f * TEMPERATURE, logits, drawn)) for f in doctor_checks.TEMPERATURES
    }
    check = doctor_checks.temperature(in_answers(learner), asked, configured=TEMPERATURE)
    assert check.passed
    assert check.figures["fitted"] == pytest.approx(TEMPERATURE, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 1 / TEMPERATURE])
def test_a_temperature_that_is_not_the_configured_one(factor: float, dtype: str) -> None:
    """The engine samples at TEMPERATURE, the learner computes with `factor` of it."""
    logits, drawn = draws(0)
    engine, configured = logprobs_at(TEMPERATURE, logits, drawn), factor * TEMPERATURE
    asked = {f * configured: [logprobs_at(f * configured, logits, drawn)] for f in doctor_checks.TEMPERATURES}
    check = doctor_checks.temperature([engine], asked, configured=configured)
    assert check.verdict is Verdict.FAIL
    assert check.figures["fitted"] == pytest.approx(TEMPERATURE, rel=0.03)
    assert doctor_checks.logprobs([engine], asked[configured], dtype=dtype).verdict is Verdict.FAIL


@pytest.mark.parametrize("places", [1, -1])
def test_logprobs_of_the_token_next_to_it(places: int) -> None:
    logits, drawn = draws(1)
    learner = logprobs_at(TEMPERATURE, logits, drawn)
    engine = np.roll(learner, places)
    assert doctor_checks.logprobs([engine], [learner], dtype="bfloat16").verdict is Verdict.FAIL
    check = doctor_checks.shift([engine], [learner])
    assert check.verdict is Verdict.FAIL
    assert f"they fit at {-places:+d}" in check.measured


def test_one_token_that_is_far_off_in_float32() -> None:
    logits, drawn = draws(2)
    learner = logprobs_at(TEMPERATURE, logits, drawn)
    engine = learner.copy()
    engine[7] += 0.1  # the mean is still below its limit
    assert doctor_checks.logprobs([engine], [learner], dtype="float32").verdict is Verdict.FAIL
    assert doctor_checks.logprobs([engine], [learner], dtype="bfloat16").passed


def test_a_logprob_that_is_missing_is_no_agreement() -> None:
    learner = np.full(5, -1.0, dtype=np.float32)
    assert (
        doctor_checks.logprobs([np.array([-1, -1, np.nan, -1, -1])], [learner], dtype="bfloat16").verdict
        is Verdict.FAIL
    )


def test_the_users_own_limit() -> None:
    learner, engine = [np.full(5, -1.0)], [np.full(5, -1.2)]
    assert doctor_checks.logprobs(engine, learner, dtype="bfloat16").verdict is Verdict.FAIL
    assert doctor_checks.logprobs(engine, learner, dtype="bfloat16", max_gap=0.3).passed


# Masks


def answered(chat: ChatTemplate, text: str = "I am here.", *, ends: bool = True, version: int = 0) -> Trajectory:
    messages = ({"role": "user", "content": "Where are you?"},)
    prompt = chat.prompt_ids(messages)
    ids = chat.tokenizer.encode(text, add_special_tokens=False) + [chat.eos_ids[0]] * ends
    mask = np.arange(len(prompt) + len(ids)) >= len(prompt)
    return Trajectory(
        group_id="g0-0",
        index=0,
        prompt_id="p",
        messages=(*messages, {"role": "assistant", "content": text}),
        token_ids=np.array([*prompt, *ids], dtype=np.int32),
        response_mask=mask,
        behaviour_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        version_spans=(VersionSpan(len(prompt), len(mask), version),),
        finish_reason="stop" if ends else "length",
        metadata={"prompt_length_messages": 1},
    )


def masks(chat: ChatTemplate, trajectory: Trajectory, *, max_response_tokens: int = 64) -> Check:
    return doctor_checks.masks([trajectory], chat, max_response_tokens=max_response_tokens, max_tokens=512)


def test_masks_of_right_answers(chat: ChatTemplate) -> None:
    assert masks(chat, answered(chat)).passed
    cut = answered(chat, ends=False)
    assert masks(chat, cut, max_response_tokens=cut.response_length).passed


def changed(t: Trajectory, **fields: Any) -> Trajectory:
    return dataclasses.replace(t, version_spans=(), **fields)


def moved_mask(t: Trajectory, by: int) -> Trajectory:
    start = int(np.argmax(t.response_mask))
    return changed(t, response_mask=np.arange(len(t.token_ids)) >= start + by)


def with_ids(t: Trajectory, place: int, token: int) -> Trajectory:
    ids = t.token_ids.copy()
    ids[place] = token
    return changed(t, token_ids=ids)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda t, chat: moved_mask(t, -1), "1 tokens of the prompt are marked as sampled"),
        (lambda t, chat: moved_mask(t, 1), "1 tokens after the prompt are not marked as sampled"),
        (lambda t, chat: with_ids(t, 1, 9), "the first tokens are not the prompt's"),
        (lambda t, chat: with_ids(t, -3, 9), "the sampled tokens do not spell the answer's text"),
        (lambda t, chat: changed(t, response_mask=t.response_mask & False), "not marked as sampled"),
        (lambda t, chat: changed(t, finish_reason="length"), "it was cut off after"),
        (
            lambda t, chat: dataclasses.replace(answered(chat, ends=False), finish_reason="stop"),
            "not with an end-of-sequence",
        ),
        (lambda t, chat: with_ids(t, -2, chat.eos_ids[0]), "spell"),
        (lambda t, chat: changed(t, behaviour_logprobs=t.behaviour_logprobs * np.nan), "has no logprob"),
    ],
    ids=["one-early", "one-late", "prompt", "text", "empty", "cut", "no-eos", "lost-token", "no-logprob"],
)
def test_a_mask_or_text_that_is_off(
    chat: ChatTemplate, fault: Callable[[Trajectory, ChatTemplate], Trajectory], said: str
) -> None:
    check = masks(chat, fault(answered(chat), chat))
    assert check.verdict is Verdict.FAIL
    assert said in check.measured
    assert "g0-0[0]" in check.measured


def test_an_end_in_the_middle(chat: ChatTemplate) -> None:
    whole = answered(chat)
    ids = np.append(whole.token_ids, [whole.token_ids[-1]])
    longer = changed(
        whole,
        token_ids=ids.astype(np.int32),
        response_mask=np.append(whole.response_mask, True),
        behaviour_logprobs=np.append(whole.behaviour_logprobs, np.float32(-1)),
    )
    assert "in the middle" in masks(chat, longer).measured


# Rewards, versions, disk, replay, checkpoint


def rewards(values: Sequence[Sequence[float | None]], **more: Any) -> Check:
    options = {"min_scored_fraction": 1.0, "must_differ": True, "tolerance": 1e-6, **more}
    return doctor_checks.rewards(values, ["scored"], **options)


def test_rewards_that_teach() -> None:
    assert rewards([[0.0, 1.0], [1.0, 1.0]]).passed
    assert rewards([[0.0, 1.0]], golds=[("p", 1.0, 0.0), ("q", 1.0, None)]).passed
    assert rewards([[1.0, 1.0]], must_differ=False).passed
    assert rewards([[0.0, 1.0, None]], min_scored_fraction=0.5).passed


@pytest.mark.parametrize(
    ("values", "golds"),
    [
        ([[1.0, 1.0], [0.0, 0.0]], []),
        ([[0.0, 1.0], [None, 1.0]], []),
        ([[None, None]], []),
        ([[0.0, 1.0]], [("p", 0.0, 0.0)]),
        ([[0.0, 1.0]], [("p", 0.0, 1.0)]),
        ([[0.0, 1.0]], [("p", None, 0.0)]),
    ],
    ids=["all-equal", "some-unscored", "none-scored", "gold-unpaid", "upside-down", "gold-unscored"],
)
def test_rewards_that_do_not(
    values: list[list[float | None]], golds: list[tuple[str, float | None, float | None]]
) -> None:
    assert rewards(values, golds=golds).verdict is Verdict.FAIL


def test_tokens_of_an_older_version(chat: ChatTemplate) -> None:
    new = answered(chat, version=1)
    [span] = new.version_spans
    assert doctor_checks.versions([new], 1, 0.01).passed
    middle = (span.start + span.end) // 2
    mixed = dataclasses.replace(
        new, version_spans=(VersionSpan(span.start, middle, 0), VersionSpan(middle, span.end, 1))
    )
    check = doctor_checks.versions([new, mixed], 1, None)
    assert check.verdict is Verdict.FAIL
    assert check.figures["of_other_versions"] == middle - span.start
    assert doctor_checks.versions([changed(new)], 1, None).verdict is Verdict.FAIL  # by no version at all


def test_disk() -> None:
    assert doctor_checks.disk(100, 10, keep=2, free_bytes=310).passed
    assert doctor_checks.disk(100, 10, keep=2, free_bytes=309).verdict is Verdict.FAIL


def test_object_store() -> None:
    placement = plan(load(["experiment=tiny"]), [{"CPU": 4.0}])

    def check(weights_bytes: int, *, through: bool = True) -> Check:
        there = {"CPU": 4.0, "object_store_memory": 1000.0}
        return doctor_checks.resources(placement, there, weights_bytes=weights_bytes, through_object_store=through)

    assert check(1000).passed
    assert check(1001).verdict is Verdict.FAIL
    assert check(1001, through=False).passed


def test_memory() -> None:
    estimate = Memory("rank", {"weights": 50.0}, {})
    assert doctor_checks.memory(100, 100, estimate, tokens=8, longest=4).passed
    assert doctor_checks.memory(101, 100, estimate, tokens=8, longest=4).verdict is Verdict.FAIL


def replay_of(loss: float, again: float | None, gap: float = 0.0) -> Replay:
    difference = None if again is None else abs(again - loss)
    figures = (
        Figure("actor/loss", loss, again, difference, 1e-6),
        Figure("advantage of each answer", 0.5, 0.5, 0.0),
        Figure("learner logprobs", -1.0, -1.0 + gap, gap, 1e-4),
    )
    return Replay(Path("run"), 0, figures)


def test_a_replay_that_comes_out_otherwise() -> None:
    assert doctor_checks.replayed(replay_of(0.25, 0.25)).passed
    assert doctor_checks.replayed(replay_of(0.25, 0.26)).verdict is Verdict.FAIL
    assert doctor_checks.replayed(replay_of(0.25, None)).verdict is Verdict.FAIL
    assert doctor_checks.replayed(replay_of(0.25, 0.25, gap=0.1)).verdict is Verdict.FAIL


def test_a_state_that_does_not_come_back() -> None:
    before = [np.array([-1.0, -2.0]), np.array([-3.0])]
    assert doctor_checks.restored(before, before, dtype="bfloat16").passed
    assert doctor_checks.restored(before, [before[0], before[1] + 1e-4], dtype="float32").verdict is Verdict.FAIL


# Updates, with a real rank whose engine is plain torch


class Torch:
    """DeepSpeed's engine in one process: what a learner rank asks of it."""

    def __init__(self, policy: Policy, rate: float) -> None:
        self._policy = policy
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)

    def __call__(self, *arguments: Any) -> Any:
        return self._policy(*arguments)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        pass

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self._norm = torch.nn.utils.get_total_norm([p.grad for p in self._policy.parameters() if p.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def get_global_grad_norm(self) -> torch.Tensor:
        return self._norm


def rank_of(config: Config, model: str) -> LearnerRank:
    policy = Policy(PolicySettings(model, "float32"))
    c = config.learner
    settings = LearnerSettings(
        PolicySettings(model, "float32"), objective(config.algorithm), "cpu", TEMPERATURE, 1, c.learning_rate, 10
    )
    rank = LearnerRank(settings, 0, 1)
    rank._policy, rank._device, rank._reference = policy, torch.device("cpu"), None
    rank._engine = Torch(policy, c.learning_rate)
    return rank


def moved(config: Config, model: str, advantage: float, answer: Trajectory) -> tuple[float, float]:
    rank = rank_of(config, model)
    plans = update_on(config, [[(answer, advantage)]], ranks=1, share_prefixes=False, epochs=2)
    before, after = (
        sum(float(values.sum()) for values in call(plans[0], (answer,))[1].values())
        for call in (rank.learn, rank.score)
    )
    return before, after


def reversed_ppo(*arguments: Any, **options: Any) -> Any:
    """A loss of a user's own, with the sign of its paper's objective."""
    from learner.losses import ppo_clip

    terms = ppo_clip(*arguments, **options)
    return dataclasses.replace(terms, token_loss=-terms.token_loss)


def frozen(*arguments: Any, **options: Any) -> Any:
    """Its gradient is not zero, which would be refused before anything starts, but far below Adam's epsilon."""
    from learner.losses import ppo_clip

    terms = ppo_clip(*arguments, **options)
    return dataclasses.replace(terms, token_loss=terms.token_loss * 1e-30)


@pytest.mark.parametrize("algorithm", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_an_update_moves_an_answer_the_way_of_its_advantage(tiny: str, chat: ChatTemplate, algorithm: str) -> None:
    config = for_doctor(load(["experiment=tiny", f"algorithm={algorithm}", "algorithm.kl_coefficient=0"]))
    check = direction(config, tiny, chat)
    assert check.passed, check.measured


def test_a_joint_update_moves_answers_apart() -> None:
    assert doctor_checks.direction((-5.0, -4.0), (-5.0, -4.5), dtype="float32", tokens=9, joint=True).passed
    assert (
        doctor_checks.direction((-5.0, -4.5), (-5.0, -4.0), dtype="float32", tokens=9, joint=True).verdict
        is Verdict.FAIL
    )
    assert doctor_checks.direction((-5.0, -4.0), (-5.0, -4.5), dtype="float32", tokens=9).verdict is Verdict.FAIL


@pytest.mark.parametrize("loss", ["reversed_ppo", "frozen"])
def test_a_loss_with_the_wrong_sign_or_hardly_a_gradient(tiny: str, chat: ChatTemplate, loss: str) -> None:
    config = for_doctor(load(["experiment=tiny", f'algorithm.loss="{__file__}:{loss}"', "algorithm.loss_options={}"]))
    assert direction(config, tiny, chat).verdict is Verdict.FAIL


def direction(config: Config, model: str, chat: ChatTemplate) -> Check:
    answers = [answered(chat, text) for text in ("I am here.", "In the north, where the wind is strong.")]
    ups, downs = (
        moved(config, model, advantage, a)
        for advantage, a in zip((1.0, -1.0), map(own_behaviour, answers), strict=True)
    )
    return doctor_checks.direction(ups, downs, dtype="float32", tokens=20)


def test_scoring_counts_what_learning_would_and_learns_nothing(tiny: str, chat: ChatTemplate) -> None:
    config = for_doctor(load(["experiment=tiny"]))
    rank, answer = rank_of(config, tiny), answered(chat)
    plans = update_on(config, [[(answer, 0.5)]], ranks=1, share_prefixes=False)
    first, _ = rank.score(plans[0], (answer,))
    again, logprobs = rank.score(plans[0], (answer,))
    report, learned = rank.learn(plans[0], (answer,))
    assert first == again == Tally(report.sums, report.maxima)
    for key, values in learned.items():
        np.testing.assert_array_equal(logprobs[key], values)


@given(
    prompt=st.integers(1, 64),
    response=st.integers(1, 64),
    room=st.integers(1, 512),
    ranks=st.integers(1, 3),
    share=st.booleans(),
)
def test_the_longest_answers_fill_a_micro_batch_of_every_rank(
    prompt: int, response: int, room: int, ranks: int, share: bool
) -> None:
    config = Config()
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = prompt, response
    config.learner.max_tokens_per_microbatch = room
    groups = longest_answers(config, [5, 6, 7], ranks=ranks)
    plans = update_on(config, [[(t, 1.0) for t in group] for group in groups], ranks=ranks, share_prefixes=share)
    assert len(plans) == ranks
    for of_rank in map(fullest, plans):
        [[micro_batch]] = of_rank.updates
        tokens = max(map(packed_length, micro_batch)) * len(micro_batch)
        assert min(room - prompt - response + 1, prompt + response) <= tokens <= max(room, prompt + response)


# All of it, with engines and a learner that are fakes


class OneTokenRank(FakeLearner):
    """A learner of one number, its weights, that can be asked for what the doctor asks.

    The engines' fakes report a logprob of -1 whatever the weights are, so it must score the same; a loss is 0.
    """

    refuses: str = ""  # the method that fails
    stays: bool = False  # updates move nothing
    state: tuple[float, int] = (0.0, 0)

    async def learn(
        self, plans: Sequence[RankPlan], payloads: Sequence[Any], references: Sequence[Any] | None = None
    ) -> Any:
        self._refuse("learn")
        [report], _, [logprobs] = await super().learn(plans, payloads)
        tally = self._tally(logprobs)
        return [dataclasses.replace(report, sums=tally.sums, maxima=tally.maxima)], tally, [_done(logprobs)]

    async def score(self, plans: Sequence[RankPlan], payloads: Sequence[Any]) -> Any:
        rows = [r for plan in plans for update in plan.updates for micro in update for packed in micro for r in packed]
        change = 0.0 if self.stays or not self.weights else rows[0].advantage
        logprobs = {(r.group_id, r.index): np.full(r.response_length, -1.0 + change / 10) for r in rows}
        return self._tally(logprobs), [_done(logprobs)]

    def _tally(self, logprobs: dict[tuple[str, int], np.ndarray]) -> Tally:
        tokens = float(sum(map(len, logprobs.values())))
        return Tally({"tokens": (tokens,), "loss": (0.0,)}, {})

    async def device_bytes(self) -> int:
        return 2**30

    async def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        return [values - math.log(temperature) for values in await super().logprobs(sequences)]

    async def save(self, folder: Path) -> list[str]:
        self._refuse("save")
        self.state = (self.weights, self.optimizer_step)
        (folder / "learner.json").write_text(json.dumps(self.state))
        return ["learner.json"]

    async def load(self, folder: Path) -> None:
        self.weights, self.optimizer_step = json.loads((folder / "learner.json").read_text())

    def _refuse(self, what: str) -> None:
        if self.refuses == what:
            raise OSError(f"no room to {what}")


def _done(value: Any) -> Reference:
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return Reference(LocalActor(None), future)


class DeafEngine(FakeEngine):
    """It acknowledges weights that it does not take."""

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.full(len(ids) - 1, -1.0) for ids in sequences]


class FakeCluster:
    """What the doctor needs of a cluster."""

    engine: Callable[[int], FakeEngine]
    learner_fake: OneTokenRank
    rule: Callable[[Trajectory], RewardResult]

    def __init__(self, prepared: Any, *, on_change: Callable[[], None]) -> None:
        self._prepared, self._on_change = prepared, on_change

    async def __aenter__(self) -> FakeCluster:
        config = self._prepared.config
        assert config.run.batches == 2
        self.placement = plan(config, [{"CPU": 4.0, "GPU": 0.0}])
        self.rollouts = rollout_fleet(FakeCluster.engine, on_change=self._on_change)
        await self.rollouts.start(0)
        self.rewards = reward_fleet([FakeCluster.rule])
        self.checker = self.watch = None
        self.clerks = ClerkFleet([LocalActor(Clerk())], 5.0)
        self.learner = FakeCluster.learner_fake
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass

    def link_logs(self, folder: Path) -> None:
        pass


def by_index(trajectory: Trajectory) -> RewardResult:
    """A right answer gets 1; of a policy's answers every second one does."""
    value = float(trajectory.completion != "" and trajectory.index % 2 == 0)
    return RewardResult(value, components={"letters": value})


class Shell:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder / "runs" / "x" / "doctor"
        self._capsys = capsys

    def doctor(self, *overrides: str) -> tuple[int, dict[str, Check], str]:
        """Exit code, the checks by name and what was printed."""
        config = [
            "experiment=tiny",
            f"run.dir={self.folder.parents[1]}",
            "run.name=x",
            "logging.console=plain",
            "sampling.answers_per_group=2",
            "rollout.answer_timeout_s=0.1",
            "reward.timeout_s=0.1",
            "run.watchdog_s=5",
            *overrides,
        ]
        code = cli.main(["doctor", *config])
        report = json.loads((self.folder / "doctor.json").read_text())
        assert report["passed"] == (code == 0)
        printed = self._capsys.readouterr().out
        return (
            code,
            {item["name"]: Check(**item | {"verdict": Verdict(item["verdict"])}) for item in report["checks"]},
            printed,
        )


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    patch_ray(monkeypatch)
    monkeypatch.setattr("ray.put", _done)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "object_store_memory": 1e9})
    monkeypatch.setattr(orchestrator.cluster, "Cluster", FakeCluster)
    monkeypatch.setattr(FakeCluster, "engine", staticmethod(lambda index: FakeEngine()), raising=False)
    monkeypatch.setattr(FakeCluster, "learner_fake", OneTokenRank(), raising=False)
    monkeypatch.setattr(FakeCluster, "rule", staticmethod(by_index), raising=False)
    return Shell(tmp_path, capsys)


FAKES_FAIL = {"masks"}  # their tokens are nobody's


def failing(found: dict[str, Check]) -> set[str]:
    return {name for name, check in found.items() if check.verdict is Verdict.FAIL}


def test_a_report_of_all_checks(shell: Shell) -> None:
    code, found, printed = shell.doctor()
    assert code == 1
    assert failing(found) == FAKES_FAIL
    assert {name for name, check in found.items() if check.verdict is Verdict.SKIPPED} == set()
    for name, check in found.items():
        assert name in printed
        assert check.measured
        if check.verdict is Verdict.FAIL:
            assert check.advice
    assert "4 of 4 prompts" in found["rewards"].measured
    assert not list(shell.folder.glob("state-*"))


def test_engines_that_keep_old_weights(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster, "engine", staticmethod(lambda index: DeafEngine()))
    _, found, _ = shell.doctor()
    assert "weights" in failing(found)
    assert "WeightsDiverged: canary" in found["weights"].measured
    assert found["disk"].passed  # the rest is told all the same


def test_a_reward_that_can_not_judge(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster, "rule", staticmethod(lambda answer: RewardResult(None, Status.ERRORED)))
    _, found, _ = shell.doctor()
    assert failing(found) == {"batches"}
    for name in ("masks", "logprobs", "shift", "rewards", "versions", "temperature", "replay", "direction"):
        assert found[name].verdict is Verdict.SKIPPED
    assert found["checkpoint"].passed
    assert found["memory"].passed


def test_rewards_that_are_all_alike(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster, "rule", staticmethod(lambda t: RewardResult(1.0, components={"letters": 1.0})))
    _, found, _ = shell.doctor("sampling.max_dispatches_per_batch=2")
    assert found["batches"].verdict is Verdict.FAIL
    assert "0 of 2" in found["batches"].measured


def test_updates_that_move_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCluster.learner_fake, "stays", True)
    assert failing(shell.doctor()[1]) == {*FAKES_FAIL, "direction"}


@pytest.mark.parametrize(("refuses", "failed"), [("save", {"checkpoint"}), ("learn", {"batches", "memory"})])
def test_a_learner_that_fails(shell: Shell, monkeypatch: pytest.MonkeyPatch, refuses: str, failed: set[str]) -> None:
    monkeypatch.setattr(FakeCluster.learner_fake, "refuses", refuses)
    _, found, _ = shell.doctor()
    assert failing(found) - FAKES_FAIL == failed
    assert f"OSError: no room to {refuses}" in found[failed.pop()].measured


def test_mistakes_are_found_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "experiment=tiny", f"run.dir={tmp_path}", "doctor.groups=0"]) == 2
    assert "doctor.groups=0: expected at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_a_doctor_changes_of_a_configuration() -> None:
    config = load(["experiment=tiny", "staleness.max=3", "staleness.adaptive=true", "algorithm.updates_per_batch=2"])
    ours = for_doctor(config)
    assert (ours.staleness.max, ours.staleness.adaptive, ours.algorithm.updates_per_batch) == (0, False, 1)
    assert ours.sampling.groups_per_batch == min(config.sampling.groups_per_batch, config.doctor.groups)
    assert for_doctor(load(["experiment=tiny", "sampling.groups_per_batch=2"])).sampling.groups_per_batch == 2
    same = ("model", "placement", "replay", "profile", "logging", "doctor")
    assert all(getattr(ours, name) == getattr(config, name) for name in same)
    assert config.staleness.max == 3  # the user's own is left alone
