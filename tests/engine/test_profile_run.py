"""`headway profile-difficulty` on a real engine, and the way on to training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from orchestrator import cli
from orchestrator.compose import load
from orchestrator.prepare import prepare
from orchestrator.prompts import require_batch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ANSWERS = 4
REWARD = """
def odd(completion):
    return float(len(completion) % 2)
"""


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_a_profile_copies_what_lies_in_the_band(tmp_path: Path, small: list[str], ray_session: None) -> None:
    lines = [json.dumps({"prompt": f"Line {i}, please.", "note": i}) + "\n" for i in range(24)]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    table = pyarrow.table({"prompt": [f"Another {i}." for i in range(8)], "id": range(8)})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    (tmp_path / "own.py").write_text(REWARD)
    out = tmp_path / "out"
    ours = [
        *(override for override in small if not override.startswith("data.train")),
        "reward=custom",
        f'reward.functions.odd.path="{tmp_path}/own.py:odd"',
    ]
    profile = [
        "profile-difficulty",
        *ours,
        f"data.train.lines.path={tmp_path}/lines.jsonl",
        f"data.train.table.path={tmp_path}/table.parquet",
        f"profile.answers_per_prompt={ANSWERS}",
        f"profile.out={out}",
    ]
    assert cli.main(profile) == 0

    measured = [json.loads(line) for line in (out / "pass_rates.jsonl").read_text().splitlines()]
    assert len({line["prompt_id"] for line in measured}) == 32
    rates = {line["prompt_id"]: line["rate"] for line in measured}
    assert all(line["rate"] == sum(line["values"]) / ANSWERS for line in measured)
    assert len(set(rates.values())) > 2  # answers of a group differ

    summary = json.loads((out / "summary.json").read_text())
    prepared = prepare(load([*ours, summary["train_on"]]))
    require_batch(prepared.train, prepared.config.sampling.groups_per_batch)
    kept = {prompt_id for prompt_id, rate in rates.items() if 0.2 <= rate <= 0.8}
    assert {prompt_id for source in prepared.train for prompt_id in source.ids} == kept
    copied = (out / "data" / "lines.jsonl").read_text().splitlines(keepends=True)
    assert set(copied) < set(lines)
    assert copied == [line for line in lines if line in copied]
    assert pyarrow.parquet.read_table(out / "data" / "table.parquet").schema == table.schema

    # A second start has nothing left to measure: another band takes a moment.
    before = (out / "pass_rates.jsonl").read_bytes()
    assert cli.main([*profile, "profile.band=[0,0.5]"]) == 0
    assert (out / "pass_rates.jsonl").read_bytes() == before
    again = prepare(load([*ours, json.loads((out / "summary.json").read_text())["train_on"]]))
    assert {i for source in again.train for i in source.ids} == {i for i, rate in rates.items() if rate <= 0.5}
