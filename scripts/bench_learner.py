"""The learner's step beside a bare PyTorch one, and what computing a group's prompt once saves.

    python scripts/bench_learner.py [--model smollm2_135m] [--dtype float32] [--rounds 3] [--only step,prefix]

One process, one rank, made-up tokens. `step_vs_bare` is tokens per second of a whole step of ours (plan, tensors, forward with
logprobs and entropy, backward, ZeRO's optimizer) over those of a bare step (Hugging Face's forward, log-softmax, backward,
AdamW) on the same tokens, unpacked. `shared_prefix` is the time of a step without sharing over one with it, at 8 answers a
prompt that share nothing else. Both sides of a ratio are measured in turns, and the medians compared; what takes long is
measured fewer times. Peak memory is of the step alone: on a CPU the
resident set's high-water mark over what was there before.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ANSWERS = 8
PREFIXES = [(prompt, answer) for answer in (18, 128) for prompt in (45, 256, 1024)]
STEP = (45, 18, 4)  # prompt, answer, groups: half the quickstart's work
ENOUGH_S = 20.0  # spent on one ratio, no more rounds follow
MAX_TOKENS = 4096  # in a micro-batch; a shared row of every setting fits
LEARNING_RATE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2_135m", help="as model.path")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="step,prefix", help="which of step, prefix")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if has_gpu() else "cpu")

    from orchestrator.models import resolve_model

    model = str(resolve_model(options.model))
    rank = make_rank(model, options.dtype, options.threads)
    if "step" in options.only:
        bench_step(rank, model, options)
    if "prefix" in options.only:
        bench_prefixes(rank, model, options.rounds)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def make_rank(model: str, dtype: str, threads: int) -> Any:
    from learner.losses import ppo_clip
    from learner.objective import Objective
    from learner.policy import PolicySettings
    from learner.settings import LearnerSettings
    from learner.worker import LearnerRank

    settings = LearnerSettings(
        policy=PolicySettings(model, dtype),
        objective=Objective(ppo_clip),
        device="gpu" if has_gpu() else "cpu",
        temperature=1.0,
        zero_stage=2,
        learning_rate=LEARNING_RATE,
        total_optimizer_steps=10**6,
        threads=threads,
    )
    rank = LearnerRank(settings, 0, 1)
    rank.start(f"file://{tempfile.mkdtemp()}/rendezvous")
    return rank


def vocabulary(model: str) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config().vocab_size


def made_up(
    prompt: int, answer: int, groups: int, *, vocabulary: int
) -> tuple[list[list[Any]], dict[int, tuple[Any, ...]]]:
    """Rows and payloads of groups whose answers vary by a third around `answer` tokens."""
    from learner.batch import Row
    from rollout_workers.trajectory import Trajectory, VersionSpan

    rng = np.random.default_rng(0)
    rows, payloads = [], {}
    for group in range(groups):
        ids = rng.integers(0, vocabulary, prompt)
        lengths = rng.integers(answer * 2 // 3, answer * 4 // 3 + 1, ANSWERS)
        payloads[group] = tuple(
            Trajectory(
                group_id=f"g{group}",
                index=index,
                prompt_id=f"p{group}",
                messages=(),
                token_ids=np.concatenate([ids, rng.integers(0, vocabulary, length)]).astype(np.int32),
                response_mask=np.arange(prompt + length) >= prompt,
                behaviour_logprobs=np.where(np.arange(prompt + length) >= prompt, -3.0, 0.0).astype(np.float32),
                version_spans=(VersionSpan(prompt, prompt + int(length), 0),),
                finish_reason="stop",
            )
            for index, length in enumerate(lengths)
        )
        rows.append(
            [
                Row(f"g{group}", i, group, i, prompt, int(length), float(rng.normal()), 1 / int(lengths.sum()))
                for i, length in enumerate(lengths)
            ]
        )
    return rows, payloads


def plan_of(rows: Sequence[Sequence[Any]], *, share: bool, max_tokens: int) -> Any:
    from learner.batch import plan_updates

    [plan] = plan_updates([rows], version=0, max_staleness=0, ranks=1, max_tokens=max_tokens, share_prefixes=share)
    return plan


def bench_step(rank: Any, model: str, options: argparse.Namespace) -> None:
    prompt, answer, groups = STEP
    rows, payloads = made_up(prompt, answer, groups, vocabulary=vocabulary(model))
    plan = plan_of(rows, share=False, max_tokens=1024)
    tokens = sum(row.length for group in rows for row in group)
    bare = bare_step(model, options.dtype, plan, payloads)
    (ours, theirs), _ = in_turns([lambda: learn(rank, plan, payloads), bare], options.rounds)
    show(
        f"{groups} groups x {ANSWERS} answers, prompt {prompt}, answer about {answer}: {tokens} tokens, {options.dtype}"
    )
    show(f"{'ours':6} {tokens / ours:8.0f} tokens/s")
    show(f"{'bare':6} {tokens / theirs:8.0f} tokens/s")
    show(f"step_vs_bare {theirs / ours:.3f}")


def bare_step(model: str, dtype: str, plan: Any, payloads: Any) -> Callable[[], None]:
    """The same micro-batches through Hugging Face's model, with as little around it as can be."""
    import torch
    from transformers import AutoModelForCausalLM

    from learner.tensors import build_tensors

    device = "cuda" if has_gpu() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, fused=True)
    batches = [build_tensors(m, payloads).to(torch.device(device)) for update in plan.updates for m in update]

    def step() -> None:
        for batch in batches:
            logits = policy(
                input_ids=batch.input_ids,  # padded behind, where causal attention needs no mask
                position_ids=batch.position_ids,
                use_cache=False,
            ).logits
            sampled = logits[batch.source_row, batch.source_position].float()
            logprobs = sampled.log_softmax(-1).gather(-1, batch.target_ids[:, None])[batch.prediction, 0]
            weights = (batch.token_weights * batch.advantages)[batch.answer, 0]
            (-(logprobs * weights).sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bench_prefixes(rank: Any, model: str, rounds: int) -> None:
    for prompt, answer in PREFIXES:
        rows, payloads = made_up(prompt, answer, 1, vocabulary=vocabulary(model))
        plans = [plan_of(rows, share=share, max_tokens=MAX_TOKENS) for share in (False, True)]
        (apart, shared), peaks = in_turns([partial(learn, rank, plan, payloads) for plan in plans], rounds)
        show(
            f"shared_prefix prompt={prompt} answer={answer} speedup={apart / shared:.2f} "
            f"memory_mib={peaks[0]:.0f}->{peaks[1]:.0f} seconds={apart:.1f}->{shared:.1f}"
        )


def learn(rank: Any, plan: Any, payloads: Any) -> None:
    rank.learn(plan, *(payloads[number] for number in plan.payloads))


def in_turns(steps: Sequence[Callable[[], None]], rounds: int) -> tuple[list[float], list[float]]:
    """Median seconds of each step and the highest memory of one, in MiB, over what was held before it."""
    taken: list[list[float]] = [[] for _ in steps]
    peaks = [0.0 for _ in steps]
    while len(taken[0]) < rounds and sum(map(sum, taken)) < ENOUGH_S:
        for number, step in enumerate(steps):
            before = reset_peak()
            began = time.perf_counter()
            step()
            after = peak_bytes()
            taken[number].append(time.perf_counter() - began)
            peaks[number] = max(peaks[number], (after - before) / 2**20)
    return [statistics.median(seconds) for seconds in taken], peaks


def reset_peak() -> int:
    """Bytes held now; `peak_bytes` counts from here."""
    if has_gpu():
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    return status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most that was held since `reset_peak`."""
    if has_gpu():
        import torch

        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
