"""One micro-batch as a model's inputs, and where in its output the answers' tokens are.

Contract. Every answer of the plan is there with all of its sampled tokens, its own mask, behaviour logprobs and versions; the
tokens that feed the model stand once for all answers of a packed row that begin alike, be it the prompt, first turns of a
conversation or whole answers (`learner.prefix_tree`). A token that several answers sampled after the same text is predicted once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from learner.batch import MicroBatch, PackedRow, Row
from learner.prefix_tree import PrefixTree

if TYPE_CHECKING:
    import torch

    from rollout_workers.trajectory import Trajectory

Payloads = Mapping[int, Sequence["Trajectory"]]


@dataclass(frozen=True)
class MicroBatchTensors:
    """B packed rows of at most T tokens; R answers with N sampled tokens, at most L each, of which S are different."""

    input_ids: torch.Tensor  # int64 [B, T]
    position_ids: torch.Tensor  # int64 [B, T]
    subtree_end: torch.Tensor  # int64 [B, T]: who sees whom, see `learner.attention.tree_mask`
    source_row: torch.Tensor  # int64 [S]: where the hidden state lies that predicts the token
    source_position: torch.Tensor  # int64 [S]
    target_ids: torch.Tensor  # int64 [S]
    prediction: torch.Tensor  # int64 [N]: which of the S
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


def build_tensors(micro_batch: MicroBatch, trajectories: Payloads) -> MicroBatchTensors:
    """Tensors (on the CPU) of one micro-batch; `trajectories[payload][position]` are its data.

    An empty micro-batch becomes one row of two tokens with nothing sampled, so that a rank without data still
    takes part in every collective. Raises ValueError, naming the trajectory, if data and plan disagree.
    """
    import torch

    if not micro_batch:
        return _empty_tensors()
    answers = [_answers(packed, trajectories) for packed in micro_batch]
    trees = [PrefixTree.of([answer.token_ids for answer in of_row]) for of_row in answers]
    sampled = [
        _Sampled.of(b, columns, answer)
        for b, (tree, of_row) in enumerate(zip(trees, answers, strict=True))
        for columns, answer in zip(tree.columns, of_row, strict=True)
    ]
    input_ids, position_ids, subtree_end = _rows(trees)
    # What is predicted is a token of the tree: the same one for all answers that sampled it after the same text.
    row, column, source = (np.concatenate([getattr(s, name) for s in sampled]) for name in ("row", "column", "source"))
    places, first, prediction = np.unique(row * input_ids.shape[1] + column, return_index=True, return_inverse=True)
    lengths = [len(s.column) for s in sampled]
    response_mask = np.arange(max(1, *lengths)) < np.array(lengths)[:, None]
    answer, offset = response_mask.nonzero()
    behaviour = np.zeros(response_mask.shape, dtype=np.float32)
    behaviour[response_mask] = np.concatenate([s.behaviour_logprobs for s in sampled])
    versions = np.full(response_mask.shape, -1, dtype=np.int64)
    versions[response_mask] = np.concatenate([s.versions for s in sampled])
    rows = tuple(row for packed in micro_batch for row in packed)
    return MicroBatchTensors(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        subtree_end=torch.from_numpy(subtree_end),
        source_row=torch.from_numpy(row[first]),
        source_position=torch.from_numpy(source[first]),
        target_ids=torch.from_numpy(input_ids.ravel()[places]),
        prediction=torch.from_numpy(prediction),
        answer=torch.from_numpy(answer),
        offset=torch.from_numpy(offset),
        behaviour_logprobs=torch.from_numpy(behaviour),
        response_mask=torch.from_numpy(response_mask),
        versions=torch.from_numpy(versions),
        advantages=torch.tensor([[row.advantage] for row in rows], dtype=torch.float32),
        token_weights=torch.tensor([[row.token_weight] for row in rows], dtype=torch.float32),
        rows=rows,
    )


@dataclass(frozen=True)
class _Sampled:
    """The sampled tokens of one answer, each array of one entry a token."""

    row: np.ndarray
    column: np.ndarray  # where the token stands in the row
    source: np.ndarray  # where the one before it in the text stands
    behaviour_logprobs: np.ndarray
    versions: np.ndarray

    @classmethod
    def of(cls, row: int, columns: np.ndarray, answer: Trajectory) -> _Sampled:
        at = np.flatnonzero(answer.response_mask)
        logprobs, versions = answer.behaviour_logprobs[at], answer.token_versions[at]
        return cls(np.full(len(at), row), columns[at], columns[at - 1], logprobs, versions)


def _answers(packed: PackedRow, trajectories: Payloads) -> list[Trajectory]:
    answers = [trajectories[row.payload][row.position] for row in packed]
    for row, answer in zip(packed, answers, strict=True):
        _check(row, answer)
        if not np.array_equal(answer.token_ids[: row.prompt_length], answers[0].token_ids[: packed[0].prompt_length]):
            raise ValueError(f"answers of group {row.group_id} do not share one prompt")
    return answers


def _rows(trees: Sequence[PrefixTree]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input ids, positions and ends of subtrees, int64 [B, T]. Padding goes on where the row's last sequence ends."""
    width = max(len(tree.ids) for tree in trees)
    input_ids = np.zeros((len(trees), width), dtype=np.int64)
    deepest = max(int(tree.depths.max()) for tree in trees)
    # Rows that do not branch count on through the padding: transformers reads a position that restarts as another text.
    position_ids = np.tile(np.minimum(np.arange(width), deepest), (len(trees), 1))
    subtree_end = np.full((len(trees), width), width, dtype=np.int64)
    for b, tree in enumerate(trees):
        size = len(tree.ids)
        input_ids[b, :size] = tree.ids
        position_ids[b, :size] = tree.depths
        subtree_end[b, :size] = np.where(tree.subtree_end == size, width, tree.subtree_end)
    return input_ids, position_ids, subtree_end


def text_tensors(sequences: Sequence[Sequence[int]]) -> MicroBatchTensors:
    """Tensors that ask for the logprob of tokens 1… of each given text; nothing in them is for training."""
    import torch

    batch, width = len(sequences), max(len(ids) for ids in sequences)
    input_ids = torch.zeros(batch, width, dtype=torch.int64)
    response_mask = torch.zeros(batch, width - 1, dtype=torch.bool)
    for b, ids in enumerate(sequences):
        input_ids[b, : len(ids)] = torch.as_tensor(ids)
        response_mask[b, : len(ids) - 1] = True
    row, offset = response_mask.nonzero(as_tuple=True)
    return MicroBatchTensors(
        input_ids=input_ids,
        position_ids=torch.arange(width).expand(batch, width),
        subtree_end=torch.full((batch, width), width),
        source_row=row,
        source_position=offset,
        target_ids=input_ids[row, offset + 1],
        prediction=torch.arange(len(row)),
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


_PER_TOKEN = ("source_row", "source_position", "target_ids", "prediction", "answer", "offset")
_PER_ANSWER = ("behaviour_logprobs", "response_mask", "versions", "advantages", "token_weights")


def _check(row: Row, trajectory: Trajectory) -> None:
    if (trajectory.group_id, trajectory.index) != (row.group_id, row.index):
        raise ValueError(
            f"the plan expects member {row.index} of group {row.group_id}, its payload holds member "
            f"{trajectory.index} of group {trajectory.group_id}"
        )
    if row.prompt_length < 1:
        raise ValueError(f"member {row.index} of group {row.group_id} has no prompt: nothing predicts its first token")
    if len(trajectory.token_ids) != row.length or trajectory.response_mask[: row.prompt_length].any():
        raise ValueError(
            f"member {row.index} of group {row.group_id}: {len(trajectory.token_ids)} tokens, the plan expects "
            f"{row.prompt_length} of prompt and {row.own_length} of answer"
        )
