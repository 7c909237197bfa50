"""One process of a learner job, for test_learner_rank.

It starts a LearnerRank with DeepSpeed, lets it learn from made-up answers, and writes what it found to
`FOLDER/rank-RANK.pt`. The made-up batch and the settings are those that the test computes its own figures from. With
`on_policy` the answers have the behaviour logprobs of the policy itself, and there is one optimizer update and no more.
With `resume` it loads that checkpoint first, and learns once.
With `spoiled` (a group id and an index) the policy gives NaN for that answer. With `reference` own each process has a reference
actor's work done by itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_data import Payloads, batch_of, plans_of, row, trajectory
from plain_reference import frozen_distributions

from learner import corrections, kl, losses, selection
from learner.batch import Coefficients, RankPlan, Row
from learner.objective import Objective
from learner.policy import Policy, PolicySettings
from learner.reference import ReferenceActor
from learner.settings import LearnerSettings
from learner.worker import LearnerRank
from rollout_workers.weights.bucket import Bucket, unpack

TEXTS = [[1, 5, 9, 200], [3, 4]]  # for the probe
TEMPERATURE = 0.7
LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 0.05  # below the norms that occur: the clipping is tested with the rest
KL_COEFFICIENT = 0.1  # of this batch
CAP = 1.5  # of the importance weights


def settings(job: dict[str, Any]) -> LearnerSettings:
    objective = Objective(
        losses.ppo_clip,
        proximal=job["proximal"],
        correction=None if job["proximal"] == "behaviour" else corrections.token_tis,
        correction_options={"cap": CAP},
        kl=kl.k3 if job["kl"] else None,
        kl_coefficient=9.9,  # the plan's counts
        selection=getattr(selection, job["selection"]) if job["selection"] else None,
        selection_options={"share": 0.2, "coefficient": 0.5} if job["selection"] else {},
    )
    return LearnerSettings(
        policy=PolicySettings(job["model"], job["dtype"], lora_rank=job["lora_rank"], chunk_tokens=20),
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
        threads=1,
        bucket_bytes=200_000,
        reference=job["reference"],
    )


def plans(job: dict[str, Any]) -> tuple[list[RankPlan], list[list[Row]], Payloads]:
    """Three optimizer updates an epoch: their plans for the job's ranks, their rows, and the answers.

    The second has several micro-batches, one of them without any sampled token. The others are one packed row each, so a
    second rank has no data there.
    """
    updates, payloads = [], {}
    for sizes, seed in (([2], 21), ([3, 1, 2], 22), ([1], 23)):
        rows, answers = batch_of(sizes, seed, first_group=len(payloads))
        updates.append(rows)
        payloads |= answers
    masked = len(payloads)  # the policy sampled nothing of it: a micro-batch of its own, and two answers among others
    lengths = (28, 2, 2)
    payloads[masked] = tuple(trajectory(masked, i, [7, 8], [9] * n, [0] * n, [0.0] * n) for i, n in enumerate(lengths))
    updates[1].append([row(masked, i, 2, n, advantage=1.0) for i, n in enumerate(lengths)])
    plan = plans_of(updates, epochs=job["epochs"], ranks=job["ranks"], max_tokens=30, share_prefixes=True)
    plan = [dataclasses.replace(of_rank, coefficients=Coefficients(kl=KL_COEFFICIENT)) for of_rank in plan]
    flat = [[row for group in groups for row in group] for groups in updates]
    return plan, flat, payloads


def on_policy(payloads: Payloads, policy: Policy) -> Payloads:
    """The same answers with the policy's own logprobs as the behaviour's."""
    out: Payloads = {}
    for number, answers in payloads.items():
        rewritten = []
        for answer in answers:
            distributions = frozen_distributions(policy, answer.token_ids, TEMPERATURE).numpy()
            own = np.append(0.0, distributions[np.arange(len(answer.token_ids) - 1), answer.token_ids[1:]])
            logprobs = np.where(answer.response_mask, own, 0.0).astype(np.float32)
            rewritten.append(dataclasses.replace(answer, behaviour_logprobs=logprobs))
        out[number] = tuple(rewritten)
    return out


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

    of_ranks, _, payloads = plans(job)
    plan = of_ranks[number]
    if job["on_policy"]:
        plan = dataclasses.replace(plan, updates=plan.updates[1:2])
        payloads = on_policy(payloads, Policy(settings(job).policy))

    if job["spoiled"]:

        def spoil(module: Any, arguments: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> Any:
            there = [(row.group_id, row.index) == tuple(job["spoiled"]) for row in arguments[0].rows]
            factors = torch.where(torch.tensor(there, dtype=torch.bool), torch.nan, 1.0)[:, None] if there else 1.0
            return output[0] * factors, output[1]

        rank._policy.register_forward_hook(spoil)

    data: list[Any] = [payloads[p] for p in plan.payloads]
    if job["reference"] == "own":
        actor = ReferenceActor(settings(job), {"max_tokens": 40, "share_prefixes": False})
        data += [actor.score(answers)[1] for answers in data]

    def learn() -> Any:
        return rank.learn(plan, *data)

    if job["resume"]:
        found["loaded_step"] = rank.load(job["resume"])
    found["logprobs_before"] = rank.logprobs(TEXTS)
    found["report"], found["first_logprobs"] = learn()
    found["weights"] = weights()
    if job["resume"]:
        rank.save(str(folder / "checkpoint"))
    if job["on_policy"] or job["resume"]:
        torch.save(found, folder / f"rank-{number}.pt")
        return
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
    if job["lora_rank"]:
        rank.export_adapter(str(folder / "adapter"))
        rank._settings = dataclasses.replace(rank._settings, send_adapter=True)
        of_model = found.get("manifest")
        found |= {"adapter": weights(), "adapter_manifest": found.get("manifest"), "manifest": of_model}
    torch.save(found, folder / f"rank-{number}.pt")
