"""The schema: every configuration key, its type, its default and its meaning. Units are in the names.

`orchestrator.compose` fills it from `conf/` and overrides, `orchestrator.checks` holds the checks of values and across
keys. What the rest of Headway reads are instances of these dataclasses. `docs/config.md` is made from this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


class ConfigError(ValueError):
    """The configuration asks for something that can't be; the message says what and what would do."""


@dataclass
class RunConfig:
    name: str | None = None  # folder under `dir`; default: date and time
    dir: str = "runs"
    batches: int = 20  # batches to train on; each ends in one published version
    seed: int = 0  # sampling, initialisation; the order of prompts has data.seed
    deterministic: bool = False  # seed every request by prompt and index, so that a run can be repeated
    watchdog_s: float = 900.0  # without any progress for so long, stop with a dump of the queue


@dataclass
class LoraConfig:
    rank: int = 0  # 0: full fine-tuning
    alpha: float = 32.0
    targets: str = "all-linear"  # peft's target_modules: all-linear, or a regular expression of module names


@dataclass
class ModelConfig:
    # A folder, a hub id, or builtin:smollm2_135m / builtin:tiny (made in the user's cache at first use).
    path: str = MISSING
    dtype: str = "bfloat16"  # bfloat16 | float32: engine weights and learner compute; master weights are float32
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class SourceConfig:
    """One named source of prompts. Give `path` (JSONL, Parquet, or a data set folder or hub id) or `generator`."""

    path: str | None = None
    split: str = "train"  # of a Hugging Face data set
    generator: str | None = None  # dotted path of a function that yields rows
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the generator
    weight: float = 1.0  # share of the prompts drawn from this source, relative to the others'
    prompt_column: str = "prompt"
    system_prompt: str | None = None  # put before prompts that have no system message
    limit: int | None = None  # use only the first so many rows
    reward: list[str] | None = None  # names of the reward functions for these rows; default: all


@dataclass
class DataConfig:
    train: dict[str, SourceConfig] = field(default_factory=dict)
    eval: dict[str, SourceConfig] = field(default_factory=dict)
    seed: int = 0  # order of the prompts, apart from run.seed
    shuffle: bool = True
    epochs: int | None = None  # passes over the prompts; null: as many as run.batches needs


@dataclass
class RewardFunctionConfig:
    path: str = MISSING  # dotted path, or file.py:function
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # further keyword arguments


@dataclass
class RewardConfig:
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    primary: str | None = None  # the correctness-like component; default: the first function
    workers: int = 1
    timeout_s: float = 30.0  # for one call of one function, from its start
    retries: int = 1  # further tries after an error or a time-out, before a member is unscored
    max_error_ratio: float = 0.05  # a larger share of errored or timed-out rewards stops the run


@dataclass
class WeightsConfig:
    transport: str = "auto"  # auto | shared_memory | nccl; auto: nccl on GPUs, else shared_memory
    bucket_mib: int = 256  # tensors travel in buckets of about this size
    timeout_s: float = 300.0  # for each step of a broadcast
    canary: bool = True  # at start: perturb, publish, see the engines move as the learner did, restore
    probe_max_gap: float | None = None  # nats; null: from the noise measured by the canary


@dataclass
class RolloutConfig:
    replicas: int = 1
    tensor_parallel_size: int = 1
    max_prompt_tokens: int = 512  # longer prompts are refused at load
    max_response_tokens: int = 512
    temperature: float = 1.0
    # The learner could not follow a truncated distribution; these exist to be refused with that reason.
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_concurrent_answers: int = 256  # per engine
    kv_cache_mib: int | None = None  # null: vLLM's own choice from the device's memory (CPU: 512)
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False
    threads: int | None = None  # CPU threads of one engine; null: shared out evenly
    engine_options: dict[str, Any] = field(default_factory=dict)  # further vLLM engine arguments
    start_timeout_s: float = 900.0
    answer_timeout_s: float = 600.0  # for all answers of one request
    retries: int = 2  # of a member whose generation failed for a reason of the infrastructure
    max_restarts: int = 3  # of one rollout actor in a run
    weights: WeightsConfig = field(default_factory=WeightsConfig)


@dataclass
class SamplingConfig:
    groups_per_batch: int = 8  # prompts a batch is made of, after filtering
    answers_per_group: int = 8
    filter: bool | None = None  # set equal-reward groups aside; null: on for group-relative estimators
    filter_on: str | None = None  # reward component that must differ; null: reward.primary
    filter_tolerance: float = 1e-6
    min_scored_fraction: float = 1.0  # of a group's members, for it to train
    window_batches: float = 1.0  # consume oldest-dispatched first within so many batches of dispatch order
    max_dispatches_per_batch: int = 10  # times groups_per_batch; beyond, the data counts as unable to fill it
    on_starved: str = "shrink"  # shrink | stop | error: when the data can't fill a batch


@dataclass
class StalenessConfig:
    max: int = 0  # versions; 0 is synchronous, 1 one-step-off, more fully asynchronous


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"  # a function of learner.advantages, or a dotted path
    advantage_options: dict[str, Any] = field(default_factory=dict)
    loss: str = "ppo_clip"  # a function of learner.losses, or a dotted path
    loss_options: dict[str, Any] = field(default_factory=dict)
    aggregation: str = "token_mean"  # a function of learner.aggregation
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    proximal: str = "behaviour"  # behaviour | recompute: denominator of the policy ratio
    correction: str | None = None  # a function of learner.corrections; only with a recomputed proximal policy
    correction_options: dict[str, Any] = field(default_factory=dict)
    kl_coefficient: float = 0.0  # of the KL term to the initial policy, in the loss
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    mask_truncated: bool = False  # leave answers that hit the length limit out of the loss
    updates_per_batch: int = 1  # optimizer updates, each on its share of the batch's groups
    epochs_per_batch: int = 1


@dataclass
class LearnerConfig:
    ranks: int = 1
    zero_stage: int = 2
    learning_rate: float = 1e-6
    warmup_steps: int = 0  # optimizer steps
    schedule: str = "constant"  # constant | linear | cosine, over the run's optimizer steps
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    max_tokens_per_microbatch: int = 4096
    logprob_chunk_tokens: int = 1024  # positions whose vocabulary logits are held at once
    share_prefixes: bool | None = None  # compute a group's prompt once; null: where the model allows
    gradient_checkpointing: bool = False
    offload: bool = False  # optimizer state and, with ZeRO-3, parameters on the CPU (GPU ranks)
    threads: int | None = None  # CPU threads of one rank; null: shared out evenly
    start_timeout_s: float = 900.0
    step_timeout_s: float = 3600.0


@dataclass
class PlacementConfig:
    mode: str = "split"  # split: engines and learner have devices of their own; shared: they take turns
    device: str = "auto"  # auto | cpu | gpu
    ray_address: str | None = None  # of a running cluster; null: start one on this machine


@dataclass
class CheckpointConfig:
    resume: str = "never"  # never | auto (the newest whole checkpoint of run.name, else start) | must
    every_batches: int = 10  # 0: none
    keep: int = 2


@dataclass
class EvalConfig:
    every_batches: int = 0  # 0: only before the first and after the last update
    at_start: bool = True
    at_end: bool = True
    answers_per_prompt: int = 1
    temperature: float = 1.0
    max_response_tokens: int | None = None  # null: rollout.max_response_tokens
    checker: RewardFunctionConfig | None = None  # not the training reward; null: reward.primary, with a warning
    pass_threshold: float = 1.0  # a checker's value that counts as right
    samples: int = 16  # answers written beside the numbers


@dataclass
class LoggingConfig:
    level: str = "INFO"
    wandb: str = "auto"  # auto (online where logged in, else offline) | online | offline | disabled
    wandb_project: str = "headway"
    console: str = "auto"  # auto | live | plain


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
