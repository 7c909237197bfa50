"""A bucket: some tensors of one weight version as one run of bytes, the unit in which weights travel.

Ray's object store hands a bucket's array to every reader on a node without a copy, so one bucket object
serves all rollout actors there. Inside the array each tensor starts at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Bucket:
    slots: tuple[Slot, ...]
    data: np.ndarray  # uint8


def pack(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
    """Copy tensors (of any device) into one bucket."""
    import torch

    slots, end = [], 0
    for name, tensor in named_tensors:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(Slot(name, dtype, tuple(tensor.shape), offset, size))
        end = offset + size
    data = np.empty(end, dtype=np.uint8)
    for slot, (_, tensor) in zip(slots, named_tensors, strict=True):
        target = torch.from_numpy(data[slot.offset_bytes : slot.offset_bytes + slot.size_bytes])
        target.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return Bucket(tuple(slots), data)


def unpack(slots: Iterable[Slot], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensors in `data` (uint8 [bytes]), without a copy."""
    import torch

    for slot in slots:
        raw = data[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
        yield slot.name, raw.view(getattr(torch, slot.dtype)).view(slot.shape)
