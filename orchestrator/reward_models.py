"""Reward models of a configuration: as components of the reward set, and what can be checked of them before a run starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from orchestrator.config import Config, ConfigError
from orchestrator.prompts import Prompt, PromptSource
from reward_workers.function import RewardFunctionError
from reward_workers.reward_model import Normalisation, RewardModel
from reward_workers.reward_model_text import ConversationEncoder, ConversationRefused

logger = logging.getLogger(__name__)


def reward_models(config: Config) -> tuple[RewardModel, ...]:
    """The models of `reward.models`. Raises ConfigError, naming the key, for values that can't be."""
    models = []
    for name, item in config.reward.models.items():
        try:
            model = RewardModel(
                name,
                item.path,
                engine=item.engine,
                weight=item.weight,
                gate=item.gate_threshold if item.gate else None,
                dtype=item.dtype,
                max_tokens=item.max_tokens,
                batch_tokens=item.batch_tokens,
                normalisation=Normalisation(item.normalise, item.mean, item.std, item.clip),
            )
        except ValueError as error:
            raise ConfigError(f"reward.models.{name}: {error}") from error
        models.append(model)
    return tuple(models)


def check_models(config: Config, models: Sequence[RewardModel], sources: Sequence[PromptSource], key: str) -> None:
    """Whether each model is there, has the right head, and can read the prompts that it judges, of the sources under `key`.

    Of each source one prompt is tried for every sequence of roles: that is what chat templates refuse. In data.train a row
    may name what judges it. Raises ConfigError.
    """
    for model in models:
        try:
            model.check_options()
            limit = model.token_limit()
            encoder = _encoder(model, limit)
        except RewardFunctionError as error:
            raise ConfigError(f"reward.models.{model.name}: {error}") from error
        r = config.rollout
        if (longest := r.max_prompt_tokens + r.max_response_tokens) > limit:
            logger.warning(
                "reward.models.%s: it scores conversations of at most %d of its tokens, and rollout.max_prompt_tokens + "
                "rollout.max_response_tokens is %d of the policy's: longer ones will be errors (reward.max_error_ratio)",
                model.name,
                limit,
                longest,
            )
        for source in sources:
            judged = (p for p in source if key == "data.eval" or p.reward is None or model.name in p.reward)
            _check_prompts(model, encoder, judged, f"{key}.{source.name}")


def _encoder(model: RewardModel, limit: int) -> ConversationEncoder:
    from transformers import AutoTokenizer

    return ConversationEncoder(AutoTokenizer.from_pretrained(model.path), max_tokens=limit, pad_id=None)


def _check_prompts(model: RewardModel, encoder: ConversationEncoder, prompts: Iterable[Prompt], where: str) -> None:
    by_roles: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        by_roles.setdefault(tuple(str(message["role"]) for message in prompt.messages), prompt)
    for prompt in by_roles.values():
        try:
            encoder.ids([*prompt.messages, {"role": "assistant", "content": "."}])
        except ConversationRefused as error:
            raise ConfigError(
                f"{where}: row {prompt.prompt_id!r}: reward.models.{model.name} can't read it: {error}"
            ) from error
