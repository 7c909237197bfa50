"""Logprobs and entropies of tokens, against the formula in float64, in chunks and whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.logprobs import logit_transform, token_logprobs, use_float32

HIDDEN, VOCABULARY = 16, 300


def setup(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (count,), generator=generator)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, HIDDEN, generator=generator))
    return hidden, targets, head


def test_a_float32_head_of_a_bfloat16_model_has_float32_gradients_rounded_once() -> None:
    """As if head and hidden states were float32 copies."""
    hidden, targets, head = setup(50, seed=3)
    head = head.bfloat16()
    low = hidden.detach().bfloat16().requires_grad_()
    use_float32(head)
    for chunk_tokens in (50, 20):
        options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": chunk_tokens}
        low.grad, head.weight.grad = None, None
        logprobs, _ = token_logprobs(low, targets, head, lambda logits: logits, **options)
        logprobs.sum().backward()
        copies = low.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
        expected = (copies[0] @ copies[1].T / 0.7).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        expected.sum().backward()
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
        for found, exact in zip((low.grad, head.weight.grad), (c.grad for c in copies), strict=True):
            assert found is not None
            assert exact is not None
            assert found.dtype == torch.bfloat16
            roundings = 1 if chunk_tokens == 50 else 3  # a chunk's gradient is rounded on its own
            assert (found.double() - exact).norm() <= roundings * 2**-9 * exact.norm()


def plain(
    hidden: torch.Tensor, targets: torch.Tensor, head: torch.nn.Linear, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden.double() @ head.weight.double().T / temperature
    distribution = logits.log_softmax(-1)
    return distribution[torch.arange(len(targets)), targets], -(distribution.exp() * distribution).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 150),
    chunk=st.integers(1, 200),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    entropy_gradient=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_the_formula(
    count: int, chunk: int, temperature: float, entropy_gradient: bool, seed: int
) -> None:
    hidden, targets, head = setup(count, seed)
    logprobs, entropy = token_logprobs(
        hidden,
        targets,
        head,
        lambda logits: logits,
        temperature=temperature,
        chunk_tokens=chunk,
        entropy_gradient=entropy_gradient,
    )
    expected, expected_entropy = plain(hidden, targets, head, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=2e-5)

    weights = torch.linspace(-1, 2, count)
    loss, expected_loss = (weights * logprobs).sum(), (weights * expected).sum()
    if entropy_gradient:
        loss, expected_loss = loss + (weights * entropy).sum(), expected_loss + (weights * expected_entropy).sum()
    wanted = torch.autograd.grad(expected_loss, [hidden, head.weight])
    for gradient, right in zip(torch.autograd.grad(loss, [hidden, head.weight]), wanted, strict=True):
        assert (gradient - right).norm() <= 1e-5 * right.norm()


def test_chunked_equals_whole() -> None:
    results = []
    for chunk in (1000, 7):
        hidden, targets, head = setup(40, seed=3)
        logprobs, entropy = token_logprobs(
            hidden, targets, head, lambda x: x, temperature=0.7, chunk_tokens=chunk, entropy_gradient=True
        )
        (logprobs.square() + entropy).sum().backward()
        results.append((logprobs, entropy, hidden.grad, head.weight.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=2e-5)


def test_entropy_is_only_watched_unless_its_gradient_is_asked_for() -> None:
    hidden, targets, head = setup(5, seed=1)
    _, entropy = token_logprobs(hidden, targets, head, lambda x: x, temperature=1.0, chunk_tokens=100)
    assert not entropy.requires_grad


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_head_s_logits_are_left_as_they_are(entropy_gradient: bool) -> None:
    """The logits belong to the model; a soft cap's backward pass, for one, reads them again."""
    hidden, targets, head = setup(5, seed=1)
    seen: list[torch.Tensor] = []

    def watch(logits: torch.Tensor) -> torch.Tensor:
        seen.extend((logits, logits.detach().clone()))
        return logits

    token_logprobs(hidden, targets, head, watch, temperature=0.5, chunk_tokens=100, entropy_gradient=entropy_gradient)
    logits, before = seen
    assert torch.equal(logits, before)


def test_extreme_logits_stay_finite() -> None:
    head = torch.nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1e4, 0.0], [0.0, 1e4], [0.0, 0.0]]))
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(
        hidden, torch.tensor([0, 1]), head, lambda x: x, temperature=1.0, chunk_tokens=9, entropy_gradient=True
    )
    assert logprobs.tolist() == [0.0, -1e4]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    hidden, targets, head = setup(70, seed=2)
    low, low_head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
    logprobs, _ = token_logprobs(low, targets, low_head, lambda x: x, temperature=0.7, chunk_tokens=1000)
    expected = (low_head(low).detach().double() / 0.7).log_softmax(-1)[torch.arange(70), targets]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    exact = torch.autograd.grad(plain(hidden, targets, head.float(), 0.7)[0].sum(), [hidden])[0]
    assert low.grad is not None
    assert (low.grad - exact).norm() <= 0.02 * exact.norm()


def test_what_models_do_to_their_logits_is_read_from_their_configuration() -> None:
    logits = torch.tensor([-50.0, 0.5, 50.0])
    assert logit_transform(SimpleNamespace())(logits) is logits
    torch.testing.assert_close(logit_transform(SimpleNamespace(logit_scale=0.25))(logits), logits * 0.25)
    torch.testing.assert_close(logit_transform(SimpleNamespace(logits_scaling=8.0))(logits), logits / 8)
    capped = logit_transform(SimpleNamespace(final_logit_softcapping=30.0))(logits)
    torch.testing.assert_close(capped, torch.tanh(logits / 30) * 30)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("cohere2", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("minicpm3", {"dim_model_base": 8, "q_lora_rank": 8, "kv_lora_rank": 8}),
        ("hyperclovax", {"logits_scaling": 4.0}),  # multiplies where Granite divides
        ("falcon_h1", {"lm_head_multiplier": 0.25, **MAMBA}),
        ("recurrent_gemma", {"logits_soft_cap": 0.1, "lru_width": 32}),
        ("gemma3_text", {"final_logit_softcapping": 0.1}),
    ],
)
def test_a_models_own_logits_are_those_of_its_head_transformed(kind: str, settings: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | settings)).eval()
    ids = torch.tensor([[1, 5, 9, 20, 31]])
    with torch.no_grad():
        hidden = getattr(model, model.base_model_prefix)(ids, use_cache=False).last_hidden_state
        found = logit_transform(model.config.get_text_config())(model.get_output_embeddings()(hidden))
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)


def test_a_soft_cap_keeps_its_gradient() -> None:
    hidden, targets, head = setup(20, seed=4)
    transform = logit_transform(SimpleNamespace(final_logit_softcapping=5.0))
    for chunk in (100, 3):
        logprobs, _ = token_logprobs(hidden, targets, head, transform, temperature=0.7, chunk_tokens=chunk)
        gradient = torch.autograd.grad(logprobs.sum(), [hidden])[0]
        logits = torch.tanh(head(hidden).double() / 5) * 5 / 0.7
        expected = logits.log_softmax(-1)[torch.arange(20), targets]
        right = torch.autograd.grad(expected.sum(), [hidden])[0]
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
        assert (gradient - right).norm() <= 1e-5 * right.norm()


def peak_bytes(tokens: int, vocabulary: int, entropy_gradient: bool) -> int:
    """The most memory that tensors of one forward and backward pass held at once, hidden states aside."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.weak import WeakIdKeyDictionary

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.peak = WeakIdKeyDictionary(), 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **kwargs or {})
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self.held[storage] = storage.nbytes()
            self.peak = max(self.peak, sum(self.held.values()))
            return out

    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    head = torch.nn.Linear(HIDDEN, vocabulary, bias=False)
    with Watch() as watch:
        logprobs, entropy = token_logprobs(
            hidden,
            torch.zeros(tokens).long(),
            head,
            logit_transform(SimpleNamespace()),
            temperature=1.0,
            chunk_tokens=CHUNK,
            entropy_gradient=entropy_gradient,
        )
        (logprobs + entropy).sum().backward()
    return watch.peak


CHUNK = 64


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_memory_is_that_of_one_chunk_s_logits(entropy_gradient: bool) -> None:
    """Four times the tokens take no more than their hidden states, and a larger vocabulary as much more as one chunk's."""
    few, many, wide = (
        peak_bytes(tokens, vocabulary, entropy_gradient)
        for tokens, vocabulary in ((128, 20_000), (512, 20_000), (512, 40_000))
    )
    logits = CHUNK * 20_000 * 4
    assert few > logits, "a chunk's logits are not seen"
    assert many < 1.05 * few
    assert many < 512 * 20_000 * 4, "all of them at once"
    assert wide < 2.05 * many
    copies = (many - 2 * HIDDEN * 20_000 * 4) / logits  # the head and its gradient are no logits
    assert copies < (7 if entropy_gradient else 5.5)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_vocabulary_with_impossible_tokens(entropy_gradient: bool) -> None:
    """Logits of -inf, as padding of a vocabulary has: 0 * -inf must be in neither entropy nor gradient."""
    hidden, targets, head = setup(8, seed=5)
    results = []
    for width in (VOCABULARY, VOCABULARY + 4):

        def padded(logits: torch.Tensor, more: int = width - VOCABULARY) -> torch.Tensor:
            return torch.nn.functional.pad(logits, (0, more), value=-torch.inf)

        options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 8, "entropy_gradient": entropy_gradient}
        logprobs, entropy = token_logprobs(hidden, targets, head, padded, **options)
        loss = logprobs.sum() + (entropy.sum() if entropy_gradient else 0.0)
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, head.weight))))
    for plain_one, with_padding in zip(*results, strict=True):
        torch.testing.assert_close(with_padding, plain_one)
