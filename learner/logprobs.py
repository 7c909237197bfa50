"""Logprobs and entropy of given tokens from hidden states, without the whole [tokens, vocabulary] matrix.

The logprob of a token is that of the distribution it was sampled from: logits divided by the sampling temperature, then
log-softmax in float32. Where there is more than one chunk, each is recomputed in the backward pass, so at most
`chunk_tokens` rows of vocabulary logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies, both float32 [N], of `targets` int64 [N] given `hidden` [N, H].

    `head` maps hidden states to vocabulary logits and `transform` is what the model does to them (soft-capping,
    scaling). The entropy (nats, of the tempered distribution) carries a gradient only with `entropy_gradient`.
    """

    def chunk(hidden_part: torch.Tensor, targets_part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = transform(head(hidden_part)).float() / temperature
        log_normaliser = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(-1, targets_part[:, None])[:, 0] - log_normaliser
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            probabilities = torch.exp(logits - log_normaliser[:, None])
            entropy = log_normaliser - (probabilities * logits).sum(-1)
        return logprobs, entropy

    count = len(targets)
    if count <= chunk_tokens:
        return chunk(hidden, targets)
    parts = [
        checkpoint(chunk, hidden[i : i + chunk_tokens], targets[i : i + chunk_tokens], use_reentrant=False)
        for i in range(0, count, chunk_tokens)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def logit_transform(model_config: Any) -> LogitTransform:
    """What a Hugging Face model applies to its head's output, read from its configuration."""
    softcap = getattr(model_config, "final_logit_softcapping", None)  # Gemma
    multiplier = getattr(model_config, "logit_scale", None)  # Cohere
    divisor = getattr(model_config, "logits_scaling", None)  # Granite

    def transform(logits: torch.Tensor) -> torch.Tensor:
        if multiplier is not None:
            logits = logits * multiplier
        if divisor is not None:
            logits = logits / divisor
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return transform
