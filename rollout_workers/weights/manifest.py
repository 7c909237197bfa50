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

_COLUMNS = 4096


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

    The bytes, read as 16-bit words in rows of 4096, are summed over rows and over columns, and both sums are
    dotted with odd pseudo-random weights (arithmetic modulo 2^64): any changed word changes the result, and so
    does any exchange of two different words. Two passes at memory speed, on the tensor's own device.
    """
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 2:
        raw = torch.nn.functional.pad(raw, (0, 1))
    words = raw.view(torch.int16)
    full = words.numel() // _COLUMNS * _COLUMNS
    total = torch.full((), raw.numel(), dtype=torch.int64, device=words.device)  # zeros of another size differ
    for part in (words[:full].view(-1, _COLUMNS), words[full:].view(1, -1)):
        if part.numel():
            rows, columns = part.shape
            total = total * 1000003 + (part.sum(1, dtype=torch.int64) * _weights(rows, part.device)).sum()
            total = total * 1000003 + (part.sum(0, dtype=torch.int64) * _weights(columns, part.device)).sum()
    return int(total.item()) & (2**64 - 1)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(20_11)
    return (torch.randint(0, 2**62, (count,), generator=generator) | 1).to(device)


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _itemsize(dtype: str) -> int:
    import torch

    return getattr(torch, dtype).itemsize
