"""Aggregation: from a loss per token to the one number that is minimised.

Contract. An aggregation is a weight per token, computed once for the whole global batch (every
micro-batch, rank and accumulation step of one optimizer update), so that the loss is sum(weight *
token_loss). Any split of the batch then adds up to the same loss and the same gradient: nothing is
averaged afterwards, and no weight knows the number of ranks or of micro-batches.

All sampled tokens of a row weigh the same and their weight depends only on how many tokens the rows have,
so `row_weights` computes it from lengths. The functions of `__all__` spread those weights over a mask.
Rows without a sampled token weigh nothing; only `seq_sum_const` counts them in its denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.guards import require

__all__ = ["prompt_mean", "seq_mean_token_mean", "seq_sum_const", "token_mean"]


def row_weights(
    name: str, lengths: Sequence[int], groups: Sequence[int], *, max_tokens: int | None = None
) -> list[float]:
    """The weight of every sampled token in each row of the global batch.

    `lengths` sampled tokens per row, `groups` group number per row (only `prompt_mean` reads it),
    `max_tokens` the constant length of `seq_sum_const`. Returns one weight per row, 0 for rows without
    tokens. Raises ValueError for an unknown name, lengths below 0 or not as many as groups, or a `max_tokens` that
    is missing or not wanted.
    """
    if name not in __all__:
        raise ValueError(f"unknown aggregation {name!r}, expected one of {', '.join(__all__)}")
    if len(lengths) != len(groups):
        raise ValueError(f"{len(lengths)} lengths and {len(groups)} group numbers must be equally many")
    if not all(length >= 0 for length in lengths):
        raise ValueError(f"lengths must be at least 0, got {min(lengths)}")
    if (name == "seq_sum_const") != (max_tokens is not None):
        raise ValueError(f"max_tokens is {max_tokens} with {name}, it belongs to seq_sum_const and only there")
    if max_tokens is not None:
        require("max_tokens", max_tokens, above=0)

    if name == "token_mean":
        denominators = [sum(lengths)] * len(lengths)
    elif name == "seq_mean_token_mean":
        rows = sum(length > 0 for length in lengths)
        denominators = [rows * length for length in lengths]
    elif name == "seq_sum_const":
        denominators = [len(lengths) * (max_tokens or 0)] * len(lengths)
    else:
        tokens: Counter[int] = Counter()
        for group, length in zip(groups, lengths, strict=True):
            tokens[group] += length
        prompts = sum(count > 0 for count in tokens.values())
        denominators = [prompts * tokens[group] for group in groups]
    return [1 / below if length > 0 else 0.0 for length, below in zip(lengths, denominators, strict=True)]


def token_mean(response_mask: Tensor, groups: Tensor) -> Tensor:
    """Every token weighs the same: sum(m l) / sum(m). [B, T], [B] -> [B, T]. DAPO, arXiv:2503.14476."""
    return _spread("token_mean", response_mask, groups)


def seq_mean_token_mean(response_mask: Tensor, groups: Tensor) -> Tensor:
    """Mean over answers of their token means. [B, T], [B] -> [B, T]. GRPO, arXiv:2402.03300."""
    return _spread("seq_mean_token_mean", response_mask, groups)


def seq_sum_const(response_mask: Tensor, groups: Tensor, *, max_tokens: int) -> Tensor:
    """sum(m l) / (B max_tokens) with B all rows. [B, T], [B] -> [B, T]. Dr. GRPO, arXiv:2503.20783."""
    return _spread("seq_sum_const", response_mask, groups, max_tokens)


def prompt_mean(response_mask: Tensor, groups: Tensor) -> Tensor:
    """Mean over groups of their token means. [B, T], [B] -> [B, T]. ScaleRL, arXiv:2510.13786."""
    return _spread("prompt_mean", response_mask, groups)


def _spread(name: str, response_mask: Tensor, groups: Tensor, max_tokens: int | None = None) -> Tensor:
    """Row weights on the sampled tokens, in the dtype of a floating mask (at least float32), else float64."""
    if response_mask.dim() != 2 or groups.dim() != 1:
        raise ValueError(
            f"response_mask must be [B, T] and groups [B], got {list(response_mask.shape)} and {list(groups.shape)}"
        )
    mask = response_mask.bool()
    weights = row_weights(name, mask.sum(1).tolist(), groups.tolist(), max_tokens=max_tokens)
    # A token of a million weighs 1e-6, of which float16 keeps one digit.
    floating = response_mask.is_floating_point()
    dtype = torch.promote_types(response_mask.dtype, torch.float32) if floating else torch.float64
    return torch.tensor(weights, dtype=dtype, device=mask.device)[:, None] * mask
