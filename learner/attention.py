"""Attention of micro-batches whose rows are prefix trees (`learner.prefix_tree`).

Contract. `tree_mask` says who sees whom, once for all layers, and `tree_attention` is the attention function that reads it. A row
that does not branch is plainly causal and needs no mask: attention has its fastest kernel, and padding, which stands behind
everything, is seen by nobody. Where rows branch, pairs of tokens of which one does not see the other are not computed: on a GPU by
FlexAttention's block mask, in blocks of 128. It has no backward pass on CPUs; there attention of wide rows goes node by node,
each a causal square and what descends from it a full rectangle, and the parts of a token's softmax are joined by their log-sums.
Narrow ones have a whole mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "headway_prefix_tree"  # as the models' attention implementation
# In narrower rows one call with a whole mask costs about as much CPU time as the many small ones, and every call is a barrier
# of its threads: where engines and a driver want the same cores, each of them may wait.
NODES_FROM_TOKENS = 384

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_mask(subtree_end: torch.Tensor) -> torch.Tensor | BlockMask | None:
    """What attention needs to know of the rows beside causality; `subtree_end` int64 [B, T] as in `PrefixTree`.

    None: nothing. A BlockMask, on a GPU. Else, of narrow rows, the whole mask, bool [B, 1, T, T]; of wide ones int64
    [1, 1, N, 4], since models hand on untouched what has four dimensions: row, start and end of each node, and the end of what
    descends from it.
    """
    width = subtree_end.shape[1]
    if bool((subtree_end == width).all()):
        return None
    if subtree_end.is_cuda:
        return block_mask(subtree_end)
    if width < NODES_FROM_TOKENS:
        rows, places = torch.arange(len(subtree_end)), torch.arange(width)
        return sees(subtree_end)(rows[:, None, None], None, places[:, None], places)[:, None]
    nodes = []
    for row, ends in enumerate(subtree_end):
        # A node's tokens have the same descendants behind the node; where nodes meet, they differ.
        for start, end in zip(*_runs(ends), strict=True):
            nodes.append((row, start, end, int(ends[start])))
    return torch.tensor(nodes)[None, None]


def _runs(values: torch.Tensor) -> tuple[list[int], list[int]]:
    """Starts and ends of the runs of equal values."""
    edges = (values.diff().nonzero()[:, 0] + 1).tolist()
    return [0, *edges], [*edges, len(values)]


def block_mask(subtree_end: torch.Tensor) -> BlockMask:
    """The mask for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, width = subtree_end.shape
    return create_block_mask(sees(subtree_end), batch, None, width, width, device=subtree_end.device.type)


def sees(subtree_end: torch.Tensor) -> Callable[..., torch.Tensor]:
    """FlexAttention's `mask_mod`: whether a query of a row sees a key."""

    def mask_mod(row: torch.Tensor, head: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < subtree_end[row, key])

    return mask_mod


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as transformers' `AttentionInterface` has it: query [B, H, T, D], key and value [B, K, T, D] to [B, T, H, D].

    Without dropout, whatever the model's configuration says.
    """
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    options["dropout"] = 0.0
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.int64:
        nodes = attention_mask[0, 0].tolist()
        missing = query.shape[-1] - value.shape[-1]  # the kernel has one width for all three
        values = torch.nn.functional.pad(value, (0, missing)) if missing else value
        out = _TreeAttention.apply(query, key, values, nodes, options.get("scaling"))
        return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None
    if attention_mask is None or isinstance(attention_mask, torch.Tensor):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return flex_attention_forward(module, query, key, value, attention_mask, **options)


class _TreeAttention(torch.autograd.Function):
    """Softmax over all that a token sees, from parts: exp(scores) of a part sum to exp(l) of it, of all parts to exp(L).

    The output is the sum of the parts' outputs, each times exp(l - L). The backward pass of a part, given L and the whole
    output in place of its own, is the part of the whole's: its probabilities are exp(score - L).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        nodes: list[tuple[int, int, int, int]],
        scale: float | None,
    ) -> torch.Tensor:
        out = torch.zeros_like(query, dtype=torch.float32)
        log_sum = torch.full(query.shape[:3], -torch.inf, device=query.device)
        for q, k, causal in _parts(nodes):
            part, part_log_sum = _flash(query[q], key[k], value[k], 0.0, causal, scale=scale)
            total = torch.logaddexp(log_sum[q], part_log_sum)
            out[q].mul_((log_sum[q] - total).exp()[..., None])
            out[q].addcmul_(part, (part_log_sum - total).exp()[..., None])
            log_sum[q] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.nodes, ctx.scale = nodes, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for q, k, causal in _parts(ctx.nodes):
            of_part = _flash_backward(
                gradients[0][q], query[q], key[k], value[k], out[q], log_sum[q], 0.0, causal, scale=ctx.scale
            )
            for whole, places, part in zip(found, (q, k, k), of_part, strict=True):
                whole[places] += part
        return *found, None, None


def _parts(nodes: list[tuple[int, int, int, int]]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], bool]]:
    """Places of queries and keys, and whether causal: each node in itself, and its descendants upon it."""
    everything = slice(None)
    for row, start, end, last in nodes:
        own = (slice(row, row + 1), everything, slice(start, end))
        yield own, own, True
        if last > end:
            yield (own[0], everything, slice(end, last)), own, False


def use_tree_attention(model: Any) -> None:
    """Give a Hugging Face model that runs with SDPA `tree_attention` in its place.

    ValueError: its attention is its own, or caps its scores, which SDPA would leave out without a word.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        raise ValueError(
            f"{type(model).__name__} caps attention scores (attn_logit_softcapping), which SDPA can't compute"
        )
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for a caller's own two-dimensional masks
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} has attention of its own, which rows of several answers can't go through"
        )
