"""What a profile comes to: classes, shares, copies that hold what they should byte for byte, picture and summary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import SourceConfig
from orchestrator.profile import Measured, ProfileError, RateLog, content_of
from orchestrator.profile_report import (
    CLASSES,
    Shares,
    SourceProfile,
    class_of,
    histogram,
    refuse_nothing,
    refuse_unwritable,
    shares_table,
    train_on,
    write_copy,
    write_results,
)
from orchestrator.prompts import PromptSource, load_source
from orchestrator.sources import DataError

BAND = (0.2, 0.8)


def load(name: str = "mine", **config: Any) -> PromptSource:
    return load_source(name, SourceConfig(**config), "train")


def profile(source: PromptSource, rates: Sequence[float | None], band: tuple[float, float] = BAND) -> SourceProfile:
    """Rates by row, None for a prompt without one."""
    return SourceProfile(
        source,
        band,
        {index: rate for index, rate in enumerate(rates) if rate is not None},
        [Measured(source.ids[i], "", None, (), "no answer") for i, rate in enumerate(rates) if rate is None],
    )


class TestClasses:
    @pytest.mark.parametrize(
        ("rate", "expected"),
        [
            (0.0, "all wrong"),
            (0.125, "below band"),
            (0.2, "in band"),
            (1 / 5, "in band"),
            (0.1 + 0.1, "in band"),
            (0.5, "in band"),
            (sum([0.1] * 8), "in band"),  # 0.7999999999999999
            (0.8, "in band"),
            (0.875, "above band"),
            (1.0, "all right"),
        ],
    )
    def test_the_ends_of_the_band_are_inside(self, rate: float, expected: str) -> None:
        assert class_of(rate, BAND) == expected

    def test_a_band_that_reaches_an_end_keeps_it(self) -> None:
        assert class_of(0.0, (0.0, 0.5)) == "in band"
        assert class_of(1.0, (0.0, 0.5)) == "all right"
        assert class_of(1.0, (0.5, 1.0)) == "in band"

    @given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
    def test_every_rate_is_in_one_class(self, rate: float, one: float, other: float) -> None:
        band = (min(one, other), max(one, other))
        found = class_of(rate, band)
        assert found in CLASSES
        if found == "below band":
            assert 0 < rate < band[0]
        if found == "above band":
            assert band[1] < rate < 1

    def test_shares(self) -> None:
        shares = Shares.of([0.0, 0.125, 0.5, 0.5, 0.75, 0.875, 1.0, 1.0], BAND)
        assert shares.mean == pytest.approx(0.59375)
        assert dict(shares.shares) == {
            "all wrong": 0.125,
            "below band": 0.125,
            "in band": 0.375,
            "above band": 0.125,
            "all right": 0.25,
        }
        assert Shares.of([], BAND).mean is None

    def test_a_table_shows_each_source_before_and_after(self, tmp_path: Path) -> None:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
        a, b = (load(name, path=str(rows)) for name in "ab")
        one = shares_table([profile(a, [0.0, 0.5, 0.5, 1.0])], BAND)
        assert [name for name, _ in one] == ["", "a", "  kept"]
        assert one[1][1].split() == ["4", "0.500", "25.0%", "0.0%", "50.0%", "0.0%", "25.0%"]
        assert one[2][1].split() == ["2", "0.500", "0.0%", "0.0%", "100.0%", "0.0%", "0.0%"]
        both = shares_table([profile(a, [0.0, 0.5, 0.5, 1.0]), profile(b, [0.0, None, 0.0, 0.0])], BAND)
        assert [name for name, _ in both] == ["", "a", "  kept", "b", "  kept", "together", "  kept"]
        assert both[4][1].split()[:2] == ["0", "-"]
        assert both[5][1].split()[:2] == ["7", "0.286"]


class TestCopies:
    def test_lines_of_jsonl_are_copied_byte_for_byte(self, tmp_path: Path) -> None:
        lines = [
            b'\xef\xbb\xbf{"prompt": "a", "x": 1.10, "big": 123456789012345678901234567890}\n',
            b"\n",
            '{ "prompt":"ä\\u00df", "id":"k", "nan": NaN }\r\n'.encode(),
            b'{"prompt": "b"}\n',
            b"   \n",
            b'{"prompt": "c", "n": null}',
        ]
        rows = tmp_path / "rows.jsonl"
        rows.write_bytes(b"".join(lines))
        source = load(path=str(rows))
        copy = write_copy(source, [1, 3], tmp_path / "out")
        assert copy == tmp_path / "out" / "data" / "mine.jsonl"
        assert copy.read_bytes() == lines[2] + lines[5] + b"\n"
        assert load(path=str(copy)).ids == (source.ids[1], source.ids[3])
        whole = write_copy(source, [0, 1, 2, 3], tmp_path / "out")
        assert whole is not None
        assert load(path=str(whole)).ids == source.ids

    def test_parquet_keeps_rows_schema_and_metadata(self, tmp_path: Path) -> None:
        table = pyarrow.table(
            {
                "prompt": [[{"role": "user", "content": f"q{i}"}] for i in range(5)],
                "score": pyarrow.array([1.5, None, float("nan"), 2.5, 3.5], pyarrow.float32()),
                "kind": pyarrow.array(["a", "b", "a", "b", "a"]).dictionary_encode(),
            }
        ).replace_schema_metadata({"made_by": "someone"})
        rows = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(table, rows)
        source = load(path=str(rows), limit=4)
        copy = write_copy(source, [0, 2, 3], tmp_path / "out")
        assert copy == tmp_path / "out" / "data" / "mine.parquet"
        written = pyarrow.parquet.read_table(copy)
        assert written.schema.equals(pyarrow.parquet.read_table(rows).schema, check_metadata=True)
        assert written.select(["prompt", "kind"]).equals(table.take([0, 2, 3]).select(["prompt", "kind"]))
        assert str(written["score"].to_pylist()) == "[1.5, nan, 2.5]"
        assert load(path=str(copy)).ids == tuple(source.ids[i] for i in (0, 2, 3))

    def test_a_generator_becomes_jsonl(self, tmp_path: Path) -> None:
        source = load(generator=f"{__name__}.rows")
        copy = write_copy(source, [1, 2], tmp_path)
        assert copy == tmp_path / "data" / "mine.jsonl"
        again = load(path=str(copy))
        assert list(again.rows) == [{"prompt": "ü1", "answer": 1}, {"prompt": "ü2", "answer": 2}]
        assert again.ids == (source.ids[1], source.ids[2])

    def test_a_data_set_becomes_jsonl(self, tmp_path: Path) -> None:
        import datasets

        datasets.Dataset.from_list([{"prompt": f"q{i}"} for i in range(3)]).save_to_disk(str(tmp_path / "set"))
        source = load(path=str(tmp_path / "set"))
        refuse_unwritable(source, tmp_path)
        copy = write_copy(source, [2], tmp_path)
        assert copy is not None
        assert load(path=str(copy)).ids == (source.ids[2],)

    def test_rows_that_json_can_not_hold_are_found_before_anything_is_measured(self, tmp_path: Path) -> None:
        source = load(generator=f"{__name__}.odd_rows")
        with pytest.raises(
            DataError, match=r"data\.train\.mine: .*odd_rows row 1: can't be copied as a line of JSON \(.*set"
        ):
            refuse_unwritable(source, tmp_path)

    def test_a_source_that_is_the_copy_itself_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        rows = tmp_path / "data" / "mine.jsonl"
        rows.write_text('{"prompt": "a"}\n')
        with pytest.raises(DataError, match=r"data\.train\.mine\.path=.*choose another profile\.out"):
            refuse_unwritable(load(path=str(rows)), tmp_path)
        refuse_unwritable(load("other", path=str(rows)), tmp_path)

    @pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
    @pytest.mark.parametrize("change", ["edited", "shorter"])
    def test_a_file_that_changed_meanwhile_is_refused(self, tmp_path: Path, suffix: str, change: str) -> None:
        rows = tmp_path / f"rows.{suffix}"

        def write(prompts: Sequence[str]) -> None:
            if suffix == "jsonl":
                rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
            else:
                rows.unlink(missing_ok=True)
                pyarrow.parquet.write_table(pyarrow.table({"prompt": list(prompts)}), rows)

        write("abc")
        source = load(path=str(rows))
        write("abx" if change == "edited" else "ab")
        with pytest.raises(DataError, match=r"data\.train\.mine: .*rows\.\w+.*: the file changed while"):
            write_copy(source, [0, 2], tmp_path / "out")
        assert not list((tmp_path / "out" / "data").iterdir())
        assert write_copy(source, [0, 1], tmp_path / "out") is not None


def rows() -> Iterator[dict[str, Any]]:
    yield from ({"prompt": f"ü{i}", "answer": i} for i in range(3))


def odd_rows() -> Iterator[dict[str, Any]]:
    yield {"prompt": "a", "answer": [1]}
    yield {"prompt": "b", "answer": {1}}


class TestResults:
    def profiles(self, tmp_path: Path) -> list[SourceProfile]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"q": f"{i}"}) + "\n" for i in range(5)))
        easy = load("easy", path=str(file), prompt_column="q", weight=2.0, limit=5)
        made = load("made", generator=f"{__name__}.rows")
        return [profile(easy, [1.0, 0.75, 0.125, None]), profile(made, [0.0, 0.0, 1.0])]

    def test_copies_summary_and_picture(self, tmp_path: Path) -> None:
        profiles = self.profiles(tmp_path)
        stale = tmp_path / "out" / "data" / "made.jsonl"
        stale.parent.mkdir(parents=True)
        stale.write_text("of another band")
        copies = write_results(profiles, tmp_path / "out", BAND, 8)
        path = str(tmp_path / "out" / "data" / "easy.jsonl")
        assert copies == {"easy": SourceConfig(path=path, prompt_column="q", weight=2.0)}
        assert Path(path).read_text() == '{"q": "1"}\n'
        assert not stale.exists()
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["band"] == [0.2, 0.8]
        assert summary["answers_per_prompt"] == 8
        easy = summary["sources"]["easy"]
        assert easy["before"]["prompts"] == 3
        assert easy["before"]["shares"]["in band"] == pytest.approx(1 / 3)
        assert easy["after"] == {
            "prompts": 1,
            "mean": 0.75,
            "shares": {**dict.fromkeys(CLASSES, 0.0), "in band": 1.0},
        }
        assert easy["no_pass_rate"] == [{"prompt_id": profiles[0].source.ids[3], "reason": "no answer"}]
        assert easy["not_measured"] == 1
        assert easy["copy"] == path
        assert summary["sources"]["made"]["copy"] is None
        page = (tmp_path / "out" / "histogram.html").read_text()
        assert len(page) > 1_000_000  # plotly itself is in it: the page needs no network
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["data", "histogram.html", "summary.json"]

    def test_the_picture_has_a_bar_for_each_possible_rate(self, tmp_path: Path) -> None:
        page = histogram(self.profiles(tmp_path), BAND, 8)
        drawn = page[page.rindex("Plotly.newPlot(") :].replace(" ", "").replace("\n", "")
        assert '"name":"easy"' in drawn
        assert '"x":[0.0,0.125,0.25,0.375,0.5,0.625,0.75,0.875,1.0],"y":[0,1,0,0,0,0,1,0,1]' in drawn
        assert '"y":[2,0,0,0,0,0,0,0,1]' in drawn
        assert '"x0":0.2,"x1":0.8' in drawn

    def test_rates_are_found_by_row_in_the_log(self, tmp_path: Path) -> None:
        source = load(generator=f"{__name__}.rows")
        first, second, _ = source
        with RateLog(tmp_path, {}) as log:
            log.add(Measured(first.prompt_id, content_of(first), 0.5, (0.0, 1.0)))
            log.add(Measured(second.prompt_id, content_of(second), None, (None, 1.0), "late"))
            found = SourceProfile.of(source, log, BAND)
        assert found.rates == {0: 0.5}
        assert [m.reason for m in found.failed] == ["late"]
        assert found.kept == [0]

    def test_a_profile_of_failures_alone_says_nothing(self, tmp_path: Path) -> None:
        source = load(generator=f"{__name__}.rows")
        with pytest.raises(ProfileError, match=r"none of 3 prompts has a pass rate; mine:.*: no answer"):
            refuse_nothing([profile(source, [None, None, None])])
        refuse_nothing([profile(source, [None, None, 0.0])])


def test_a_name_that_no_override_can_hold_costs_the_advice_alone() -> None:
    copy = SourceConfig(path="kept.jsonl", weight=2.0)
    assert train_on({"mine": copy}) == 'data.train={mine:{path:"kept.jsonl",weight:2.0}}'
    assert train_on({"mine": copy, "1": copy}) is None
    assert train_on({}) is None
