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
    # Seed every request by prompt and index, and let the learner use nothing but algorithms that repeat: from the same weights
    # the same batch gives the same weights, bit by bit, on one machine.
    deterministic: bool = False
    watchdog_s: float = 900.0  # without any progress for so long, stop with a dump of the queue


@dataclass
class LoraConfig:
    rank: int = 0  # 0: full fine-tuning; docs/lora.md
    alpha: float = 32.0  # the adapter adds alpha / rank x B A to a layer's weight
    targets: str = "all-linear"  # peft's target_modules: all-linear, or a regular expression of module names


@dataclass
class ModelConfig:
    # A folder, a hub id, or builtin:smollm2_135m / builtin:tiny (made in the user's cache at first use).
    path: str = MISSING
    dtype: str = "bfloat16"  # bfloat16 | float32: engine weights and learner compute; master weights are float32
    fp32_head: bool = False  # logits in float32, of the learner and of the engines: they differ less; slower
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
    gate: bool = False  # below gate_threshold nothing else counts: the other functions add 0 to the total
    gate_threshold: float = 1.0  # the least unweighted value with which the gate is passed
    needs: str | None = None  # the function or model whose verdict this one is given, as `verdict` or `verdicts`


@dataclass
class RewardModelConfig:
    """A sequence classifier with one label that scores whole conversations, on actors of its own; docs/reward_models.md."""

    path: str = MISSING  # a model folder with a chat template, or a hub id
    engine: str = "transformers"  # transformers | vllm
    weight: float = 1.0
    gate: bool = False  # below gate_threshold nothing else counts: the other components add 0 to the total
    gate_threshold: float = 1.0  # the least unweighted value, after normalisation, with which the gate is passed
    normalise: str | None = None  # sigmoid | standard (score - mean) / std; null: the score as it is
    mean: float | None = None  # standard: of the starting policy's scores, as std; fixed for the run
    std: float | None = None
    clip: float | None = None  # cut what comes out to [-clip, clip]
    dtype: str = "bfloat16"  # bfloat16 | float32
    max_tokens: int | None = None  # longer conversations are errors, never cut; null: its context or batch_tokens
    batch_tokens: int = 16384  # in one forward pass, padding included
    replicas: int = 1
    # Of one replica, in a run on GPUs; a run on CPUs ignores it. Below 1 several share one, above 1 needs engine=vllm.
    gpus: float = 1.0
    timeout_s: float = 300.0  # for one group at one replica, waiting included; then another is asked (reward.retries)


@dataclass
class WatchConfig:
    """An independent checker beside the reward, on training answers: the policy learns to game what it is trained on."""

    checker: RewardFunctionConfig | None = None  # not a reward that is trained on; null: eval.checker, if it can judge
    share: float = 0.25  # of the scored groups, chosen by a hash of their id; 0: nothing is watched
    # Batches of the baseline, the first ones, and of the running mean. Short, so that the baseline is of a policy that has not
    # learned to game yet; batches of few groups need more.
    window_batches: int = 5
    max_gap: float = 0.2  # growth over the baseline of mean(reward) - mean(checker) that is no alarm
    on_gap: str = "warn"  # warn | stop: what the alarm does


@dataclass
class RewardConfig:
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    models: dict[str, RewardModelConfig] = field(default_factory=dict)  # components beside the functions, or alone
    primary: str | None = None  # the correctness-like component; default: the first function, else the first model
    workers: int = 1
    timeout_s: float = 30.0  # for one call of one function, from its start
    retries: int = 1  # further tries after an error or a time-out, before a member is unscored
    max_error_ratio: float = 0.05  # a larger share of errored or timed-out rewards stops the run
    watch: WatchConfig = field(default_factory=WatchConfig)


@dataclass
class WeightsConfig:
    # auto | shared_memory | nccl | lora. auto: nccl on GPUs, else shared_memory. lora: the adapter alone travels, and the
    # engines serve the base model with it; with the others they serve the merged model. docs/lora.md
    transport: str = "auto"
    bucket_mib: int = 256  # tensors travel in buckets of about this size
    timeout_s: float = 300.0  # for each step of a broadcast
    canary: bool = True  # at start: perturb, publish, see the engines move as the learner did, restore
    probe_max_gap: float | None = None  # nats; null: from the noise measured by the canary
    # Requests in flight continue under new weights with keys and values recomputed; costs a prefill of every unfinished
    # answer per update.
    recompute_kv: bool = False


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
class EarlyStopConfig:
    """Stop groups whose answers in time are all equal, so that the overdue ones would hardly make them useful."""

    after_s: float | None = None  # of generation, since the group's dispatch; null: no group is stopped
    control_share: float = 0.1  # of the groups that could be stopped go on all the same: they show what stopping loses


@dataclass
class DifficultyConfig:
    """What is remembered of each prompt's pass rate, and whether it decides which prompts are drawn."""

    memory: float = 0.5  # weight of a prompt's newest group in its remembered pass rate
    sampler: bool = False  # draw prompts that are all right or all wrong by now less often
    retest_share: float = 0.1  # sampler: the chance in an epoch that even such a prompt is drawn


@dataclass
class SamplingConfig:
    groups_per_batch: int = 8  # prompts a batch is made of, after filtering
    answers_per_group: int = 8
    filter: bool | None = None  # set equal-reward groups aside; null: on for group-relative estimators
    filter_on: str | None = None  # reward component that must differ; null: reward.primary
    filter_tolerance: float = 1e-6
    pass_rate_band: list[float] | None = None  # [low, high]: set groups aside whose mean of filter_on is outside
    keep: str | None = None  # dotted path or file.py:function of a further filter: (scored members) -> bool
    min_scored_fraction: float = 1.0  # of a group's members, for it to train
    window_batches: float = 1.0  # consume oldest-dispatched first within so many batches of dispatch order
    max_dispatches_per_batch: int = 10  # times groups_per_batch; beyond, the data counts as unable to fill it
    on_starved: str = "shrink"  # shrink | stop | error: when the data can't fill a batch
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)


@dataclass
class StalenessConfig:
    max: int = 0  # versions; 0 is synchronous, 1 one-step-off, more fully asynchronous
    # wait | drop: what to do when an unfinished group would be too old after one more batch without it. wait holds the
    # batch back and loses nothing; drop trains on others and sets the group aside, which costs slow and long answers.
    on_late: str = "wait"
    # Run less far ahead than max while batches come back too far off-policy, and further again when they don't.
    adaptive: bool = False
    min_ess: float = 0.7  # adaptive: least mismatch/ess, a share of the batch's tokens
    max_mismatch_kl: float = 0.05  # adaptive: largest mismatch/kl, nats a token
    patience_batches: int = 5  # adaptive: batches within both limits before running one version further ahead


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"  # a function of learner.advantages, or a dotted path
    advantage_options: dict[str, Any] = field(default_factory=dict)
    loss: str = "ppo_clip"  # a function of learner.losses, or a dotted path
    loss_options: dict[str, Any] = field(default_factory=dict)
    aggregation: str = "token_mean"  # a function of learner.aggregation, or a dotted path
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    proximal: str = "behaviour"  # behaviour | recompute | interpolate (A-3PO): what the ratio is taken against
    correction: str | None = None  # of learner.corrections, or a dotted path; with proximal=behaviour only a mask
    correction_options: dict[str, Any] = field(default_factory=dict)
    kl_coefficient: float = 0.0  # of the KL term to the initial policy
    kl_placement: str = "loss"  # loss | reward (k1 off each token's reward; algorithm.advantage=reinforce_pp)
    kl_estimator: str = "k3"  # in the loss
    # Nats a token: after each batch kl_coefficient moves so that actor/kl_ref comes to this; null: it is fixed.
    kl_target: float | None = None
    kl_horizon_answers: int = 10000  # trained answers in which it moves by a factor of e^0.2 at most
    entropy_coefficient: float = 0.0
    # Nats: after each batch entropy_coefficient moves up by entropy_step while actor/entropy is at or below this, else down,
    # and then the next batch has no bonus; null: it is fixed.
    entropy_target: float | None = None
    entropy_step: float = 0.001  # of entropy_coefficient, a batch
    entropy_coefficient_max: float = 0.05  # with a target
    # top_entropy | clip_cov | kl_cov, of learner.selection: tokens treated apart, at one more forward pass an update
    selection: str | None = None
    selection_options: dict[str, Any] = field(default_factory=dict)
    mask_truncated: bool = False  # leave answers that hit the length limit out of the loss
    updates_per_batch: int = 1  # optimizer updates, each on its share of the batch's groups
    epochs_per_batch: int = 1


@dataclass
class LearnerConfig:
    ranks: int = 1
    zero_stage: int = 2
    learning_rate: float | None = None  # null: 1e-6 for full fine-tuning, ten times that with LoRA
    warmup_steps: int = 0  # optimizer steps
    schedule: str = "constant"  # constant | linear | cosine, over the run's optimizer steps
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    max_skipped_updates: int = 5  # in a row whose gradients are not finite; then the run stops
    max_tokens_per_microbatch: int = 4096
    logprob_chunk_tokens: int = 1024  # positions whose vocabulary logits are held at once
    share_prefixes: bool | None = None  # compute what a group's answers share once; null: where the model can
    gradient_checkpointing: bool = False
    offload: bool = False  # optimizer state and, with ZeRO-3, parameters on the CPU (GPU ranks)
    threads: int | None = None  # CPU threads of one rank; null: shared out evenly
    # Where the frozen initial policy of a KL term lives (docs/algorithms.md): ranks | offload (in the ranks' host memory but for
    # one pass a batch, with GPUs) | own (actors with devices of their own). A LoRA policy is its own.
    reference: str = "ranks"
    reference_ranks: int = 1  # actors of learner.reference=own, each with a whole model
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
class ProfileConfig:
    """For `headway profile-difficulty`: pass rates of data.train, measured before training."""

    answers_per_prompt: int = 8
    band: tuple[float, float] = (0.2, 0.8)  # [low, high], both inclusive: prompts whose pass rate is in it are kept
    limit: int | None = None  # measure only the first so many prompts in a run's order (random where data.shuffle)
    out: str | None = None  # folder of the results; null: difficulty/ in the folder of run.name, else in run.dir


@dataclass
class DoctorConfig:
    """For `headway doctor`: the parts of a run tried out before it; docs/doctor.md."""

    groups: int = 4  # in each of the two batches that are learned; at most sampling.groups_per_batch
    max_logprob_gap: float | None = None  # nats, mean over tokens of |engine's - learner's|; null: by model.dtype
    out: str | None = None  # folder of the results; null: doctor/ in the folder of run.name, else in run.dir


@dataclass
class ReplayConfig:
    """For `headway replay`: a step of a run computed again from its journal; docs/doctor.md."""

    run: str | None = None  # folder of the run; its configuration is the one that counts
    version: int | None = None  # replay the step from this version to the next; null: the newest that is written down
    forward: bool = False  # the learner's logprobs too: needs a checkpoint of that version, or version 0


@dataclass
class CheckRewardsConfig:
    """For `headway check-rewards`: what rewards and checker give to answers of known quality, before training."""

    sets: tuple[str, ...] = ("train", "eval")  # of data; data.train is judged by its rewards, data.eval by eval.checker
    rows: int | None = 100  # of each source, drawn with run.seed; null: all
    gold_column: str | None = None  # data column of a right completion; null: what the reward functions say is one
    gold_template: str | None = None  # a right completion made of columns, as in "The answer is {answer}."
    pays: float = 0.9  # share of the way from a row's worst answer to the best gold at which an answer counts as paid
    max_gold_failures: int = 0  # golds that may not pay before it is an error
    allow: list[str] = field(default_factory=list)  # kinds of wrong answers that may pay, such as unfinished_thought
    out: str | None = None  # folder of the results; null: reward_check/ in the folder of run.name, else in run.dir


@dataclass
class SimulatedModelConfig:
    parameters_billion: float = 7.6
    active_parameters_billion: float | None = None  # that one token uses (mixture of experts); null: all
    bytes_per_parameter: float = 2.0  # on the engines, and when weights are sent
    kv_bytes_per_token: float = 57344.0  # 2 x layers x key-value heads x head dimension x bytes of a number


@dataclass
class SimulatedGpuConfig:
    memory_gb: float = 80.0
    memory_gb_per_s: float = 3350.0
    peak_tflops: float = 989.0  # dense, at the model's precision
    decode_bandwidth_share: float = 0.6  # of memory_gb_per_s that decoding reaches
    decode_mfu: float = 0.5  # share of peak_tflops that decoding and prefill reach
    learner_mfu: float = 0.35  # share of peak_tflops that the learner reaches
    network_gb_per_s: float = 8.0  # at which weights reach the engines, all at once


@dataclass
class SimulatedWorkloadConfig:
    """Lognormal lengths, Beta-distributed pass rates; see orchestrator.simulation.workload.SyntheticWorkload."""

    prompt_tokens: int = 512
    median_response_tokens: float = 2500.0
    response_spread: float = 1.0  # standard deviation of the log-length; 0: all alike
    prompt_share: float = 0.5  # of the variance of the log-length: the prompt's; the rest is the answer's
    wrong_length_factor: float = 1.0  # wrong answers are so many times as long
    pass_alpha: float = 0.5  # mean pass rate is alpha / (alpha + beta); the smaller both, the more prompts are
    pass_beta: float = 0.5  # always right or always wrong
    failed_ratio: float = 0.0  # answers without a reward, after all retries


@dataclass
class SimulateConfig:
    """`headway simulate`. Batch, staleness, window and filter are the ordinary keys; docs/simulator.md."""

    steps: int = 200  # batches to simulate
    seed: int = 0
    rollout_gpus: int | None = None  # null: rollout.replicas x rollout.tensor_parallel_size
    learner_gpus: int | None = None  # null: learner.ranks; with placement.mode=shared both take turns on all of them
    gpus_per_engine: int | None = None  # null: rollout.tensor_parallel_size
    from_run: str | None = None  # folder of a finished run: fit to it, and start from its configuration
    advise: bool = False  # search the split of these GPUs and the staleness, up to staleness.max if that is above 0
    output: str | None = None  # folder of the results; default: simulations/ with date and time
    model: SimulatedModelConfig = field(default_factory=SimulatedModelConfig)
    gpu: SimulatedGpuConfig = field(default_factory=SimulatedGpuConfig)
    workload: SimulatedWorkloadConfig = field(default_factory=SimulatedWorkloadConfig)
    score_s: float = 1.0  # last answer of a group to its verdict
    publish_s: float | None = None  # end of learning to the acknowledgement; null: from model and gpu.network_gb_per_s
    pause_s: float | None = None  # the part of it in which engines stand still; null: all of it
    between_s: float = 1.0  # acknowledgement to the next batch: records, probe, checkpoints
    turn_s: float = 5.0  # placement.mode=shared: putting engines to sleep and waking them, once a batch
    # Speed of engines and learner while the other side works too. null: 1 (split), turns (shared), or fitted.
    engine_speed_while_learning: float | None = None
    learner_speed_while_generating: float | None = None


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
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    check_rewards: CheckRewardsConfig = field(default_factory=CheckRewardsConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)


def reference_place(config: Config) -> str | None:
    """`learner.reference` where a KL term needs a second model; None without such a term and for LoRA, its own reference."""
    return config.learner.reference if config.algorithm.kl_coefficient and not config.model.lora.rank else None
