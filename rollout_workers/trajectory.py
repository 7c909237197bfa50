"""The data that flows: what a policy wrote, and what a verifier made of it.

A `Trajectory` is one answer to one prompt, token by token. Its contract is that tokens are exact: `token_ids`
are the ids the engine sampled and `behaviour_logprobs` the logprobs the engine reported for them, never a
re-encoding of text. Every token carries three things: whether the policy sampled it (`response_mask`), its
behaviour logprob, and, through `version_spans`, the policy version that wrote it. Prompt, tool and padding
tokens have `response_mask` False and must not enter any loss, statistic or denominator.

A `TrajectoryGroup` is the answers to one dispatch of one prompt. Groups are found by `group_id`, never by
position or by the prompt's text. A `RewardResult` is a number or a status: a failure is not a zero.

Everything here is frozen and imports nothing else of Headway, so that every floor can use it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Message = Mapping[str, Any]


class Status(enum.StrEnum):
    """What became of a reward."""

    SCORED = "scored"
    UNSCORED = "unscored"  # a reward function returned None: it does not judge this trajectory
    ERRORED = "errored"  # the verifier failed
    TIMED_OUT = "timed_out"  # the verifier ran out of time (a policy's slow program is scored, 0)
    UNPARSEABLE_ANSWER = "unparseable_answer"  # the gold answer of the data row can't be read


@dataclass(frozen=True)
class RewardResult:
    """A verdict on one trajectory.

    `value` is the total reward, and is None exactly when `status` is not `scored`. `components` holds each
    reward function's unweighted value by name (None: skipped); `metrics` numbers to be averaged and shown;
    `detail` what a person debugging would want; `step_values` optional per-turn rewards.
    """

    value: float | None
    status: Status = Status.SCORED
    components: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)
    step_values: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.SCORED) != (self.value is not None):
            raise ValueError(f"a reward is a number or a status, got value={self.value} with {self.status}")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a reward must be finite, got {self.value}")


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start` (inclusive) to `end` (exclusive) of `token_ids` were sampled under policy `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Trajectory:
    """One answer, token by token.

    `token_ids` int32 [T], `response_mask` bool [T], `behaviour_logprobs` float32 [T] (0 where the mask is
    False; temperature applied); what is given otherwise, as lists say, is made into these. `version_spans` cover
    exactly the masked tokens, in order, without overlap.
    `messages` is the conversation, the answer included. `finish_reason` is `stop`, `length`, or `parked` for
    one that was interrupted, to be continued. `turns` counts assistant turns. `routed_experts` is kept for
    mixture-of-experts replay.

    Raises ValueError, naming the trajectory, when lengths or spans do not fit each other, or an id is no whole number, a mask
    entry neither 0 nor 1, or a logprob no number that float32 holds (NaN is one: an engine may not know).
    """

    group_id: str
    index: int
    prompt_id: str
    messages: Sequence[Message]
    token_ids: np.ndarray
    response_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    reward: RewardResult | None = None
    turns: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        name = f"trajectory {self.group_id}/{self.index} (prompt {self.prompt_id})"
        for field_name, dtype in (
            ("token_ids", np.int32),
            ("response_mask", np.bool_),
            ("behaviour_logprobs", np.float32),
        ):
            object.__setattr__(self, field_name, _tokens(getattr(self, field_name), dtype, f"{name}: {field_name}"))
        lengths = {len(self.token_ids), len(self.response_mask), len(self.behaviour_logprobs)}
        if len(lengths) != 1:
            raise ValueError(
                f"{name}: {len(self.token_ids)} token ids, {len(self.response_mask)} mask entries and "
                f"{len(self.behaviour_logprobs)} logprobs must be equally many"
            )
        previous_end, covered = 0, 0
        for span in self.version_spans:
            if not previous_end <= span.start < span.end <= len(self.token_ids):
                raise ValueError(f"{name}: version span {span} is out of order or out of range")
            if not self.response_mask[span.start : span.end].all():
                raise ValueError(f"{name}: version span {span} covers tokens the policy did not sample")
            previous_end = span.end
            covered += span.end - span.start
        if self.version_spans and covered != int(self.response_mask.sum()):
            raise ValueError(f"{name}: version spans cover {covered} of {self.response_length} sampled tokens")

    @property
    def response_length(self) -> int:
        """Number of tokens the policy sampled."""
        return int(self.response_mask.sum())

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that the policy sampled; all of them where it sampled none."""
        return int(self.response_mask.argmax()) if self.response_mask.any() else len(self.token_ids)

    @property
    def truncated(self) -> bool:
        """The engine stopped at the length limit. Decided by finish reason: an answer may end without EOS."""
        return self.finish_reason == "length"

    @property
    def completion(self) -> str:
        """Text of the last assistant message, the empty string if there is none. Of content in parts, those that are text."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                content = message.get("content") or ""
                return content if isinstance(content, str) else "".join(map(_text, content))
        return ""

    @property
    def prompt_messages(self) -> Sequence[Message]:
        """The messages before the first one that the policy wrote (`metadata["prompt_length_messages"]`)."""
        count = self.metadata.get("prompt_length_messages")
        if count is None:
            count = next((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), len(self.messages))
        return self.messages[:count]

    @property
    def token_versions(self) -> np.ndarray:
        """int64 [T]: the version that wrote each token, -1 for tokens the policy did not sample."""
        versions = np.full(len(self.token_ids), -1, dtype=np.int64)
        for span in self.version_spans:
            versions[span.start : span.end] = span.version
        return versions

    def with_reward(self, reward: RewardResult) -> Trajectory:
        return dataclasses.replace(self, reward=reward)

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Message],
        choice: Any = None,
        *,
        group_id: str = "",
        index: int = 0,
        prompt_id: str = "",
        reward: RewardResult | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """From OpenAI message dicts, with or without a final OpenAI `Choice` (object or dict).

        A choice adds its message to the conversation, and its finish reason. Where it carries token ids
        (`token_ids`, as vLLM's server adds them) and logprobs, those become the trajectory's tokens;
        otherwise the trajectory has text only (zero tokens) and can be judged, not trained on.

        Raises ValueError for a message without a role, and for a choice with ids and logprobs that are not equally many.
        """
        conversation = list(messages)
        finish_reason = "stop"
        ids: Sequence[int] = ()
        logprobs: Sequence[float] = ()
        if choice is not None:
            conversation.append(_message(_get(choice, "message")))
            finish_reason = _get(choice, "finish_reason") or "stop"
            ids = _get(choice, "token_ids") or ()
            content = _get(_get(choice, "logprobs"), "content") or ()
            logprobs = [_get(entry, "logprob") for entry in content]
            if ids and len(ids) != len(logprobs):
                raise ValueError(f"choice {index} has {len(ids)} token ids and {len(logprobs)} logprobs")
        for place, message in enumerate(conversation):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"trajectory {group_id}/{index}: message {place} has no role: {message!r:.80}")
        return cls(
            group_id=group_id,
            index=index,
            prompt_id=prompt_id,
            messages=tuple(conversation),
            token_ids=ids,  # type: ignore[arg-type]
            response_mask=np.ones(len(ids), dtype=bool),
            behaviour_logprobs=logprobs[: len(ids)],  # type: ignore[arg-type]
            version_spans=(),
            finish_reason=finish_reason,
            reward=reward,
            turns=sum(m["role"] == "assistant" for m in conversation),
            metadata={"prompt_length_messages": len(messages), **(metadata or {})}
            if choice is not None
            else dict(metadata or {}),
        )


def _tokens(values: Any, dtype: type[np.generic], what: str) -> np.ndarray:
    """Values of a text's tokens as an array [T]. ValueError where that would change what they say."""
    try:
        given = np.asarray(values)
        # As a logprob, None would become NaN, a text its number, and what is complex its real part.
        if given.ndim == 1 and given.dtype.kind in ("fiu" if dtype is np.float32 else "biufO"):
            with np.errstate(all="ignore"):  # what does not fit is found here
                array = given.astype(dtype, copy=False)
            if dtype is np.float32:  # rounding is no change
                same = np.array_equal(np.isfinite(given), np.isfinite(array))
            else:
                same = given.dtype == dtype or np.array_equal(given, array)
            if same:
                return array
    except (TypeError, ValueError, OverflowError) as error:  # something that is no number, or lists of several lengths
        raise ValueError(f"{what}: expected {dtype.__name__} [T]: {error}") from error
    raise ValueError(f"{what}: expected {dtype.__name__} [T], found {given.dtype} {list(given.shape)}")


def _text(part: Any) -> str:
    """The text of one part of a message's content, empty for an image."""
    return part if isinstance(part, str) else part.get("text") or ""


def _message(message: Any) -> Message:
    """An OpenAI message, object or dict, as a dict with all that it says: reasoning and tool calls as well."""
    if isinstance(message, Mapping):
        return message
    if hasattr(message, "model_dump"):
        return {"role": "assistant", "content": None, **message.model_dump(exclude_none=True)}
    names = ("content", "reasoning_content", "tool_calls")
    said = {name: value for name in names if (value := getattr(message, name, None)) is not None}
    return {"role": "assistant", "content": None, **said}


def _get(source: Any, name: str) -> Any:
    """An attribute of an object or an entry of a dict; None if absent."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


@dataclass(frozen=True)
class TrajectoryGroup:
    """The answers to one dispatch of one prompt. `columns` are the data row's columns besides the prompt."""

    group_id: str
    prompt_id: str
    trajectories: tuple[Trajectory, ...]
    dispatched_at_version: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if trajectory.group_id != self.group_id:
                raise ValueError(f"group {self.group_id} was given a trajectory of group {trajectory.group_id}")

    @classmethod
    def from_messages(
        cls,
        message_lists: Sequence[Sequence[Message]],
        *,
        group_id: str = "",
        prompt_id: str = "",
        columns: Mapping[str, Any] | None = None,
    ) -> TrajectoryGroup:
        """A group of text-only trajectories from OpenAI message lists, in the given order."""
        trajectories = tuple(
            Trajectory.from_messages(messages, group_id=group_id, index=index, prompt_id=prompt_id)
            for index, messages in enumerate(message_lists)
        )
        return cls(group_id, prompt_id, trajectories, columns=dict(columns or {}))
