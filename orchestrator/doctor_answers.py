"""Answers that `headway doctor` makes up, and plans of the updates that it throws away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from learner.batch import MicroBatch, RankPlan, Row, packed_length, plan_updates
from orchestrator.algorithm import token_weights
from orchestrator.config import Config
from orchestrator.prompts import Prompt
from rollout_workers.trajectory import Trajectory, VersionSpan


def update_on(
    config: Config,
    groups: Sequence[Sequence[tuple[Trajectory, float]]],
    *,
    ranks: int,
    share_prefixes: bool,
    epochs: int = 1,
) -> list[RankPlan]:
    """An update on answers with their advantages, made `epochs` times; group g is payload g."""
    lengths = [t.response_length for group in groups for t, _ in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    weights = iter(token_weights(config.algorithm, lengths, numbers))
    rows = [
        [
            Row(t.group_id, t.index, number, place, t.prompt_length, t.response_length, advantage, next(weights))
            for place, (t, advantage) in enumerate(group)
        ]
        for number, group in enumerate(groups)
    ]
    return plan_updates(
        [rows],
        version=0,
        max_staleness=config.staleness.max,
        epochs=epochs,
        ranks=ranks,
        max_tokens=config.learner.max_tokens_per_microbatch,
        share_prefixes=share_prefixes,
    )


def longest_answers(config: Config, text: Sequence[int], *, ranks: int) -> list[list[Trajectory]]:
    """A group for each rank, of answers as long as allowed to a prompt as long as allowed, enough to fill a micro-batch.

    Their tokens are those of `text`, the prompt's again and again, the answers' at random: what is alike would be computed once.
    """
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    count = 1 + config.learner.max_tokens_per_microbatch // response
    tokens, rng = np.asarray(text, dtype=np.int32), np.random.default_rng(0)
    mask = np.arange(prompt + response) >= prompt
    return [
        [
            own_behaviour(
                Trajectory(
                    group_id=f"longest-{rank}",
                    index=index,
                    prompt_id="longest",
                    messages=(),
                    token_ids=np.concatenate([np.resize(tokens, prompt), rng.choice(tokens, response)]),
                    response_mask=mask,
                    behaviour_logprobs=np.zeros(prompt + response, dtype=np.float32),
                    version_spans=(VersionSpan(prompt, prompt + response, 0),),
                    finish_reason="length",
                )
            )
            for index in range(count)
        ]
        for rank in range(ranks)
    ]


def fullest(plan: RankPlan) -> RankPlan:
    """The plan's fullest micro-batch, padding included, as an update of its own."""

    def padded_tokens(micro_batch: MicroBatch) -> int:
        return len(micro_batch) * max(map(packed_length, micro_batch), default=0)

    [micro_batches] = plan.updates
    return dataclasses.replace(plan, updates=((max(micro_batches, key=padded_tokens),),))


def own_behaviour(trajectory: Trajectory) -> Trajectory:
    """The answer as if the learner had written it: its ratio is 1, and no clip hides the gradient."""
    # What the engine could not give counts as the learner's own.
    unknown = np.where(trajectory.response_mask, np.nan, 0.0).astype(np.float32)
    return dataclasses.replace(trajectory, behaviour_logprobs=unknown)


def answer_of(prompt: Prompt, index: int, text: str, ids: Sequence[int]) -> Trajectory:
    """An answer that no policy wrote, to be judged: `ids` are its tokens."""
    return Trajectory(
        group_id=f"doctor-{prompt.prompt_id}",
        index=index,
        prompt_id=prompt.prompt_id,
        messages=(*prompt.messages, {"role": "assistant", "content": text}),
        token_ids=np.asarray(ids, dtype=np.int32),
        response_mask=np.ones(len(ids), dtype=bool),
        behaviour_logprobs=np.zeros(len(ids), dtype=np.float32),
        version_spans=(VersionSpan(0, len(ids), 0),) if len(ids) else (),
        finish_reason="stop",
        metadata={"prompt_length_messages": len(prompt.messages)},
    )
