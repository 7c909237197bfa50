"""Every configuration key: its type, its default, its meaning, and the checks across keys.

The dataclasses below are the schema. Hydra composes the groups in `conf/` over them, so an unknown or mistyped
key is refused with its full name before anything starts. `load` composes, converts and checks; what
it returns is plain frozen-in-spirit dataclasses that the rest of Headway reads. Units are in the names.
Checks across keys live in `validate`; each message names the keys, what was found and what would do.

Mappings whose keys are the user's own (sources, reward functions, options) take new keys without Hydra's «+»; a whole
mapping given at once, `data.eval={}`, replaces what was there, as a list does.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


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


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose `conf/` with Hydra overrides, convert and check. Raises ConfigError naming the key."""
    for override in overrides:
        _refuse_unknown(override)
    ConfigStore.instance().store("schema", node=Config)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        try:
            composed = compose("config", overrides=[o for o in overrides if not _OWN_KEYS.match(o)])
            for override in filter(_OWN_KEYS.match, overrides):
                _merge(composed, override)
            config = OmegaConf.to_object(composed)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain(error, overrides)) from error
    assert isinstance(config, Config)
    validate(config)
    return config


# What Hydra can't add to without «+», or at all where it is null: these overrides are merged in after it composed.
_OWN_KEYS = re.compile(
    r"\+{0,2}(?P<mapping>data\.(train|eval)|reward\.functions|eval\.checker|model\.chat_template_kwargs"
    r"|rollout\.engine_options|algorithm\.\w+_options)(?P<inside>\.[^=]+)?="
)


def _merge(composed: DictConfig, override: str) -> None:
    """Carry out an override of one of the user's own mappings, its value read by Hydra's grammar."""
    parsed = OverridesParser.create().parse_override(override.lstrip("+"))
    if parsed.is_sweep_override():
        raise ConfigError(f"{override}: commas outside brackets would be a sweep; a list is written key=[a,b]")
    value: Any = parsed.value()
    matched = _OWN_KEYS.match(override)
    if matched and not matched["inside"] and (mapping := OmegaConf.select(composed, matched["mapping"])) is not None:
        with open_dict(mapping):
            mapping.clear()
    for part in reversed(parsed.key_or_group.split(".")):
        value = {part: value}
    try:
        with open_dict(composed):
            composed.merge_with(value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{override}: {error}") from error


def _refuse_unknown(override: str) -> None:
    """Hydra would advise a «+» for a mistyped key, and a key added with it would be read by nobody."""
    key = override.partition("=")[0].lstrip("+~")
    if (CONF_DIR / key.partition("@")[0]).is_dir():  # the choice of a config group
        return
    kind: Any = Config
    path: list[str] = []
    parts = iter(key.split("."))
    for part in parts:
        hints = get_type_hints(kind)
        path.append(part)
        if part not in hints:
            near = difflib.get_close_matches(part, hints, n=1)
            hint = f"; did you mean {'.'.join([*path[:-1], near[0]])}?" if near else ""
            raise ConfigError(f"{'.'.join(path)}: there is no such key{hint} (docs/config.md lists every key)")
        below = [t for t in (hints[part], *get_args(hints[part])) if dataclasses.is_dataclass(t)]
        if not below:
            return
        kind = below[0]
        if get_origin(hints[part]) is dict:
            path.append(next(parts, ""))  # a name of the user's


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """The library's message, with what to do about the mistakes people make most."""
    text = str(error).strip()
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    for override in overrides:
        if re.search(r"=[^'\"{\[]*=", override):
            text += f"\n{override}: a value with '=' needs quotes for Hydra inside those of the shell: 'key=\"a=b\"' (or a\\=b)."
    if "sweep" in text.lower() or any(re.search(r"^[^=]+=[^'\"\[({]+,", override) for override in overrides):
        text += "\nA list is written key=[1,2]; commas outside brackets would be a sweep."
    return text


_CHOICES = {
    "model.dtype": ("bfloat16", "float32"),
    "rollout.weights.transport": ("auto", "shared_memory", "nccl"),
    "sampling.on_starved": ("shrink", "stop", "error"),
    "algorithm.proximal": ("behaviour", "recompute"),
    "learner.schedule": ("constant", "linear", "cosine"),
    "learner.zero_stage": (0, 1, 2, 3),
    "placement.mode": ("split", "shared"),
    "placement.device": ("auto", "cpu", "gpu"),
    "checkpoint.resume": ("never", "auto", "must"),
    "logging.wandb": ("auto", "online", "offline", "disabled"),
    "logging.console": ("auto", "live", "plain"),
    "logging.level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}
# None, where a key may be null, passes all of these.
_AT_LEAST = {
    "run.batches": 1,
    "data.epochs": 1,
    "rollout.replicas": 1,
    "rollout.tensor_parallel_size": 1,
    "rollout.max_prompt_tokens": 1,
    "rollout.max_response_tokens": 1,
    "rollout.max_concurrent_answers": 1,
    "rollout.retries": 0,
    "rollout.max_restarts": 0,
    "rollout.kv_cache_mib": 1,
    "rollout.threads": 1,
    "rollout.weights.bucket_mib": 1,
    "rollout.weights.probe_max_gap": 0,
    "sampling.groups_per_batch": 1,
    "sampling.answers_per_group": 1,
    "sampling.filter_tolerance": 0,
    "sampling.window_batches": 0,
    "sampling.max_dispatches_per_batch": 1,
    "staleness.max": 0,
    "algorithm.updates_per_batch": 1,
    "algorithm.epochs_per_batch": 1,
    "learner.ranks": 1,
    "learner.max_tokens_per_microbatch": 1,
    "learner.logprob_chunk_tokens": 1,
    "learner.warmup_steps": 0,
    "learner.learning_rate": 0,
    "learner.threads": 1,
    "reward.max_error_ratio": 0,
    "reward.workers": 1,
    "reward.retries": 0,
    "checkpoint.every_batches": 0,
    "checkpoint.keep": 1,
    "eval.every_batches": 0,
    "eval.answers_per_prompt": 1,
    "eval.max_response_tokens": 1,
    "eval.samples": 0,
    "eval.temperature": 0,  # 0 is greedy
    "model.lora.rank": 0,
}
_ABOVE_ZERO = (
    "run.watchdog_s",
    "reward.timeout_s",
    "rollout.start_timeout_s",
    "rollout.answer_timeout_s",
    "rollout.weights.timeout_s",
    "rollout.gpu_memory_utilization",
    "sampling.min_scored_fraction",
    "learner.start_timeout_s",
    "learner.step_timeout_s",
    "learner.max_grad_norm",
)
_AT_MOST_ONE = ("reward.max_error_ratio", "rollout.gpu_memory_utilization", "sampling.min_scored_fraction")


def validate(config: Config) -> None:
    """Checks of values and across keys; raises ConfigError for the first that fails."""
    for key, choices in _CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            raise ConfigError(f"{key}={value}: expected one of {', '.join(map(str, choices))}")
    for key, least in _AT_LEAST.items():
        value = _get(config, key)
        if value is not None and not value >= least:  # so put, it refuses nan too
            raise ConfigError(f"{key}={value}: expected at least {least}")
    for key in _ABOVE_ZERO:
        if not (value := _get(config, key)) > 0:
            raise ConfigError(f"{key}={value}: expected more than 0")
    for key in _AT_MOST_ONE:
        if (value := _get(config, key)) > 1:
            raise ConfigError(f"{key}={value}: expected at most 1")
    _refuse_none_strings(config, "")
    _check_sampling(config)
    _check_algorithm(config)
    _check_names(config)
    if config.checkpoint.resume != "never" and config.run.name is None:
        raise ConfigError(f"checkpoint.resume={config.checkpoint.resume} needs run.name: the name of the run to continue")
    if config.placement.mode == "shared" and config.placement.device == "gpu" and config.staleness.max > 0:
        raise ConfigError(
            f"placement.mode=shared on GPUs lets engine and learner take turns, so nothing can be generated ahead: "
            f"staleness.max={config.staleness.max} needs placement=split, or set staleness.max=0"
        )


def _check_sampling(config: Config) -> None:
    r, s = config.rollout, config.sampling
    for key, value, neutral in (("top_p", r.top_p, 1.0), ("top_k", r.top_k, 0), ("min_p", r.min_p, 0.0)):
        if value != neutral:
            raise ConfigError(
                f"rollout.{key}={value}: training samples from the full distribution. The engine would renormalise over "
                f"the tokens it keeps, the learner would not, and every policy ratio would be wrong; leave it at {neutral}"
            )
    if r.temperature <= 0:
        raise ConfigError(f"rollout.temperature={r.temperature}: must be above 0, or all answers of a group are equal")
    from learner.advantages import GROUP_RELATIVE

    if s.answers_per_group < 2 and config.algorithm.advantage in GROUP_RELATIVE:
        raise ConfigError(
            f"sampling.answers_per_group={s.answers_per_group}: algorithm.advantage={config.algorithm.advantage} compares "
            "the answers of a group, a group of one teaches nothing; expected at least 2"
        )
    if config.algorithm.updates_per_batch > s.groups_per_batch:
        raise ConfigError(
            f"algorithm.updates_per_batch={config.algorithm.updates_per_batch} cuts a batch into that many parts, "
            f"but sampling.groups_per_batch={s.groups_per_batch}: expected at most as many updates as groups"
        )
    if (
        config.reward.primary is not None
        and config.reward.functions
        and config.reward.primary not in config.reward.functions
    ):
        raise ConfigError(
            f"reward.primary={config.reward.primary}: no such reward function, expected one of "
            f"{', '.join(config.reward.functions)}"
        )
    if s.filter_on is not None and config.reward.functions and s.filter_on not in config.reward.functions:
        raise ConfigError(
            f"sampling.filter_on={s.filter_on}: no such reward function, expected one of "
            f"{', '.join(config.reward.functions)}"
        )


def _check_algorithm(config: Config) -> None:
    """Resolves every part and calls it once on one token, so that a wrong option shows up now."""
    from orchestrator.algorithm import check_algorithm

    check_algorithm(config.algorithm, config.sampling.answers_per_group)


def _check_names(config: Config) -> None:
    names = [("reward.functions", name) for name in config.reward.functions]
    names += [("data.eval", name) for name in config.data.eval] + [("data.train", name) for name in config.data.train]
    names += [("run.name", config.run.name)] if config.run.name is not None else []
    for key, name in names:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ConfigError(f"{key}: {name!r} becomes part of metric and file names; use letters, digits, _ . -")


def _refuse_none_strings(node: Any, path: str) -> None:
    """`key=None` reaches us as the text «None»; Hydra's word for nothing is null."""
    if isinstance(node, str) and node in ("None", "none"):
        raise ConfigError(f"{path}={node}: write {path}=null for no value")
    if dataclasses.is_dataclass(node):
        for item in dataclasses.fields(node):
            _refuse_none_strings(getattr(node, item.name), f"{path}.{item.name}".lstrip("."))


def _get(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node
