"""Checks of a configuration's values, one by one and across keys.

Each message names the keys, says what was found, and what would do. What depends on the model, the data or the cluster
is checked where those are known (`orchestrator.prepare`, `orchestrator.placement`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from learner.group_relative import GROUP_RELATIVE
from orchestrator.config import CheckRewardsConfig, Config, ConfigError, RewardFunctionConfig, RewardModelConfig
from orchestrator.reward_probes import KINDS

MAX_SERVED_RANK = 512  # of adapters in vLLM
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0  # that vLLM samples with
# Of vLLM's engine arguments those that others rely on, and what sets them here; None: nothing may.
_OWN_ENGINE_ARGUMENTS = {
    "model": "model.path",
    "seed": "run.seed (each engine has one of its own)",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_response_tokens",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "dtype": "model.dtype",
    "enable_lora": "model.lora.rank and rollout.weights.transport",
    "enable_sleep_mode": "placement.mode",
    "logprobs_mode": None,
    "generation_config": None,
    "scheduling_policy": None,
    "weight_transfer_config": "rollout.weights.transport",
}
_CHOICES = {
    "model.dtype": ("bfloat16", "float32"),
    "rollout.weights.transport": ("auto", "shared_memory", "nccl", "lora"),
    "reward.watch.on_gap": ("warn", "stop"),
    "sampling.on_starved": ("shrink", "stop", "error"),
    "staleness.on_late": ("wait", "drop"),
    "algorithm.kl_placement": ("loss", "reward"),
    "algorithm.proximal": ("behaviour", "recompute", "interpolate"),
    "learner.schedule": ("constant", "linear", "cosine"),
    "learner.zero_stage": (0, 1, 2, 3),
    "learner.reference": ("ranks", "offload", "own"),
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
    "sampling.early_stop.control_share": 0,
    "staleness.max": 0,
    "staleness.min_ess": 0,
    "staleness.max_mismatch_kl": 0,
    "staleness.patience_batches": 1,
    "algorithm.kl_coefficient": 0,
    "algorithm.entropy_coefficient": 0,
    "algorithm.updates_per_batch": 1,
    "algorithm.epochs_per_batch": 1,
    "learner.ranks": 1,
    "learner.reference_ranks": 1,
    "learner.max_skipped_updates": 1,
    "learner.max_tokens_per_microbatch": 1,
    "learner.logprob_chunk_tokens": 1,
    "learner.warmup_steps": 0,
    "learner.learning_rate": 0,
    "learner.weight_decay": 0,
    "learner.adam_beta1": 0,
    "learner.adam_beta2": 0,
    "learner.threads": 1,
    "reward.max_error_ratio": 0,
    "reward.workers": 1,
    "reward.retries": 0,
    "reward.watch.share": 0,
    "reward.watch.window_batches": 1,
    "checkpoint.every_batches": 0,
    "checkpoint.keep": 1,
    "eval.every_batches": 0,
    "eval.answers_per_prompt": 1,
    "eval.max_response_tokens": 1,
    "eval.samples": 0,
    "eval.temperature": 0,  # 0 is greedy
    "profile.answers_per_prompt": 2,
    "profile.limit": 1,
    "check_rewards.rows": 1,
    "check_rewards.max_gold_failures": 0,
    "doctor.groups": 1,
    "replay.version": 0,
    "model.lora.rank": 0,
    "simulate.steps": 1,
    "simulate.rollout_gpus": 1,
    "simulate.learner_gpus": 1,
    "simulate.gpus_per_engine": 1,
    "simulate.workload.prompt_tokens": 0,
    "simulate.workload.median_response_tokens": 1,
    "simulate.workload.response_spread": 0,
    "simulate.workload.prompt_share": 0,
    "simulate.workload.failed_ratio": 0,
    "simulate.score_s": 0,
    "simulate.publish_s": 0,
    "simulate.pause_s": 0,
    "simulate.between_s": 0,
    "simulate.turn_s": 0,
    "simulate.engine_speed_while_learning": 0,
    "simulate.learner_speed_while_generating": 0,
}
_ABOVE_ZERO = (
    "model.lora.alpha",
    "run.watchdog_s",
    "reward.timeout_s",
    "reward.watch.max_gap",
    "rollout.start_timeout_s",
    "rollout.answer_timeout_s",
    "rollout.weights.timeout_s",
    "rollout.gpu_memory_utilization",
    "doctor.max_logprob_gap",
    "algorithm.kl_target",
    "algorithm.entropy_target",
    "algorithm.entropy_step",
    "algorithm.entropy_coefficient_max",
    "sampling.min_scored_fraction",
    "sampling.early_stop.after_s",
    "sampling.difficulty.memory",
    "sampling.difficulty.retest_share",
    "check_rewards.pays",
    "learner.start_timeout_s",
    "learner.step_timeout_s",
    "learner.max_grad_norm",
    "simulate.model.parameters_billion",
    "simulate.model.active_parameters_billion",
    "simulate.model.bytes_per_parameter",
    "simulate.model.kv_bytes_per_token",
    "simulate.gpu.memory_gb",
    "simulate.gpu.memory_gb_per_s",
    "simulate.gpu.peak_tflops",
    "simulate.gpu.decode_bandwidth_share",
    "simulate.gpu.decode_mfu",
    "simulate.gpu.learner_mfu",
    "simulate.gpu.network_gb_per_s",
    "simulate.workload.wrong_length_factor",
    "simulate.workload.pass_alpha",
    "simulate.workload.pass_beta",
)
_AT_MOST_ONE = (
    "reward.max_error_ratio",
    "reward.watch.share",
    "rollout.gpu_memory_utilization",
    "sampling.min_scored_fraction",
    "sampling.early_stop.control_share",
    "sampling.difficulty.memory",
    "sampling.difficulty.retest_share",
    "check_rewards.pays",
    "staleness.min_ess",
    "simulate.gpu.decode_bandwidth_share",
    "simulate.gpu.decode_mfu",
    "simulate.gpu.learner_mfu",
    "simulate.workload.prompt_share",
    "simulate.workload.failed_ratio",
    "simulate.engine_speed_while_learning",
    "simulate.learner_speed_while_generating",
)


def validate(config: Config) -> None:
    """Checks of values and across keys; raises ConfigError for the first that fails."""
    from orchestrator.algorithm import check_algorithm, wants_components  # imports torch: a simulation does without

    _check_keys(config)
    check_algorithm(config.algorithm, config.sampling.answers_per_group)
    parts: dict[str, RewardFunctionConfig | RewardModelConfig] = {**config.reward.functions, **config.reward.models}
    gates = [name for name, part in parts.items() if part.gate]
    if gates and wants_components(config.algorithm):
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage} normalises each reward component by itself and knows no gates; "
            f"{', '.join(gates)} has gate=true: set it to false, or choose another estimator"
        )


def validate_simulation(config: Config) -> None:
    """The same for `headway simulate`, where the objective is of no account and its own keys are."""
    _check_keys(config)
    _check_simulation(config)


def _check_keys(config: Config) -> None:
    for key, choices in _CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            raise ConfigError(f"{key}={value}: expected one of {', '.join(map(str, choices))}")
    for key, least in _AT_LEAST.items():
        value = _get(config, key)
        if value is not None and not value >= least:  # so put, it refuses nan too
            raise ConfigError(f"{key}={value}: expected at least {least}")
    for key in _ABOVE_ZERO:
        if (value := _get(config, key)) is not None and not value > 0:
            raise ConfigError(f"{key}={value}: expected more than 0")
    for key in _AT_MOST_ONE:
        if (value := _get(config, key)) is not None and value > 1:
            raise ConfigError(f"{key}={value}: expected at most 1")
    for key in ("learner.adam_beta1", "learner.adam_beta2"):
        if (value := _get(config, key)) >= 1:
            raise ConfigError(f"{key}={value}: expected less than 1, or nothing is ever forgotten")
    _refuse_none_strings(config)
    _refuse_not_finite(config)
    if config.learner.zero_stage == 0 and config.model.dtype == "bfloat16":
        raise ConfigError(
            "learner.zero_stage=0 with model.dtype=bfloat16: DeepSpeed would add gradients up in bfloat16; expected 1, 2 or 3 "
            "(with one rank there is no difference but this), or model.dtype=float32"
        )
    _check_sampling(config)
    _check_engine_options(config.rollout.engine_options)
    _check_adapter(config)
    if config.model.lora.rank and config.learner.reference != "ranks":
        raise ConfigError(
            f"learner.reference={config.learner.reference} with model.lora.rank={config.model.lora.rank}: a LoRA policy is its own "
            "reference, with its adapters off, and needs no second model; leave it at ranks"
        )
    _check_names(config)
    _check_checker(config)
    _check_reward_models(config)
    _check_reward_check(config.check_rewards)
    band = config.profile.band
    if len(band) != 2 or not 0 <= band[0] <= band[1] <= 1:
        raise ConfigError(f"profile.band={list(band)}: expected [low, high] with 0 <= low <= high <= 1")
    for key in ("rollout.answer_timeout_s", "reward.timeout_s"):
        if config.run.watchdog_s <= (slowest := _get(config, key)):
            raise ConfigError(
                f"run.watchdog_s={config.run.watchdog_s} must be longer than {key}={slowest}: a slow answer is no lack of progress"
            )
    if (
        config.placement.mode == "shared"
        and config.placement.device == "gpu"
        and config.rollout.tensor_parallel_size > 1
    ):
        raise ConfigError(
            f"rollout.tensor_parallel_size={config.rollout.tensor_parallel_size} with placement.mode=shared on GPUs: an engine "
            "takes turns with one learner rank on one GPU; use placement=split"
        )
    if config.checkpoint.resume != "never" and config.run.name is None:
        raise ConfigError(
            f"checkpoint.resume={config.checkpoint.resume} needs run.name: the name of the run to continue"
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
    for key, temperature in (("rollout.temperature", r.temperature), ("eval.temperature", config.eval.temperature)):
        if temperature != 0 and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
            raise ConfigError(
                f"{key}={temperature}: expected {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}; below, the engine takes "
                f"{LEAST_TEMPERATURE} in its place, which the learner would not, and above it refuses every request"
            )
    answers = s.groups_per_batch * s.answers_per_group
    if config.algorithm.kl_target is not None and config.algorithm.kl_horizon_answers < answers:
        raise ConfigError(
            f"algorithm.kl_horizon_answers={config.algorithm.kl_horizon_answers}: expected at least the {answers} answers of a "
            "batch (sampling.groups_per_batch x sampling.answers_per_group), or the coefficient would overshoot"
        )
    if s.answers_per_group < 2 and config.algorithm.advantage in GROUP_RELATIVE:
        raise ConfigError(
            f"sampling.answers_per_group={s.answers_per_group}: algorithm.advantage={config.algorithm.advantage} compares "
            "the answers of a group, a group of one teaches nothing; expected at least 2"
        )
    if s.pass_rate_band is not None and (len(s.pass_rate_band) != 2 or not s.pass_rate_band[0] <= s.pass_rate_band[1]):
        raise ConfigError(f"sampling.pass_rate_band={s.pass_rate_band}: expected [low, high] with low <= high, or null")
    if s.difficulty.sampler and s.answers_per_group < 2:
        raise ConfigError(
            f"sampling.difficulty.sampler=true with sampling.answers_per_group={s.answers_per_group}: prompts are drawn by the "
            "chance that the answers of a group differ; expected at least 2 answers, or set the sampler to false"
        )
    if config.staleness.adaptive and config.staleness.max == 0:
        raise ConfigError(
            "staleness.adaptive=true moves the bound between 0 and staleness.max; set staleness.max to 1 or more"
        )
    if s.early_stop.after_s is not None and s.early_stop.after_s >= r.answer_timeout_s:
        raise ConfigError(
            f"sampling.early_stop.after_s={s.early_stop.after_s} must be shorter than rollout.answer_timeout_s="
            f"{r.answer_timeout_s}: after that no answer is waited for"
        )
    if config.algorithm.updates_per_batch > s.groups_per_batch:
        raise ConfigError(
            f"algorithm.updates_per_batch={config.algorithm.updates_per_batch} cuts a batch into that many parts, "
            f"but sampling.groups_per_batch={s.groups_per_batch}: expected at most as many updates as groups"
        )
    # Where there are no functions, a Python caller may pass some whose names are not known here.
    components = [*config.reward.functions, *config.reward.models]
    for key, name in (("reward.primary", config.reward.primary), ("sampling.filter_on", s.filter_on)):
        if name is not None and config.reward.functions and name not in components:
            raise ConfigError(
                f"{key}={name}: no such reward function or model, expected one of {', '.join(components)}"
            )


def _check_engine_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _OWN_ENGINE_ARGUMENTS:
            owner = _OWN_ENGINE_ARGUMENTS[name]
            instead = f"it comes from {owner}" if owner else "it is fixed, because the learner relies on it"
            raise ConfigError(f"rollout.engine_options.{name}: can't be set here; {instead}")


def _check_adapter(config: Config) -> None:
    rank = config.model.lora.rank
    if config.rollout.weights.transport != "lora":
        return
    if not rank:
        raise ConfigError(
            "rollout.weights.transport=lora sends the LoRA adapter, and model.lora.rank=0 is full fine-tuning without one: set "
            "model.lora.rank to 1 or more, or transport to auto"
        )
    if rank > MAX_SERVED_RANK:
        raise ConfigError(
            f"rollout.weights.transport=lora with model.lora.rank={rank}: vLLM serves adapters up to rank {MAX_SERVED_RANK}; "
            "lower the rank, or let the adapter be merged with transport=auto"
        )


def _check_simulation(config: Config) -> None:
    s, longest = config.simulate, config.rollout.max_response_tokens
    if s.from_run is None and s.workload.median_response_tokens > longest:
        raise ConfigError(
            f"simulate.workload.median_response_tokens={s.workload.median_response_tokens:g} is above "
            f"rollout.max_response_tokens={longest}, which cuts answers off: lower the one or raise the other"
        )
    if s.publish_s is not None and s.pause_s is not None and s.pause_s > s.publish_s:
        raise ConfigError(
            f"simulate.pause_s={s.pause_s} is the part of simulate.publish_s={s.publish_s} in which engines stand still; "
            "expected at most as much"
        )


def _check_checker(config: Config) -> None:
    for key, checker in (("eval.checker", config.eval.checker), ("reward.watch.checker", config.reward.watch.checker)):
        if checker is not None and (checker.gate or checker.needs):
            raise ConfigError(f"{key}.gate and {key}.needs relate one reward to others; a checker stands alone")


def _check_reward_check(config: CheckRewardsConfig) -> None:
    may_pay = [name for name, kind in KINDS.items() if kind.level in ("error", "warning")]
    for key, chosen, known in (("sets", config.sets, ["train", "eval"]), ("allow", config.allow, may_pay)):
        if unknown := [name for name in chosen if name not in known]:
            raise ConfigError(
                f"check_rewards.{key}: there is no {', '.join(unknown)}; expected some of {', '.join(known)}"
            )
    if not config.sets:
        raise ConfigError("check_rewards.sets=[]: expected some of train, eval")
    if config.gold_column is not None and config.gold_template is not None:
        raise ConfigError("check_rewards.gold_column and check_rewards.gold_template both say what a gold is: give one")


def _check_reward_models(config: Config) -> None:
    """What concerns the actors; `orchestrator.reward_models` checks the models themselves."""
    for name, model in config.reward.models.items():
        key = f"reward.models.{name}"
        if model.replicas < 1:
            raise ConfigError(f"{key}.replicas={model.replicas}: expected at least 1")
        if not model.gpus > 0:
            raise ConfigError(f"{key}.gpus={model.gpus}: expected more than 0 (a run on CPUs ignores it)")
        if model.gpus > 1 and (model.engine != "vllm" or model.gpus != int(model.gpus)):
            raise ConfigError(
                f"{key}.gpus={model.gpus} with engine={model.engine}: only vllm cuts a model over several GPUs, a whole "
                "number of them; expected at most 1, or engine=vllm"
            )
        if not 0 < model.timeout_s < config.run.watchdog_s:
            raise ConfigError(
                f"{key}.timeout_s={model.timeout_s}: expected more than 0 and less than run.watchdog_s="
                f"{config.run.watchdog_s}: a slow score is no lack of progress"
            )


def _check_names(config: Config) -> None:
    names = [("reward.functions", name) for name in config.reward.functions]
    names += [("reward.models", name) for name in config.reward.models]
    names += [("data.eval", name) for name in config.data.eval] + [("data.train", name) for name in config.data.train]
    names += [("run.name", config.run.name)] if config.run.name is not None else []
    for key, name in names:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ConfigError(f"{key}: {name!r} becomes part of metric and file names; use letters, digits, _ . -")


def _refuse_none_strings(config: Config) -> None:
    """`key=None` reaches us as the text «None»; Hydra's word for nothing is null."""
    for path, value in _values(config, ""):
        in_options = _IN_OPTIONS.search(path) is not None
        if in_options and path.startswith("algorithm."):
            continue  # these are tried out
        if value == "None" or (value == "none" and not in_options):  # of the user's own options it may be a choice
            raise ConfigError(f"{path}={value}: write {path}=null for no value")


_IN_OPTIONS = re.compile(r"\b(options|\w+_options|chat_template_kwargs)\.")


def _refuse_not_finite(config: Config) -> None:
    """NaN is neither above nor below any bound, and infinity above all."""
    for path, value in _values(config, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path}={value}: expected a finite number")


def _values(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its key; what lies in mappings and lists too."""
    items: Iterable[tuple[Any, Any]]
    if dataclasses.is_dataclass(node):
        items = [(item.name, getattr(node, item.name)) for item in dataclasses.fields(node)]
    elif isinstance(node, Mapping):
        items = node.items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    else:
        yield path, node
        return
    for name, value in items:
        yield from _values(value, f"{path}.{name}".lstrip("."))


def _get(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node
