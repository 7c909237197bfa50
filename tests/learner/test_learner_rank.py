"""Learner ranks: the learning-rate schedule, and real DeepSpeed processes against plain torch.

For each kind of job the fixture `ran` starts `rank_process.py` once per rank; the tests compare what the processes wrote with
`plain_reference` and torch's AdamW in this process.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_process
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_data import VERSION, Payloads, tokens_by_staleness
from plain_reference import frozen_distributions, reference_gradients
from rank_jobs import run_processes
from safetensors import safe_open

from learner import mismatch
from learner.batch import Row
from learner.objective import Objective
from learner.policy import Policy, PolicySettings
from learner.settings import LearnerSettings, learning_rate
from learner.tally import Tally
from learner.weight_source import PolicyWeightSource
from rollout_workers.weights.manifest import checksum

TOLERANCE = 1e-5

BASE = LearnerSettings(
    PolicySettings("unused", "float32"), Objective(lambda: None), "cpu", 1.0, 0, 2e-4, total_optimizer_steps=10
)


# The schedule


def test_a_constant_rate_is_constant() -> None:
    assert [learning_rate(BASE, step) for step in range(20)] == [2e-4] * 20


def test_warm_up_rises_in_equal_steps_to_the_whole_rate() -> None:
    settings = replace(BASE, warmup_steps=4)
    assert [learning_rate(settings, step) for step in range(5)] == pytest.approx([0.5e-4, 1e-4, 1.5e-4, 2e-4, 2e-4])


def test_linear_decay_reaches_zero_after_the_last_step() -> None:
    settings = replace(BASE, schedule="linear", warmup_steps=2)
    assert learning_rate(settings, 2) == pytest.approx(2e-4)
    assert learning_rate(settings, 6) == pytest.approx(1e-4)
    assert learning_rate(settings, 9) == pytest.approx(2e-4 / 8)
    assert learning_rate(settings, 10) == 0.0


def test_cosine_decay_reaches_zero_after_the_last_step() -> None:
    settings = replace(BASE, schedule="cosine")
    assert learning_rate(settings, 0) == pytest.approx(2e-4)
    assert learning_rate(settings, 5) == pytest.approx(1e-4)
    assert learning_rate(settings, 9) == pytest.approx(1e-4 * (1 + math.cos(math.pi * 0.9)))
    assert learning_rate(settings, 10) == pytest.approx(0.0)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    total=st.integers(1, 30),
    step=st.integers(0, 60),
)
def test_a_rate_is_never_negative_nor_above_the_peak(schedule: str, warmup: int, total: int, step: int) -> None:
    settings = replace(BASE, schedule=schedule, warmup_steps=warmup, total_optimizer_steps=total)
    assert 0 <= learning_rate(settings, step) <= 2e-4 * (1 + 1e-12)
    if step < total:
        assert learning_rate(settings, step) > 0, "a step that learns nothing"


# DeepSpeed processes

JOBS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1, "kl": True},
    "zero2": {"zero_stage": 2, "proximal": "recompute", "epochs": 2, "kl": True, "reference": "offload"},
    "zero3_two_ranks": {"zero_stage": 3, "ranks": 2, "kl": True, "reference": "offload"},
    "zero2_two_ranks": {"zero_stage": 2, "ranks": 2, "proximal": "interpolate", "kl": True, "reference": "own"},
    "zero3_two_ranks_lora": {"zero_stage": 3, "ranks": 2, "lora_rank": 4, "kl": True, "proximal": "recompute"},
}
DEFAULTS = {"ranks": 1, "epochs": 1, "lora_rank": 0, "kl": False, "proximal": "behaviour", "on_policy": False}
DEFAULTS |= {"dtype": "float32", "spoiled": None, "resume": None, "selection": None, "reference": "ranks"}


def run_ranks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank found."""
    run_processes(rank_process.main, job)
    folder = Path(job["folder"])
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(job["ranks"])]


def expected_steps(job: dict[str, Any]) -> tuple[list[float], Policy]:
    """Gradient norms, and the policy after the optimizer updates of plain torch."""
    settings = rank_process.settings(job)
    policy, initial = Policy(settings.policy), Policy(replace(settings.policy, lora_rank=0))
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.0, weight_decay=settings.weight_decay)
    plans, updates, payloads = rank_process.plans(job)
    assert len(plans[0].updates[1]) > 1, "accumulation is not tested"
    assert all(plan.updates[0] == plan.updates[2] == ((),) for plan in plans[1:]), "ranks without data are not tested"
    norms: list[float] = []
    for rows in updates * job["epochs"]:
        if job["spoiled"] and tuple(job["spoiled"]) in [(row.group_id, row.index) for row in rows]:
            continue
        _, gradients = reference_gradients(
            policy,
            rows,
            payloads,
            temperature=settings.temperature,
            proximal=initial if job["proximal"] == "recompute" else None,
            interpolate=job["proximal"] == "interpolate",
            correction=lambda log_ratios, _: [min(math.exp(d), rank_process.CAP) for d in log_ratios],
            reference=initial if job["kl"] else None,
            kl_coefficient=rank_process.KL_COEFFICIENT,
        )
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                parameter.grad = gradients[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, settings.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, len(norms) - 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms, policy


@dataclass(frozen=True)
class Ran:
    """A job that ran: what each rank found, and what plain torch says."""

    folder: Path
    job: dict[str, Any]
    ranks: list[dict[str, Any]]
    initial: Policy
    policy: Policy
    norms: list[float]
    updates: list[list[Row]]
    payloads: Payloads


@pytest.fixture(scope="module", params=JOBS)
def ran(request: pytest.FixtureRequest, wide_path: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp(request.param)
    job = DEFAULTS | JOBS[request.param] | {"model": wide_path, "folder": str(folder)}
    norms, policy = expected_steps(job)
    _, updates, payloads = rank_process.plans(job)
    initial = Policy(rank_process.settings(job).policy)
    return Ran(folder, job, run_ranks(job), initial, policy, norms, updates, payloads)


@pytest.mark.engine
def test_every_rank_takes_the_steps_of_plain_torch(ran: Ran) -> None:
    assert min(ran.norms) > rank_process.MAX_GRAD_NORM, "clipping is not tested"
    for found in ran.ranks:
        assert found["parameters"] == sum(p.numel() for p in ran.policy.parameters() if p.requires_grad)
        assert found["report"].grad_norms == pytest.approx(ran.norms, rel=TOLERANCE)
        assert found["report"].learning_rates[:3] == pytest.approx([5e-6, 1e-5, 1e-5])
        assert found["report"].optimizer_step == len(ran.norms) == 3 * ran.job["epochs"]
        assert found["report"].peak_memory_bytes > 0


@pytest.mark.engine
def test_counts_by_staleness_add_up_over_the_ranks(ran: Ran) -> None:
    whole = Tally()
    for found in ran.ranks:
        whole.merge(Tally(found["report"].sums, found["report"].maxima))
    rows = [row for rows in ran.updates for row in rows]
    counts = tokens_by_staleness(rows, ran.payloads)
    assert min(counts) > 0
    assert whole.sums["mismatch_tokens"] == tuple(counts)
    assert whole.sums["tokens"] == tuple(count * ran.job["epochs"] for count in counts)

    if ran.job["proximal"] != "recompute":
        return  # of later updates the policy had moved when their tokens were first seen
    ratios: list[list[float]] = [[] for _ in counts]
    for row in rows:
        answer = ran.payloads[row.payload][row.position]
        own = frozen_distributions(ran.initial, answer.token_ids, rank_process.TEMPERATURE)
        for t in np.flatnonzero(answer.response_mask):
            behaviour = float(answer.behaviour_logprobs[t])
            d = 0.0 if math.isnan(behaviour) else float(own[t - 1, answer.token_ids[t]]) - behaviour
            ratios[VERSION - answer.token_versions[t]].append(math.exp(d))
    metrics = [mismatch.metrics(part) for part in whole.split()]
    assert [m["ratio_mean"] for m in metrics] == pytest.approx([np.mean(of) for of in ratios], rel=1e-4)
    assert [m["ratio_max"] for m in metrics] == pytest.approx([max(of) for of in ratios], rel=1e-4)
    ess = [sum(of) ** 2 / (len(of) * sum(r * r for r in of)) for of in ratios]
    assert [m["ess"] for m in metrics] == pytest.approx(ess, rel=1e-4)


@pytest.mark.engine
def test_interpolated_and_recomputed_policies_are_one_while_the_policy_has_not_moved(
    wide_path: str, tmp_path: Path
) -> None:
    """On answers of several versions that the policy, as it is, would have written alike: one update."""
    found = []
    for proximal in ("interpolate", "recompute"):
        folder = tmp_path / proximal
        folder.mkdir()
        job = DEFAULTS | {"zero_stage": 2, "proximal": proximal, "on_policy": True, "model": wide_path}
        found += run_ranks(job | {"folder": str(folder)})
    interpolated, recomputed = (one["report"] for one in found)
    assert interpolated.sums["loss"] == pytest.approx(recomputed.sums["loss"], rel=TOLERANCE, abs=1e-7)
    assert interpolated.grad_norms == pytest.approx(recomputed.grad_norms, rel=TOLERANCE)
    assert interpolated.sums["correction"] == pytest.approx(interpolated.sums["tokens"], rel=TOLERANCE)
    assert min(interpolated.sums["tokens"]) > 0
    for name, tensor in found[1]["weights"].items():
        error = (found[0]["weights"][name] - tensor).norm() / tensor.norm()
        assert error <= TOLERANCE, f"{name}: relative error {float(error):.2e}"


@pytest.mark.engine
def test_the_weights_that_leave_are_those_of_plain_torch(ran: Ran) -> None:
    """Only rank 0 hands out anything, together with the manifest of it."""
    assert [bool(found["weights"]) for found in ran.ranks] == [True] + [False] * (len(ran.ranks) - 1)
    weights = ran.ranks[0]["weights"]
    source = PolicyWeightSource(ran.policy, zero_stage=0, bucket_bytes=2**40)
    expected = {name: tensor for bucket in source.buckets() for name, tensor in bucket}
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (weights[name] - tensor).norm() / tensor.norm()
        assert error <= TOLERANCE, f"{name}: relative error {float(error):.2e}"
    last = {name: checksum(tensor) for name, tensor in ran.ranks[0]["again_weights"].items()}
    ran.ranks[0]["manifest"].check(last, "the test")


@pytest.mark.engine
def test_logprobs_of_the_answers_are_from_before_they_were_learned_from(ran: Ran) -> None:
    logprobs = {key: values for found in ran.ranks for key, values in found["first_logprobs"].items()}
    assert logprobs.keys() == {(row.group_id, row.index) for rows in ran.updates for row in rows}
    assert sum(len(found["first_logprobs"]) for found in ran.ranks) == len(logprobs), "an answer on two ranks"
    for row in ran.updates[0]:
        answer = ran.payloads[row.payload][row.position]
        expected = frozen_distributions(ran.initial, answer.token_ids, rank_process.TEMPERATURE).numpy()
        positions = np.flatnonzero(answer.response_mask)
        np.testing.assert_allclose(
            logprobs[row.group_id, row.index], expected[positions - 1, answer.token_ids[positions]], rtol=0, atol=1e-4
        )


@pytest.mark.engine
def test_the_canary_is_felt_on_every_rank_and_taken_back_exactly(ran: Ran) -> None:
    text = rank_process.TEXTS[0]
    before, after = (
        frozen_distributions(policy, text, 1.0)[range(len(text) - 1), text[1:]].numpy()
        for policy in (ran.initial, ran.policy)
    )
    for found in ran.ranks:
        np.testing.assert_allclose(found["logprobs_before"][0], before, rtol=0, atol=1e-4)
        np.testing.assert_allclose(found["logprobs_after"][0], after, rtol=0, atol=1e-4)
        assert [len(v) + 1 for v in found["logprobs_after"]] == [len(ids) for ids in rank_process.TEXTS]
        assert np.abs(found["logprobs_perturbed"][0] - after).max() > 1e-3
        for restored, unperturbed in zip(found["logprobs_restored"], found["logprobs_after"], strict=True):
            np.testing.assert_array_equal(restored, unperturbed)


def check_that_steps_repeat_from_the_checkpoint(ranks: list[dict[str, Any]], *, steps: int) -> None:
    """`steps` are those that were made before it was written, and again with each `learn` behind it."""
    for found in ranks:
        assert found["loaded_step"] == steps
        assert found["again_report"].optimizer_step == 2 * steps
        again, following = (replace(found[key], peak_memory_bytes=0) for key in ("again_report", "next_report"))
        assert repr(again) == repr(following), "sums may be NaN, which equals nothing"
        for key, values in found["next_logprobs"].items():
            np.testing.assert_array_equal(found["again_logprobs"][key], values)
    for name, tensor in ranks[0]["next_weights"].items():
        assert torch.equal(ranks[0]["again_weights"][name], tensor), name


@pytest.mark.engine
def test_a_loaded_checkpoint_goes_on_to_the_same_next_steps_bit_by_bit(ran: Ran) -> None:
    checkpoint = ran.folder / "checkpoint"
    files = sorted(file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*.*") if file.is_file())
    assert sorted(file for found in ran.ranks for file in found["saved"]) == files
    for path in ran.folder.rglob("*.safetensors"):  # colleagues may read what they may read around it
        assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o666
    check_that_steps_repeat_from_the_checkpoint(ran.ranks, steps=len(ran.norms))


def masters_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The float32 master weights that all ranks saved, flattened, by their names in the model."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in (checkpoint / "learner").glob("part-*"):
        with safe_open(path, "pt") as file:
            for name, about in json.loads(file.metadata()["parts"]).items():
                values = file.get_tensor(f"master|{name}")
                parts.setdefault(name.removeprefix("model."), []).append((about["start"], values))
    return {name: torch.cat([values for _, values in sorted(of_it)]) for name, of_it in parts.items()}


@pytest.mark.engine
def test_other_ranks_and_stages_go_on_from_a_checkpoint_as_its_own_do(wide_path: str, tmp_path: Path) -> None:
    """ZeRO stage, ranks and type of the writers and of those who go on; three ranks fill up their last shards."""
    full, half = "float32", "bfloat16"
    ways = [((2, 2, full), (3, 3, full)), ((3, 3, full), (0, 1, full)), ((0, 1, full), (1, 2, half))]

    def ran(way: tuple[int, int, str], origin: Path | None = None) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path / f"{way}-{origin is not None}"
        folder.mkdir()
        job = DEFAULTS | dict(zip(("zero_stage", "ranks", "dtype"), way, strict=True))
        return folder, run_ranks(job | {"model": wide_path, "folder": str(folder), "resume": origin and str(origin)})[0]

    for origin, other in ways:
        folder, found = ran(origin)
        _, resumed = ran(other, folder / "checkpoint")
        assert resumed["loaded_step"] == found["loaded_step"] == 3
        assert resumed["report"].optimizer_step == 6
        exact = other[2] == full
        expected = pytest.approx(found["next_report"].grad_norms, rel=TOLERANCE if exact else 0.05)
        assert resumed["report"].grad_norms == expected
        assert resumed["report"].learning_rates == found["next_report"].learning_rates
        masters = masters_in(tmp_path / f"{other}-True" / "checkpoint")
        for name, tensor in found["next_weights"].items():
            moved = (found["weights"][name] - tensor).norm()
            away = (masters[name].view_as(tensor) - tensor).norm()
            assert away <= (1e-3 if exact else 0.3) * moved, f"{origin} to {other}: {name}"


@pytest.mark.engine
def test_the_exported_folder_holds_what_the_engines_got(ran: Ran) -> None:
    from transformers import AutoModelForCausalLM

    exported = dict(AutoModelForCausalLM.from_pretrained(ran.folder / "model").named_parameters())
    weights = ran.ranks[0]["again_weights"]
    assert exported.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.engine
def test_an_adapter_leaves_the_ranks_in_pefts_format(ran: Ran) -> None:
    """In checkpoints, as a result and on its way to engines: the base with it is the exported model."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    if not ran.job["lora_rank"]:
        pytest.skip("no adapter in this job")
    sent = ran.ranks[0]["adapter"]
    ran.ranks[0]["adapter_manifest"].check({name: checksum(tensor) for name, tensor in sent.items()}, "the test")
    saved = load_file(ran.folder / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == sent.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in sent.items())
    assert all("lora_A" in name or "lora_B" in name for name in sent)
    base = AutoModelForCausalLM.from_pretrained(ran.job["model"])
    adapted = PeftModel.from_pretrained(base, ran.folder / "adapter", autocast_adapter_dtype=False)
    assert adapted.peft_config["default"].base_model_name_or_path == ran.job["model"]
    merged = AutoModelForCausalLM.from_pretrained(ran.folder / "model")
    ids = torch.tensor([rank_process.TEXTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
    checkpoint = load_file(ran.folder / "checkpoint" / "adapter" / "adapter_model.safetensors")
    assert checkpoint.keys() == sent.keys()
    assert (ran.folder / "checkpoint" / "adapter" / "adapter_config.json").exists()


@pytest.mark.engine
@pytest.mark.parametrize(("zero_stage", "ranks"), [(0, 1), (2, 2), (3, 1)])
def test_an_update_that_is_not_finite_changes_nothing_and_names_the_answer(
    wide_path: str, tmp_path: Path, zero_stage: int, ranks: int
) -> None:
    """On all ranks alike, wherever the answer lies; the updates around it are made."""
    job = DEFAULTS | {"zero_stage": zero_stage, "ranks": ranks, "spoiled": ["g2", 0]}
    job |= {"model": wide_path, "folder": str(tmp_path)}
    norms, policy = expected_steps(job)
    assert len(norms) == 2
    found = run_ranks(job)
    for of_rank in found:
        assert [s.number for s in of_rank["report"].skipped] == [1]
        assert of_rank["report"].grad_norms == pytest.approx(norms, rel=TOLERANCE)
        assert of_rank["report"].optimizer_step == 2
    named = [answer for of_rank in found for s in of_rank["report"].skipped for answer in s.answers]
    assert named == [("g2", 0)]
    tally = Tally()
    for of_rank in found:
        tally.merge(Tally(of_rank["report"].sums, of_rank["report"].maxima))
    assert math.isfinite(tally.total("loss"))
    source = PolicyWeightSource(policy, zero_stage=0, bucket_bytes=2**40)
    for name, tensor in (item for bucket in source.buckets() for item in bucket):
        error = (found[0]["weights"][name] - tensor).norm() / tensor.norm()
        assert error <= TOLERANCE, f"{name}: relative error {float(error):.2e}"


@pytest.mark.engine
@pytest.mark.parametrize(("zero_stage", "ranks"), [(1, 1), (1, 2), (2, 2), (3, 2)])
def test_bfloat16_weights_skip_and_resume_as_float32_ones_do(
    wide_path: str, tmp_path: Path, zero_stage: int, ranks: int
) -> None:
    """DeepSpeed has another optimizer for them, with ZeRO-1 a third one."""
    job = DEFAULTS | {"zero_stage": zero_stage, "ranks": ranks, "spoiled": ["g2", 0], "model": wide_path}
    norms, _ = expected_steps(job)
    found = run_ranks(job | {"dtype": "bfloat16", "folder": str(tmp_path)})
    for of_rank in found:
        for report in (of_rank["report"], of_rank["next_report"]):
            assert [s.number for s in report.skipped] == [1]
        assert of_rank["report"].optimizer_step == 2
        assert of_rank["report"].grad_norms == pytest.approx(norms, rel=0.05)
    named = [answer for of_rank in found for s in of_rank["report"].skipped for answer in s.answers]
    assert named == [("g2", 0)]
    check_that_steps_repeat_from_the_checkpoint(found, steps=2)
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in found[0]["weights"].values())
    for name, tensor in found[0]["weights"].items():  # a norm's weights of 1 are too far from their neighbours
        assert "norm" in name or not torch.equal(found[0]["next_weights"][name], tensor), name


@pytest.mark.engine
def test_a_selection_marks_tokens_of_the_whole_update_on_any_number_of_ranks(wide_path: str, tmp_path: Path) -> None:
    """The two ranks of the second job hold different answers, and the second of them none in two of three updates."""
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        job = DEFAULTS | {"zero_stage": 2, "ranks": ranks, "selection": "kl_cov", "epochs": 2, "model": wide_path}
        found.append(run_ranks(job | {"folder": str(folder)}))
    tallies = []
    for of_ranks in found:
        tally = Tally()
        for of_rank in of_ranks:
            tally.merge(Tally(of_rank["report"].sums, of_rank["report"].maxima))
        tallies.append(tally)
    one, two = tallies
    _, updates, payloads = rank_process.plans(job)
    counts = [sum(payloads[r.payload][r.position].response_length for r in rows) for rows in updates[:2]]
    # The third update has one answer, one advantage, and so no covariance.
    assert one.total("selected") == two.total("selected") == 2 * sum(max(1, round(0.2 * count)) for count in counts)
    assert one.total("loss") == pytest.approx(two.total("loss"), rel=TOLERANCE)
    for name, tensor in found[0][0]["weights"].items():
        error = (found[1][0]["weights"][name] - tensor).norm() / tensor.norm()
        assert error <= TOLERANCE, f"{name}: relative error {float(error):.2e}"
