"""Where rows come from (JSONL, Parquet, Hugging Face data sets, generators), and what a row must contain.

Contract: `read_rows` turns one `SourceConfig` into `Rows`, a sequence of plain dicts that knows where each
row stands, for error messages: `rows.jsonl:12`, `rows.parquet row 11`, `squad[train] row 11` (lines count
from 1 as editors do, rows from 0 as tables do).

A row has a prompt (text, or a list of messages), may have an `id` and a `reward` (names of its reward
functions), and any further columns. The functions that read these take the row's place and name it in their
errors.

Parquet and Hugging Face data sets stay in Arrow's memory-mapped tables and become dicts one row at a time,
so a large set costs address space, not memory. Every error is a DataError that names the configuration key
and the place.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import ConfigError, SourceConfig
from rollout_workers.trajectory import Message

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class DataError(ConfigError):
    """A source or a row can't be used; says the key, the place, what was found and what expected."""


@dataclass(frozen=True)
class Rows:
    """Rows of one source. `fetch(i)` gives row `i` as a dict, `place(i)` says where it stands."""

    count: int
    fetch: Callable[[int], Mapping[str, Any]]
    place: Callable[[int], str]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self.fetch, range(self.count))


def read_rows(key: str, config: SourceConfig) -> Rows:
    """The rows of the source configured under `key` (`data.train.NAME`), at most `config.limit`.

    Raises DataError when both or neither of `path` and `generator` are given, the path or generator does
    not exist, the data can't be parsed, or there is no row.
    """
    if (config.path is None) == (config.generator is None):
        raise DataError(f"{key}: give either path or generator, found {'neither' if config.path is None else 'both'}")
    if config.limit is not None and config.limit < 1:
        raise DataError(f"{key}.limit={config.limit}: expected at least 1")
    if config.generator is not None:
        rows = _generated(key, config.generator, config.options, config.limit)
    else:
        assert config.path is not None
        if config.options:
            raise DataError(f"{key}.options: are arguments of a generator, and {key} has a path instead")
        rows = _read_path(key, config.path, config.split, config.limit)
    if not rows.count:
        raise DataError(f"{key}: {config.path or config.generator} has no rows")
    return rows


def _read_path(key: str, path: str, split: str, limit: int | None) -> Rows:
    file = Path(path).expanduser()
    if file.is_file():
        readers = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".parquet": _read_parquet}
        if file.suffix not in readers:
            raise DataError(f"{key}.path={path}: expected a file that ends with {', '.join(readers)}")
        if split != SourceConfig.split:
            raise DataError(f"{key}.split={split}: a file has no splits, all of {path} would be read; leave it out")
        return readers[file.suffix](key, file, limit)
    if (
        file.suffix in (".jsonl", ".ndjson", ".json", ".parquet")
        or not (file.is_dir() or HUB_ID.fullmatch(path))
        or not path
    ):
        raise DataError(f"{key}.path={path}: no such file or folder")
    return _read_dataset(key, path, split, limit)


def _read_jsonl(key: str, file: Path, limit: int | None) -> Rows:
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []  # line of each row; empty lines are no rows
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if limit is not None and len(rows) == limit:
                break
            if not line.strip():
                continue
            place = f"{key}: {file}:{number}"
            try:
                # The byte order mark, which some editors write, is not part of the first line.
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: is not UTF-8 ({error})") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{place}: is not JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(row, dict):
                raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
            rows.append(row)
            lines.append(number)
    return Rows(len(rows), rows.__getitem__, lambda index: f"{file}:{lines[index]}")


def _read_parquet(key: str, file: Path, limit: int | None) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file, memory_map=True)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{key}.path={file}: is not a Parquet file that can be read ({error})") from error
    return Rows(
        table.num_rows if limit is None else min(limit, table.num_rows),
        lambda index: table.slice(index, 1).to_pylist()[0],
        lambda index: f"{file} row {index}",
    )


def _read_dataset(key: str, path: str, split: str, limit: int | None) -> Rows:
    """A data set of the hub, a folder of data files, or a folder that `Dataset.save_to_disk` wrote."""
    import datasets

    folder = Path(path).expanduser()
    saved = any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    try:
        data = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(path, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{key}.path={path}: the data set (split {split}) could not be loaded: {error}") from error
    if isinstance(data, Mapping):
        if split not in data:
            raise DataError(f"{key}.split={split}: {path} has the splits {', '.join(data)}")
        data = data[split]
    return Rows(
        len(data) if limit is None else min(limit, len(data)),
        data.__getitem__,
        lambda index: f"{path}[{split}] row {index}",
    )


def _generated(key: str, generator: str, options: Mapping[str, Any], limit: int | None) -> Rows:
    function = _function(f"{key}.generator", generator)
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise DataError(f"{key}.options: do not fit {generator}{inspect.signature(function)}: {error}") from error
    made = function(**options)
    try:
        each = iter(made)
    except TypeError as error:
        raise DataError(f"{key}: {generator} gave {type(made).__name__}; expected rows, one after the other") from error
    rows: list[Mapping[str, Any]] = []
    for index, row in enumerate(itertools.islice(each, limit)):
        if not isinstance(row, Mapping):
            raise DataError(f"{key}: {generator} row {index}: expected a mapping, found {type(row).__name__}")
        rows.append(dict(row))  # a generator may go on to fill the same one
    return Rows(len(rows), rows.__getitem__, lambda index: f"{generator} row {index}")


def _function(key: str, path: str) -> Callable[..., Any]:
    """The function at a dotted path. Its absence is a DataError, an error inside its module is not."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name) if module_name else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise DataError(f"{key}={path}: there is no module {error.name}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"{key}={path}: expected the dotted path of a function, found none there")
    return function


def explicit_id(row: Mapping[str, Any], place: str) -> str | None:
    """The row's own id (column `id`, text or a whole number), None where it has none."""
    value = row.get("id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | str) or value == "":
        raise DataError(f"{place}: column id: expected text or a whole number, found {value!r}")
    _refuse_half_characters(str(value), f"{place}: column id")
    return str(value)


def _refuse_half_characters(text: str, place: str) -> None:
    """Half of a surrogate pair, as cut texts have, can't be encoded: neither by a tokenizer nor into a file."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start : error.end])
        raise DataError(
            f"{place}: holds half a character ({found} at {error.start}), which can't be encoded"
        ) from error


def content_hash(row: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the row's content, the same from JSONL and from Parquet (which adds nulls)."""
    text = json.dumps(_without_nulls(row), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def conversation(row: Mapping[str, Any], config: SourceConfig, place: str) -> tuple[str | None, tuple[Message, ...]]:
    """The row's prompt as (its text or None, its messages with the source's system prompt)."""
    column = config.prompt_column
    prompt = row.get(column)
    if prompt is None:
        raise DataError(f"{place}: has no prompt (column {column}); its columns are {', '.join(row) or 'none'}")
    text = None
    if isinstance(prompt, str):
        text, messages = prompt, [{"role": "user", "content": prompt}]
        _refuse_half_characters(prompt, f"{place}: {column}")
    elif isinstance(prompt, Sequence):
        messages = [_message(message, f"{place}: {column}[{i}]") for i, message in enumerate(prompt)]
    else:
        raise DataError(f"{place}: {column}: expected text or a list of messages, found {type(prompt).__name__}")
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{place}: {column}: is empty")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{place}: {column}: ends with an assistant message; the policy is to write that one")
    if config.system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return text, tuple(messages)


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{place}: expected a message with role and content, found {type(message).__name__}")
    # Arrow gives every message the keys of all of them, null where a message has none.
    present = {name: value for name, value in message.items() if value is not None}
    if present.get("tool_calls"):
        present.setdefault("content", "")  # a message that only calls tools
    for name in ("role", "content"):
        if not isinstance(present.get(name), str):
            raise DataError(f"{place}: expected text as {name}, found {message.get(name)!r}")
        _refuse_half_characters(present[name], f"{place}.{name}")
    return present


def reward_names(row: Mapping[str, Any], config: SourceConfig, place: str) -> tuple[str, ...] | None:
    """The row's reward functions, else the source's."""
    value = row.get("reward")
    if value is None:
        return None if config.reward is None else tuple(config.reward)
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{place}: column reward: expected names of reward functions, found {value!r}")
    return tuple(names)
