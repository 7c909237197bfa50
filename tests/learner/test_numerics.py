"""What a step's numbers rest on: float32 sums of bfloat16 gradients, and steps that repeat bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numerics_process
import pytest
import torch
from numerics_process import DEFAULTS, TEMPERATURE
from rank_jobs import run_processes

from learner.objective import micro_batch_loss
from learner.policy import Policy
from learner.tensors import build_tensors

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


def ranks_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    folder = Path(job["folder"])
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(job["ranks"])]


def float32_sums(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The first update's gradients: those of every micro-batch, as bfloat16 computes them, added up in float64."""
    settings = numerics_process.settings(job)
    policy = Policy(settings.policy)
    plans, payloads = numerics_process.plans(job)
    totals = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in policy.named_parameters()}
    for plan in plans:
        for micro_batch in filter(None, plan.updates[0]):
            batch = build_tensors(micro_batch, payloads)
            logprobs, entropy = policy(batch, TEMPERATURE)
            loss, _ = micro_batch_loss(
                settings.objective, batch, logprobs, entropy, version=plan.version, max_staleness=plan.max_staleness
            )
            loss.backward()
            for name, parameter in policy.named_parameters():
                if parameter.grad is not None:
                    totals[name] += parameter.grad
            policy.zero_grad(set_to_none=True)
    return totals


@pytest.mark.parametrize(("zero_stage", "fp32_head"), [(1, False), (2, False), (3, True)])
def test_gradients_of_bfloat16_weights_are_added_up_in_float32(
    wide_path: str, tmp_path: Path, zero_stage: int, fp32_head: bool
) -> None:
    """Over micro-batches and over ranks; in bfloat16 they are off by about 2^-8. Master weights are float32 as well."""
    job = DEFAULTS | {"dtype": "bfloat16", "zero_stage": zero_stage, "fp32_head": fp32_head}
    job |= {"model": wide_path, "folder": str(tmp_path)}
    plans, _ = numerics_process.plans(job)
    assert min(len(plan.updates[0]) for plan in plans) >= 8
    run_processes(numerics_process.main, job)
    [found, _] = ranks_of(job)
    expected = float32_sums(job)
    assert found["gradients"].keys() == expected.keys()
    for name, total in expected.items():
        error = float((found["gradients"][name].double() - total).norm() / total.norm())
        assert error <= 1e-5, f"{name}: relative error {error:.2e}"
    initial = dict(Policy(numerics_process.settings(job).policy).named_parameters())
    for name, master in found["masters"].items():
        assert master.dtype == torch.float32
        # Two steps of 1e-6, far below bfloat16's resolution.
        assert 0 < float((master - initial[name].detach().float()).abs().max()) < 1e-5, name


def in_a_new_interpreter(jobs: list[dict[str, Any]], hash_seed: int) -> None:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    environment["OMP_WAIT_POLICY"] = "passive"  # two threads that spin for each other take long on a busy machine
    done = subprocess.run(
        [sys.executable, numerics_process.__file__, json.dumps(jobs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_deterministic_step_repeats_bit_by_bit(wide_path: str, tmp_path: Path) -> None:
    """Two updates on two ranks, or on one with two threads. Sets are in another order and addresses are others."""
    common = DEFAULTS | {"deterministic": True, "gradients": False, "selection": "clip_cov", "groups": 4}
    kinds = [
        {"dtype": "bfloat16", "zero_stage": 2},
        {"dtype": "bfloat16", "zero_stage": 3},
        {"dtype": "float32", "zero_stage": 2, "threads": 2, "ranks": 1},
    ]
    found = []
    for hash_seed in (1, 2):
        jobs = [
            common | kind | {"model": wide_path, "folder": str(tmp_path / f"{hash_seed}-{number}")}
            for number, kind in enumerate(kinds)
        ]
        for job in jobs:
            Path(job["folder"]).mkdir()
        in_a_new_interpreter(jobs, hash_seed)
        found.append([ranks_of(job) for job in jobs])
    for kind, first, second in zip(kinds, *found, strict=True):
        assert first[0]["weights"], kind
        assert first[0]["deterministic"]
        for one, other in zip(first, second, strict=True):
            for key in ("weights", "master_checksums", "grad_norms", "sums"):
                assert one[key] == other[key], f"{kind}: {key}"
            for answer, logprobs in one["logprobs"].items():
                assert (logprobs == other["logprobs"][answer]).all(), f"{kind}: {answer}"
