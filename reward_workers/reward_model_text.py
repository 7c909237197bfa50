"""A conversation as the token ids that a reward model scores.

Contract:
- The whole conversation up to the policy's last message, through the reward model's own chat template, special tokens
  exactly as the template writes them.
- What somebody wrote stays text: special tokens that occur in a message (`<|im_end|>`) are broken up by a space, so that an
  answer can't end its own turn and praise itself in another.
- A conversation that is too long, or that the template refuses, is an error. Nothing is cut: a score of half an answer
  would be a number, and a wrong one.
- Padding ids at the very end don't count, as in transformers' classifiers, which score at the last id that is no padding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollout_workers.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ConversationRefused(ValueError):
    """A conversation that can't be scored; the message says why."""


class ConversationEncoder:
    """`max_tokens` is the longest conversation; `pad_id` the classifier's padding id, if it has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, pad_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._pad_id = pad_id
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation. Raises ConversationRefused."""
        from jinja2 import TemplateError

        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None:
            raise ConversationRefused("there is no answer to score: no message is the assistant's")
        try:
            # `return_dict` defaults to True since transformers 5, and a dict would pass for a list here.
            ids: Any = self._tokenizer.apply_chat_template(
                [self._as_text(message) for message in messages[: last + 1]],
                tokenize=True,
                add_generation_prompt=False,
                return_dict=False,
            )
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages[: last + 1])
            raise ConversationRefused(f"the reward model's chat template refuses roles {roles}: {error}") from error
        ids = list(ids)
        while ids and ids[-1] == self._pad_id:
            ids.pop()
        if not ids:
            raise ConversationRefused("the reward model's chat template left nothing of the conversation")
        if len(ids) > self._max_tokens:
            raise ConversationRefused(
                f"the conversation has {len(ids)} tokens of the reward model, which takes {self._max_tokens} (max_tokens)"
            )
        return ids

    def _as_text(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, str):
            return dict(message)
        return {**message, "content": self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", content)}
