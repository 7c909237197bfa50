"""Attention of rows that branch, against a softmax with the whole mask, and FlexAttention's mask against it."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import batch_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from learner import attention, policy
from learner.attention import block_mask, sees, tree_attention, tree_mask
from learner.policy import Policy, PolicySettings
from learner.prefix_tree import PrefixTree
from learner.tensors import build_tensors


@pytest.fixture(autouse=True)
def node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the narrow rows of tests."""
    monkeypatch.setattr(attention, "WHOLE_MASK_BELOW_TOKENS", 0)


TREES = st.lists(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=1, max_size=6), min_size=1, max_size=3
)


def ends_of(trees: list[list[list[int]]]) -> Tensor:
    """`subtree_end` of rows that hold these sequences, padded to one width."""
    rows = [PrefixTree.of([np.array(sequence) for sequence in tree]).subtree_end for tree in trees]
    width = max(map(len, rows))
    padded = [np.concatenate([np.where(row == len(row), width, row), [width] * (width - len(row))]) for row in rows]
    return torch.tensor(np.array(padded), dtype=torch.int64)


def dense(subtree_end: Tensor) -> Tensor:
    """bool [B, T, T]: what sees what, by the definition."""
    place = torch.arange(subtree_end.shape[1], device=subtree_end.device)
    return (place <= place[:, None]) & (place[:, None] < subtree_end[:, None, :])


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax over what is seen, [B, T, H, V]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@settings(max_examples=80, deadline=None)
@given(
    trees=TREES,
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    value_width=st.sampled_from([16, 8]),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_are_those_of_a_softmax_with_the_whole_mask(
    trees: list[list[list[int]]], heads: tuple[int, int], value_width: int, scale: float | None, seed: int
) -> None:
    ends = ends_of(trees)
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int, width: int) -> Tensor:
        return torch.randn(len(ends), count, ends.shape[1], width, generator=generator).requires_grad_()

    inputs = drawn(heads[0], 16), drawn(heads[1], 16), drawn(heads[1], value_width)
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    found, _ = tree_attention(module, *inputs, tree_mask(ends), scaling=scale, dropout=0.5)
    expected = plain(*inputs, dense(ends), scale or 1 / math.sqrt(16))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(found.shape, generator=generator)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for gradient, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_joined_in_float32() -> None:
    ends = ends_of([[[1] * 40 + [n] * 30 for n in range(8)]])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, ends.shape[1], 32, generator=generator).bfloat16() for _ in range(3))
    found, _ = tree_attention(torch.nn.Module(), query, key, value, tree_mask(ends))
    assert found.dtype == torch.bfloat16
    exact = plain(query.double(), key.double(), value.double(), dense(ends), 1 / math.sqrt(32))
    assert (found - exact).norm() < 0.004 * exact.norm()  # 8 bits


@settings(max_examples=80, deadline=None)
@given(trees=TREES, repeats=st.sampled_from([1, 37, 64, 130]))
def test_flex_attention_is_told_the_blocks_that_it_would_find_itself(
    trees: list[list[list[int]]], repeats: int
) -> None:
    ends = ends_of([[list(np.repeat(sequence, repeats)) for sequence in tree] for tree in trees])
    width = ends.shape[1]
    found, expected = block_mask(ends), create_block_mask(sees(ends), len(ends), None, width, width, device="cpu")
    assert torch.equal(create_mask(found.mask_mod, len(ends), None, width, width, device="cpu")[:, 0], dense(ends))
    assert (found.shape, found.BLOCK_SIZE) == ((len(ends), 1, width, width), expected.BLOCK_SIZE)
    for of in ("kv", "full_kv", "q", "full_q"):
        counts, right_counts = getattr(found, f"{of}_num_blocks"), getattr(expected, f"{of}_num_blocks")
        assert torch.equal(counts, right_counts), of
        listed = torch.arange(counts.shape[-1]) < counts[..., None]  # what stands behind them is never read
        blocks, right = getattr(found, f"{of}_indices"), getattr(expected, f"{of}_indices")
        assert torch.equal(blocks.where(listed, 0), right.where(listed, 0)), of


@pytest.mark.thorough
def test_flex_attention_is_compiled_a_few_times_and_has_the_gradients_of_the_whole_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of the compiler but the kernels, which have no backward pass on CPUs."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    attention._flex_attention.cache_clear()
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    before = counters["stats"]["unique_graphs"]
    try:
        for batch, width in [(1, 384), (2, 500), (3, 512), (1, 777), (2, 641), (1, 1024), (4, 513)]:
            ends = torch.full((batch, width), width)
            ends[:, 100 : width // 2] = width // 2
            drawn = [torch.randn(batch, heads, width, 16, generator=generator) for heads in (9, 3, 3)]
            with torch.no_grad():
                tree_attention(module, *drawn, block_mask(ends), scaling=0.3)
            inputs = [tensor.requires_grad_() for tensor in drawn]
            found, _ = tree_attention(module, *inputs, block_mask(ends), scaling=0.3)
            expected = plain(*inputs, dense(ends), 0.3)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            weights = torch.randn(found.shape, generator=generator)
            right = torch.autograd.grad((expected * weights).sum(), inputs)
            for gradient, of in zip(torch.autograd.grad((found * weights).sum(), inputs), right, strict=True):
                torch.testing.assert_close(gradient, of, rtol=1e-4, atol=1e-5)
    finally:
        attention._flex_attention.cache_clear()
        torch._dynamo.reset()
    assert counters["stats"]["unique_graphs"] - before <= 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's kernels have a backward pass on GPUs only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_outputs_and_gradients_are_those_of_the_whole_mask(dtype: torch.dtype) -> None:
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    generator = torch.Generator("cuda").manual_seed(0)
    for batch, width in [(1, 300), (1, 384), (2, 500), (3, 512), (1, 777), (2, 4100), (1, 2048)]:
        ends = torch.full((batch, width), width, device="cuda")
        ends[:, 100 : width // 2] = width // 2
        inputs = [
            torch.randn(batch, heads, width, 64, generator=generator, device="cuda", dtype=dtype).requires_grad_()
            for heads in (9, 3, 3)
        ]
        found, _ = tree_attention(module, *inputs, tree_mask(ends), scaling=0.3)
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected = plain(*exact, dense(ends), 0.3)
        weights = torch.randn(found.shape, generator=generator, device="cuda", dtype=dtype)
        gradients = torch.autograd.grad((found * weights).sum(), inputs)
        right = torch.autograd.grad((expected * weights).sum(), exact)
        for values, of in zip((found, *gradients), (expected, *right), strict=True):
            assert (values - of).norm() < (5e-3 if dtype == torch.float32 else 2e-2) * of.norm()


@settings(max_examples=80, deadline=None)
@given(trees=TREES)
def test_a_narrow_row_has_the_whole_mask(trees: list[list[list[int]]]) -> None:
    ends = ends_of(trees)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "WHOLE_MASK_BELOW_TOKENS", ends.shape[1] + 1)
        mask = tree_mask(ends)
    if mask is None:
        assert torch.equal(dense(ends), torch.ones_like(dense(ends)).tril())
    else:
        assert torch.equal(mask[:, 0], dense(ends))


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_rows_that_do_not_branch_need_no_mask(lengths: list[int]) -> None:
    assert tree_mask(ends_of([[list(range(length))] for length in lengths])) is None


def test_flex_attention_gives_the_logprobs_of_the_cpu_s_own_path(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward only, and not compiled: on CPUs it has no backward pass."""
    rows, payloads = batch_of([4, 1, 3], seed=5)
    batch = build_tensors(tuple(tuple(group) for group in rows), payloads)
    model = Policy(PolicySettings(tiny_path, "float32"))
    calls: list[str] = []
    original = attention.tree_attention

    def watch(module: torch.nn.Module, *inputs: Tensor, **options: object) -> object:
        calls.append(type(inputs[3]).__name__)
        return original(module, *inputs, **options)

    monkeypatch.setattr(attention, "tree_attention", watch)
    attention.use_tree_attention(model.model)
    with torch.no_grad():
        expected = model(batch, 0.7)
        monkeypatch.setattr(policy, "tree_mask", block_mask)
        with torch.compiler.set_stance("force_eager"):
            found = model(batch, 0.7)
    assert set(calls[: len(calls) // 2]) == {"Tensor"}
    assert set(calls[len(calls) // 2 :]) == {"BlockMask"}
    for values, right in zip(found, expected, strict=True):
        torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)


def test_attention_drops_nothing_whatever_the_model_s_configuration_says(tiny_path: str) -> None:
    rows, payloads = batch_of([3, 2], seed=8)
    plain_policy, dropping = Policy(PolicySettings(tiny_path, "float32")), Policy(PolicySettings(tiny_path, "float32"))
    for module in dropping.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.9
    assert dropping.training
    for share in (True, False):
        micro_batch = tuple(tuple(g) for g in rows) if share else tuple((r,) for g in rows for r in g)
        batch = build_tensors(micro_batch, payloads)
        with torch.no_grad():
            assert torch.equal(dropping(batch, 1.0)[0], plain_policy(batch, 1.0)[0])


def test_a_model_whose_attention_is_its_own_is_refused() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(ValueError, match="FalconForCausalLM has attention of its own"):
        attention.use_tree_attention(FalconForCausalLM(config))
