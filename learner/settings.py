"""What a learner rank is started with, and what follows from it: the rate of a step, the set-up of process and DeepSpeed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from learner.objective import Objective
    from learner.policy import PolicySettings

CPU_REDUCE_BUCKET = 2**25  # gradients that wait to be reduced together; DeepSpeed's 5e8 is a buffer of gigabytes


@dataclass(frozen=True)
class LearnerSettings:
    """What every rank is started with. `total_optimizer_steps` is the length of the learning-rate schedule."""

    policy: PolicySettings
    objective: Objective
    device: str
    temperature: float
    zero_stage: int
    learning_rate: float
    total_optimizer_steps: int
    warmup_steps: int = 0
    schedule: str = "constant"
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    offload: bool = False
    deterministic: bool = False  # the same plan and weights give the same weights bit by bit; see `_be_deterministic`
    threads: int | None = None
    bucket_bytes: int = 256 * 2**20
    reference: str = "ranks"  # where a reference lives, see `learner.reference`
    send_adapter: bool = False  # engines serve base and adapter: the weights of a version are the adapter's alone


def learning_rate(settings: LearnerSettings, step: int) -> float:
    """Of optimizer step `step` (from 0): linear warm-up, then the schedule down to 0 after the last step."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    span = max(1, settings.total_optimizer_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    if settings.schedule == "linear":
        return settings.learning_rate * (1 - progress)
    return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def _be_deterministic() -> None:
    """Only algorithms that repeat bit by bit, in this process; one that can't raises RuntimeError when it is called.

    What is left is the order of sums over ranks and threads: fixed for a number of ranks and threads, and other for another.
    """
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at cuBLAS's first call; without it torch refuses to use it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def use_device(settings: LearnerSettings) -> torch.device:
    """Set this process up for the settings' device, threads and determinism; the device."""
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.deterministic:
        _be_deterministic()
    if settings.device != "gpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def device_bytes(settings: LearnerSettings) -> int:
    """All memory of this process's GPU, or of its machine; callable before `use_device`."""
    import torch

    if settings.device == "gpu":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def deepspeed_config(settings: LearnerSettings) -> dict[str, Any]:
    """Of every engine of a rank. ZeRO's own losses of precision are switched off."""
    s = settings
    zero: dict[str, Any] = {"stage": s.zero_stage}
    if s.device == "cpu":
        zero["reduce_bucket_size"] = CPU_REDUCE_BUCKET
    if s.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if s.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # driven by hand, see `learner.worker`
        "zero_optimization": zero,
        "bf16": {"enabled": s.policy.dtype == "bfloat16"},
        # By default DeepSpeed adds gradients of bfloat16 weights up in bfloat16, over micro-batches and over ranks.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": s.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own needs a compiler at run time
        "steps_per_print": 10**9,
    }
