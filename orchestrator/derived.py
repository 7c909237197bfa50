"""What the configuration comes to once model and data are known: settings and sizes that follow from other keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from learner.group_relative import GROUP_RELATIVE
from orchestrator.config import Config, ConfigError
from orchestrator.prompts import Prompt
from orchestrator.sampling_types import Member, OnLate, OnStarved, QueueSettings
from reward_workers.function import RewardFunctionError, load_function

if TYPE_CHECKING:
    from orchestrator.prepare import Prepared

FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-5
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
        function = load_function(path)
    except RewardFunctionError as error:
        raise ConfigError(f"sampling.keep={path}: {error}") from error
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"sampling.keep={path}: is an async function; expected a plain one")

    def keep(members: Sequence[Member]) -> bool:
        """Raises ConfigError where the user's function fails or gives no answer, which a bare `return` would turn into a no."""
        try:
            answer = function(members)
            kept = bool(answer)
        except Exception as error:
            raise ConfigError(f"sampling.keep={path}: raised {type(error).__name__}: {error}") from error
        if answer is None or inspect.isawaitable(answer):  # the latter would be a yes to everything
            raise ConfigError(
                f"sampling.keep={path}: returned {answer!r:.80}; expected true for a group to train on, else false"
            )
        return kept

    return keep


def prefix_sharing(prepared: Prepared) -> bool:
    """Whether what a group's answers share is computed once; null stands for wherever that can be.

    It can't where a model carries state from token to token. Elsewhere nothing is lost by it: neither in the layers nor in
    attention is any work done twice or for nothing (`learner.attention`).
    """
    from transformers import AutoConfig

    wanted = prepared.config.learner.share_prefixes
    text_config = AutoConfig.from_pretrained(prepared.model_path).get_text_config()
    # Older configurations do not name their layers' kinds: a window is one for all.
    window = getattr(text_config, "sliding_window", None)
    unnamed = ["full_attention" if window is None else "sliding_attention"]
    kinds = set(getattr(text_config, "layer_types", None) or unnamed)
    possible = kinds == {"full_attention"}
    if wanted and not possible:
        raise ConfigError(
            f"learner.share_prefixes=true: the model has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}, in which "
            "answers that share a row would see each other; leave it at null or set false"
        )
    return possible if wanted is None else wanted


def probe_texts(prepared: Prepared) -> list[list[int]]:
    """The first prompts' tokens: fixed for the run, and text the policy cares about."""
    prompts: list[Prompt] = [prepared.train[0].prompt(i, 0) for i in range(min(PROBE_TEXTS, len(prepared.train[0])))]
    return [prepared.chat.prompt_ids(prompt.messages)[-PROBE_TOKENS:] for prompt in prompts]


def learning_rate(config: Config) -> float:
    """learner.learning_rate, or what null stands for.

    1e-6 is what published runs with full fine-tuning use. An adapter learns best at ten times the rate of full fine-tuning
    (LoRA Without Regret), whatever its rank: it is scaled by alpha / rank.
    """
    given = config.learner.learning_rate
    if given is not None:
        return given
    return LORA_LEARNING_RATE if config.model.lora.rank else FULL_LEARNING_RATE


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
            f"{config.learner.ranks} rank(s), ZeRO-{config.learner.zero_stage}, lr {learning_rate(config):g}",
        ),
    ]


def _tuning(config: Config) -> str:
    lora = config.model.lora
    if not lora.rank:
        return "full fine-tuning"
    how = "served as an adapter" if config.rollout.weights.transport == "lora" else "merged"
    return f"LoRA rank {lora.rank}, {how}"
