"""A learner rank: one process of the DeepSpeed job, as a Ray actor.

A rank fetches its own shards (trajectories arrive as object references resolved by Ray on this node), performs the
optimizer updates of its plan in lockstep with the others, and can say how likely given tokens are, hand out its
weights, save and load. Version numbers are the orchestrator's: a rank only counts optimizer steps.

DeepSpeed averages gradients over data-parallel ranks and would divide by accumulation steps. Normalisers here are
global (`Row.token_weight`), so the loss is multiplied by the number of ranks and accumulation is driven by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from learner.batch import RankPlan
from learner.settings import LearnerSettings, deepspeed_config, device_bytes, learning_rate, use_device
from learner.tensors import MicroBatchTensors, build_tensors, text_tensors
from rollout_workers.trajectory import Trajectory
from rollout_workers.weights.bucket import Bucket, pack
from rollout_workers.weights.manifest import Manifest, TensorRecord

if TYPE_CHECKING:
    import torch

    from learner.perturbation import Perturbation
    from learner.reference import Answer, Reference
    from learner.survey import Place, Survey
    from learner.tally import Tally
    from rollout_workers.weights.trainer_side import NCCLSender


@dataclass(frozen=True)
class SkippedUpdate:
    """Update `number` of the batch (epochs follow one another) was left out: somewhere its gradient was not finite.

    `answers` are those of this rank, by (group id, index), whose own loss or logprobs were not finite. Where no rank names
    any, the backward pass alone overflowed.
    """

    number: int
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class LearnReport:
    """Of one rank and batch. Sums and maxima are a `learner.tally.Tally`'s, of the answers in updates that were made;
    norms and rates are of these, one for each."""

    sums: dict[str, tuple[float, ...]]
    maxima: dict[str, tuple[float, ...]]
    grad_norms: tuple[float, ...]
    learning_rates: tuple[float, ...]
    skipped: tuple[SkippedUpdate, ...]
    optimizer_step: int  # so many updates were made since the run began
    model_tokens: int  # that went through the model, prompts and padding included
    peak_memory_bytes: int  # of the rank so far


def _not_finite(batch: MicroBatchTensors, logprobs: torch.Tensor) -> list[tuple[str, int]]:
    """The answers whose logprobs are not finite; all of the micro-batch where that explains nothing."""
    bad = ~logprobs.detach().isfinite().all(1)
    return [
        (row.group_id, row.index) for row, its in zip(batch.rows, bad.tolist(), strict=True) if its or not bad.any()
    ]


class LearnerRank:
    """The actor. Create it with `ray.remote(LearnerRank)`, one per rank, and call every rank alike."""

    def __init__(self, settings: LearnerSettings, rank: int, ranks: int) -> None:
        self._settings = settings
        self._rank = rank
        self._ranks = ranks
        self._optimizer_step = 0
        self._perturbation: Perturbation | None = None
        self._sender: NCCLSender | None = None

    def address(self) -> str:
        """This node's IP address and a free port, for the rendezvous of all ranks."""
        import socket

        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def device_bytes(self) -> int:
        """All memory of this rank's GPU, or of its machine; before `start` as well."""
        return device_bytes(self._settings)

    def start(self, rendezvous: str) -> int:
        """Join the process group and load the model; returns the number of trainable parameters."""
        import deepspeed
        import torch
        import torch.distributed as dist

        from learner.policy import Policy
        from learner.state import LearnerState
        from learner.weight_source import PolicyWeightSource

        s = self._settings
        self._device = use_device(s)
        # Without `device_id`: with it, NCCL weight transfer to engines has been reported to hang.
        dist.init_process_group(
            "nccl" if s.device == "gpu" else "gloo",
            init_method=rendezvous,
            rank=self._rank,
            world_size=self._ranks,
        )
        # DeepSpeed would compile a shared-memory reduction for CPUs; gloo does without a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists; Ray shows each actor its own device only
        policy = Policy(s.policy)
        trainable = [p for p in policy.parameters() if p.requires_grad]
        count = sum(p.numel() for p in trainable)
        optimizer = torch.optim.AdamW(
            trainable,
            lr=s.learning_rate,
            betas=s.adam_betas,
            weight_decay=s.weight_decay,
            fused=True,  # one pass over weights and moments instead of eight
        )
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=optimizer, config=deepspeed_config(self._settings), dist_init_required=False
        )
        self._policy = policy
        self._state = LearnerState(policy, optimizer, self._engine.optimizer, zero_stage=s.zero_stage, rank=self._rank)
        if s.zero_stage == 3 and self._ranks > 1:
            policy.agree = self._most_of_ranks
        self._reference = self._load_reference()
        self._source = PolicyWeightSource(policy, zero_stage=s.zero_stage, bucket_bytes=s.bucket_bytes)
        self._adapter: PolicyWeightSource | None = None
        if policy.is_lora:
            self._adapter = PolicyWeightSource(
                policy, zero_stage=s.zero_stage, bucket_bytes=s.bucket_bytes, adapter=True
            )
        return count

    def _load_reference(self) -> Reference | None:
        """The frozen initial policy for a KL term where it lives in the ranks; a LoRA policy is its own (adapters off)."""
        s = self._settings
        if not s.objective.needs_reference or s.reference == "own":
            return None
        import deepspeed

        from learner.policy import Policy
        from learner.reference import forward_passes, visiting

        if self._policy.is_lora:
            return forward_passes(self._engine, s.temperature, self._policy.as_reference)
        model = Policy(dataclasses.replace(s.policy, gradient_checkpointing=False)).requires_grad_(False)
        if s.zero_stage == 3:
            model.agree = self._policy.agree
            zero = {"stage": 3} | ({"offload_param": {"device": "cpu"}} if s.reference == "offload" else {})
            config = deepspeed_config(self._settings) | {
                "zero_optimization": zero
            }  # without an optimizer it only shards
            engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
            return forward_passes(engine, s.temperature)
        if s.reference == "offload":
            return forward_passes(model, s.temperature, lambda: visiting(model, self._device))
        return forward_passes(model.to(self._device), s.temperature)

    def learn(self, plan: RankPlan, *data: Any) -> tuple[LearnReport, dict[Answer, np.ndarray]]:
        """Perform the plan's optimizer updates.

        `data` are the payloads in the order of `plan.payloads`; behind them, where reference actors have scored them, what these
        found of each payload.

        An update whose gradient is not finite changes nothing, on any rank, and is reported as skipped.

        Returns the report and, apart from it because it is as large as the batch, the logprobs of each answer by (group
        id, index), float32 [sampled tokens]: of the first forward pass over it.
        """
        from learner.reference import by_answer
        from learner.tally import Tally

        tally, norms, rates = Tally(), [], []
        skipped: list[SkippedUpdate] = []
        first_logprobs: dict[Answer, np.ndarray] = {}
        survey = self._survey(plan, *data)
        tokens = 0
        for epoch, (update, micro_batches) in itertools.product(range(plan.epochs), enumerate(plan.updates)):
            rate = learning_rate(self._settings, self._optimizer_step)
            survey.begin(update, self._optimizer_step)
            of_update, not_finite = Tally(), []
            for number, micro_batch in enumerate(micro_batches):
                place, last = (update, number), number == len(micro_batches) - 1
                batch = survey.batch(place)
                tokens += batch.input_ids.numel() if micro_batch else 0
                logprobs, counted, bad = self._accumulate(survey, place, batch, first_pass=epoch == 0, last=last)
                of_update.merge(counted)
                not_finite += bad
                if epoch == 0:
                    before = survey.known(place).proximal_logprobs
                    first_logprobs |= by_answer(batch, logprobs if before is None else before)
                survey.saw(place, logprobs)
            norm = self._step(rate)
            if norm is None:
                skipped.append(SkippedUpdate(epoch * len(plan.updates) + update, tuple(not_finite)))
                continue
            tally.merge(of_update)
            norms.append(norm)
            rates.append(rate)
        report = LearnReport(
            tally.sums,
            tally.maxima,
            tuple(norms),
            tuple(rates),
            tuple(skipped),
            self._optimizer_step,
            tokens,
            self._peak_memory_bytes(),
        )
        return report, first_logprobs

    def score(self, plan: RankPlan, *data: Any) -> tuple[Tally, dict[Answer, np.ndarray]]:
        """One forward pass over every answer of the plan under the present weights; nothing is learned.

        Returns what `learn` would count in such a pass, the loss included, and the logprobs as `learn` does; `data` as there.
        """
        import torch

        from learner.reference import by_answer
        from learner.tally import Tally

        tally = Tally()
        found: dict[Answer, np.ndarray] = {}
        survey = self._survey(plan, *data)
        for update, micro_batches in enumerate(plan.updates):
            survey.begin(update, self._optimizer_step)
            for place in ((update, number) for number in range(len(micro_batches))):
                batch = survey.batch(place)
                with torch.no_grad():
                    _, logprobs, counted = self._loss(survey, place, batch, first_pass=True)
                tally.merge(counted)
                found |= by_answer(batch, logprobs)
        return tally, found

    def _survey(self, plan: RankPlan, *data: Any) -> Survey:
        """See `learn`."""
        from learner.reference import looked_up
        from learner.survey import Survey

        count = len(plan.payloads)
        payloads: dict[int, Sequence[Trajectory]] = dict(zip(plan.payloads, data[:count], strict=True))
        reference = self._reference
        if reference is None:
            reference = looked_up({answer: of_it for found in data[count:] for answer, of_it in found.items()})
        return Survey(
            self._settings.objective,
            plan,
            tensors=lambda micro_batch: build_tensors(micro_batch, payloads).to(self._device),
            forward=lambda batch: self._engine(batch, self._settings.temperature),
            reference=reference,
            total=self._over_ranks,
        )

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. Every rank calls it."""
        import torch
        import torch.distributed as dist

        total = torch.as_tensor(values).detach().clone().to(self._device)
        dist.all_reduce(total)
        return total

    def _most_of_ranks(self, count: int) -> int:
        """The largest count of any rank. Every rank calls it."""
        import torch
        import torch.distributed as dist

        most = torch.tensor(count, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def _accumulate(
        self, survey: Survey, place: Place, batch: MicroBatchTensors, *, first_pass: bool, last: bool
    ) -> tuple[torch.Tensor, Tally, list[tuple[str, int]]]:
        """Forward and backward of one micro-batch: its logprobs, detached, its tally, and its answers that are not finite."""
        self._engine.set_gradient_accumulation_boundary(last)
        loss, logprobs, tally = self._loss(survey, place, batch, first_pass=first_pass)
        if not batch.rows:
            loss = logprobs.sum() + loss  # zero, but it reaches every parameter
        finite = math.isfinite(tally.total("loss"))
        # A loss that is not finite goes backwards as well, and spoils the gradient of all ranks, which then skip together.
        self._engine.backward(loss * (self._ranks if finite else math.nan), scale_wrt_gas=False)
        return logprobs.detach(), tally, [] if finite else _not_finite(batch, logprobs)

    def _loss(
        self, survey: Survey, place: Place, batch: MicroBatchTensors, *, first_pass: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tally]:
        """One forward pass: the loss, the logprobs and the tally of a micro-batch."""
        from learner.objective import micro_batch_loss

        known = survey.known(place)
        logprobs, entropy = self._engine(batch, self._settings.temperature)
        loss, tally = micro_batch_loss(
            survey.objective,
            batch,
            logprobs,
            entropy,
            version=survey.plan.version,
            max_staleness=survey.plan.max_staleness,
            first_pass=first_pass,
            proximal_logprobs=known.proximal_logprobs,
            ref_logprobs=known.ref_logprobs,
            selected=known.selected,
        )
        return loss, logprobs, tally

    def _step(self, rate: float) -> float | None:
        """One optimizer step; the gradient norm before clipping. None: it is not finite, and nothing was changed."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        own_norm = self._plain_grad_norm() if self._settings.zero_stage == 0 else None
        if own_norm is not None and not own_norm.isfinite():
            self._engine.optimizer.zero_grad(set_to_none=True)  # DeepSpeed's own optimizers do so by themselves
            return None
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = float(norm if norm is not None else own_norm or 0.0)
        if not math.isfinite(norm):
            return None
        self._optimizer_step += 1
        return norm

    def _plain_grad_norm(self) -> torch.Tensor:
        """Without ZeRO and in float32, DeepSpeed clips with torch and keeps no norm."""
        import torch

        gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """Logprobs of tokens 1… of each sequence under the current weights: a list of float32 [T-1]."""
        import torch

        with torch.no_grad():
            batch = text_tensors(sequences).to(self._device)
            logprobs, _ = self._engine(batch, temperature)
        return [logprobs[i, : len(ids) - 1].cpu().numpy() for i, ids in enumerate(sequences)]

    def export_weights(self, version: int) -> Iterator[Bucket | Manifest]:
        """The policy (or its adapter) as buckets, then the manifest. All ranks iterate; only rank 0 yields anything."""
        records: list[TensorRecord] = []
        source = self._adapter if self._settings.send_adapter and self._adapter is not None else self._source
        for named in source.buckets():
            if self._rank == 0:
                records.extend(TensorRecord.of(name, tensor) for name, tensor in named)
                yield pack(named)
        if self._rank == 0:
            yield Manifest(version, tuple(records))

    def connect_nccl(self, init_info: Mapping[str, Any]) -> None:
        """Join the weight-transfer group that the engines are joining now (again after its membership changed)."""
        from rollout_workers.weights.trainer_side import NCCLSender

        if self._sender is not None:
            self._sender.close()
        self._sender = NCCLSender(self._source, init_info, self._rank)

    def send_nccl(self, version: int) -> Manifest:
        """Broadcast the policy to the connected engines, which are receiving it now."""
        if self._sender is None:
            raise RuntimeError("connect_nccl comes before send_nccl")
        return self._sender.send(version)

    def nccl_metadata(self) -> dict[str, Any]:
        """What the engines must be told to expect."""
        from rollout_workers.weights.trainer_side import update_info

        return update_info(self._source)

    def perturb(self, scale: float, seed: int) -> None:
        """Shift every trainable parameter by noise of `scale` times its size; see `learner.perturbation`."""
        from learner.perturbation import Perturbation

        self._perturbation = Perturbation(self._policy, zero_stage=self._settings.zero_stage, scale=scale, seed=seed)

    def restore(self) -> None:
        """Undo `perturb` exactly."""
        if self._perturbation is None:
            raise RuntimeError("perturb comes before restore")
        self._perturbation.undo()
        self._perturbation = None

    def save(self, folder: str) -> list[str]:
        """Write weights, optimizer, step and RNG under `folder`, and a LoRA policy's `adapter/`; all ranks call it.

        Returns the names this rank wrote. Raises OSError when the disk does not take them.
        """
        names = self._state.save(Path(folder), self._optimizer_step)
        if self._adapter is not None:
            names += [f"adapter/{name}" for name in self.export_adapter(f"{folder}/adapter")]
        return names

    def load(self, folder: str) -> int:
        """Load what `save` wrote, on whatever ranks; the optimizer step. Errors as of `learner.state.LearnerState.load`."""
        self._optimizer_step = self._state.load(Path(folder))
        return self._optimizer_step

    def export_model(self, folder: str) -> None:
        """Write the policy (adapters merged) as an ordinary Hugging Face folder; all ranks call it, rank 0 writes."""
        from learner.export import export_folder

        export_folder(self._policy, self._source, self._settings.policy.model_path, Path(folder), write=self._rank == 0)

    def export_adapter(self, folder: str) -> list[str]:
        """Write a LoRA policy's adapter alone in peft's format; all ranks call it, rank 0 writes. The files it wrote."""
        from learner.export import export_adapter

        if self._adapter is None:
            raise RuntimeError("a policy without LoRA has no adapter")
        base = self._settings.policy.model_path
        return export_adapter(self._policy, self._adapter, base, Path(folder), write=self._rank == 0)

    def _peak_memory_bytes(self) -> int:
        """Device memory on a GPU, resident memory on a CPU."""
        import resource

        import torch

        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
