"""Everything that can be known before an engine starts: model, prompts, rewards and their fit to each other.

`prepare` either returns what a run needs or raises an error that names the key, file or row at fault. It starts no
process and writes nothing but the user's model cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.adapted_layers import adapted_layers
from orchestrator.config import Config, ConfigError, RewardFunctionConfig, SourceConfig
from orchestrator.derived import queue_settings
from orchestrator.models import resolve_model
from orchestrator.prompts import PromptSource, load_sources, refuse_long_prompts, require_batch
from orchestrator.reward_models import check_models, reward_models
from reward_workers.function import RewardFunction, RewardFunctionError
from reward_workers.reward import RewardModel, RewardSet
from rollout_workers.chat import ChatTemplate

logger = logging.getLogger(__name__)

CHECKER = "checker"
UserReward = Callable[..., Any] | Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class Prepared:
    config: Config
    model_path: str
    chat: ChatTemplate
    train: list[PromptSource]
    evaluation: list[PromptSource]
    rewards: RewardSet
    checker: RewardSet | None  # None: nothing is evaluated
    watch: RewardSet | None = None  # judges training answers beside the rewards: `checker` or its own; None: nothing

    @property
    def filter_on(self) -> str:
        """The component that must differ within a group."""
        return self.config.sampling.filter_on or self.rewards.primary

    def models(self, *, training: bool) -> tuple[RewardModel, ...]:
        """The reward models that have to be started. What only evaluates asks its checker, and needs none for the rewards."""
        sets = [self.rewards] if training or self.checker is None else []
        sets += [self.checker] if self.checker is not None else []
        return tuple({model.name: model for rewards in sets for model in rewards.models}.values())


def prepare(config: Config, reward: UserReward | None = None, *, training: bool = True) -> Prepared:
    """Load and check. `reward` is what a Python caller passed instead of `reward.functions`."""
    if training:
        queue_settings(config)  # imports the user's filter, if there is one
    model_path = str(resolve_model(config.model.path))
    _check_context(config, model_path)
    if training and config.model.lora.rank:
        adapted_layers(model_path, config.model.lora.targets)
    try:
        chat = ChatTemplate.from_pretrained(model_path, config.model.chat_template_kwargs)
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    rewards = _rewards(config, reward)
    train = load_sources(config.data.train, "train") if training else []
    evaluation = load_sources(config.data.eval, "eval") if config.data.eval else []
    if training:
        if not train:
            raise ConfigError(
                "data.train: no source of prompts; give data.train.NAME.path or data.train.NAME.generator"
            )
        require_batch(train, config.sampling.groups_per_batch)
    for source in [*train, *evaluation]:
        refuse_long_prompts(source, chat, config.rollout.max_prompt_tokens)
    for source in train:
        _check_rows(source, rewards, "data.train")
    checker = _checker(config, rewards) if evaluation else None
    if checker is not None:
        for source in evaluation:
            _check_rows(source, checker, "data.eval")
        _check_options(checker, "eval.checker")
        check_models(config, checker.models, evaluation, "data.eval")
    if training:
        _check_options(rewards, "reward.functions")
        check_models(config, rewards.models, train, "data.train")
    watch = _watch(config, rewards, checker, train) if training else None
    return Prepared(config, model_path, chat, train, evaluation, rewards, checker, watch)


@dataclass(frozen=True)
class Task:
    """What is asked and what judges it, without a model. `checker` is eval.checker; None where there is none."""

    train: list[PromptSource]
    evaluation: list[PromptSource]
    rewards: RewardSet
    checker: RewardSet | None


def prepare_task(
    config: Config, reward: UserReward | None, draw: Callable[[PromptSource], PromptSource], sets: Collection[str]
) -> Task:
    """Load and check those of the `sets` train and eval, as far as `draw` takes their rows. Without eval.checker the primary
    reward stands for it in data.eval, as in evaluation.
    """
    rewards = _rewards(config, reward)
    train = [draw(source) for source in load_sources(config.data.train, "train")] if "train" in sets else []
    evaluation = [draw(source) for source in load_sources(config.data.eval, "eval")] if "eval" in sets else []
    if not train and not evaluation:
        raise ConfigError("data: no source of prompts; give data.train.NAME.path or data.train.NAME.generator")
    checker = _checker(config, rewards) if evaluation or config.eval.checker is not None else None
    for key, sources, judges in (("train", train, rewards), ("eval", evaluation, checker)):
        for source in sources:
            assert judges is not None
            _check_rows(source, judges, f"data.{key}")
    _check_options(rewards, "reward.functions")
    check_models(config, rewards.models, train, "data.train")
    if checker is not None:
        _check_options(checker, "eval.checker")
    return Task(train, evaluation, rewards, checker)


def _check_context(config: Config, model_path: str) -> None:
    """Prompt and answer together must fit the model's context, or the engine would refuse them in the middle of a run."""
    from transformers import AutoConfig

    limit = getattr(AutoConfig.from_pretrained(model_path).get_text_config(), "max_position_embeddings", None)
    r = config.rollout
    asked = r.max_prompt_tokens + max(r.max_response_tokens, config.eval.max_response_tokens or 0)
    if limit is not None and asked > limit:
        raise ConfigError(
            f"rollout.max_prompt_tokens={r.max_prompt_tokens} and the longest answer come to {asked} tokens; "
            f"{config.model.path} has a context of {limit}"
        )


def _rewards(config: Config, reward: UserReward | None) -> RewardSet:
    try:
        models = reward_models(config)
        if reward is not None:
            # The configuration's primary may be a function that the caller's take the place of.
            primary = config.reward.primary if config.reward.primary in config.reward.models else None
            return RewardSet(RewardSet.of(reward).functions, primary or "", models=models)
        if not config.reward.functions and not models:
            raise ConfigError(
                "reward.functions: no reward function; give reward.functions.NAME.path=module.function, or "
                "reward.models.NAME.path"
            )
        functions = [_function(name, item) for name, item in config.reward.functions.items()]
        return RewardSet(tuple(functions), config.reward.primary or "", models=models)
    except RewardFunctionError as error:
        raise ConfigError(f"reward.functions: {error}") from error


def _function(name: str, config: RewardFunctionConfig) -> RewardFunction:
    gate = config.gate_threshold if config.gate else None
    return RewardFunction(name, config.path, config.weight, dict(config.options), gate, config.needs)


def _checker(config: Config, rewards: RewardSet) -> RewardSet:
    if config.eval.checker is None:
        logger.warning(
            "eval.checker is not set: evaluation uses the training reward %r, which can't notice that it is being gamed",
            rewards.primary,
        )
    try:
        if config.eval.checker is None:
            return rewards.only([rewards.primary])
        return RewardSet((_function(CHECKER, config.eval.checker),))
    except RewardFunctionError as error:
        raise ConfigError(f"eval.checker: {error}") from error


def _watch(
    config: Config, rewards: RewardSet, checker: RewardSet | None, train: Sequence[PromptSource]
) -> RewardSet | None:
    """What judges training answers beside the rewards. `eval.checker` does where it can, reward.watch.checker must."""
    own = config.reward.watch.checker
    chosen = own or config.eval.checker
    if chosen is None or not config.reward.watch.share:
        return None
    try:
        watch = checker if own is None and checker is not None else RewardSet((_function(CHECKER, chosen),))
        _refuse_trained_on(watch.functions[0], rewards)
        for prompt in (prompt for source in train for prompt in source):
            if rewards.primary in (function.name for function in rewards.select(prompt.reward)):
                try:
                    watch.check_row(prompt.columns)
                except RewardFunctionError as error:
                    raise RewardFunctionError(f"row {prompt.prompt_id!r} of data.train: {error}") from error
        if watch is not checker:
            watch.functions[0].check_options()
    except RewardFunctionError as error:
        if own is not None:
            raise ConfigError(f"reward.watch.checker: {error}") from error
        logger.warning(
            "reward.watch is off: eval.checker can't watch the training reward. %s. Give reward.watch.checker, or "
            "reward.watch.share=0 for no watch",
            error,
        )
        return None
    return watch


def _refuse_trained_on(checker: RewardFunction, rewards: RewardSet) -> None:
    """What the policy is trained on can't tell that it is being gamed."""
    for function in rewards.functions:
        counts = function.weight != 0 or function.name == rewards.primary
        if counts and checker.same_as(function):
            raise RewardFunctionError(
                f"it is the same as the training reward {function.name!r}, and so not independent of it"
            )


def _check_rows(source: PromptSource, rewards: RewardSet, key: str) -> None:
    """Every row has what the functions that judge it take, and a gold that they can use."""
    for prompt in source:
        try:
            rewards.check_row(prompt.columns, prompt.reward if key == "data.train" else None)
        except RewardFunctionError as error:
            raise ConfigError(f"{key}.{source.name}: row {prompt.prompt_id!r}: {error}") from error


def _check_options(rewards: RewardSet, key: str) -> None:
    """Functions that depend on something outside, such as a judge, must find it."""
    for function in rewards.functions:
        try:
            function.check_options()
        except RewardFunctionError as error:
            raise ConfigError(f"{key}.{function.name}: {error}") from error


def source_of(data: Any) -> dict[str, SourceConfig]:
    """A Python caller's `data`: a path or hub id, or a mapping of names to paths, or to sources as a configuration has them."""
    named = data if isinstance(data, Mapping) else {"main": data}
    for name, source in named.items():
        if not isinstance(source, str | Path | SourceConfig):
            raise ConfigError(
                f"data: expected the path of a file or folder, a hub id, or a mapping of names to these; found "
                f"{type(source).__name__} for {name}. Rows in memory: write them to a JSONL file, or give "
                "data.train.NAME.generator"
            )
    return {
        name: item if isinstance(item, SourceConfig) else SourceConfig(path=str(item)) for name, item in named.items()
    }
