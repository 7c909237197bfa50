"""The learner's side of a broadcast: the policy as named full tensors, bucket by bucket, from any ZeRO stage.

Names, shapes and types are those of the Hugging Face checkpoint, which is what an engine loads. Under ZeRO-3 the
parameters of one bucket at a time are gathered, on all ranks in the same order; elsewhere nothing is copied. LoRA
adapters are merged on the way out, so the engine serves an ordinary model; or they alone go out, named as in peft's files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from learner.policy import Policy
from learner.shards import full_numel, full_shape, grouped


@dataclass(frozen=True)
class _Unit:
    """One tensor of the checkpoint: its parameter, and the LoRA layer to merge into it, if any."""

    name: str
    parameter: torch.nn.Parameter
    lora_layer: Any = None

    @property
    def gathered(self) -> list[torch.nn.Parameter]:
        if self.lora_layer is None:
            return [self.parameter]
        adapters = (self.lora_layer.lora_A["default"].weight, self.lora_layer.lora_B["default"].weight)
        return [self.parameter, *adapters]

    def tensor(self) -> torch.Tensor:
        """The checkpoint's tensor; call while its parameters are gathered."""
        if self.lora_layer is None:
            return self.parameter.detach()
        # The product in float32, one rounding at the end: small updates must not be lost twice.
        a = self.lora_layer.lora_A["default"].weight.detach().float()
        b = self.lora_layer.lora_B["default"].weight.detach().float()
        merged = self.parameter.detach().to(torch.float32, copy=True)
        merged.addmm_(b, a, alpha=self.lora_layer.scaling["default"])
        return merged.to(self.parameter.dtype)


class PolicyWeightSource:
    """Re-iterable: each pass yields every tensor of the checkpoint (or `adapter`) once, in the same order on every rank."""

    def __init__(self, policy: Policy, *, zero_stage: int, bucket_bytes: int, adapter: bool = False) -> None:
        self._zero_stage = zero_stage
        self._bucket_bytes = bucket_bytes
        self._units = _adapter_units(policy) if adapter else _units(policy)

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Named tensors, about `bucket_bytes` at a time. A bucket's tensors are valid until the next is asked for."""
        for units in self._grouped():
            with self._gathered(units):
                yield [(unit.name, unit.tensor()) for unit in units]

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and full shape of every tensor, without gathering any."""
        return [(unit.name, unit.parameter.dtype, full_shape(unit.parameter)) for unit in self._units]

    def _grouped(self) -> Iterator[list[_Unit]]:
        def unit_bytes(unit: _Unit) -> int:
            return full_numel(unit.parameter) * unit.parameter.element_size()

        return grouped(self._units, unit_bytes, self._bucket_bytes)

    def _gathered(self, units: Sequence[_Unit]) -> contextlib.AbstractContextManager[Any]:
        if self._zero_stage < 3:
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([p for unit in units for p in unit.gathered])


def _adapter_units(policy: Policy) -> list[_Unit]:
    """The A and B of every adapted layer; the names of the base model are those inside peft's wrapper."""
    return [
        _Unit(f"base_model.model.{name.replace('.default.weight', '.weight')}", parameter)
        for name, parameter in policy.causal_lm.named_parameters()
        if name.endswith((".lora_A.default.weight", ".lora_B.default.weight"))
    ]


def _units(policy: Policy) -> list[_Unit]:
    if not policy.is_lora:
        return [_Unit(name, parameter) for name, parameter in policy.model.named_parameters()]
    from peft.tuners.lora import LoraLayer

    units = []
    for name, parameter in policy.causal_lm.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        module_name, _, leaf = name.rpartition(".")
        if module_name.endswith(".base_layer"):
            layer_name = module_name.removesuffix(".base_layer")
            layer = policy.causal_lm.get_submodule(layer_name)
            if not isinstance(layer, LoraLayer):
                raise TypeError(f"{layer_name} has a base_layer but is no LoRA layer")
            units.append(_Unit(f"{layer_name}.{leaf}", parameter, layer if leaf == "weight" else None))
        else:
            units.append(_Unit(name, parameter))
    return units
