"""The frozen initial policy of a KL term: what it says of a batch's answers, wherever it lives.

Contract. It never changes, so its logprobs are computed once a batch, before the first update (`learner.survey`), and serve
every update and epoch. Where it lives is `learner.reference`:

- `ranks`: in every learner rank, a second model that ZeRO-3 shards over them. A LoRA policy is its own, adapters off.
- `offload`: the same, but its weights rest in the host's memory and visit the device for the pass.
- `own`: in actors of its own, a whole model each, that score a group as soon as it is written. How they pack answers is their
  own matter: what they find goes to the ranks by (group id, index), float32 [sampled tokens] each. See
  `learner.reference_group`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from learner.batch import Row, plan_updates
from learner.tensors import MicroBatchTensors, build_tensors
from rollout_workers.trajectory import Trajectory

if TYPE_CHECKING:
    import torch

    from learner.settings import LearnerSettings

Answer = tuple[str, int]  # group id, index
# From micro-batches, taken one by one, to the logprobs of each, float32 [R, L] on its device.
Reference = Callable[[Iterable[MicroBatchTensors]], "list[torch.Tensor]"]


def by_answer(batch: MicroBatchTensors, logprobs: torch.Tensor) -> dict[Answer, np.ndarray]:
    """Logprobs [R, L] of each answer's sampled tokens."""
    values, sampled = logprobs.cpu().numpy(), batch.response_mask.cpu().numpy()
    return {(row.group_id, row.index): values[i][sampled[i]] for i, row in enumerate(batch.rows)}


def forward_passes(
    forward: Callable[[MicroBatchTensors, float], tuple[torch.Tensor, torch.Tensor]],
    temperature: float,
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Reference:
    """The reference as a model: `around` is entered for all passes together."""
    import torch

    def reference(batches: Iterable[MicroBatchTensors]) -> list[torch.Tensor]:
        with torch.no_grad(), around():
            return [forward(batch, temperature)[0] for batch in batches]

    return reference


def looked_up(found: Mapping[Answer, np.ndarray]) -> Reference:
    """The reference as what its actors have found."""
    import torch

    def reference(batches: Iterable[MicroBatchTensors]) -> list[torch.Tensor]:
        logprobs = []
        for batch in batches:
            mask = batch.response_mask
            values = [found[row.group_id, row.index] for row in batch.rows]
            flat = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *values])).to(mask.device)
            logprobs.append(torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat))
        return logprobs

    return reference


@contextlib.contextmanager
def visiting(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Within this context a frozen model's tensors are copies on the device; those that rest elsewhere are left as they are."""
    resting = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in resting:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in resting:
            tensor.data = data


class ReferenceActor:
    """A whole frozen model on a device of its own. Create it with `ray.remote(ReferenceActor)`.

    `settings` are those of the learner ranks, `cut` the keyword arguments of `learner.batch.plan_updates` that say how much
    goes into a packed row and a micro-batch.
    """

    def __init__(self, settings: LearnerSettings, cut: Mapping[str, Any]) -> None:
        self._settings = settings
        self._cut = dict(cut)
        self._passes: Reference | None = None

    def device_bytes(self) -> int:
        """All memory of this actor's GPU, or of its machine."""
        from learner.settings import device_bytes

        return device_bytes(self._settings)

    def load(self) -> None:
        """Load the model, unless it is there. An actor that replaces a lost one does so in its first `score`."""
        if self._passes is not None:
            return
        from learner.policy import Policy
        from learner.settings import use_device

        s = self._settings
        device = use_device(s)
        policy = Policy(dataclasses.replace(s.policy, gradient_checkpointing=False)).to(device).requires_grad_(False)
        self._passes = forward_passes(lambda batch, temperature: policy(batch.to(device), temperature), s.temperature)

    def score(self, answers: Sequence[Trajectory]) -> tuple[int, dict[Answer, np.ndarray]]:
        """The logprobs of the answers of one group, and, apart from them because they are large, of how many answers."""
        # The prompt that they share ends where the first of them was sampled.
        prompt = min(a.prompt_length for a in answers)
        rows = [
            Row(
                a.group_id,
                a.index,
                payload=0,
                position=position,
                prompt_length=prompt,
                response_length=a.response_length,
                advantage=0.0,
                token_weight=0.0,
                other_length=len(a.token_ids) - prompt - a.response_length,
            )
            for position, a in enumerate(answers)
        ]
        [plan] = plan_updates([[rows]], version=0, max_staleness=0, ranks=1, **self._cut)
        [micro_batches] = plan.updates
        batches = [build_tensors(micro_batch, {0: answers}) for micro_batch in micro_batches]
        self.load()
        assert self._passes is not None
        logprobs = self._passes(batches)
        found: dict[Answer, np.ndarray] = {}
        for batch, values in zip(batches, logprobs, strict=True):
            found |= by_answer(batch, values)
        return len(found), found
