"""One process of a learner job, for test_gradient_matrix.

It starts a LearnerRank with DeepSpeed and takes the gradient of one batch after another, each cut in another way, without
moving the weights. Rank 0 writes them to `FOLDER/gradients.pt`. The cuts are those of `cut_of`, which the test reads as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from learner_data import MAX_STALENESS, VERSION, Payloads, batch_of

from learner import losses
from learner.batch import MicroBatch, PackedRow, RankPlan, Row
from learner.objective import Objective
from learner.policy import PolicySettings
from learner.settings import LearnerSettings
from learner.worker import LearnerRank

TEMPERATURE = 0.7
SIZES = {"even": (3, 3, 3), "uneven": (4, 1, 3, 2)}


@dataclass(frozen=True)
class Cut:
    """`rows_a_micro_batch` 0: all in one. `layout`: every answer in a row of its own, all of a group in one, or in two.

    `empty`: the last rank has no data.
    """

    rows_a_micro_batch: int
    layout: str  # apart | shared | halves
    groups: str  # even | uneven
    empty: bool

    def __str__(self) -> str:
        size = self.rows_a_micro_batch or "all"
        return f"{size} a micro-batch, {self.layout}, {self.groups}{', a rank without data' if self.empty else ''}"


# Every two values of two properties meet.
CUTS = [
    Cut(size, layout, "even" if (i + j) % 2 else "uneven", (i + j // 2) % 2 == 0)
    for i, size in enumerate((1, 2, 3, 0))
    for j, layout in enumerate(("apart", "shared", "halves"))
]


def batch(groups: str) -> tuple[list[list[Row]], Payloads]:
    return batch_of(SIZES[groups], seed=31)


def plans_of(cut: Cut, ranks: int) -> list[RankPlan]:
    rows, _ = batch(cut.groups)
    packed = [row for group in rows for row in _packed(group, cut.layout)]
    owners = 1 if cut.empty else ranks
    shares = [_micro_batches(packed[rank::owners], cut.rows_a_micro_batch) for rank in range(owners)]
    shares += [[] for _ in range(ranks - owners)]
    count = max(map(len, shares))
    return [RankPlan((tuple(share + [()] * (count - len(share))),), VERSION, MAX_STALENESS) for share in shares]


def _packed(group: Sequence[Row], layout: str) -> list[PackedRow]:
    if layout == "apart":
        return [(row,) for row in group]
    middle = (len(group) + 1) // 2 if layout == "halves" else len(group)
    return [tuple(part) for part in (group[:middle], group[middle:]) if part]


def _micro_batches(packed: Sequence[PackedRow], size: int) -> list[MicroBatch]:
    size = size or len(packed)
    return [tuple(packed[start : start + size]) for start in range(0, len(packed), size)]


def main(number: int, ranks: int, rendezvous: str, job: dict[str, Any]) -> None:
    from deepspeed.utils import safe_get_full_grad

    settings = LearnerSettings(
        policy=PolicySettings(job["model"], "float32", chunk_tokens=20),
        objective=Objective(losses.ppo_clip),
        device="cpu",
        temperature=TEMPERATURE,
        zero_stage=job["zero_stage"],
        learning_rate=0.0,
        total_optimizer_steps=1000,
        max_grad_norm=1e9,
        threads=1,
    )
    rank = LearnerRank(settings, number, ranks)
    rank.start(rendezvous)
    gradients = []
    for cut in CUTS:
        plan, (_, payloads) = plans_of(cut, ranks)[number], batch(cut.groups)
        survey = rank._survey(plan, *(payloads[number] for number in plan.payloads))
        micro_batches = plan.updates[0]
        for place in range(len(micro_batches)):
            rank._accumulate(
                survey, (0, place), survey.batch((0, place)), first_pass=True, last=place == len(micro_batches) - 1
            )
        found = {name: safe_get_full_grad(p) for name, p in rank._policy.named_parameters()}
        gradients.append({name: gradient.clone() for name, gradient in found.items() if gradient is not None})
        rank._step(0.0)  # AdamW at rate 0 leaves the weights where they are, and the gradients are gone
    if number == 0:
        torch.save(gradients, Path(job["folder"]) / "gradients.pt")
