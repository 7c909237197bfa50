"""What every formula is guarded with: options within their bounds, tensors of one shape, numbers wide enough.

A wrong option or shape is a ValueError that names it. Nothing here changes a tensor in place.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

# Instead of -inf, of a token that can't be: differences, products and squares of it are numbers.
LEAST_LOGPROB = -1e15


def require(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raises ValueError unless the option is a finite number within the bounds that are given."""
    bounds = [(">=", at_least), (">", above), ("<=", at_most), ("<", below)]
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if (
        number
        and (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
        and (above is None or value > above)
        and (below is None or value < below)
    ):
        return
    wanted = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    raise ValueError(f"{name} must be {wanted or 'a number'}, got {value!r}")


def require_band(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raises ValueError unless 0 <= low <= 1 <= high: a band that leaves out the ratio 1 would drop tokens without mismatch."""
    require(low_name, low, at_least=0, at_most=1)
    require(high_name, high, at_least=1)


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError unless all are of one shape, [1] and scalars apart: broadcasting [N] against [N, 1] makes [N, N]."""
    if len({tensor.shape for tensor in tensors.values() if tensor.numel() != 1 or tensor.dim() > 1}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"expected tensors of one shape, got {shapes}")


def require_advantages(advantages: Tensor, response_mask: Tensor) -> None:
    """Raises ValueError unless [B, T] or [B, 1] as the mask is [B, T]: [B] would be broadcast along the tokens where B is T."""
    if advantages.dim() != 2 or advantages.shape not in (response_mask.shape, (len(response_mask), 1)):
        raise ValueError(
            f"advantages must be [B, T] or [B, 1] as response_mask {list(response_mask.shape)}, got {list(advantages.shape)}"
        )


def wide(values: Tensor) -> Tensor:
    """At least float32, differentiably: exp(20) is infinite in float16, and a mean in bfloat16 has two digits."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
