"""What a rank holds of the trainable parameters under each of ZeRO's stages.

Two things differ there: the weights that compute, and the float32 masters that the optimizer steps. `local_values` are the first;
`parts` are the second, as pieces of flattened parameters with the tensors that AdamW knows them by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from learner.policy import Policy

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Elements of the flattened parameter `name` from `start` on: those of `stepped`, a tensor of the optimizer, from `offset`."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    length: int
    stepped: torch.Tensor
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part's elements of a tensor that has `stepped`'s shape: a view, [length]."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)


def trainable(policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Also where ZeRO-3 holds only a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: torch.nn.Parameter) -> int:
    return torch.Size(full_shape(parameter)).numel()


def grouped(items: Iterable[Item], size_bytes: Callable[[Item], int], most_bytes: int) -> Iterator[list[Item]]:
    """The items in order, in lists of at most `most_bytes`, or of a single one that is larger."""
    group: list[Item] = []
    total = 0
    for item in items:
        size = size_bytes(item)
        if group and total + size > most_bytes:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


def parts(policy: Policy, zero: Any, *, zero_stage: int, rank: int) -> Iterator[Part]:
    """What this rank's optimizer steps; `zero` is DeepSpeed's optimizer around it. Together the ranks have everything, and without
    ZeRO each of them has."""
    for name, parameter in trainable(policy):
        if zero_stage == 0:
            yield Part(name, parameter, 0, parameter.numel(), parameter, 0)
        elif zero_stage < 3:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:  # else other ranks have all of it
                [stepped] = zero.optimizer.param_groups[mapping.param_group_index]["params"]
                own, flat = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                yield Part(name, parameter, own.start, own.numel, stepped, flat.start)
        else:
            group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            start = rank * length
            inside = min(length, full_numel(parameter) - start)  # behind it the last part is filled up
            if inside > 0:
                yield Part(name, parameter, start, inside, zero.fp32_partitioned_groups_flat[group], offset)


def local_values(policy: Policy) -> list[torch.Tensor]:
    """The weights that compute of each trainable parameter: under ZeRO-3 this rank's shard of it, else all of it."""
    return [getattr(parameter, "ds_tensor", parameter.data) for _, parameter in trainable(policy)]


def drop_gathered(policy: Policy, *, zero_stage: int) -> None:
    """ZeRO-3 keeps small parameters gathered: let go of those copies, so that changed shards are gathered anew. All ranks."""
    if zero_stage == 3:
        import deepspeed

        persistent = [p for p in policy.parameters() if getattr(p, "ds_persist", False)]
        with deepspeed.zero.GatheredParameters(persistent):
            pass
