"""A reward model in this process, run by transformers: texts of many groups in common forward passes.

Contract:
- The score of a text is what the model gives for that text alone, in whatever company it is scored: texts are padded on the
  right, and the padding id is one that the classifier doesn't score at.
- Those who ask while a pass runs share the next ones: each round takes all texts that wait, longest together, and cuts them
  into passes of at most `batch_tokens` tokens, padding included. No text waits for more than one round of others.
- A pass runs in a thread, so the event loop stays free. When a pass of several texts fails, each is tried alone, and only
  those that fail alone are errors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from reward_workers.reward_model import RewardModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Text:
    ids: Sequence[int]
    score: asyncio.Future[float]


class TransformersScorer:
    """`device` is `cpu` or `gpu`. `pad_id` is the id at which the classifier never scores, if its configuration names one."""

    def __init__(self, model: RewardModel, *, device: str) -> None:
        self._settings = model
        self._device = "cuda" if device == "gpu" else "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._waiting: list[_Text] = []
        self._rounds: asyncio.Task[None] | None = None
        self._model: Any = None
        self.pad_id: int | None = None

    async def load(self) -> None:
        """Load the model. Raises RewardFunctionError for a checkpoint that lacks some of its weights."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        model, report = AutoModelForSequenceClassification.from_pretrained(
            self._settings.path, dtype=getattr(torch, self._settings.dtype), output_loading_info=True
        )
        if missing := sorted(report["missing_keys"]):
            raise self._settings.error(
                f"{self._settings.path} lacks weights, which would be random: {', '.join(missing)}"
            )
        model.config.use_cache = False  # keys and values are of no use after the pass
        head = getattr(model, "score", None)
        if isinstance(head, torch.nn.Linear):
            # A score in bfloat16 has steps of 1/128 of its size: answers of a group would tie that differ.
            head.float().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        self._text_config = model.config.get_text_config()
        self.pad_id = self._text_config.pad_token_id
        self._model = model.to(self._device).eval()

    async def score(self, ids: Sequence[int]) -> float:
        """The model's score of one text. Raises what the model raises for it."""
        text = _Text(ids, asyncio.get_running_loop().create_future())
        self._waiting.append(text)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._work())
        return await text.score  # whoever asks for a group has a deadline

    async def _work(self) -> None:
        await asyncio.sleep(0)  # whoever asks in the same moment comes along
        while self._waiting:
            texts, self._waiting = [text for text in self._waiting if not text.score.done()], []
            for indexes in micro_batches([len(text.ids) for text in texts], self._settings.batch_tokens):
                # Those who asked may have given up meanwhile.
                await self._pass([texts[i] for i in indexes if not texts[i].score.done()])

    async def _pass(self, texts: Sequence[_Text]) -> None:
        if not texts:
            return
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(self._thread, self._forward, [text.ids for text in texts])
        except Exception as error:  # noqa: BLE001  out of memory, an id beyond the vocabulary: the contract's last sentence
            if len(texts) > 1:
                logger.warning("a pass of %d texts failed, each is tried alone: %s", len(texts), error)
                for text in texts:
                    await self._pass([text])
            elif not texts[0].score.done():
                texts[0].score.set_exception(error)
            return
        for text, score in zip(texts, scores, strict=True):
            if not text.score.done():
                text.score.set_result(score)

    def _forward(self, texts: Sequence[Sequence[int]]) -> list[float]:
        import torch

        pad_id = self.pad_id
        if pad_id is None:
            # Any id will do at which no text ends: the classifier scores at the last one that is not it.
            ends = {ids[-1] for ids in texts}
            pad_id = next(number for number in itertools.count() if number not in ends)
            self._text_config.pad_token_id = pad_id
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[pad_id] * (longest - len(text))] for text in texts], device=self._device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=self._device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits  # [texts, 1]
        return logits[:, 0].float().tolist()

    async def close(self) -> None:
        """Give up what waits. A pass that runs ends by itself."""
        if self._rounds is not None:
            self._rounds.cancel()
        for text in self._waiting:
            text.score.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def micro_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut texts of these lengths into batches of at most `batch_tokens` tokens each, padding included.

    Returns the texts' indexes, every one once, longest first, so that texts of about one length lie together. A text that
    is longer than `batch_tokens` has a batch to itself.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not room:
            batches.append([])
            room = max(1, batch_tokens // lengths[index])  # the longest of a batch comes first
        batches[-1].append(index)
        room -= 1
    return batches
