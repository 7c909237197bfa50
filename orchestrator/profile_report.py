"""What a difficulty profile comes to: how hard each source is, and copies of the sources without what teaches nothing.

Contract:
- A pass rate is in exactly one of the five `CLASSES`. In band means kept: the band's ends are inclusive, and a band that
  reaches 0 or 1 keeps what is all wrong or all right.
- A copy holds the kept rows of its source in their order, each as it was: the very lines of a JSONL file, the rows of a Parquet
  file with its schema; what a generator or a data set gave becomes JSONL. Prompt ids are the same in it. Prompts without a
  pass rate are in no share and no copy.
- Every file is there whole or not at all; `summary.json` comes last.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.compose import literal
from orchestrator.config import ConfigError, SourceConfig
from orchestrator.durable import remove_temporaries, whole_file, write_json
from orchestrator.profile import Measured, ProfileError, RateLog
from orchestrator.prompts import PromptSource
from orchestrator.sources import DataError, content_hash

CLASSES = ("all wrong", "below band", "in band", "above band", "all right")
COPIES = "data"
SUMMARY = "summary.json"
HISTOGRAM = "histogram.html"
ROUNDING = 1e-9  # an end of the band is met although a mean of floats misses it by so much

Band = tuple[float, float]


def class_of(rate: float, band: Band) -> str:
    """The one of `CLASSES` that a pass rate in [0, 1] is in."""
    low, high = band
    if low - ROUNDING <= rate <= high + ROUNDING:
        return "in band"
    if rate in (0.0, 1.0):
        return "all right" if rate else "all wrong"
    return "below band" if rate < low else "above band"


@dataclass(frozen=True)
class SourceProfile:
    """Pass rates by row of one source, and the prompts that have none. The other rows were not measured."""

    source: PromptSource
    band: Band
    rates: Mapping[int, float]
    failed: Sequence[Measured]

    @classmethod
    def of(cls, source: PromptSource, log: RateLog, band: Band) -> SourceProfile:
        measured = {index: found for index, prompt in enumerate(source) if (found := log.get(prompt)) is not None}
        rates = {index: found.rate for index, found in measured.items() if found.rate is not None}
        return cls(source, band, rates, [found for found in measured.values() if found.rate is None])

    @property
    def kept(self) -> list[int]:
        """Rows in the band, in order."""
        return [index for index, rate in self.rates.items() if class_of(rate, self.band) == "in band"]


def refuse_nothing(profiles: Sequence[SourceProfile]) -> None:
    """Raises ProfileError when no prompt has a pass rate: that says nothing about the prompts."""
    failed = [measured for profile in profiles for measured in profile.failed]
    if failed and not any(profile.rates for profile in profiles):
        raise ProfileError(f"none of {len(failed)} prompts has a pass rate; {failed[0].prompt_id}: {failed[0].reason}")


@dataclass(frozen=True)
class Shares:
    """How many pass rates there are, their mean (None for none) and the share of each of `CLASSES`."""

    prompts: int
    mean: float | None
    shares: Mapping[str, float]

    @classmethod
    def of(cls, rates: Sequence[float], band: Band) -> Shares:
        counts = Counter(class_of(rate, band) for rate in rates)
        mean = math.fsum(rates) / len(rates) if rates else None
        return cls(len(rates), mean, {name: counts[name] / len(rates) if rates else 0.0 for name in CLASSES})

    @property
    def row(self) -> str:
        mean = "-" if self.mean is None else f"{self.mean:.3f}"
        return f"{self.prompts:>9}{mean:>8}" + "".join(f"{self.shares[name]:>11.1%}" for name in CLASSES)


def shares_table(profiles: Sequence[SourceProfile], band: Band) -> list[tuple[str, str]]:
    """Rows for a person: before and after, by source and, of several, together."""
    rows = [("", f"{'prompts':>9}{'mean':>8}" + "".join(f"{name:>11}" for name in CLASSES))]

    def add(name: str, members: Sequence[SourceProfile]) -> None:
        before = [rate for profile in members for rate in profile.rates.values()]
        after = [profile.rates[index] for profile in members for index in profile.kept]
        rows.extend([(name, Shares.of(before, band).row), ("  kept", Shares.of(after, band).row)])

    for profile in profiles:
        add(profile.source.name, [profile])
    if len(profiles) > 1:
        add("together", profiles)
    return rows


def write_results(profiles: Sequence[SourceProfile], folder: Path, band: Band, answers: int) -> dict[str, SourceConfig]:
    """Copies, histogram and summary into `folder`; the sources of the copies, configured as before.

    A source without a prompt in the band has no copy: nothing of it is worth training on.
    """
    remove_temporaries(folder / COPIES)
    copies: dict[str, SourceConfig] = {}
    for profile in profiles:
        path = write_copy(profile.source, profile.kept, folder)
        if path is not None:
            copies[profile.source.name] = _configured(profile.source.config, path)
    with whole_file(folder / HISTOGRAM) as file:
        file.write(histogram(profiles, band, answers).encode())
    write_json(folder / SUMMARY, _summary(profiles, band, answers, copies))
    return copies


def train_on(copies: Mapping[str, SourceConfig]) -> str | None:
    """The override that makes the copies the training data; None where there are none, or one has a name that it can't hold."""
    usual = asdict(SourceConfig())
    given = {
        name: {key: value for key, value in asdict(copy).items() if value != usual[key]}
        for name, copy in copies.items()
    }
    try:
        return f"data.train={literal(given)}" if given else None
    except ConfigError:
        return None


def _configured(config: SourceConfig, path: Path) -> SourceConfig:
    return replace(config, path=str(path), split=SourceConfig.split, generator=None, options={}, limit=None)


def _summary(
    profiles: Sequence[SourceProfile], band: Band, answers: int, copies: Mapping[str, SourceConfig]
) -> dict[str, Any]:
    def figures(shares: Shares) -> dict[str, Any]:
        return {"prompts": shares.prompts, "mean": shares.mean, "shares": shares.shares}

    return {
        "band": list(band),
        "answers_per_prompt": answers,
        "train_on": train_on(copies),
        "sources": {
            p.source.name: {
                "before": figures(Shares.of(list(p.rates.values()), band)),
                "after": figures(Shares.of([p.rates[index] for index in p.kept], band)),
                "not_measured": len(p.source) - len(p.rates) - len(p.failed),
                "no_pass_rate": [{"prompt_id": f.prompt_id, "reason": f.reason} for f in p.failed],
                "copy": copies[p.source.name].path if p.source.name in copies else None,
            }
            for p in profiles
        },
    }


# Copies


def refuse_unwritable(source: PromptSource, folder: Path) -> None:
    """Whether `write_results` will be able to copy the source into `folder`.

    Raises DataError when the source is itself that copy, or naming the first row of a generator or a data set that does
    not fit into JSON.
    """
    if _suffix(source) is not None:
        if _file(source).resolve() == _target(source, folder).resolve():
            raise DataError(
                f"{source.key}.path={source.config.path}: is a copy that a profile in this folder writes; choose "
                "another profile.out"
            )
        return
    for index, row in enumerate(source.rows):
        try:
            _json_line(row)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{source.key}: {source.rows.place(index)}: can't be copied as a line of JSON ({error}); give this source as a "
                "Parquet file"
            ) from error


def write_copy(source: PromptSource, kept: Sequence[int], folder: Path) -> Path | None:
    """Write the rows `kept` (in order) of a source as `folder/data/<name>.jsonl` or `.parquet`; None, and no file, for none.

    Raises DataError when the source's file is not what it was when it was loaded.
    """
    suffix, path = _suffix(source), _target(source, folder)
    if not kept:
        path.unlink(missing_ok=True)  # of another band
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        if suffix == ".parquet":
            _write_parquet(source, kept, file)
        else:
            file.writelines(_file_lines(source, kept) if suffix else (_json_line(source.rows.fetch(i)) for i in kept))
    return path


def _suffix(source: PromptSource) -> str | None:
    """Of the file that holds the source; None where it is no single file."""
    path = None if source.config.path is None else Path(source.config.path).expanduser()
    return path.suffix if path is not None and path.is_file() else None


def _target(source: PromptSource, folder: Path) -> Path:
    suffix = ".parquet" if _suffix(source) == ".parquet" else ".jsonl"
    return folder / COPIES / f"{source.name}{suffix}"


def _file(source: PromptSource) -> Path:
    assert source.config.path is not None
    return Path(source.config.path).expanduser()


def _json_line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(row), ensure_ascii=False) + "\n").encode()


def _file_lines(source: PromptSource, kept: Sequence[int]) -> Iterator[bytes]:
    """The lines of a JSONL file that hold the rows `kept`: byte for byte, but for a missing newline at the end."""
    wanted = iter(kept)
    index = next(wanted, None)
    with _file(source).open("rb") as file:
        rows = (line for line in file if line.strip())
        for number, line in enumerate(rows):
            if number == index:
                if content_hash(json.loads(line.decode("utf-8-sig"))) != content_hash(source.rows.fetch(index)):
                    raise _changed(source, index)
                yield line if line.endswith(b"\n") else line + b"\n"
                index = next(wanted, None)
    if index is not None:
        raise _changed(source, index)


def _write_parquet(source: PromptSource, kept: Sequence[int], file: Any) -> None:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(_file(source), memory_map=True)
    for index in kept:
        rows = table.slice(index, 1).to_pylist()
        if not rows or content_hash(rows[0]) != content_hash(source.rows.fetch(index)):
            raise _changed(source, index)
    pyarrow.parquet.write_table(table.take(kept), file)


def _changed(source: PromptSource, index: int) -> DataError:
    return DataError(
        f"{source.key}: {source.rows.place(index)}: the file changed while its prompts were measured; start once more: what was "
        "measured of unchanged prompts is kept"
    )


# Picture


def histogram(profiles: Sequence[SourceProfile], band: Band, answers: int) -> str:
    """A self-contained HTML page: prompts by pass rate, a colour for each source, the band shaded."""
    import plotly.graph_objects as go

    figure = go.Figure()
    places = [k / answers for k in range(answers + 1)]
    for profile in profiles:
        bins = Counter(round(rate * answers) for rate in profile.rates.values())
        counts = [bins[k] for k in range(answers + 1)]
        figure.add_bar(x=places, y=counts, name=profile.source.name, width=0.9 / answers)
    figure.add_vrect(
        x0=band[0], x1=band[1], fillcolor="green", opacity=0.12, line_width=0, annotation_text="kept", layer="below"
    )
    figure.update_layout(
        title=f"Pass rates before training ({answers} answers a prompt)",
        xaxis={"title": "pass rate", "range": [-0.6 / answers, 1 + 0.6 / answers]},
        yaxis={"title": "prompts"},
        barmode="stack",
        showlegend=True,
        template="plotly_white",
    )
    return str(figure.to_html(include_plotlyjs=True))
