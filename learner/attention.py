"""Attention of micro-batches whose rows are prefix trees (`learner.prefix_tree`).

Contract. `tree_mask` says who sees whom, once for all layers, and `tree_attention` is the attention function that reads it. A row
that does not branch is plainly causal and needs no mask: attention has its fastest kernel, and padding, which stands behind
everything, is seen by nobody. Where rows branch, pairs of tokens of which one does not see the other are not computed: on a GPU by
FlexAttention's block mask, in blocks of 128. It has no backward pass on CPUs; there attention of wide rows goes node by node,
each a causal square and what descends from it a full rectangle, and the parts of a token's softmax are joined by their log-sums.
Narrow ones have a whole mask, on both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "headway_prefix_tree"  # as the models' attention implementation
# In narrower rows one call with a whole mask costs about as much CPU time as the many small ones, and every call is a barrier
# of its threads: where engines and a driver want the same cores, each of them may wait.
# A GPU gains little there, and a width that is always a few blocks spares FlexAttention's compiler its special cases.
WHOLE_MASK_BELOW_TOKENS = 384
BLOCK_TOKENS = 128  # FlexAttention's own choice
# One each for a single row and several, widths that fill their blocks and others, with and without gradients: about 8 for one
# model. PyTorch's own limit is 8, and where it is reached, attention would go on unfused, in memory quadratic in the width.
FLEX_COMPILATIONS_MAX = 32

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_mask(subtree_end: torch.Tensor) -> torch.Tensor | BlockMask | None:
    """What attention needs to know of the rows beside causality; `subtree_end` int64 [B, T] as in `PrefixTree`.

    None: nothing. Of narrow rows, the whole mask, bool [B, 1, T, T]. Of wide ones, a BlockMask on a GPU; else int64 [1, 1, N, 4],
    since models hand on untouched what has four dimensions: row, start and end of each node, and the end of what descends from it.
    """
    width = subtree_end.shape[1]
    if bool((subtree_end == width).all()):
        return None
    if width < WHOLE_MASK_BELOW_TOKENS:
        rows, places = (torch.arange(count, device=subtree_end.device) for count in subtree_end.shape)
        return sees(subtree_end)(rows[:, None, None], None, places[:, None], places)[:, None]
    if subtree_end.is_cuda:
        return block_mask(subtree_end)
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
    """The mask for FlexAttention; what `create_block_mask` would find by asking for each of T² pairs, from blocks alone.

    Below the diagonal, a block of queries sees something of a block of keys if one of these ends behind the first query, and all
    of it if each ends behind the last. On the diagonal it sees a part.
    """
    from torch.nn.attention.flex_attention import BlockMask

    width = subtree_end.shape[1]
    blocks = -(-width // BLOCK_TOKENS)
    # What fills up the last block sees nothing and is seen by nobody: that block is never seen as a whole.
    padded = torch.nn.functional.pad(subtree_end, (0, blocks * BLOCK_TOKENS - width)).unflatten(
        1, (blocks, BLOCK_TOKENS)
    )
    first = torch.arange(blocks, device=subtree_end.device)[:, None] * BLOCK_TOKENS
    below = torch.ones(blocks, blocks, dtype=torch.bool, device=subtree_end.device).tril(-1)
    whole = below & (padded.amin(2)[:, None] >= first + BLOCK_TOKENS)
    some = (below & (padded.amax(2)[:, None] > first)) | torch.eye(blocks, dtype=torch.bool, device=subtree_end.device)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=sees(subtree_end),
        seq_lengths=(width, width),
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, int32 [B, 1, N], and which, int32 [B, 1, N, N], those first."""
    blocks = blocks[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()


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
    out = _flex_attention()(
        query,
        key,
        value,
        block_mask=attention_mask,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


@functools.cache
def _flex_attention() -> Callable[..., Any]:
    """FlexAttention, compiled for all sizes at once, and an error where it can't be: uncompiled it holds all T² scores."""
    from torch.nn.attention.flex_attention import flex_attention

    # torch's overloads do not name `recompile_limit` yet.
    return torch.compile(  # type: ignore[call-overload]
        flex_attention, fullgraph=True, dynamic=True, recompile_limit=FLEX_COMPILATIONS_MAX
    )


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
