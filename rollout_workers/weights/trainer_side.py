"""The learner's side of the NCCL transport: vLLM's own trainer engine, with the handshake driven by the orchestrator.

vLLM's engine wants to call the inference side itself. Here the orchestrator makes those calls (it owns deadlines and
acknowledgements) while the ranks send, so the client given to it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from rollout_workers.weights.manifest import Manifest, TensorRecord


class BucketSource(Protocol):
    """Named full tensors, bucket by bucket (`learner.weight_source.PolicyWeightSource`)."""

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]: ...

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...


class _DrivenElsewhere:
    """The inference side as vLLM's trainer engine sees it: the orchestrator calls the engines meanwhile."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class _RecordedSource(WeightSource):
    """The policy's tensors in vLLM's form; keeps the record of each tensor that was sent."""

    def __init__(self, source: BucketSource) -> None:
        self._source = source
        self.records: list[TensorRecord] = []

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype, shape) for name, dtype, shape in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.records = []
        for named in self._source.buckets():
            for name, tensor in named:
                self.records.append(TensorRecord.of(name, tensor))
                yield name, tensor


class NCCLSender:
    """Every rank makes one (gathering is collective); only rank 0 is in the NCCL group with the engines."""

    def __init__(self, source: BucketSource, init_info: Mapping[str, Any], rank: int) -> None:
        self._source = _RecordedSource(source)
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(**init_info, rank=rank), client=_DrivenElsewhere(), source=self._source
        )

    def send(self, version: int) -> Manifest:
        """Broadcast every tensor; returns what was sent."""
        self._engine.send_weights()
        return Manifest(version, tuple(self._source.records))

    def close(self) -> None:
        self._engine.shutdown()


def update_info(source: BucketSource) -> dict[str, Any]:
    """What the engines must be told to expect, in the order it will be sent."""
    metadata = source.metadata()
    return {
        "names": [name for name, _, _ in metadata],
        "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in metadata],
        "shapes": [list(shape) for _, _, shape in metadata],
    }
