"""One process of a learner job, for test_learner_rank: `python rank_process.py RANK RANKS RENDEZVOUS JSON`.

It starts a LearnerRank with DeepSpeed, lets it learn from made-up answers, and writes what it found to
`FOLDER/rank-RANK.pt`. The made-up batch and the settings are those that the test computes its own figures from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from learner_data import Payloads, batch_of

from learner import kl, losses
from learner.batch import RankPlan, Row, plan_updates
from learner.objective import Objective
from learner.policy import PolicySettings
from learner.worker import LearnerRank, LearnerSettings
from rollout_workers.weights.bucket import Bucket, unpack

TEXTS = [[1, 5, 9, 200], [3, 4]]  # for the probe
TEMPERATURE = 0.7
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 0.05  # below the norms that occur: the clipping is tested with the rest


def settings(job: dict[str, Any]) -> LearnerSettings:
    objective = Objective(losses.ppo_clip, kl=kl.k3 if job["kl"] else None, kl_coefficient=0.1)
    return LearnerSettings(
        policy=PolicySettings(job["model"], "float32", lora_rank=job["lora_rank"], chunk_tokens=20),
        objective=objective,
        device="cpu",
        temperature=TEMPERATURE,
        zero_stage=job["zero_stage"],
        learning_rate=LEARNING_RATE,
        total_optimizer_steps=10,
        warmup_steps=2,
        schedule="cosine",
        weight_decay=0.01,
        max_grad_norm=MAX_GRAD_NORM,
        recompute_proximal=job["recompute_proximal"],
        threads=1,
        bucket_bytes=200_000,
    )


def plans(ranks: int) -> tuple[list[RankPlan], list[list[Row]], Payloads]:
    """Three optimizer updates: their plans for so many ranks, their rows, and the answers.

    The second has several micro-batches. The others are one packed row each, so a second rank has no data there.
    """
    updates, payloads = [], {}
    for sizes, seed in (([2], 21), ([3, 1, 2], 22), ([1], 23)):
        rows, answers = batch_of(sizes, seed, first_group=len(payloads))
        updates.append(rows)
        payloads |= answers
    plan = plan_updates(updates, ranks=ranks, max_tokens=30, share_prefixes=True)
    flat = [[row for group in groups for row in group] for groups in updates]
    return plan, flat, payloads


def main(number: int, ranks: int, rendezvous: str, job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    rank = LearnerRank(settings(job), number, ranks)
    found: dict[str, Any] = {"parameters": rank.start(rendezvous)}

    def weights() -> dict[str, torch.Tensor]:
        """Exported by all ranks together; empty on all but the first."""
        items = list(rank.export_weights(7))
        buckets = [item for item in items if isinstance(item, Bucket)]
        if items:
            found["manifest"] = items[-1]
        return {
            name: tensor.clone()
            for bucket in buckets
            for name, tensor in unpack(bucket.slots, torch.from_numpy(bucket.data))
        }

    of_ranks, _, payloads = plans(ranks)
    plan = of_ranks[number]

    def learn() -> Any:
        return rank.learn(plan, *(payloads[p] for p in plan.payloads))

    found["logprobs_before"] = rank.logprobs(TEXTS)
    found["report"], found["first_logprobs"] = learn()
    found["weights"] = weights()
    found["logprobs_after"] = rank.logprobs(TEXTS)
    rank.perturb(0.1, seed=3)
    found["logprobs_perturbed"] = rank.logprobs(TEXTS)
    rank.restore()
    found["logprobs_restored"] = rank.logprobs(TEXTS)

    found["saved"] = rank.save(str(folder / "checkpoint"))
    found["next_report"], found["next_logprobs"] = learn()
    found["next_weights"] = weights()
    found["loaded_step"] = rank.load(str(folder / "checkpoint"))
    found["again_report"], found["again_logprobs"] = learn()
    found["again_weights"] = weights()
    rank.export_model(str(folder / "model"))
    rank.close()
    torch.save(found, folder / f"rank-{number}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
