"""What the frozen initial policy says of answers, wherever it lives; the ranks' gradients with it are in test_learner_rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from learner_data import batch_of, plans_of, trajectory
from plain_reference import frozen_distributions

from learner import losses
from learner.objective import Objective
from learner.policy import Policy, PolicySettings
from learner.reference import ReferenceActor, forward_passes, looked_up, visiting
from learner.settings import LearnerSettings
from learner.tensors import build_tensors

TEMPERATURE = 0.7


def settings(model: str, **changes: Any) -> LearnerSettings:
    return LearnerSettings(
        PolicySettings(model, "float32", **changes), Objective(losses.ppo_clip), "cpu", TEMPERATURE, 0, 0.0, 1
    )


@pytest.mark.parametrize(
    "cut",
    [{"max_tokens": 1, "share_prefixes": False}, {"max_tokens": 200, "share_prefixes": True}],
    ids=["apart", "shared"],
)
def test_an_actor_scores_each_answer_as_the_plain_model_does(tiny_path: str, cut: dict[str, Any]) -> None:
    _, payloads = batch_of((4, 1), seed=41)
    actor = ReferenceActor(settings(tiny_path, gradient_checkpointing=True), cut)
    policy = Policy(settings(tiny_path).policy)
    for answers in payloads.values():
        count, found = actor.score(answers)
        assert count == len(found) == len(answers)
        for answer in answers:
            distributions = frozen_distributions(policy, answer.token_ids, TEMPERATURE).numpy()
            at = np.flatnonzero(answer.response_mask)
            values = found[answer.group_id, answer.index]
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, distributions[at - 1, answer.token_ids[at]], rtol=0, atol=1e-5)


def test_an_answer_without_a_sampled_token_has_no_logprob(tiny_path: str) -> None:
    actor = ReferenceActor(settings(tiny_path), {"max_tokens": 200, "share_prefixes": True})
    silent = trajectory(0, 0, [1, 2, 3], [4, 5], [0, 0], [0.0, 0.0])
    spoken = trajectory(0, 1, [1, 2, 3], [4, 5], [1, 1], [-1.0, -1.0])
    _, found = actor.score([silent, spoken])
    assert {answer: len(values) for answer, values in found.items()} == {("g0", 0): 0, ("g0", 1): 2}


def test_what_actors_found_reaches_other_packings_token_by_token(tiny_path: str) -> None:
    """With a micro-batch without answers among them, as ranks without data have."""
    rows, payloads = batch_of((3, 2), seed=42)
    actor = ReferenceActor(settings(tiny_path), {"max_tokens": 1, "share_prefixes": False})
    found = {answer: values for answers in payloads.values() for answer, values in actor.score(answers)[1].items()}
    [plan] = plans_of([rows], ranks=1, max_tokens=200, share_prefixes=True)
    batches = [build_tensors(micro_batch, payloads) for micro_batch in (*plan.updates[0], ())]
    own = forward_passes(Policy(settings(tiny_path).policy), TEMPERATURE)(batches)
    for batch, mine, theirs in zip(batches, own, looked_up(found)(batches), strict=True):
        assert theirs.shape == batch.response_mask.shape
        assert not mine.requires_grad
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-5)


def test_a_visitors_weights_rest_where_they_were(tiny_path: str) -> None:
    """Also when the pass fails; what was copied to the device is let go."""
    model = Policy(settings(tiny_path).policy).requires_grad_(False)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}

    def fail() -> None:
        with visiting(model, torch.device("cpu")):
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.clone()
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
