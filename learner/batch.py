"""How one batch is cut: optimizer updates, ranks, micro-batches, rows.

`plan_batch` decides everything from lengths alone, on the driver, so token data goes straight to the ranks that need
it. The plan keeps three promises: every trainable answer appears exactly once per epoch; every rank has the same
number of micro-batches in every update (ZeRO-3 gathers parameters in lockstep), with empty ones where it has no data;
and the weights of the answers' tokens are global, so no cut changes the gradient.

`build_tensors` turns one micro-batch into model inputs. A packed row holds a prompt once and then the answers that
share it; positions restart after the prompt and the attention mask lets each answer see the prompt and itself. An
answer of its own is the same thing with one answer.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from rollout_workers.trajectory import Trajectory


@dataclass(frozen=True)
class Row:
    """One answer as the plan knows it.

    `payload` and `position` say where its trajectory is (which payload, which place in it). `advantage` is its reward where
    the objective has advantages per token (`learner.objective.TokenReturns`). `token_weight` is the weight
    of each of its sampled tokens in the loss, denominators included.
    """

    group_id: str
    index: int
    payload: int
    position: int
    prompt_length: int
    response_length: int
    advantage: float
    token_weight: float

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length


PackedRow = tuple[Row, ...]  # answers that share one prompt
MicroBatch = tuple[PackedRow, ...]


@dataclass(frozen=True)
class RankPlan:
    """What one rank does with a batch that improves `version`.

    `updates[u]` are its micro-batches in optimizer update `u` of an epoch; `epochs` of these follow one another. Metrics
    tell stalenesses up to `max_staleness` apart.
    """

    updates: tuple[tuple[MicroBatch, ...], ...]
    version: int
    max_staleness: int
    epochs: int = 1

    @property
    def payloads(self) -> tuple[int, ...]:
        """The payloads this rank needs, in order of first use."""
        seen: dict[int, None] = {}
        for micro_batches in self.updates:
            for micro_batch in micro_batches:
                for packed in micro_batch:
                    for row in packed:
                        seen.setdefault(row.payload)
        return tuple(seen)


def packed_length(packed: PackedRow) -> int:
    """Tokens of a packed row: the shared prompt once, then the answers."""
    return packed[0].prompt_length + sum(row.response_length for row in packed)


def plan_updates(
    updates: Sequence[Sequence[Sequence[Row]]],
    *,
    version: int,
    max_staleness: int,
    epochs: int = 1,
    ranks: int,
    max_tokens: int,
    share_prefixes: bool,
    pair_cost: float = 0.0,
) -> list[RankPlan]:
    """One plan per rank. `updates[u][g]` are the trainable rows of group g in optimizer update u of an epoch.

    `share_prefixes` allows a prompt to be computed once for several answers, and `pair_cost`, what it costs a token to attend
    to another, as a share of what the token itself costs, decides where that is worth it (see `_pack`).
    """
    per_rank: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(ranks)]
    for groups in updates:
        packed_rows = [
            packed for group in groups for packed in _pack(group, max_tokens if share_prefixes else 0, pair_cost)
        ]
        shares = [_micro_batches(share, max_tokens) for share in _balance(packed_rows, ranks)]
        count = max(1, *(len(share) for share in shares))
        for plan, share in zip(per_rank, shares, strict=True):
            plan.append(tuple(share + [()] * (count - len(share))))
    return [RankPlan(tuple(plan), version, max_staleness, epochs) for plan in per_rank]


def _pack(group: Sequence[Row], max_tokens: int, pair_cost: float) -> list[PackedRow]:
    """Answers of one group in those packed rows that are predicted to cost least; one each where `max_tokens` allows none.

    Sharing saves the prompt's tokens and costs attention: the mask of a packed row is dense, so every token meets all others
    of the row, while an answer of its own has a causal kernel, which does half of that.
    """
    apart: list[PackedRow] = [(row,) for row in group]
    counts = itertools.takewhile(lambda count: count < len(group), (2**i for i in itertools.count()))
    spreads = [_spread(group, count) for count in counts]
    choices = [apart] + [packed for packed in spreads if max(map(packed_length, packed)) <= max_tokens]

    def cost(packed: Sequence[PackedRow]) -> float:
        lengths = [(packed_length(rows), 1.0 if len(rows) > 1 else 0.5) for rows in packed]
        return sum(length + pair_cost * share * length**2 for length, share in lengths)

    return min(choices, key=cost)


def _spread(group: Sequence[Row], count: int) -> list[PackedRow]:
    """The group in `count` packed rows of about equal length."""
    packed: list[list[Row]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for row in sorted(group, key=lambda row: -row.response_length):
        load, number = loads[0]
        packed[number].append(row)
        heapq.heapreplace(loads, (load + row.response_length, number))
    return [tuple(sorted(rows, key=lambda row: row.index)) for rows in packed]


def _balance(packed_rows: Sequence[PackedRow], ranks: int) -> list[list[PackedRow]]:
    """Spread rows over ranks by length, longest first to the least loaded."""
    shares: list[list[PackedRow]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for packed in sorted(packed_rows, key=packed_length, reverse=True):
        load, rank = heapq.heappop(loads)
        shares[rank].append(packed)
        heapq.heappush(loads, (load + packed_length(packed), rank))
    return shares


def _micro_batches(share: Sequence[PackedRow], max_tokens: int) -> list[MicroBatch]:
    """Rows of like length together, up to `max_tokens` with padding; a longer row is a micro-batch of its own."""
    micro_batches: list[list[PackedRow]] = []
    for packed in sorted(share, key=packed_length, reverse=True):
        # Sorted, so the first row of a micro-batch is its longest and sets the padded width.
        if micro_batches and (len(micro_batches[-1]) + 1) * packed_length(micro_batches[-1][0]) <= max_tokens:
            micro_batches[-1].append(packed)
        else:
            micro_batches.append([packed])
    return [tuple(rows) for rows in micro_batches]


@dataclass(frozen=True)
class MicroBatchTensors:
    """Model inputs of one micro-batch, and the coordinates of its sampled tokens.

    B packed rows of at most T tokens; N sampled tokens of R answers with at most L tokens each.
    """

    input_ids: torch.Tensor  # int64 [B, T]
    position_ids: torch.Tensor  # int64 [B, T]
    attention_mask: torch.Tensor  # bool [B, 1, T, T], or int64 [B, T] where no prompt is shared
    source_row: torch.Tensor  # int64 [N]: where the hidden state lies that predicts the token
    source_position: torch.Tensor  # int64 [N]
    target_ids: torch.Tensor  # int64 [N]
    answer: torch.Tensor  # int64 [N]: which answer
    offset: torch.Tensor  # int64 [N]: which of its sampled tokens
    behaviour_logprobs: torch.Tensor  # float32 [R, L], NaN where the engine gave none
    response_mask: torch.Tensor  # bool [R, L]
    versions: torch.Tensor  # int64 [R, L]: policy version of each token, -1 where masked
    advantages: torch.Tensor  # float32 [R, 1]
    token_weights: torch.Tensor  # float32 [R, 1]
    rows: tuple[Row, ...]  # the R answers

    def to(self, device: torch.device) -> MicroBatchTensors:
        if self.input_ids.device == device:
            return self
        moved = {f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self) if f.name != "rows"}
        return dataclasses.replace(self, **moved)


def build_tensors(micro_batch: MicroBatch, trajectories: Mapping[int, Sequence[Trajectory]]) -> MicroBatchTensors:
    """Tensors (on the CPU) of one micro-batch; `trajectories[payload][position]` are its data.

    An empty micro-batch becomes one row of two tokens with nothing sampled, so that a rank without data still
    takes part in every collective. Raises ValueError, naming the trajectory, if data and plan disagree.
    """
    import torch

    if not micro_batch:
        return _empty_tensors()
    width = max(packed_length(packed) for packed in micro_batch)
    shared = any(len(packed) > 1 for packed in micro_batch)
    batch = len(micro_batch)
    input_ids = np.zeros((batch, width), dtype=np.int64)
    position_ids = np.zeros((batch, width), dtype=np.int64)
    segment = np.full((batch, width), -1, dtype=np.int64)  # 0 prompt, 1… answers, -1 padding
    rows: list[Row] = []
    columns: list[tuple[np.ndarray, ...]] = []
    for b, packed in enumerate(micro_batch):
        prompt_length = packed[0].prompt_length
        cursor = prompt_length
        for number, row in enumerate(packed, start=1):
            trajectory = trajectories[row.payload][row.position]
            _check(row, trajectory)
            ids, mask = trajectory.token_ids, trajectory.response_mask
            if number == 1:
                input_ids[b, :prompt_length] = ids[:prompt_length]
                position_ids[b, :prompt_length] = np.arange(prompt_length)
                segment[b, :prompt_length] = 0
            elif not np.array_equal(ids[:prompt_length], input_ids[b, :prompt_length]):
                raise ValueError(f"answers of group {row.group_id} do not share one prompt")
            end = cursor + row.response_length
            input_ids[b, cursor:end] = ids[prompt_length:]
            position_ids[b, cursor:end] = np.arange(prompt_length, row.length)
            segment[b, cursor:end] = number
            sampled = np.flatnonzero(mask[prompt_length:])
            # The token before the first answer token is the prompt's last, wherever the answer lies in the row.
            source = np.where(sampled == 0, prompt_length - 1, cursor + sampled - 1)
            columns.append(
                (
                    np.full(len(sampled), b),
                    source,
                    ids[prompt_length:][sampled],
                    np.full(len(sampled), len(rows)),
                    np.arange(len(sampled)),
                    trajectory.behaviour_logprobs[prompt_length:][sampled],
                    trajectory.token_versions[prompt_length:][sampled],
                )
            )
            rows.append(row)
            cursor = end
    source_row, source_position, targets, answer, offset, logprobs, versions = (
        np.concatenate(parts) for parts in zip(*columns, strict=True)
    )
    longest = int(offset.max(initial=0)) + 1
    behaviour = np.zeros((len(rows), longest), dtype=np.float32)
    response_mask = np.zeros((len(rows), longest), dtype=bool)
    token_versions = np.full((len(rows), longest), -1, dtype=np.int64)
    behaviour[answer, offset] = logprobs
    response_mask[answer, offset] = True
    token_versions[answer, offset] = versions
    segments = torch.from_numpy(segment)
    attention = _shared_prefix_mask(segments) if shared else (segments >= 0).long()
    return MicroBatchTensors(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=attention,
        source_row=torch.from_numpy(source_row.astype(np.int64)),
        source_position=torch.from_numpy(source_position.astype(np.int64)),
        target_ids=torch.from_numpy(targets.astype(np.int64)),
        answer=torch.from_numpy(answer.astype(np.int64)),
        offset=torch.from_numpy(offset.astype(np.int64)),
        behaviour_logprobs=torch.from_numpy(behaviour),
        response_mask=torch.from_numpy(response_mask),
        versions=torch.from_numpy(token_versions),
        advantages=torch.tensor([[row.advantage] for row in rows], dtype=torch.float32),
        token_weights=torch.tensor([[row.token_weight] for row in rows], dtype=torch.float32),
        rows=tuple(rows),
    )


def _shared_prefix_mask(segments: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, T, T]: causal, and a token sees only the prompt (segment 0) and its own segment.

    Padding (segment -1) sees itself, so that no row of the softmax is empty.
    """
    import torch

    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    query, key = segments[:, :, None], segments[:, None, :]
    return (((query == key) | ((key == 0) & (query > 0))) & causal)[:, None]


def text_tensors(sequences: Sequence[Sequence[int]]) -> MicroBatchTensors:
    """Tensors that ask for the logprob of tokens 1… of each given text; nothing in them is for training."""
    import torch

    batch, width = len(sequences), max(len(ids) for ids in sequences)
    input_ids = torch.zeros(batch, width, dtype=torch.int64)
    attention = torch.zeros(batch, width, dtype=torch.int64)
    response_mask = torch.zeros(batch, width - 1, dtype=torch.bool)
    for b, ids in enumerate(sequences):
        input_ids[b, : len(ids)] = torch.as_tensor(ids)
        attention[b, : len(ids)] = 1
        response_mask[b, : len(ids) - 1] = True
    row, offset = response_mask.nonzero(as_tuple=True)
    return MicroBatchTensors(
        input_ids=input_ids,
        position_ids=torch.arange(width).expand(batch, width),
        attention_mask=attention,
        source_row=row,
        source_position=offset,
        target_ids=input_ids[row, offset + 1],
        answer=row,
        offset=offset,
        behaviour_logprobs=torch.zeros(batch, width - 1),
        response_mask=response_mask,
        versions=torch.full((batch, width - 1), -1),
        advantages=torch.zeros(batch, 1),
        token_weights=torch.zeros(batch, 1),
        rows=(),
    )


def _empty_tensors() -> MicroBatchTensors:
    """A text of two tokens of which nothing is asked."""
    tensors = text_tensors([[0, 0]])
    nothing = {name: getattr(tensors, name)[:0] for name in _PER_TOKEN + _PER_ANSWER}
    return dataclasses.replace(tensors, **nothing)


_PER_TOKEN = ("source_row", "source_position", "target_ids", "answer", "offset")
_PER_ANSWER = ("behaviour_logprobs", "response_mask", "versions", "advantages", "token_weights")


def _check(row: Row, trajectory: Trajectory) -> None:
    if (trajectory.group_id, trajectory.index) != (row.group_id, row.index):
        raise ValueError(
            f"the plan expects member {row.index} of group {row.group_id}, its payload holds member "
            f"{trajectory.index} of group {trajectory.group_id}"
        )
    if len(trajectory.token_ids) != row.length or trajectory.response_mask[: row.prompt_length].any():
        raise ValueError(
            f"member {row.index} of group {row.group_id}: {len(trajectory.token_ids)} tokens, the plan expects "
            f"{row.prompt_length} of prompt and {row.response_length} of answer"
        )
