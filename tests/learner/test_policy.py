"""The policy network: what it computes besides gradients (those are in test_gradient_invariance)."""

from __future__ import annotations

import pytest
import torch
from learner_data import batch_of

from learner.policy import Policy, PolicySettings
from learner.tensors import build_tensors, text_tensors


@pytest.fixture(scope="module")
def policy(tiny_path: str) -> Policy:
    return Policy(PolicySettings(tiny_path, "float32"))


def test_logprobs_of_texts_do_not_depend_on_their_neighbours(policy: Policy) -> None:
    texts = [[1, 5, 9, 200, 31], [7, 8], [300, 2, 2, 4, 5, 6, 17, 90]]
    with torch.no_grad():
        together, _ = policy(text_tensors(texts), 1.0)
        for number, text in enumerate(texts):
            logits = policy.model(input_ids=torch.tensor([text])).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
            torch.testing.assert_close(together[number, : len(text) - 1], expected, rtol=0, atol=1e-5)
            assert not together[number, len(text) - 1 :].any()


def test_values_outside_the_mask_are_zero(policy: Policy) -> None:
    rows, payloads = batch_of([3, 2], seed=8)
    batch = build_tensors(tuple(tuple(group) for group in rows), payloads)
    logprobs, entropy = policy(batch, 0.7)
    assert logprobs.shape == entropy.shape == batch.response_mask.shape
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not logprobs[~batch.response_mask].any()
    assert not entropy[~batch.response_mask].any()
    assert (logprobs[batch.response_mask] < 0).all()
    assert (entropy[batch.response_mask] > 0).all()


def test_ranks_start_with_equal_adapters(tiny_path: str) -> None:
    """Each rank makes its own: a seed keeps them equal, whatever was drawn before."""
    first = Policy(PolicySettings(tiny_path, "float32", lora_rank=4, seed=7))
    torch.rand(3)
    second = Policy(PolicySettings(tiny_path, "float32", lora_rank=4, seed=7))
    third = Policy(PolicySettings(tiny_path, "float32", lora_rank=4, seed=8))
    states = [dict(p.named_parameters()) for p in (first, second, third)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_only_adapters_of_a_lora_policy_learn(tiny_path: str) -> None:
    policy = Policy(PolicySettings(tiny_path, "float32", lora_rank=4))
    learning = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert learning
    assert all(".lora_A." in name or ".lora_B." in name for name in learning)
    assert not any("lm_head" in name or "embed_tokens" in name for name in learning), "tied tensors stay as they are"


def test_the_reference_of_a_lora_policy_is_its_base(policy: Policy, tiny_path: str) -> None:
    lora = Policy(PolicySettings(tiny_path, "float32", lora_rank=4))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
        batch = text_tensors([[1, 5, 9, 200, 31]])
        base, adapted = policy(batch, 1.0)[0], lora(batch, 1.0)[0]
        with lora.as_reference():
            reference = lora(batch, 1.0)[0]
        again = lora(batch, 1.0)[0]
    torch.testing.assert_close(reference, base, rtol=0, atol=1e-6)
    assert not torch.allclose(adapted, base, atol=1e-3)
    assert torch.equal(again, adapted)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_float32_head_rounds_no_logit(tiny_path: str, lora_rank: int) -> None:
    """Its logprobs are those of the exact product of bfloat16 hidden states and weight; a bfloat16 head's are not."""
    text = [1, 5, 9, 200, 31, 77, 78, 79]
    errors = {}
    for fp32_head in (False, True):
        policy = Policy(PolicySettings(tiny_path, "bfloat16", lora_rank=lora_rank, fp32_head=fp32_head))
        logprobs = policy(text_tensors([text]), 1.0)[0].detach().double()
        causal_lm = policy.causal_lm
        with torch.no_grad():
            hidden = causal_lm.model(input_ids=torch.tensor([text])).last_hidden_state[0, :-1]
            logits = hidden.double() @ causal_lm.get_output_embeddings().weight.double().T
        exact = logits.log_softmax(-1).gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        errors[fp32_head] = float((logprobs[0] - exact).abs().max())
    assert errors[True] < 2e-6
    assert errors[False] > 1e-4


def test_forward_passes_repeat_exactly(policy: Policy) -> None:
    """No dropout: the ratio between two passes over the same weights is 1."""
    batch = text_tensors([[1, 5, 9, 200, 31]])
    assert policy.training
    with torch.no_grad():
        assert torch.equal(policy(batch, 1.0)[0], policy(batch, 1.0)[0])
