"""What the configuration comes to once model and data are known: settings and sizes that follow from other keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from learner.group_relative import GROUP_RELATIVE
from orchestrator.config import Config, ConfigError
from orchestrator.model_shape import ModelShape
from orchestrator.prompts import Prompt
from orchestrator.sampling_types import Member, OnLate, OnStarved, QueueSettings
from reward_workers.function import RewardFunctionError, load_function

if TYPE_CHECKING:
    from orchestrator.prepare import Prepared

# Measured with scripts/bench_learner.py on a CPU.
MASKED_ATTENTION_SLOWER = 3.0
PROBE_TEXTS = 2
PROBE_TOKENS = 64


def queue_settings(config: Config) -> QueueSettings:
    s = config.sampling
    # A KL term gives equal groups a gradient, and other estimators learn from them.
    automatic = config.algorithm.advantage in GROUP_RELATIVE and config.algorithm.kl_coefficient == 0
    return QueueSettings(
        groups_per_batch=s.groups_per_batch,
        answers_per_group=s.answers_per_group,
        filter=automatic if s.filter is None else s.filter,
        filter_tolerance=s.filter_tolerance,
        pass_rate_band=None if s.pass_rate_band is None else (s.pass_rate_band[0], s.pass_rate_band[1]),
        keep=None if s.keep is None else _loaded_filter(s.keep),
        min_scored_fraction=s.min_scored_fraction,
        window_batches=s.window_batches,
        max_dispatches_per_batch=s.max_dispatches_per_batch,
        on_starved=OnStarved(s.on_starved),
        member_retries=config.rollout.retries,
        max_staleness=config.staleness.max,
        on_late=OnLate(config.staleness.on_late),
    )


def _loaded_filter(path: str) -> Callable[[Sequence[Member]], bool]:
    try:
        return load_function(path)
    except RewardFunctionError as error:
        raise ConfigError(f"sampling.keep={path}: {error}") from error


def prefix_sharing(prepared: Prepared) -> tuple[bool, float]:
    """Whether a group's prompt may be computed once for several answers, and the `pair_cost` of `learner.batch.plan_updates`.

    Not where a model carries state from token to token. With learner.share_prefixes=true it is always done: attention counts
    as free then.
    """
    from transformers import AutoConfig

    wanted = prepared.config.learner.share_prefixes
    text_config = AutoConfig.from_pretrained(prepared.model_path).get_text_config()
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    possible = kinds == {"full_attention"}
    if wanted and not possible:
        raise ConfigError(
            f"learner.share_prefixes=true: the model has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}, in which "
            "answers that share a row would see each other; leave it at null or set false"
        )
    if wanted is None:
        return possible, attention_pair_cost(prepared.model_path) if possible else 0.0
    return wanted, 0.0


def attention_pair_cost(model_path: str) -> float:
    """What it costs a token to attend to another, as a share of what the token itself costs in the linear layers.

    Of floating-point operations: 4 x layers x width over 2 x parameters, times what attention with a mask loses against a
    matrix product.
    """
    shape = ModelShape.of(model_path)
    return 2 * shape.layers * shape.queries / shape.parameters * MASKED_ATTENTION_SLOWER


def probe_texts(prepared: Prepared) -> list[list[int]]:
    """The first prompts' tokens: fixed for the run, and text the policy cares about."""
    prompts: list[Prompt] = [prepared.train[0].prompt(i, 0) for i in range(min(PROBE_TEXTS, len(prepared.train[0])))]
    return [prepared.chat.prompt_ids(prompt.messages)[-PROBE_TOKENS:] for prompt in prompts]


def derived_sizes(config: Config, version: int) -> list[tuple[str, str]]:
    """What the keys come to, for the panel at the start."""
    s, a = config.sampling, config.algorithm
    answers = s.groups_per_batch * s.answers_per_group
    capacity = (config.staleness.max + 1) * s.groups_per_batch
    updates = a.updates_per_batch * a.epochs_per_batch
    return [
        ("model", f"{config.model.path} ({config.model.dtype}, {_tuning(config)})"),
        ("batches", f"{config.run.batches - version} to go, from version {version}"),
        ("batch", f"{s.groups_per_batch} groups x {s.answers_per_group} answers = {answers} answers"),
        ("updates", f"{updates} per batch, each on about {answers // a.updates_per_batch} answers"),
        ("ahead", f"at most {capacity} groups untrained (staleness.max={config.staleness.max})"),
        (
            "answer",
            f"at most {config.rollout.max_response_tokens} tokens at temperature {config.rollout.temperature}",
        ),
        ("engines", f"{config.rollout.replicas} x tensor parallel {config.rollout.tensor_parallel_size}"),
        (
            "learner",
            f"{config.learner.ranks} rank(s), ZeRO-{config.learner.zero_stage}, lr {config.learner.learning_rate:g}",
        ),
    ]


def _tuning(config: Config) -> str:
    lora = config.model.lora
    return f"LoRA rank {lora.rank}" if lora.rank else "full fine-tuning"
