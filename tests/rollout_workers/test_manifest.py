"""Checksums that notice what can go wrong with weights, and the comparison that names the tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout_workers.weights.manifest import Manifest, TensorRecord, WeightsNotDelivered, checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]

# Around the edges of the rows of 1024 words (8192 bytes) that a checksum is computed in.
SIZES = st.one_of(
    st.integers(1, 300), st.sampled_from([8190, 8191, 8192, 8193, 8194, 16384, 16389, 3 * 8192, 5 * 8192 + 77])
)


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@settings(deadline=None)
@given(SIZES, st.integers(0, 99), st.data())
def test_any_changed_byte_changes_it(size: int, seed: int, data: st.DataObject) -> None:
    original = random_bytes(size, seed)
    position = data.draw(st.integers(0, size - 1))
    changed = original.clone()
    changed[position] ^= data.draw(st.integers(1, 255))
    assert checksum(changed) != checksum(original)
    assert 0 <= checksum(original) < 2**64


@settings(deadline=None)
@given(st.integers(2, 200) | st.sampled_from([4096, 4097, 12288, 12301]), st.integers(0, 99), st.data())
def test_any_exchange_of_two_words_changes_it(words: int, seed: int, data: st.DataObject) -> None:
    original = random_bytes(2 * words, seed).view(torch.bfloat16)
    one, other = data.draw(st.integers(0, words - 1)), data.draw(st.integers(0, words - 1))
    swapped = original.view(torch.int16).clone()
    assume(swapped[one] != swapped[other])
    swapped[one], swapped[other] = swapped[other].clone(), swapped[one].clone()
    assert checksum(swapped) != checksum(original)


@settings(deadline=None)
@given(st.data())
def test_exchanged_signs_change_it(data: st.DataObject) -> None:
    """The highest bits of words, of which sums modulo a power of two lose most; also in one column of the rows."""
    tensor = torch.ones(5 * 8192 // 2).bfloat16()
    places = st.integers(0, len(tensor) - 1)
    tensor[data.draw(st.lists(places, min_size=1, max_size=20))] = -1.0
    one = data.draw(places)
    for other in {data.draw(places), (one + 4096) % len(tensor)}:
        swapped = tensor.clone()
        swapped[one], swapped[other] = tensor[other], tensor[one]
        assert (checksum(swapped) == checksum(tensor)) == torch.equal(swapped, tensor)


@settings(deadline=None)
@given(st.integers(2, 90), st.integers(2, 90), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_another_order_of_the_same_numbers_changes_it(rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, columns, generator=generator).to(dtype)
    assume(not torch.equal(tensor.T.reshape(-1), tensor.reshape(-1)))
    for other in (tensor.T, tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(1, 1)):
        if not torch.equal(other.reshape(-1), tensor.reshape(-1)):
            assert checksum(other) != checksum(tensor)


@pytest.mark.parametrize("shape", [(256, 4096), (4096, 32), (300, 576)])
def test_blocks_of_a_large_matrix_in_the_wrong_place_change_it(shape: tuple[int, int]) -> None:
    """As after a wrong split or merge of tensor-parallel shards."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for dimension in (0, 1):
        low, high = tensor.chunk(2, dimension)
        assert checksum(torch.cat([high, low], dimension)) != checksum(tensor)
    assert checksum(tensor.T) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 3, 4)])
def test_it_is_of_the_bytes_wherever_they_lie(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    padded = torch.zeros((*shape, 2), dtype=dtype)
    padded[..., 0] = tensor
    assert checksum(padded[..., 0]) == checksum(tensor) == checksum(tensor.clone().reshape(-1))


def test_nothing_has_a_checksum_too() -> None:
    assert checksum(torch.empty(0)) == checksum(torch.empty(3, 0))


def test_it_takes_a_parameter_and_leaves_it_alone() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    before = parameter.detach().clone()
    assert checksum(parameter) == checksum(before)
    assert torch.equal(parameter, before)


# The manifest


def manifest() -> Manifest:
    tensors = {
        "a.weight": torch.ones(2, 3),
        "b.weight": torch.arange(5, dtype=torch.bfloat16),
        "c.bias": torch.ones(()),
    }
    return Manifest(7, tuple(TensorRecord.of(name, tensor) for name, tensor in tensors.items()))


def received() -> dict[str, int]:
    return {record.name: record.checksum for record in manifest().records}


def test_a_record_says_what_was_sent() -> None:
    record = manifest().records[1]
    assert (record.name, record.dtype, record.shape) == ("b.weight", "bfloat16", (5,))
    assert manifest().total_bytes == 6 * 4 + 5 * 2 + 4


def test_what_was_sent_was_received() -> None:
    manifest().check(received(), "rollout-1")
    manifest().check(dict(reversed(received().items())), "rollout-1")  # in any order


@pytest.mark.parametrize("name", received())
def test_a_missing_tensor_is_named(name: str) -> None:
    found = received()
    del found[name]
    with pytest.raises(WeightsNotDelivered, match=rf"version 7: rollout-1 did not receive tensor '{name}'"):
        manifest().check(found, "rollout-1")


@pytest.mark.parametrize("name", received())
def test_a_damaged_tensor_is_named(name: str) -> None:
    found = received()
    found[name] ^= 1
    with pytest.raises(WeightsNotDelivered, match=rf"version 7: rollout-1 received tensor '{name}' damaged"):
        manifest().check(found, "rollout-1")


def test_an_unexpected_tensor_is_named() -> None:
    with pytest.raises(WeightsNotDelivered, match=r"version 7: rollout-1 received unexpected tensor 'lm_head.weight'"):
        manifest().check(received() | {"lm_head.weight": 5}, "rollout-1")
