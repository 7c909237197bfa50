"""Reading rows: places in errors, limits, and every kind of source."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from orchestrator.config import SourceConfig
from orchestrator.sources import DataError, read_rows

KEY = "data.train.mine"


def three_rows() -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {"prompt": f"Say {number}.", "answer": number}


class Numbered:
    """A data set that is read by index, as torch's are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return [{"prompt": "a"}, {"prompt": "b"}][index]

    def __len__(self) -> int:
        return 2


def not_rows() -> Iterator[Any]:
    yield {"prompt": "Say 0."}
    yield "Say 1."


def no_rows_at_all() -> None:
    pass


def one_row_filled_again() -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    for number in range(3):
        row["prompt"] = f"Say {number}."
        yield row


def wants_size(*, size: int) -> Iterator[dict[str, Any]]:
    for number in range(size):
        yield {"prompt": f"Say {number}."}


def write_lines(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_jsonl_rows_know_their_lines_past_empty_ones(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", '\ufeff{"prompt": "a"}', "", '{"prompt": "b"}')
    rows = read_rows(KEY, SourceConfig(path=path))
    assert [dict(row) for row in rows] == [{"prompt": "a"}, {"prompt": "b"}]
    assert rows.place(1) == f"{path}:3"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "b"', "is not JSON"),
        ('["prompt"]', "expected a JSON object, found list"),
        ("", "has no rows"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    lines = ['{"prompt": "a"}', line] if line else [""]
    path = write_lines(tmp_path / "rows.jsonl", *lines)
    with pytest.raises(DataError, match=reason) as error:
        read_rows(KEY, SourceConfig(path=path))
    assert KEY in str(error.value)
    assert (f"{path}:2" if line else path) in str(error.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: is not UTF-8"):
        read_rows(KEY, SourceConfig(path=str(tmp_path / "rows.jsonl")))


def test_limit_stops_before_later_lines_are_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", '{"prompt": "a"}', "broken")
    assert len(read_rows(KEY, SourceConfig(path=path, limit=1))) == 1


def test_parquet_rows_come_one_by_one_and_are_numbered(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    messages = [{"role": "user", "content": "Hello."}]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [messages] * 3, "answer": [1, 2, 3]}), path)
    rows = read_rows(KEY, SourceConfig(path=path, limit=2))
    assert [row["answer"] for row in rows] == [1, 2]
    assert rows.fetch(1)["prompt"] == messages
    assert rows.place(1) == f"{path} row 1"


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.parquet", "no")
    with pytest.raises(DataError, match=r"rows\.parquet: is not a Parquet file"):
        read_rows(KEY, SourceConfig(path=path))


@pytest.fixture
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("dataset_cache")
def test_saved_data_sets_and_folders_of_files_are_read(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "several"))
    (tmp_path / "files").mkdir()
    write_lines(tmp_path / "files" / "train.jsonl", *(json.dumps(row) for row in data))
    one = read_rows(KEY, SourceConfig(path=str(tmp_path / "one")))
    several = read_rows(KEY, SourceConfig(path=str(tmp_path / "several"), split="test"))
    files = read_rows(KEY, SourceConfig(path=str(tmp_path / "files"), limit=1))
    assert [row["prompt"] for row in one] == [row["prompt"] for row in several] == ["a", "b"]
    assert [row["prompt"] for row in files] == ["a"]
    assert several.place(1) == f"{tmp_path / 'several'}[test] row 1"
    with pytest.raises(DataError, match=r"split=train: .* has the splits test"):
        read_rows(KEY, SourceConfig(path=str(tmp_path / "several")))


@pytest.mark.usefixtures("dataset_cache")
def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=KEY):
        read_rows(KEY, SourceConfig(path=str(tmp_path)))


def test_generators_get_their_options_and_the_limit() -> None:
    config = SourceConfig(generator=f"{__name__}.wants_size", options={"size": 5}, limit=4)
    assert len(read_rows(KEY, config)) == 4


def test_a_generator_may_give_a_data_set_that_is_read_by_index() -> None:
    rows = read_rows(KEY, SourceConfig(generator=f"{__name__}.Numbered"))
    assert [row["prompt"] for row in rows] == ["a", "b"]


def test_a_generator_may_fill_the_same_row_again() -> None:
    rows = read_rows(KEY, SourceConfig(generator=f"{__name__}.one_row_filled_again"))
    assert [row["prompt"] for row in rows] == ["Say 0.", "Say 1.", "Say 2."]


def test_a_split_of_a_file_is_refused(tmp_path: Path) -> None:
    """It would have no effect: a run would be evaluated on what it was trained on."""
    path = write_lines(tmp_path / "rows.jsonl", '{"prompt": "a"}')
    with pytest.raises(DataError, match=r"^data\.train\.mine\.split=test: a file has no splits"):
        read_rows(KEY, SourceConfig(path=path, split="test"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SourceConfig(), r"give either path or generator, found neither"),
        (SourceConfig(path="a.jsonl", generator="a.b"), r"found both"),
        (SourceConfig(path="missing.jsonl"), r"path=missing\.jsonl: no such file"),
        (SourceConfig(path="./missing"), r"path=\./missing: no such file or folder"),
        (SourceConfig(path=""), r"path=: no such file or folder"),
        (SourceConfig(path=__file__), r"expected a file that ends with \.jsonl"),
        (SourceConfig(path="a.jsonl", options={"size": 1}), r"options: are arguments of a generator"),
        (SourceConfig(path="a.jsonl", limit=0), r"limit=0: expected at least 1"),
        (SourceConfig(generator="no.such.thing"), r"generator=no\.such\.thing: there is no module no"),
        (
            SourceConfig(generator="orchestrator.tasks.nothing"),
            r"generator=orchestrator\.tasks\.nothing: expected",
        ),
        (SourceConfig(generator="nothing"), r"generator=nothing: expected the dotted path"),
        (SourceConfig(generator=f"{__name__}.wants_size"), r"options: do not fit .*wants_size.*'size'"),
        (SourceConfig(generator=f"{__name__}.not_rows"), r"not_rows row 1: expected a mapping, found str"),
        (SourceConfig(generator=f"{__name__}.no_rows_at_all"), r"no_rows_at_all gave NoneType; expected rows"),
    ],
)
def test_a_wrong_source_is_refused_with_its_key(config: SourceConfig, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_rows(KEY, config)
    assert str(error.value).startswith(KEY)
