"""The engine's side of a broadcast: vLLM weight-transfer engines that prove what they received.

Both transports record the checksum of every tensor on its way into the model (`received`), which the actor
reads through `EngineExtension` and returns to the orchestrator for comparison with the manifest.

- `headway_shared_memory` reads buckets that the rollout actor prepared (`spool.py`); any device, no NCCL.
- `headway_nccl` is vLLM's own NCCL engine; only the checksum is ours.

An adapter's tensors come the first way, and `adapter.install` takes them.

Runs inside vLLM's engine process; registered there by `vllm_plugin.register`.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout_workers.weights import adapter
from rollout_workers.weights.bucket import Slot, unpack
from rollout_workers.weights.manifest import checksum


class _Recorder:
    """Stands for the model while weights are received: passes them on, and keeps their checksums."""

    def __init__(self, model: Any, received: dict[str, int]) -> None:
        self._model = model
        self._received = received

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return self._model.load_weights(self._recorded(weights))

    def _recorded(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._received[name] = checksum(tensor)
            yield name, tensor


def _mapped(path: str, slots: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket that the rollout actor prepared, without a copy."""
    with open(path, "rb") as file:
        # A private writable map: torch wants writable memory, the file is never written.
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    return unpack([Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in slots], data)


def refresh_packed_head(model: torch.nn.Module) -> None:
    """Make packed copies of embedding and head weights again.

    On CPUs vLLM keeps a packed copy of a tied output head that a reload does not renew: logits would go on
    coming from the old head without any error. Embedding methods that keep no copy make this a no-op.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: a file to map, and where its tensors lie."""

    path: str
    slots: list[dict[str, Any]]


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.received: dict[str, int] = {}

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        self.received = {}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        _Recorder(self.model, self.received).load_weights(
            (name, tensor.to(self.device)) for name, tensor in _mapped(update_info.path, update_info.slots)
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_packed_head(self.model)

    def shutdown(self) -> None:
        """No connection to close."""


class RecordingNCCLEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine, with the checksum of each received tensor kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.received: dict[str, int] = {}

    def start_weight_update(self) -> None:
        self.received = {}
        super().start_weight_update()

    def receive_weights(self, update_info: Any) -> None:
        model: Any = self.model
        self.model: Any = _Recorder(model, self.received)
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        refresh_packed_head(self.model)


class EngineExtension:
    """Methods that vLLM adds to its workers (`worker_extension_cls`), called by `collective_rpc`."""

    def headway_received(self) -> dict[str, int]:
        """Checksums of what the last update delivered to this worker, by tensor name."""
        return self.weight_transfer_engine.received  # type: ignore[attr-defined]

    def headway_begin_adapter(self, modules: Collection[str]) -> list[str]:
        """Before the first request of an engine with an adapter; see `adapter.begin`."""
        return adapter.begin(self.model_runner.lora_manager, modules)  # type: ignore[attr-defined]

    def headway_install_adapter(self, buckets: Sequence[Mapping[str, Any]], rank: int, alpha: float) -> dict[str, int]:
        """Replace the adapter by the one in the buckets (`Spool.update_infos`); checksums of what arrived, by tensor name."""
        tensors = dict(item for bucket in buckets for item in _mapped(bucket["path"], bucket["slots"]))
        received = {name: checksum(tensor) for name, tensor in tensors.items()}  # vLLM scales them in place
        adapter.install(self.model_runner.lora_manager, tensors, rank=rank, alpha=alpha)  # type: ignore[attr-defined]
        return received
