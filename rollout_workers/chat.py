"""Chat messages -> the token ids the policy continues.

Contract: there is one place where messages become tokens, and it is this one; the engine is given ids,
never text, so nothing is templated or tokenised twice (a second pass puts a second start token before the
prompt, and the policy is trained on prompts that nobody will send it). `eos_ids` are all the ids that end
an answer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_workers.trajectory import Message

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Of `apply_chat_template`: what messages and template are, and what the template is told.
OPEN_ARGUMENTS = ("tools", "documents", "chat_template")


class ChatTemplate:
    """A tokenizer's chat template with the user's keyword arguments (`model.chat_template_kwargs`).

    `generation_config` is the model's, where it has one: some models end their answers with ids that the
    tokenizer does not call end-of-sequence. Raises ValueError when the tokenizer has no chat template, when
    nothing ends an answer, or when `kwargs` would change what this class relies on.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        # Any other argument that is not the template's would cut, pad or wrap the ids, or write something else than a prompt.
        own = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - set(OPEN_ARGUMENTS)
        if reserved := [name for name in self.kwargs if name in own or name == "messages"]:
            raise ValueError(f"model.chat_template_kwargs: {', '.join(reserved)} can't be set, they are fixed")
        if not tokenizer.chat_template and "chat_template" not in self.kwargs:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template (chat_template.jinja, or in "
                "tokenizer_config.json); prompts are chats, so one is needed"
            )
        template = tokenizer.get_chat_template(self.kwargs.get("chat_template"))
        if unread := [name for name in self.kwargs if name != "chat_template" and name not in template]:
            logger.warning(
                "model.chat_template_kwargs: the chat template never reads %s; it has no effect",
                ", ".join(unread),
            )
        self.eos_ids = _eos_ids(tokenizer, generation_config)

    @classmethod
    def from_pretrained(cls, model: str | Path, kwargs: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Of a model folder or hub id."""
        from transformers import AutoTokenizer, GenerationConfig

        tokenizer = AutoTokenizer.from_pretrained(model)
        try:
            generation_config = GenerationConfig.from_pretrained(model)
        except OSError:  # the file is optional in a model folder
            generation_config = None
        return cls(tokenizer, kwargs, generation_config)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `messages` and the opening of the assistant's turn, special tokens exactly as the
        template writes them.

        Raises ValueError when the template refuses the messages (for example a role it does not know) or fails on them (for
        example arguments of a tool call that it wants to be a mapping) or on its keyword arguments, or their text can't be
        encoded.
        """
        from jinja2 import TemplateError

        try:
            # `return_dict` defaults to True since transformers 5, and a dict would pass for a list here.
            ids = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **self.kwargs,
            )
        except (TemplateError, TypeError, LookupError, AttributeError, UnicodeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            told = f" and model.chat_template_kwargs {', '.join(self.kwargs)}" if self.kwargs else ""
            raise ValueError(f"the chat template refuses messages with roles {roles}{told}: {error}") from error
        return list(ids)


def _eos_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence id first, then the generation config's others, without repetition."""
    found: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    further = None if generation_config is None else generation_config.eos_token_id
    if further is not None:
        found += [further] if isinstance(further, int) else list(further)
    if not found:
        raise ValueError(
            f"neither the tokenizer nor the generation config of {tokenizer.name_or_path} names an eos token"
        )
    return tuple(dict.fromkeys(found))
