"""One rank of a learner job, for test_numerics; and, called as a script, whole jobs in processes of their own.

`main` starts a LearnerRank with DeepSpeed, notes the gradients of the first update as the optimizer would get them, then
lets it learn, and writes what it found to `FOLDER/rank-RANK.pt`. As a script it makes a new interpreter do that:
`python numerics_process.py JSON`, the JSON a list of jobs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import rank_jobs
import torch
from learner_data import Payloads, batch_of, plans_of

from learner import losses, selection
from learner.batch import RankPlan
from learner.objective import Objective
from learner.policy import PolicySettings
from learner.settings import LearnerSettings
from learner.worker import LearnerRank
from rollout_workers.weights.manifest import Manifest, checksum

TEMPERATURE = 0.7
DEFAULTS = {"ranks": 2, "threads": 1, "deterministic": False, "selection": None, "gradients": True, "groups": 16}
DEFAULTS |= {"fp32_head": False}


def settings(job: dict[str, Any]) -> LearnerSettings:
    chosen = None if job["selection"] is None else getattr(selection, job["selection"])
    return LearnerSettings(
        policy=PolicySettings(job["model"], job["dtype"], chunk_tokens=20, fp32_head=job["fp32_head"]),
        objective=Objective(losses.ppo_clip, selection=chosen),
        device="cpu",
        temperature=TEMPERATURE,
        zero_stage=job["zero_stage"],
        learning_rate=1e-6,
        total_optimizer_steps=10,
        deterministic=job["deterministic"],
        threads=job["threads"],
    )


def plans(job: dict[str, Any]) -> tuple[list[RankPlan], Payloads]:
    """Two optimizer updates of small micro-batches on every rank."""
    updates, payloads = [], {}
    for seed in (41, 42):
        rows, answers = batch_of([4] * job["groups"], seed, first_group=len(payloads))
        updates.append(rows)
        payloads |= answers
    return plans_of(updates, ranks=job["ranks"], max_tokens=24, share_prefixes=True), payloads


def main(number: int, ranks: int, rendezvous: str, job: dict[str, Any]) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    rank = LearnerRank(settings(job), number, ranks)
    rank.start(rendezvous)
    of_ranks, payloads = plans(job)
    plan = of_ranks[number]
    found: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if job["gradients"]:
        survey = rank._survey(plan, *(payloads[p] for p in plan.payloads))
        last = len(plan.updates[0]) - 1
        for place in range(last + 1):
            rank._accumulate(survey, (0, place), survey.batch((0, place)), first_pass=True, last=place == last)
        gradients = {name: safe_get_full_grad(p) for name, p in rank._policy.named_parameters()}
        found["gradients"] = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
        rank._step(0.0)  # AdamW at rate 0 leaves the weights where they are
    report, logprobs = rank.learn(plan, *(payloads[p] for p in plan.payloads))
    found["sums"], found["grad_norms"] = report.sums, report.grad_norms
    found["logprobs"] = logprobs
    masters = {name: safe_get_full_fp32_param(p) for name, p in rank._policy.named_parameters()}
    found["masters"] = {name: master.clone() for name, master in masters.items() if master is not None}
    manifests = [item for item in rank.export_weights(1) if isinstance(item, Manifest)]
    found["weights"] = {record.name: record.checksum for manifest in manifests for record in manifest.records}
    found["master_checksums"] = {name: checksum(master) for name, master in found["masters"].items()}
    torch.save(found, Path(job["folder"]) / f"rank-{number}.pt")


if __name__ == "__main__":
    import numerics_process

    for its in json.loads(sys.argv[1]):
        rank_jobs.run_processes(numerics_process.main, its)
