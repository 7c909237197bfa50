"""The reward model worker: scores the answers of groups with one reward model. The body of a Ray actor, and usable without.

Contract:
- Every group that goes in comes out with one `RewardResult` per trajectory, in order. An answer that can't be scored, be it
  too long or that the model fails on it, is errored with its cause in `detail["error"]`; it is never a number.
- Groups may be asked for at the same time (an actor's `max_concurrency`); their texts share forward passes.
- The event loop stays free: tokenising and scoring are done in threads or in an engine process.
- The model is loaded by `start`, or by the first group where an actor was restarted. Deadlines are the caller's.

As an actor: `ray.remote(RewardModelWorker).options(max_concurrency=n).remote(model, device="cpu")`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from reward_workers.reward_model import RewardModel
from reward_workers.reward_model_text import ConversationEncoder
from reward_workers.reward_model_transformers import TransformersScorer
from reward_workers.reward_model_vllm import ScorerDied, VllmScorer
from rollout_workers.trajectory import Message, RewardResult, Status, Trajectory

logger = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 500


class RewardModelWorker:
    """`device` is `cpu` or `gpu`, `gpus` how much of it the model may use (see `RewardModelConfig`)."""

    def __init__(self, model: RewardModel, *, device: str, gpus: float = 1.0) -> None:
        self._model = model
        self._device = device
        self._gpus = gpus
        self._loading = asyncio.Lock()
        self._scorer: TransformersScorer | VllmScorer | None = None
        self._encoder: ConversationEncoder
        # One thread: a tokenizer may not be used by two at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model-text")

    async def start(self) -> None:
        """Load the model unless it is there. Raises what loading raises."""
        await self._loaded()

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """One verdict per trajectory, in order. Raises ScorerDied when the engine process died under them."""
        scorer = await self._loaded()
        encoding = asyncio.get_running_loop().run_in_executor(
            self._thread, self._encode, [trajectory.messages for trajectory in trajectories]
        )
        try:
            verdicts = await asyncio.gather(*(self._verdict(scorer, text) for text in await encoding))
        except ScorerDied:
            if self._scorer is scorer:
                self._scorer = None  # the next one to ask starts another
                await scorer.close()
            raise
        return list(verdicts)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._scorer is not None:
            await self._scorer.close()

    async def _loaded(self) -> TransformersScorer | VllmScorer:
        async with self._loading:
            if self._scorer is None:
                from transformers import AutoTokenizer

                model = self._model
                scorer = (
                    TransformersScorer(model, device=self._device)
                    if model.engine == "transformers"
                    else VllmScorer(model, device=self._device, gpus=self._gpus)
                )
                await scorer.load()
                tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, model.path)
                self._encoder = ConversationEncoder(tokenizer, max_tokens=model.token_limit(), pad_id=scorer.pad_id)
                self._scorer = scorer
            return self._scorer

    def _encode(self, conversations: Sequence[Sequence[Message]]) -> list[list[int] | Exception]:
        """The ids of each conversation, or why there are none."""
        return [self._encode_one(messages) for messages in conversations]

    def _encode_one(self, messages: Sequence[Message]) -> list[int] | Exception:
        try:
            return self._encoder.ids(messages)
        except Exception as error:  # noqa: BLE001  a template is a program, and may stumble over a message
            return error

    async def _verdict(self, scorer: TransformersScorer | VllmScorer, text: list[int] | Exception) -> RewardResult:
        if isinstance(text, Exception):
            return _errored(text)
        try:
            score = await scorer.score(text)
        except ScorerDied:
            raise
        except Exception as error:  # noqa: BLE001  the contract's first sentence
            logger.warning("reward model %r failed on a text of %d tokens: %s", self._model.name, len(text), error)
            return _errored(error)
        return self._model.verdict(score)


def _errored(error: Exception) -> RewardResult:
    problem = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
    return RewardResult(None, Status.ERRORED, detail={"error": problem})
