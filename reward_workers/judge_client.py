"""One judge model: how it is called, what a call may cost, and what is done when it does not answer.

Contract:
- A model is anything that LiteLLM knows (`openai/o3`, `anthropic/...`, `hosted_vllm/...` with `api_base`), or a coroutine
  function from messages to text, such as `orchestrator.judge_actor.actor_judge` makes of a rollout actor.
- What another try may mend (429, 5xx, a lost connection, no answer in time) is tried again, later each time, as late as the
  server asks. What it can't mend is not: JudgeUnusableError for the judge as a whole, JudgeCallError for this request.
- No call begins once the budget is spent; calls under way then are paid for all the same. What a failed call cost is
  not known and not counted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import random
import sqlite3
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from reward_workers.function import RewardFunctionError
from reward_workers.judge_store import JudgeStore
from rollout_workers.trajectory import Message

logger = logging.getLogger(__name__)

# One that failed raises JudgeCallError, or TimeoutError where another try may help.
Complete = Callable[[Sequence[Message]], Awaitable[str]]

MAX_BACKOFF_S = 60.0
UNUSABLE = (401, 403, 404)  # HTTP statuses: credentials, or no such model
REFUSED = (400, 413, 422)  # something about this one request
PROBE: tuple[Message, ...] = ({"role": "user", "content": "Reply with the word ready."},)


class JudgeUnusableError(RewardFunctionError):
    """The judge can't be used at all: unknown model, no or wrong credentials, options that don't fit."""


class JudgeCallError(RuntimeError):
    """The judge did not answer a request, after all tries."""


class TooLongError(JudgeCallError):
    """The request does not fit into the judge's context."""


class BudgetSpentError(JudgeCallError):
    """`budget_usd` is spent."""


class JudgeOptions(TypedDict, total=False):
    """What can be said of a judge beside its model; see `Judge`."""

    api_base: str | None
    litellm_params: Mapping[str, Any] | None
    cache_dir: str | Path | None
    budget_usd: float | None
    prices: Sequence[float] | None
    max_concurrency: int
    timeout_s: float
    tries: int
    backoff_s: float


@dataclass
class Usage:
    """What judging one group took, added up as it happens. `unpriced_calls` are not in `cost_usd`."""

    calls: int = 0
    retries: int = 0
    unpriced_calls: int = 0
    cost_usd: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    repairs: int = 0
    comparisons: int = 0
    cached: bool = False


@dataclass(frozen=True)
class Reply:
    """`cut`: the model stopped at its length limit."""

    text: str
    cut: bool = False


class Judge:
    """A judge model, to be shared by all groups that it judges.

    `api_base` is a server of one's own that speaks OpenAI's API. `litellm_params` go to every call as they are
    (`temperature`, `reasoning_effort`, `api_key`, `max_tokens`). `cache_dir` keeps verdicts, costs and agreement; without
    it nothing is kept beyond the process. `prices` are US dollars for a million prompt tokens and a million completion
    tokens, where LiteLLM's table has none. `max_concurrency` calls run at once, of all processes that share `cache_dir`.
    `timeout_s` is for one try, `backoff_s` the first pause between two.

    Raises JudgeUnusableError, before any call, for an unknown provider, missing credentials, a budget for a model without
    prices and values out of range.
    """

    def __init__(
        self,
        model: str | Complete,
        *,
        api_base: str | None = None,
        litellm_params: Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
        budget_usd: float | None = None,
        prices: Sequence[float] | None = None,
        max_concurrency: int = 8,
        timeout_s: float = 60.0,
        tries: int = 4,
        backoff_s: float = 1.0,
    ) -> None:
        self.name = model if isinstance(model, str) else str(getattr(model, "name", None) or model.__qualname__)
        for key, value, least in (("max_concurrency", max_concurrency, 1), ("tries", tries, 1)):
            if value < least:
                raise JudgeUnusableError(f"{key}={value}: expected at least {least}")
        if timeout_s <= 0 or backoff_s < 0:
            raise JudgeUnusableError(
                f"timeout_s={timeout_s}, backoff_s={backoff_s}: expected more than 0, and 0 or more"
            )
        if prices is not None and (len(prices) != 2 or min(prices) < 0):
            raise JudgeUnusableError(f"prices={list(prices)}: expected [prompt, completion] in USD per million tokens")
        self._model = model
        self._api_base = api_base
        self._params = dict(litellm_params or {})
        self._prices = prices
        self._budget_usd = budget_usd
        self._timeout_s = timeout_s
        self._tries = tries
        self._backoff_s = backoff_s
        self._priced = prices is not None
        self._structured = False
        self._warned: set[str] = set()
        if isinstance(model, str):
            self._look_up(model)
        if budget_usd is not None and not self._priced:
            raise JudgeUnusableError(
                f"budget_usd={budget_usd}: what {self.name} costs is not known; give prices=[prompt, completion] in USD per "
                "million tokens"
            )
        self.keeps_verdicts = cache_dir is not None
        if cache_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="headway-judge-")  # goes when the judge does
        try:
            self.store = JudgeStore(Path(cache_dir or self._temporary.name), max_concurrency)
        except (OSError, sqlite3.Error) as error:
            raise JudgeUnusableError(f"cache_dir={str(cache_dir)!r} can't be used: {error}") from error

    @property
    def identity(self) -> list[Any]:
        """What of the judge decides its verdicts, as JSON: for the cache's key."""
        return [self.name, {key: repr(value) for key, value in sorted(self._params.items()) if key != "api_key"}]

    def _look_up(self, model: str) -> None:
        """What LiteLLM knows about a model. Raises JudgeUnusableError for an unknown provider or missing credentials."""
        litellm = _litellm()
        try:
            name, provider, _, _ = litellm.get_llm_provider(model, api_base=self._api_base)
        except litellm.BadRequestError as error:
            raise JudgeUnusableError(
                f"judge={model!r}: LiteLLM knows no such model or provider; write provider/model, for example openai/o3, or "
                "hosted_vllm/NAME with api_base=http://host:port/v1 for a server of your own"
            ) from error
        missing = litellm.validate_environment(model)["missing_keys"]
        if self._api_base is not None and "api_key" not in self._params:
            if missing:
                self._params["api_key"] = "none"  # a server of one's own needs none, but the client wants one
        elif missing and "api_key" not in self._params:
            raise JudgeUnusableError(
                f"judge={model!r}: no credentials for {provider}; set {', '.join(missing)} in the environment of every "
                "process that judges, or give api_base for a server of your own"
            )
        known = next((litellm.model_cost[key] for key in (model, name) if key in litellm.model_cost), None)
        self._priced = self._priced or (known is not None and "input_cost_per_token" in known)
        self._structured = bool(known) and bool(litellm.supports_response_schema(model))

    async def ask(self, messages: Sequence[Message], usage: Usage, schema: Mapping[str, Any] | None = None) -> Reply:
        """The model's reply. `schema` is a JSON schema, passed on where the model is known to honour one.

        Raises JudgeUnusableError, or JudgeCallError after all tries.
        """
        reason: BaseException | None = None
        for number in range(self._tries):
            if self._budget_usd is not None and self.store.spent_usd >= self._budget_usd:
                raise BudgetSpentError(
                    f"the judge has spent {self.store.spent_usd:.4f} of budget_usd={self._budget_usd} US dollars"
                )
            if reason is not None:
                usage.retries += 1
                pause_s = self._pause_s(number, reason)
                logger.info("judge %s: %s; again in %.1f s", self.name, _short(reason), pause_s)
                await asyncio.sleep(pause_s)
            async with self.store.slot():
                usage.calls += 1
                try:
                    async with asyncio.timeout(self._timeout_s + 1.0):  # the client's own limit comes first
                        return await self._call(messages, usage, schema)
                except TimeoutError:
                    reason = TimeoutError(f"no reply within {self._timeout_s:g} s")
                except _RetryLater as error:
                    reason = error.__cause__ or error
        raise JudgeCallError(f"judge {self.name} did not answer in {self._tries} tries: {_short(reason)}")

    def _pause_s(self, number: int, reason: BaseException) -> float:
        """Twice as long each time, with jitter, so that calls turned away together don't return together."""
        later_s = float(min(self._backoff_s * 2 ** (number - 1), MAX_BACKOFF_S)) * random.uniform(0.5, 1.0)
        headers = getattr(getattr(reason, "response", None), "headers", None) or {}
        with contextlib.suppress(ValueError):
            return min(max(float(headers["retry-after"]), 0.0), MAX_BACKOFF_S) if "retry-after" in headers else later_s
        return later_s

    async def _call(self, messages: Sequence[Message], usage: Usage, schema: Mapping[str, Any] | None) -> Reply:
        if not isinstance(self._model, str):
            return Reply(await self._model(messages))
        litellm = _litellm()
        from openai import OpenAIError

        params: dict[str, Any] = dict(self._params)
        if schema is not None and self._structured:
            wrapped = {"name": "verdict", "schema": dict(schema), "strict": True}
            params.setdefault("response_format", {"type": "json_schema", "json_schema": wrapped})
        try:
            response = await litellm.acompletion(
                model=self._model,
                messages=[dict(message) for message in messages],
                api_base=self._api_base,
                timeout=self._timeout_s,
                num_retries=0,
                max_retries=0,
                **params,
            )
        except litellm.ContextWindowExceededError as error:
            raise TooLongError(f"judge {self.name}: the request is too long: {_short(error)}") from error
        except OpenAIError as error:  # the base of all that LiteLLM raises
            status = getattr(error, "status_code", None)
            if status in UNUSABLE:
                raise JudgeUnusableError(f"judge={self.name!r} can't be used: {_short(error)}") from error
            if status in REFUSED:
                raise JudgeCallError(f"judge {self.name} refuses the request: {_short(error)}") from error
            raise _RetryLater from error
        self._count(response, usage)
        if not response.choices:
            raise _RetryLater from ValueError("a reply without choices")
        choice = response.choices[0]
        return Reply(choice.message.content or "", choice.finish_reason == "length")

    def _count(self, response: Any, usage: Usage) -> None:
        tokens = getattr(response, "usage", None)
        prompt, completion = getattr(tokens, "prompt_tokens", 0) or 0, getattr(tokens, "completion_tokens", 0) or 0
        usage.prompt_tokens += prompt
        usage.completion_tokens += completion
        if not self._priced:
            usage.unpriced_calls += 1
            return
        if self._prices is not None:
            usd = (prompt * self._prices[0] + completion * self._prices[1]) / 1e6
        else:
            usd = float(_litellm().completion_cost(completion_response=response, model=self._model))
        usage.cost_usd += usd
        self.store.spend(usd)

    def check(self) -> None:
        """Ask the model for one word, to see that it is there and takes the credentials. Raises JudgeUnusableError.

        Works with and without a running event loop.
        """
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="judge-check") as thread:
            try:
                thread.submit(asyncio.run, self.ask(PROBE, Usage())).result()
            except JudgeCallError as error:
                raise JudgeUnusableError(f"judge={self.name!r} can't be used: {error}") from error

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


class _RetryLater(Exception):
    """Another try may help; the cause says what happened."""


def _short(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"[:300]


@functools.cache
def _litellm() -> Any:
    """LiteLLM, quiet, and with the price table that it carries instead of one from the network. Imports for seconds."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # Pydantic's, about LiteLLM's own types, at its first call.
    warnings.filterwarnings("ignore", "Items? .* `ReadOnly` qualifier", module=r"pydantic\._internal\..*")
    import litellm

    litellm.suppress_debug_info = True
    litellm.drop_params = True  # what a model does not take (a temperature, say) is left out, not an error
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)
    return litellm
