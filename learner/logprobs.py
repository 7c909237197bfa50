"""Logprobs and entropy of given tokens from hidden states, without the whole [tokens, vocabulary] matrix.

The logprob of a token is that of the distribution it was sampled from: logits divided by the sampling temperature, then
log-softmax in float32. Where there is more than one chunk, each is recomputed in the backward pass, so at most
`chunk_tokens` rows of vocabulary logits exist at a time.

Liger's fused kernels (Triton) don't fit: they take the head's weight outside its module, where ZeRO-3 holds none, and give a
token's logprob without the entropy of its distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from learner.entropy import categorical

BLOCK_TOKENS = 64  # rows of float32 logits that fit a CPU's cache

LogitTransform = Callable[[torch.Tensor], torch.Tensor]


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: torch.nn.Module,
    transform: LogitTransform,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
    least_chunks: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies, both float32 [N], of `targets` int64 [N] given `hidden` [N, H].

    `head` maps hidden states to vocabulary logits and `transform` is what the model does to them (soft-capping,
    scaling). The entropy (nats, of the tempered distribution) carries a gradient only with `entropy_gradient`. The head is
    called for at least `least_chunks` chunks, the last of them empty where there are not enough tokens.
    """

    def chunk(hidden_part: torch.Tensor, targets_part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = transform(head(hidden_part))
        logprobs, entropy = _TokenLogprobs.apply(logits, targets_part, temperature)
        if entropy_gradient:
            entropy = categorical(logits.float() / temperature)
        return logprobs, entropy

    chunks = max(least_chunks, chunks_of(len(targets), chunk_tokens))
    if chunks == 1:
        return chunk(hidden, targets)
    starts = range(0, chunks * chunk_tokens, chunk_tokens)
    parts = [
        checkpoint(chunk, hidden[i : i + chunk_tokens], targets[i : i + chunk_tokens], use_reentrant=False)
        for i in starts
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def chunks_of(count: int, chunk_tokens: int) -> int:
    """How many chunks `count` tokens make; none at all are one."""
    return max(1, math.ceil(count / chunk_tokens))


def use_float32(head: torch.nn.Linear) -> None:
    """Let the head compute logits in float32, from float32 copies of hidden states and weight.

    A bfloat16 head rounds every logit to 8 bits, differently in engine and learner; MiniMax-M1, arXiv:2506.13585, found that to
    be the larger part of their mismatch. The copies are made inside the module's call, where ZeRO-3 has the weight; its
    gradient is rounded once, to the weight's own type.
    """

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward  # type: ignore[method-assign, assignment]


class _TokenLogprobs(torch.autograd.Function):
    """Logprob and entropy of one token per row of logits, block by block.

    A plain log-softmax makes a dozen passes over [tokens, vocabulary] in float32, each through fresh memory; on CPUs
    that costs as much as the layers below. Here a block stays in cache, and what is kept for the backward pass is the
    softmax in the logits' own type. d(logprob)/d(logits) = (onehot - softmax) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(targets)
        logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs)
        softmax = torch.empty_like(logits)
        block = BLOCK_TOKENS if logits.device.type == "cpu" else max(count, 1)
        for start in range(0, count, block):
            rows = slice(start, start + block)
            shifted = logits[rows].to(torch.float32, copy=True)  # float() would hand out the logits themselves
            if temperature != 1.0:
                shifted.div_(temperature)
            shifted.sub_(shifted.amax(-1, keepdim=True))
            exponentials = shifted.exp()
            total = exponentials.sum(-1)
            log_total = total.log()
            logprobs[rows] = shifted.gather(-1, targets[rows, None])[:, 0] - log_total
            mean = torch.linalg.vecdot(exponentials, shifted)
            if mean.isnan().any():  # 0 * -inf of tokens that can't be, such as the padding of a vocabulary
                mean = torch.linalg.vecdot(exponentials, shifted.clamp(min=-1e30))
            entropy[rows] = log_total - mean / total
            softmax[rows] = exponentials.div_(total[:, None])
        ctx.save_for_backward(softmax, targets)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, targets = ctx.saved_tensors
        scaled = gradients[0] / ctx.temperature
        gradient = softmax * -scaled[:, None].to(softmax.dtype)
        gradient.scatter_add_(-1, targets[:, None], scaled[:, None].to(softmax.dtype))
        return gradient, None, None


def logit_transform(model_config: Any) -> LogitTransform:
    """What a Hugging Face model applies to its head's output, read from its configuration."""
    softcap = _first(model_config, "final_logit_softcapping", "logits_soft_cap")  # Gemma, RecurrentGemma
    multiplier = _first(model_config, "logit_scale", "lm_head_multiplier")  # Cohere, Falcon-H1
    divisor = getattr(model_config, "logits_scaling", None)  # Granite
    if getattr(model_config, "model_type", None) == "hyperclovax":  # Granite's name for what it multiplies by
        multiplier, divisor = divisor, None

    def transform(logits: torch.Tensor) -> torch.Tensor:
        if multiplier is not None:
            logits = logits * multiplier
        if divisor is not None:
            logits = logits / divisor
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return transform


def _first(model_config: Any, *names: str) -> float | None:
    """The first of the settings that the model has."""
    return next((value for name in names if (value := getattr(model_config, name, None)) is not None), None)
