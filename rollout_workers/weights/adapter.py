"""An adapter in the engine's process: one LoRA adapter, always in the same place, whose content is replaced.

Every request names `ADAPTER` (`request()`), also before the first update: `begin` puts an adapter of zeros there, with which
the engine computes as its base model. `install` takes the old adapter out of everything that vLLM keeps of it (the registry
of adapters, the active slot, the packed tensors) and puts the new one in, so that a request that was being written goes on
under the new one. Tensors are named as in peft's files; tensor-parallel workers each cut what is theirs out of them.

Updates do not go through vLLM's weight-transfer engines: at the end of an update these drop all adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

ADAPTER = 1


def request() -> LoRARequest:
    """What every request to the engine names. The path is never read: the adapter is there before the first request."""
    return LoRARequest("policy", ADAPTER, "/nonexistent/policy")


def begin(manager: Any, modules: Collection[str]) -> list[str]:
    """Put the adapter of zeros in its place, unless there are `modules` (Hugging Face names) that this engine can't adapt.

    Returns these.
    """
    adapters = manager._adapter_manager
    served = set(adapters.modules).union(*adapters.packed_modules.values())
    mapper = _renaming(adapters.model)
    missing = [
        name
        for name in modules
        if parse_fine_tuned_lora_name(f"base_model.model.{name}.lora_A.weight", mapper)[0] not in served
    ]
    if missing:
        return missing
    manager.add_dummy_lora(request(), rank=1)
    adapters.activate_adapter(ADAPTER)
    if manager.device.type == "cpu":
        _compute_as_one(adapters, manager.max_num_batched_tokens, manager.max_num_seqs)
    return []


def install(manager: Any, tensors: Mapping[str, torch.Tensor], *, rank: int, alpha: float) -> None:
    """Replace the adapter by the one that `tensors` are; layers without tensors are as in the base model."""
    adapters = manager._adapter_manager
    whole = _pairs(tensors)
    if not whole:
        return  # nothing but halves arrived, which the manifest will tell
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER,
        whole,
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=_renaming(adapters.model),
        skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
    )
    adapters.remove_adapter(ADAPTER)
    adapters.add_adapter(adapter)
    adapters.activate_adapter(ADAPTER)


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without tensors whose other half did not arrive: vLLM would fail on them, without the missing one's name."""
    exchanged = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if ".".join(exchanged.get(part, part) for part in name.split(".")) in tensors
    }


def _renaming(model: Any) -> Any:
    """How the model's class renames modules of the checkpoint; None: not at all."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


class _OneAdapter(PunicaWrapperCPU):
    """vLLM's LoRA arithmetic for CPUs copies the adapter once for each token. All tokens have the same one here."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """`y` [tokens, outputs] += (x A^T) B^T, slice by slice; scaling is in B already."""
        if self.no_lora:
            return
        if self.batch_size != 1:  # tokens without an adapter among the others: none of a request
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **options)
            return
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            hidden = torch.nn.functional.linear(x, a[0, 0])
            y[:, start : start + size] += torch.nn.functional.linear(hidden, b[0, 0])
            start += size


def _compute_as_one(adapters: Any, max_tokens: int, max_requests: int) -> None:
    replaced = {
        id(old): (name, _OneAdapter(max_tokens, max_requests, old.device))
        for name, old in adapters.punica_wrapper_mapping.items()
    }
    for layer in adapters.modules.values():
        layer.set_mapping(replaced[id(layer.punica_wrapper)][1])
    adapters.punica_wrapper_mapping = dict(replaced.values())
    adapters._last_mapping = None  # what the old ones were told of the batch, the new ones were not
