"""A replay: the step of a run that led from version N to N + 1, computed again from the journal.

Contract:
- What was written down goes through the very code of the run once more: rewards become advantages, answers become the plan
  of optimizer updates (`orchestrator.batching`), the plan becomes tensors, and these the loss (`learner.objective`), with the
  journal's logprobs in the place of a forward pass. A forward pass can be added where weights of version N are there.
- A figure that the journal can't give is reported as such, with the reason, never guessed. What can't:
    - entropies, a KL term and a selection of tokens need the forward pass;
    - a second epoch, and with `algorithm.proximal=recompute` a second update, see weights that nobody kept;
    - gradient norms need a backward pass.
- Limits: figures are sums of float32 terms, so they may differ by `RELATIVE` of the terms' sizes, not of a sum in which
  these nearly cancel. Advantages are float64 and must be equal.
Nothing is written to the run's folder.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from learner.batch import Coefficients
from learner.objective import Objective, micro_batch_loss
from learner.rank_group import LearnerGroup
from learner.survey import Survey
from learner.tally import Tally
from learner.tensors import MicroBatchTensors, build_tensors
from learner.worker import LearnReport
from orchestrator.algorithm import objective, per_token
from orchestrator.batching import LearningPlan, plan_learning
from orchestrator.config import Config
from orchestrator.replay_journal import Answer, RecordedBatch, named
from orchestrator.reporting import learner_metrics

RELATIVE = 1e-6
# Nats: how far logprobs of a new forward pass under the same weights may be from the journal's.
FORWARD_GAP_NATS = {"float32": 1e-4, "bfloat16": 0.02}
ADVANTAGE, LOGPROBS = "advantage of each answer", "learner logprobs"
NAMED = 5  # answers that are named where some differ


@dataclass(frozen=True)
class Scored:
    """A forward pass under the weights of version N: its tally, and each answer's logprobs, float32 [sampled tokens]."""

    tally: Tally
    logprobs: Mapping[Answer, np.ndarray]


@dataclass(frozen=True)
class Figure:
    """One line of a replay. A figure differs when `difference` is above `limit`, or no number; without one it says why.

    `difference` is None where there is nothing to compare.
    """

    name: str
    recorded: float | None
    replayed: float | None
    difference: float | None
    limit: float = 0.0
    note: str = ""

    @property
    def differs(self) -> bool:
        return self.difference is not None and not self.difference <= self.limit


@dataclass(frozen=True)
class Replay:
    """`version` is the one that the batch improved."""

    run_dir: Path
    version: int
    figures: tuple[Figure, ...]

    @property
    def differing(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.differs]

    def __getitem__(self, name: str) -> Figure:
        """The figure of that name. Raises KeyError."""
        found = [figure for figure in self.figures if figure.name == name]
        if not found:
            raise KeyError(name)
        return found[0]


def coefficients_of(config: Config, recorded: RecordedBatch) -> Coefficients:
    """Those of the batch, where they are adapted; overrides of the configuration may have fixed them."""
    a, of_batch = config.algorithm, recorded.coefficients
    return Coefficients(
        kl=None if a.kl_target is None else of_batch.kl, entropy=None if a.entropy_target is None else of_batch.entropy
    )


def plan_of(config: Config, recorded: RecordedBatch, share_prefixes: bool = False) -> LearningPlan:
    """The optimizer updates that the run's code makes of the batch.

    `share_prefixes` is what `orchestrator.derived.prefix_sharing` says. Without a forward pass it makes no difference.
    """
    return plan_learning(
        config,
        recorded.batch,
        recorded.flights,
        ranks=config.learner.ranks,
        share_prefixes=share_prefixes,
        coefficients=coefficients_of(config, recorded),
    )


def replay_batch(
    run_dir: Path, config: Config, recorded: RecordedBatch, plan: LearningPlan, scored: Scored | None = None
) -> Replay:
    """Compare what the run recorded of a batch with what follows from the journal, and from a forward pass if there is one."""
    figures = [
        _compared(recorded, "batch/groups", len(recorded.batch.groups)),
        _compared(recorded, "batch/answers", len(plan.rows)),
        _compared(recorded, "batch/trained_tokens", sum(row.response_length for row in plan.rows)),
        _compared(recorded, "optimizer_step", recorded.optimizer_step),
        _advantages(recorded, plan),
    ]
    if not config.algorithm.mask_truncated:  # which leaves answers out of the loss that count in these
        staleness = recorded.batch.staleness().metrics()
        figures += [_compared(recorded, name, staleness[name]) for name in staleness if name in recorded.metrics]
    figures += _learner_figures(config, recorded, plan, scored)
    if scored is not None:
        figures.append(_logprobs(config, recorded, plan, scored))
    return Replay(run_dir, recorded.batch.version, tuple(figures))


async def score(learner: LearnerGroup, plan: LearningPlan, recorded: RecordedBatch, timeout_s: float) -> Scored:
    """A forward pass of the learner, as it is, over the batch. `timeout_s` is for fetching the logprobs."""
    import ray

    payloads = [ray.put(recorded.payloads[number]) for number in range(len(recorded.payloads))]
    tally, references = await learner.score(plan.ranks, payloads)
    logprobs: dict[Answer, np.ndarray] = {}
    for reference in references:
        logprobs |= await asyncio.wait_for(reference, timeout_s)
    return Scored(tally, logprobs)


def _compared(
    recorded: RecordedBatch, name: str, replayed: float, *, terms: float = 0.0, relative: float = RELATIVE
) -> Figure:
    """A figure against the run's record of it. `terms` is the size of what was added up."""
    before = recorded.metrics.get(name)
    if before is None:
        why = "recorded as not finite" if name in recorded.metrics else "not in metrics.jsonl"
        return Figure(name, None, replayed, None, note=why)
    limit = relative * max(terms, abs(before))
    return Figure(name, before, replayed, abs(replayed - before), limit)


def _advantages(recorded: RecordedBatch, plan: LearningPlan) -> Figure:
    """Mean size of the advantages of all scored answers; the difference is the largest of any."""
    if not plan.advantages:
        return Figure(ADVANTAGE, None, None, None, note="are per token, and in the loss alone")
    pairs = {
        answer: (recorded.advantages.get(answer), plan.advantages.get(answer))
        for answer in recorded.advantages.keys() | plan.advantages.keys()
    }
    gaps = {
        answer: 0.0 if a == b else math.inf if a is None or b is None else abs(a - b)
        for answer, (a, b) in pairs.items()
    }
    before, after = ([abs(a) for pair in pairs.values() if (a := pair[side]) is not None] for side in (0, 1))
    return Figure(
        ADVANTAGE,
        float(np.mean(before)) if before else None,
        float(np.mean(after)) if after else None,
        max(gaps.values(), default=0.0),
        RELATIVE * max(before, default=0.0),
        _worst(gaps),
    )


def _worst(gaps: Mapping[Answer, float], limit: float = 0.0) -> str:
    """The answers that differ most, named."""
    worst = sorted((answer for answer, gap in gaps.items() if not gap <= limit), key=lambda answer: -gaps[answer])
    more = f" and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
    return ", ".join(f"{named(answer)} by {gaps[answer]:.3g}" for answer in worst[:NAMED]) + more


def _learner_figures(
    config: Config, recorded: RecordedBatch, plan: LearningPlan, scored: Scored | None
) -> list[Figure]:
    """`actor/*` and `mismatch/*` of the record, in its order, but for what a backward pass or the schedule gives."""
    a, composed = config.algorithm, objective(config.algorithm).with_coefficients(coefficients_of(config, recorded))
    updates = len(plan.ranks[0].updates)
    stored = _metrics_of(stored_tally(config, recorded), updates)
    passed = {} if scored is None else _metrics_of(scored.tally, updates)
    beyond = _beyond_the_journal(composed)
    penalised = composed.returns is not None and composed.needs_reference  # then all figures rest on the reference
    # Only then are the journal's logprobs those with which the loss was computed, and only with one pass a new one's.
    whole = a.epochs_per_batch == 1 and (a.proximal != "recompute" or updates == 1)
    alone = a.epochs_per_batch * updates == 1
    figures = []
    for name in recorded.metrics:
        of_actor = name.startswith("actor/")
        needs_pass = name in _OF_A_FORWARD_PASS or (name == "actor/loss" and bool(beyond)) or (of_actor and penalised)
        terms = _size_of_terms(config, plan) / max(updates, 1) if name == "actor/loss" else 1.0
        if not name.startswith(("actor/", "mismatch/")) or name in _NOT_OF_THE_LOSS:
            continue
        if recorded.metrics.get("actor/skipped_updates"):
            figures.append(_not_replayed(recorded, name, "an update was left out, its gradient was not finite"))
        elif of_actor and (not whole or (needs_pass and scored is not None and not alone)):
            figures.append(_not_replayed(recorded, name, "the weights between the batch's updates are not kept"))
        elif needs_pass and scored is None:
            what = " and ".join(beyond) if beyond and name not in _OF_A_FORWARD_PASS else "what is not in the journal"
            figures.append(_not_replayed(recorded, name, f"holds {what}: needs replay.forward=true"))
        elif needs_pass and name in passed:
            gap = FORWARD_GAP_NATS[config.model.dtype]
            figures.append(_compared(recorded, name, passed[name], terms=terms, relative=gap))
        elif name in stored:
            figures.append(_compared(recorded, name, stored[name], terms=terms))
    return figures


_OF_A_FORWARD_PASS = ("actor/entropy", "actor/kl_ref", "actor/selected_ratio")
_NOT_OF_THE_LOSS = (
    "actor/grad_norm",
    "actor/lr",
    "actor/skipped_updates",
    "actor/kl_coefficient",
    "actor/entropy_coefficient",
)


def _beyond_the_journal(composed: Objective) -> list[str]:
    """What enters the loss that the journal has no logprobs or entropies for."""
    parts = {
        "a KL term": composed.kl is not None,
        "a KL penalty": composed.kl is None and composed.needs_reference,
        "an entropy bonus": composed.entropy_coefficient != 0,
        "a selection of tokens": composed.selection is not None,
    }
    return [what for what, there in parts.items() if there]


def _size_of_terms(config: Config, plan: LearningPlan) -> float:
    """Of the losses of all updates: sum over the tokens of weight * |advantage|, which nearly cancel where the policy is new.

    Advantages per token are whitened: of size 1.
    """
    of_tokens = per_token(config.algorithm)
    rows = (
        row for rank in plan.ranks for update in rank.updates for micro in update for packed in micro for row in packed
    )
    return sum((1.0 if of_tokens else abs(row.advantage)) * row.token_weight * row.response_length for row in rows)


def _not_replayed(recorded: RecordedBatch, name: str, why: str) -> Figure:
    return Figure(name, recorded.metrics.get(name), None, None, note=why)


def _metrics_of(tally: Tally, updates: int) -> dict[str, float]:
    unknown = (math.nan,) * updates
    report = LearnReport(tally.sums, tally.maxima, unknown, unknown, (), 0, 0, 0)
    return learner_metrics([report], tally)


def stored_tally(config: Config, recorded: RecordedBatch) -> Tally:
    """The tally of the whole batch with the journal's logprobs as the policy's, without what is beyond the journal."""
    # One rank does it all here: sums over the ranks are its own.
    plan = plan_of(dataclasses.replace(config, learner=dataclasses.replace(config.learner, ranks=1)), recorded)
    [of_rank] = plan.ranks
    composed = objective(config.algorithm)
    composed = dataclasses.replace(
        composed, kl=None, selection=None, returns=None if composed.needs_reference else composed.returns
    )

    def forward(batch: MicroBatchTensors) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.zeros(batch.response_mask.shape)
        for number, row in enumerate(batch.rows):
            values = torch.from_numpy(recorded.learner_logprobs[row.group_id, row.index].copy())
            logprobs[number, : len(values)] = values
        return logprobs, torch.zeros_like(logprobs)

    def reference(batches: Iterable[MicroBatchTensors]) -> list[torch.Tensor]:
        raise AssertionError("nothing is left that needs it")

    survey = Survey(
        composed,
        of_rank,
        tensors=lambda micro_batch: build_tensors(micro_batch, recorded.payloads),
        forward=forward,
        reference=reference,
        total=lambda values: values,
    )
    tally = Tally()
    for update, micro_batches in enumerate(of_rank.updates):
        for place in ((update, number) for number in range(len(micro_batches))):
            batch = survey.batch(place)
            logprobs, entropy = forward(batch)
            _, counted = micro_batch_loss(
                survey.objective,
                batch,
                logprobs,
                entropy,
                version=of_rank.version,
                max_staleness=of_rank.max_staleness,
                proximal_logprobs=survey.known(place).proximal_logprobs,
            )
            tally.merge(counted)
    return tally


def _logprobs(config: Config, recorded: RecordedBatch, plan: LearningPlan, scored: Scored) -> Figure:
    """Mean logprob of the sampled tokens; the difference is the largest mean gap of any answer."""
    updates = [_answers_of(plan, number) for number in range(len(plan.ranks[0].updates))]
    # Of later updates' answers the journal holds what the policy gave them once it had moved.
    comparable = set().union(*(updates if config.algorithm.proximal == "recompute" else updates[:1]))
    pairs = {a: (recorded.learner_logprobs[a], scored.logprobs[a]) for a in comparable}
    gaps = {a: float(np.abs(before - after).mean()) for a, (before, after) in pairs.items()}
    limit = FORWARD_GAP_NATS[config.model.dtype]
    before, after = (float(np.concatenate([pair[side] for pair in pairs.values()]).mean()) for side in (0, 1))
    name = LOGPROBS if len(pairs) == len(recorded.learner_logprobs) else f"{LOGPROBS}, first update"
    return Figure(name, before, after, max(gaps.values()), limit, _worst(gaps, limit))


def _answers_of(plan: LearningPlan, update: int) -> set[Answer]:
    return {
        (row.group_id, row.index)
        for rank in plan.ranks
        for micro_batch in rank.updates[update]
        for packed in micro_batch
        for row in packed
    }


def table(replay: Replay) -> Table:
    """For a person: one row per figure."""
    view = Table(title=Text(f"replay of version {replay.version} of {replay.run_dir}"), box=SIMPLE_HEAD)
    for heading in ("figure", "recorded", "replayed", "difference", "limit", ""):
        view.add_column(heading, justify="left" if heading in ("figure", "") else "right")
    for f in replay.figures:
        verdict = f"DIFFERS {f.note}" if f.differs else f.note or "equal"
        numbers = [_number(value) for value in (f.recorded, f.replayed, f.difference)]
        limit = "" if f.difference is None else _number(f.limit)
        view.add_row(*map(Text, (f.name, *numbers, limit)), Text(verdict, style="bold red" if f.differs else ""))
    return view


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"
