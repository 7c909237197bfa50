"""What a broadcast must deliver, and the proof that it did.

A `Manifest` lists every tensor of one weight version with its shape, dtype and checksum, as the learner sent it. An
engine reports the checksum of each tensor that it received; `Manifest.check` compares the two and names the first
tensor that is missing, unexpected or different. The checksum is defined over the tensor's bytes with plain
torch operations, so that it can be taken on any device without copying to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_COLUMNS = 1024
_WORD_BYTES = 8


class WeightsNotDelivered(RuntimeError):
    """An engine did not receive exactly what the learner sent; the message names the tensor."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a weight version. `dtype` is torch's name without the prefix, e.g. `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorRecord:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum(tensor))


@dataclass(frozen=True)
class Manifest:
    version: int
    records: tuple[TensorRecord, ...]

    @property
    def total_bytes(self) -> int:
        return sum(_numel(r.shape) * _itemsize(r.dtype) for r in self.records)

    def check(self, received: Mapping[str, int], receiver: str) -> None:
        """Raise WeightsNotDelivered unless `received` (tensor name -> checksum) is exactly this manifest."""
        for record in self.records:
            if record.name not in received:
                raise WeightsNotDelivered(
                    f"weights of version {self.version}: {receiver} did not receive tensor {record.name!r}"
                )
            if received[record.name] != record.checksum:
                raise WeightsNotDelivered(
                    f"weights of version {self.version}: {receiver} received tensor {record.name!r} damaged "
                    f"(checksum {received[record.name]:#x}, sent {record.checksum:#x})"
                )
        extra = received.keys() - {record.name for record in self.records}
        if extra:
            raise WeightsNotDelivered(
                f"weights of version {self.version}: {receiver} received unexpected tensor {min(extra)!r}"
            )


def checksum(tensor: torch.Tensor) -> int:
    """A position-sensitive 64-bit checksum of a tensor's bytes.

    The bytes, read as 64-bit words in rows of 1024, are summed over rows and over columns (modulo 2^64): any changed word changes
    two of these sums, and so does any exchange of two different words. Each sum is hashed together with its place. Two passes
    at memory speed, on the tensor's own device.
    """
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = raw.numel()
    if size % _WORD_BYTES or raw.storage_offset() % _WORD_BYTES:  # a copy that can be read as words
        raw = torch.nn.functional.pad(raw, (0, -size % _WORD_BYTES))
    words = raw.view(torch.int64)
    full = words.numel() // _COLUMNS * _COLUMNS
    total = torch.full((), size, dtype=torch.int64, device=words.device)  # zeros of another size differ
    for part in (words[:full].view(-1, _COLUMNS), words[full:].view(1, -1)):
        if part.numel():
            for dimension in (1, 0):
                total = total * 1000003 + _hashed(part.sum(dimension)).sum()
    return int(total.item()) & (2**64 - 1)


def _hashed(sums: torch.Tensor) -> torch.Tensor:
    """Each number (int64 [N]) with its place in it: one to one, and with every bit spread over all (as in SplitMix64)."""
    hashed = sums ^ _places(len(sums), sums.device)
    for multiplier in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):  # SplitMix64's two, as signed numbers
        hashed = hashed * multiplier
        hashed = hashed ^ (hashed >> 32 & 0xFFFFFFFF)
    return hashed


@lru_cache(maxsize=64)
def _places(count: int, device: torch.device) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(20_11)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(device)


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _itemsize(dtype: str) -> int:
    import torch

    return getattr(torch, dtype).itemsize
