"""Tensors into buckets and out again, and buckets into files without a name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_workers.weights.bucket import Bucket, Slot, pack, unpack
from rollout_workers.weights.spool import Spool

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def named_tensors(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shapes = [[3], *draw(st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=6))]
    return [
        (f"layer.{i}.weight", (torch.randn(shape, generator=generator) * 5).to(draw(st.sampled_from(DTYPES))))
        for i, shape in enumerate(shapes)
    ]


@settings(deadline=None)
@given(named_tensors())
def test_what_is_packed_comes_out_again(tensors: list[tuple[str, torch.Tensor]]) -> None:
    bucket = pack(tensors)
    assert bucket.data.dtype == np.uint8
    found = list(unpack(bucket.slots, torch.from_numpy(bucket.data)))
    assert [name for name, _ in found] == [name for name, _ in tensors]
    for (_, actual), (_, expected) in zip(found, tensors, strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert torch.equal(actual, expected)
    end = 0
    for slot in bucket.slots:
        assert slot.offset_bytes % 64 == 0
        assert end <= slot.offset_bytes < end + 64
        end = slot.offset_bytes + slot.size_bytes
    assert len(bucket.data) == end


def test_a_tensor_is_copied_in_and_viewed_out() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T  # not contiguous
    bucket = pack([("w", tensor.requires_grad_())])
    assert bucket.slots == (Slot("w", "float32", (3, 2), 0, 24),)
    data = torch.from_numpy(bucket.data)
    ((_, view),) = unpack(bucket.slots, data)
    assert torch.equal(view, tensor.detach())
    assert view.data_ptr() == data.data_ptr()


def test_a_bucket_may_be_read_only_as_ray_hands_it_out() -> None:
    bucket = pack([("w", torch.arange(4.0))])
    bucket.data.flags.writeable = False
    spool = Spool()
    spool.add(bucket)
    (info,) = spool.update_infos()
    assert Path(info["path"]).read_bytes() == bucket.data.tobytes()
    spool.clear()


def test_a_spool_keeps_buckets_in_order_with_their_layout() -> None:
    buckets = [
        pack([("a", torch.arange(4.0)), ("b", torch.ones(3, dtype=torch.bfloat16))]),
        pack([]),
        pack([("c", torch.ones(2))]),
    ]
    spool = Spool()
    for bucket in buckets:
        spool.add(bucket)
    infos = spool.update_infos()
    assert len(infos) == 3
    for info, bucket in zip(infos, buckets, strict=True):
        data = torch.frombuffer(bytearray(Path(info["path"]).read_bytes() or b"\0"), dtype=torch.uint8)
        slots = [Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in info["slots"]]
        assert tuple(slots) == bucket.slots
        for (name, actual), (_, expected) in zip(
            unpack(slots, data), unpack(bucket.slots, torch.from_numpy(bucket.data)), strict=True
        ):
            assert torch.equal(actual, expected), name
    spool.clear()
    assert spool.update_infos() == []


def test_nothing_of_a_spool_is_left_behind() -> None:
    def files() -> set[str]:
        return {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        }

    shared_before = set(os.listdir("/dev/shm"))
    spool = Spool()
    spool.add(pack([("w", torch.arange(1000.0))]))
    assert any("headway-weights" in name for name in files())
    assert {name for name in os.listdir("/dev/shm") if "headway" in name} <= shared_before, "it has no name anywhere"
    spool.clear()
    assert not any("headway-weights" in name for name in files())


def test_a_bucket_that_does_not_fit_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    spool = Spool()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        spool.add(Bucket((), np.zeros(10, dtype=np.uint8)))
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before
    assert spool.update_infos() == []
