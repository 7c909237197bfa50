"""The judge by rule, asked as a run asks it, on the rows of its task."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.rag_task import notes
from reward_workers.judge import Judge, ruler
from reward_workers.rag import grounded


@pytest.fixture(scope="module")
def rule() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "scripts" / "rule_judge.py"
    spec = importlib.util.spec_from_file_location("rule_judge", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def judge(rule: ModuleType) -> Iterator[Judge]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), rule.Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield Judge("hosted_vllm/rule", api_base=f"http://127.0.0.1:{server.server_port}/v1")
    server.shutdown()
    server.server_close()


def test_finds_the_answer_in_the_notes_of_every_row(rule: ModuleType) -> None:
    for row in [*notes(size=300), *notes(split="eval", size=100, seed=1)]:
        answer, numbers = rule.expected(row["prompt"][0]["content"])
        assert (answer, numbers) == (row["answer"], set(row["numbers"]))


def test_orders_answers_as_the_checker_does_without_its_gold(judge: Judge) -> None:
    judge.check()
    for row in notes(size=12):
        wrong = next(number for number in row["numbers"] if number != row["answer"])
        texts = ["Not in the notes.", f"It is {wrong}.", "61", "Yes.", f"{row['answer'] or 'I think'}, {wrong} or 60"]
        texts += (
            [f"It is {row['answer']}."] if row["answer"] else ["The notes do not say that, I am very sorry to say."]
        )
        lists = [[*row["prompt"], {"role": "assistant", "content": text}] for text in texts]
        scores = [score.score or 0.0 for score in asyncio.run(ruler(lists, judge))]
        right = [grounded(text, row["answer"]) for text in texts]
        assert min(s for s, r in zip(scores, right, strict=True) if r) > max(
            s for s, r in zip(scores, right, strict=True) if not r
        )
