"""Rows -> prompts with stable ids, handed out in a fixed order that survives a kill: the resumable frontier.

Contract of `PromptSource`: every row is checked when the source is loaded, so a bad row stops a run before
it starts. A prompt's id is its source's name with the row's own `id`, or with a hash of the row's content
(equal rows are counted), never the row's position: rows may be moved or added without renaming the others.

Contract of `PromptStream`: each source is passed over epoch after epoch in an order that depends on
`data.seed`, the epoch and the ids alone, and sources take turns in proportion to their weights. The state
is the frontier: how far each source was drawn, and the prompts handed out but not finally consumed. Its
size is bounded by what is outstanding, not by the data.

A sampler may say that a prompt isn't worth drawing in this epoch. It is then skipped: it takes its turn in the order, is
never outstanding and is over for the epoch. The sampler is asked at the moment of the draw, once for each (prompt id,
epoch), and never about a prompt that was offered again. Since a skipped prompt takes a turn of its source, a source that
is mostly skipped leaves its place to the others instead of rushing through its epochs.

Invariant: a (prompt id, epoch) is drawn or skipped once; drawn, it is outstanding until `done`, and after a restore
everything that was outstanding is handed out again first, in its old order. So whatever is killed and restored, in the
surviving lineage each prompt is done or skipped exactly once an epoch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.config import DataConfig, SourceConfig
from orchestrator.sources import (
    DataError,
    Rows,
    content_hash,
    conversation,
    explicit_id,
    read_rows,
    reward_names,
)
from rollout_workers.trajectory import Message

EXAMPLES_NAMED = 5  # rows that an error about many rows names
MAX_SKIPS = (
    1000  # in a row: the prompt after them is drawn, so that a draw takes milliseconds whatever the sampler says
)

Sampler = Callable[[str, int], bool]  # whether to draw a prompt (by its id) in an epoch


@dataclass(frozen=True)
class Prompt:
    """One prompt of one epoch.

    `messages` end with the turn to be answered. `columns` are the row's other columns, which reach reward
    functions by name. `reward` names the row's own reward functions (None: all of the run's). `text` is set
    when the row's prompt was a plain string: reward functions are then given strings, not message lists.
    """

    prompt_id: str
    source: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any]
    reward: tuple[str, ...] | None
    epoch: int
    text: str | None


@dataclass(frozen=True)
class PromptSource:
    """A loaded source: `ids[i]` is the id of row `i`; `columns` every column name that some row has."""

    name: str
    key: str
    config: SourceConfig
    rows: Rows
    ids: tuple[str, ...]
    columns: frozenset[str]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Prompt]:
        """All prompts once, in the order of the rows, as epoch 0."""
        return (self.prompt(index, epoch=0) for index in range(len(self)))

    def prompt(self, index: int, epoch: int) -> Prompt:
        row = self.rows.fetch(index)
        text, messages = conversation(row, self.config, f"{self.key}: {self.rows.place(index)}")
        return Prompt(
            prompt_id=self.ids[index],
            source=self.name,
            messages=messages,
            columns={name: row[name] for name in row if name not in (self.config.prompt_column, "reward")},
            reward=reward_names(row, self.config, f"{self.key}: {self.rows.place(index)}"),
            epoch=epoch,
            text=text,
        )


def load_source(name: str, config: SourceConfig, kind: str) -> PromptSource:
    """The source configured as `data.<kind>.<name>` (kind: train or eval), every row checked.

    Raises DataError naming the file and line, or the row, of the first bad one.
    """
    key = f"data.{kind}.{name}"
    if not re.fullmatch(r"[\w.-]+", name):  # it is the first part of every prompt id
        raise DataError(f"{key}: a source's name is made of letters, digits, dot, dash and underscore")
    if not 0 < config.weight < math.inf:
        raise DataError(f"{key}.weight={config.weight}: expected a number above 0")
    if config.reward == []:
        raise DataError(
            f"{key}.reward=[]: nothing would judge its rows; name reward functions, or null for all of them"
        )
    rows = read_rows(key, config)
    ids: list[str] = []
    places: dict[str, int] = {}
    copies: Counter[str] = Counter()
    columns: set[str] = set()
    for index, row in enumerate(rows):
        place = f"{key}: {rows.place(index)}"
        conversation(row, config, place)
        reward_names(row, config, place)
        row_id = explicit_id(row, place)
        if row_id is None:
            digest = content_hash(row)
            copies[digest] += 1
            row_id = digest if copies[digest] == 1 else f"{digest}-{copies[digest]}"
        prompt_id = f"{name}:{row_id}"
        if prompt_id in places:
            raise DataError(f"{place}: has the id {row_id!r} of {rows.place(places[prompt_id])}; ids must differ")
        places[prompt_id] = index
        ids.append(prompt_id)
        columns.update(row)
    columns -= {config.prompt_column, "reward"}
    return PromptSource(name, key, config, rows, tuple(ids), frozenset(columns))


def load_sources(configs: Mapping[str, SourceConfig], kind: str) -> list[PromptSource]:
    """`load_source` for each of `data.train` or `data.eval`, in the order of the configuration."""
    return [load_source(name, config, kind) for name, config in configs.items()]


class PromptIds(Protocol):
    """What `refuse_long_prompts` needs of `rollout_workers.chat.ChatTemplate`."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...


def refuse_long_prompts(source: PromptSource, template: PromptIds, max_prompt_tokens: int) -> int:
    """Tokens of the source's longest prompt, chat template included.

    Raises DataError when prompts have more than `max_prompt_tokens`, with their number and the first few of
    them, or when the template refuses a prompt's messages: both would otherwise come to light in the middle
    of a run.
    """
    longest, too_long = 0, []
    for index, prompt in enumerate(source):
        try:
            length = len(template.prompt_ids(prompt.messages))
        except ValueError as error:
            raise DataError(f"{source.key}: {source.rows.place(index)}: {error}") from error
        longest = max(longest, length)
        if length > max_prompt_tokens:
            too_long.append(f"{source.rows.place(index)} ({prompt.prompt_id}, {length} tokens)")
    if too_long:
        named = "; ".join(too_long[:EXAMPLES_NAMED]) + ("; …" if len(too_long) > EXAMPLES_NAMED else "")
        raise DataError(
            f"{source.key}: {len(too_long)} of {len(source)} prompts are longer than "
            f"rollout.max_prompt_tokens={max_prompt_tokens}; the longest has {longest} tokens: {named}"
        )
    return longest


def require_batch(sources: Sequence[PromptSource], groups_per_batch: int) -> None:
    """Refuses data with fewer prompts than one batch: the run would train on repeats, or on nothing."""
    rows = sum(map(len, sources))
    if rows < groups_per_batch:
        raise DataError(
            f"sampling.groups_per_batch={groups_per_batch}: data.train has only {rows} prompts; "
            f"add prompts, or set sampling.groups_per_batch to {rows} or less"
        )


class PromptStream:
    """Hands out the prompts of weighted sources, epoch after epoch; see the module's contract.

    `epochs` None: without end. Otherwise a source drops out after so many passes, and `next` returns None
    when all have. `sampler` None: every prompt is drawn. Not for several threads. Raises DataError when there
    is no source.
    """

    def __init__(
        self,
        sources: Sequence[PromptSource],
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        if not sources:
            raise DataError("data.train: there is no source of prompts")
        if epochs is not None and epochs < 1:
            raise DataError(f"data.epochs={epochs}: expected at least 1, or null")
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler
        self._skipped = 0  # since the metrics before
        self._cursors = {source.name: _Cursor(source, seed, shuffle, epochs) for source in sources}
        # In the order of their first dispatch.
        self._outstanding: dict[tuple[str, int], Prompt] = {}
        # Those of them that are to be handed out again, in order.
        self._waiting: dict[tuple[str, int], None] = {}

    @classmethod
    def from_config(
        cls, sources: Sequence[PromptSource], config: DataConfig, sampler: Sampler | None = None
    ) -> PromptStream:
        return cls(sources, seed=config.seed, shuffle=config.shuffle, epochs=config.epochs, sampler=sampler)

    def next(self) -> Prompt | None:
        """The next prompt to dispatch, those offered again first; None when `exhausted`, or nothing left is worth it."""
        if self._waiting:
            key = next(iter(self._waiting))
            del self._waiting[key]
            return self._outstanding[key]
        skips = 0
        while live := [cursor for cursor in self._cursors.values() if not cursor.finished]:
            # Each turn is that of the source that is furthest behind its share; of equals, of the first.
            cursor = min(live, key=lambda cursor: (cursor.passed + 1) / cursor.source.config.weight)
            if self._sampler is None or skips == MAX_SKIPS or self._sampler(cursor.prompt_id, cursor.epoch):
                prompt = cursor.prompt()
                self._outstanding[prompt.prompt_id, prompt.epoch] = prompt
                cursor.advance()
                return prompt
            cursor.advance()
            skips += 1
            self._skipped += 1
        return None

    def done(self, prompt_id: str, epoch: int) -> None:
        """The prompt is finally consumed (trained on, filtered, failed, stale) and over for this epoch.

        Raises ValueError when it is not in flight, since then it was counted twice or never handed out.
        """
        self._check_in_flight(prompt_id, epoch)
        del self._outstanding[prompt_id, epoch]

    def offer_again(self, prompt_id: str, epoch: int) -> None:
        """Dispatch the prompt once more, before new ones. Raises ValueError when it is not in flight."""
        self._check_in_flight(prompt_id, epoch)
        self._waiting[prompt_id, epoch] = None

    def _check_in_flight(self, prompt_id: str, epoch: int) -> None:
        if (prompt_id, epoch) not in self._outstanding:
            raise ValueError(f"prompt {prompt_id} of epoch {epoch} is not outstanding")
        if (prompt_id, epoch) in self._waiting:
            raise ValueError(f"prompt {prompt_id} of epoch {epoch} waits to be handed out again, it is not in flight")

    @property
    def exhausted(self) -> bool:
        """Every prompt of every epoch was drawn or skipped. Prompts in flight may still be offered again."""
        return not self._waiting and all(cursor.finished for cursor in self._cursors.values())

    @property
    def outstanding(self) -> int:
        """Prompts handed out (or waiting to be, again) and not done."""
        return len(self._outstanding)

    def metrics(self) -> dict[str, float]:
        """`data/epoch` and, since the last call, `data/skipped`."""
        cursors = self._cursors.values()
        passes = sum(cursor.passed for cursor in cursors) / sum(len(cursor.source) for cursor in cursors)
        skipped, self._skipped = self._skipped, 0
        return {"data/epoch": passes, "data/skipped": skipped}

    def state(self) -> dict[str, Any]:
        """The frontier, of JSON's types."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "skipped": self._skipped,
            "sources": {name: cursor.state() for name, cursor in self._cursors.items()},
            "outstanding": [list(key) for key in self._outstanding],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; what was outstanding comes first. `epochs` and the sampler may differ.

        Raises DataError naming what differs when the seed, the sources, their weights or their rows are not
        those of the state, RuntimeError when prompts were drawn from this stream already: the checkpoint
        would come too late for them.
        """
        if any(cursor.passed for cursor in self._cursors.values()):
            raise RuntimeError("a prompt stream must be restored before the first prompt is drawn from it")
        now = self.state()
        for name in ("seed", "shuffle"):
            if state[name] != now[name]:
                raise DataError(f"data.{name}={now[name]}: the checkpoint was taken with {state[name]}")
        if list(state["sources"]) != list(self._cursors):
            raise DataError(
                f"data.train: has the sources {', '.join(self._cursors)}, the checkpoint {', '.join(state['sources'])}"
            )
        for name, cursor in self._cursors.items():
            cursor.restore(state["sources"][name])
        self._skipped = state["skipped"]
        self._outstanding = self._find([(prompt_id, epoch) for prompt_id, epoch in state["outstanding"]])
        self._waiting = dict.fromkeys(self._outstanding)

    def _find(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Prompt]:
        """The prompts of `keys`, in their order. One pass over the ids, so that no index of them is kept."""
        wanted = {prompt_id for prompt_id, _ in keys}
        found = {
            prompt_id: (cursor.source, index)
            for cursor in self._cursors.values()
            for index, prompt_id in enumerate(cursor.source.ids)
            if prompt_id in wanted
        }
        return {(prompt_id, epoch): found[prompt_id][0].prompt(found[prompt_id][1], epoch) for prompt_id, epoch in keys}


class _Cursor:
    """How far one source was passed over: `position` prompts of pass `epoch` were drawn or skipped."""

    def __init__(self, source: PromptSource, seed: int, shuffle: bool, epochs: int | None) -> None:
        self.source = source
        self.epoch = 0
        self.position = 0
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._order = self._order_of(0)
        # In the order of the first pass: without shuffling, moved rows are another order.
        digest = hashlib.blake2b(digest_size=16)
        for index in self._order:
            digest.update(source.ids[index].encode() + b"\n")
        self._digest = digest.hexdigest()

    def _order_of(self, epoch: int) -> Sequence[int]:
        """Rows of one pass, by a hash of seed, epoch and id: a random generator may change with versions."""
        if not self._shuffle:
            return range(len(self.source))

        def key(index: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}:{epoch}:{self.source.ids[index]}".encode(), digest_size=16).digest()

        return sorted(range(len(self.source)), key=key)

    @property
    def passed(self) -> int:
        return self.epoch * len(self.source) + self.position

    @property
    def finished(self) -> bool:
        return self._epochs is not None and self.epoch >= self._epochs

    @property
    def prompt_id(self) -> str:
        """Of the prompt whose turn it is."""
        return self.source.ids[self._order[self.position]]

    def prompt(self) -> Prompt:
        """The prompt whose turn it is."""
        return self.source.prompt(self._order[self.position], self.epoch)

    def advance(self) -> None:
        self.position += 1
        if self.position == len(self.source):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "weight": self.source.config.weight,
            "rows": len(self.source),
            "digest": self._digest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        weight, rows, key = self.source.config.weight, len(self.source), self.source.key
        if state["weight"] != weight:
            raise DataError(f"{key}.weight={weight}: the checkpoint was taken with {state['weight']}")
        if (state["rows"], state["digest"]) != (rows, self._digest):
            raise DataError(f"{key}: the data changed since the checkpoint; it had {state['rows']} rows, now {rows}")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)
