"""What has to be known of a batch or an update before it is learned: figures from passes without gradient.

Contract. A survey belongs to one rank and one batch, and every rank takes it in the same steps, empty micro-batches
included, since the passes are collective. Where it looks at the whole batch it adds up over the ranks, so no cut of the
batch changes what it finds. An objective that asks for nothing costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.advantages import discounted_returns, mean_and_variance, whiten_by
from learner.batch import MicroBatch, RankPlan
from learner.kl import reward_penalty
from learner.objective import Objective, TokenReturns
from learner.reference import Reference
from learner.selection import Marked, Tokens, Total, draws
from learner.tensors import MicroBatchTensors

Place = tuple[int, int]  # update, micro-batch


@dataclass(frozen=True)
class Known:
    """Of one micro-batch, each of [R, L] and None where it is not needed or not known yet."""

    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    selected: Marked | None = None


class Survey:
    """`forward` gives logprobs and entropies, `reference` the initial policy's logprobs, `tensors` a micro-batch's data.

    The reference never changes: it is asked once for the whole batch, whatever updates and epochs follow.
    """

    def __init__(
        self,
        objective: Objective,
        plan: RankPlan,
        *,
        tensors: Callable[[MicroBatch], MicroBatchTensors],
        forward: Callable[[MicroBatchTensors], tuple[Tensor, Tensor]],
        reference: Reference,
        total: Total,
    ) -> None:
        """Passes over the whole batch, at the weights of before its first update. `objective` is one for any batch."""
        self.objective = objective.with_coefficients(plan.coefficients)
        self.plan = plan
        self._tensors = tensors
        self._forward = forward
        self._total = total
        self._proximal: dict[Place, Tensor] = {}
        self._ref: dict[Place, Tensor] = {}
        self._advantages: dict[Place, Tensor] = {}
        places = [(u, n) for u, micro_batches in enumerate(plan.updates) for n in range(len(micro_batches))]
        if self.objective.proximal == "recompute":
            # Of the first update the first pass with gradient is early enough: `saw` takes it in.
            self._proximal = {place: self._logprobs(place) for place in places if place[0] > 0}
        if self.objective.needs_reference:
            self._ref = dict(zip(places, reference(self.batch(place) for place in places), strict=True))
        if self.objective.returns is not None:
            self._advantages = self._returns(self.objective.returns, places)
        self._selected: list[Marked] = []

    def begin(self, update: int, optimizer_step: int) -> None:
        """A pass over one update, at its weights."""
        if self.objective.selection is not None:
            self._selected = self._select(update, optimizer_step)

    def saw(self, place: Place, logprobs: Tensor) -> None:
        """The logprobs of a pass with gradient, in order: those of the first update's first are the proximal policy's."""
        if self.objective.proximal == "recompute" and place[0] == 0:
            self._proximal.setdefault(place, logprobs)

    def batch(self, place: Place) -> MicroBatchTensors:
        """The micro-batch, with advantages per token where the objective has such."""
        update, number = place
        batch = self._tensors(self.plan.updates[update][number])
        advantages = self._advantages.get(place)
        return batch if advantages is None else dataclasses.replace(batch, advantages=advantages)

    def known(self, place: Place) -> Known:
        selected = self._selected[place[1]] if self._selected else None
        return Known(self._proximal.get(place), self._ref.get(place), selected)

    def _logprobs(self, place: Place) -> Tensor:
        with torch.no_grad():
            return self._forward(self.batch(place))[0]

    def _returns(self, r: TokenReturns, places: list[Place]) -> dict[Place, Tensor]:
        """Advantages per token, whitened over the whole batch."""
        returns: dict[Place, tuple[Tensor, Tensor]] = {}
        for place in places:
            batch = self.batch(place)
            penalty = None
            if r.kl_coefficient:
                behaviour, ref = batch.behaviour_logprobs, self._ref[place]
                # A token whose logprob the engine could not give is charged nothing.
                own = torch.where(behaviour.isfinite(), behaviour, ref)
                penalty = reward_penalty(own, ref, batch.response_mask, coefficient=r.kl_coefficient)
                penalty = penalty.cpu()
            # On the host: on GPUs torch has no sum along a row that repeats bit by bit.
            rewards, mask = batch.advantages[:, 0].cpu(), batch.response_mask
            of_tokens = discounted_returns(rewards, mask.cpu(), token_rewards=penalty, gamma=r.gamma)
            returns[place] = of_tokens.to(mask.device), mask
        if not returns:  # no answer of the batch is left in the loss
            return {}
        # What is not finite, as where a reference gave NaN, spoils its own update alone: that is left out, and names the answer.
        known = [values[mask & values.isfinite()] for values, mask in returns.values()]
        mean, variance = mean_and_variance(known, std=r.std, total=self._total)
        return {
            place: whiten_by(values, mask, mean, variance, eps=r.eps).float()
            for place, (values, mask) in returns.items()
        }

    def _select(self, update: int, optimizer_step: int) -> list[Marked]:
        """For each micro-batch of the update the tokens [R, L] that the objective's selection marks."""
        objective = self.objective
        assert objective.selection is not None
        batches = [self.batch((update, number)) for number in range(len(self.plan.updates[update]))]
        with torch.no_grad():
            passes = [self._forward(batch) for batch in batches]
        masks = [batch.response_mask for batch in batches]
        tokens = Tokens(
            entropy=torch.cat([entropy[mask] for (_, entropy), mask in zip(passes, masks, strict=True)]),
            logprobs=torch.cat([logprobs[mask] for (logprobs, _), mask in zip(passes, masks, strict=True)]),
            advantages=torch.cat([b.advantages.expand(m.shape)[m] for b, m in zip(batches, masks, strict=True)]),
            draws=torch.cat([_draws(batch, optimizer_step) for batch in batches]),
        )
        marked = objective.selection(tokens, self._total, **objective.selection_options)
        parts = marked.tokens.split([int(mask.sum()) for mask in masks])
        return [
            dataclasses.replace(marked, tokens=torch.zeros_like(mask).masked_scatter(mask, part))
            for mask, part in zip(masks, parts, strict=True)
        ]


def _draws(batch: MicroBatchTensors, optimizer_step: int) -> Tensor:
    answers = [(row.group_id, row.index) for row in batch.rows]
    return draws(answers, batch.response_mask.sum(1).tolist(), optimizer_step).to(batch.response_mask.device)
