"""One judge through the real client library, against a server that misbehaves: retries, costs, slots, refusals."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from judge_server import ChatServer, Http, Request, chat_body, error, serving

from reward_workers.judge_client import (
    BudgetSpentError,
    Judge,
    JudgeCallError,
    JudgeUnusableError,
    Reply,
    TooLongError,
    Usage,
)

pytestmark = pytest.mark.thorough

HELLO = [{"role": "user", "content": "hello"}]
SECOND = {"tries": 3, "backoff_s": 0.01, "timeout_s": 5.0}


def judge_at(server: ChatServer, **options: Any) -> Judge:
    return Judge("openai/local", api_base=server.base, **{**SECOND, **options})


def ask(judge: Judge, usage: Usage | None = None) -> Reply:
    return asyncio.run(judge.ask(HELLO, usage or Usage()))


def failing(times: int, how: Http) -> Any:
    def rule(request: Request) -> str | Http:
        return how if request.number < times else "fine"

    return rule


class TestRetries:
    @pytest.mark.parametrize(
        "how",
        [
            error(429),
            error(500),
            error(503),
            Http(body=b'{"choices": [{"ind'),
            Http(body=b"<html>busy</html>"),
            Http(body=json.dumps({"id": "x", "object": "chat.completion", "model": "m", "choices": []}).encode()),
            Http(body=chat_body("x" * 1000), cut=True),
        ],
        ids=["429", "500", "503", "broken json", "html", "no choices", "cut connection"],
    )
    def test_a_passing_fault_is_tried_again(self, how: Http) -> None:
        usage = Usage()
        with serving(failing(2, how)) as server:
            assert ask(judge_at(server), usage) == Reply("fine")
        assert (len(server.requests), usage.calls, usage.retries) == (3, 3, 2)

    def test_no_more_often_than_it_may_be(self) -> None:
        with serving(failing(99, error(429, "slow down"))) as server:
            with pytest.raises(JudgeCallError, match=r"did not answer in 3 tries: .*slow down"):
                ask(judge_at(server))
            assert len(server.requests) == 3

    def test_an_answer_that_does_not_come(self) -> None:
        late = threading.Event()
        with serving(failing(1, Http(body=chat_body("late"), after=late))) as server:
            assert ask(judge_at(server, timeout_s=0.3)).text == "fine"
            late.set()
        assert len(server.requests) == 2

    def test_nobody_there(self) -> None:
        with serving(lambda _: "") as server:
            judge = judge_at(server)
        with pytest.raises(JudgeCallError, match="3 tries"):
            ask(judge)

    def test_waits_as_long_as_the_server_asks(self) -> None:
        with serving(failing(1, error(429, **{"retry-after": "0.3"}))) as server:
            began = time.monotonic()
            ask(judge_at(server))
            assert time.monotonic() - began >= 0.3

    @pytest.mark.parametrize(
        ("how", "kind"),
        [
            (error(401), JudgeUnusableError),
            (error(403), JudgeUnusableError),
            (error(404, "no such model"), JudgeUnusableError),
            (error(400, "what is this"), JudgeCallError),
            (error(400, "This model's maximum context length is 100 tokens"), TooLongError),
        ],
    )
    def test_what_no_try_can_mend_is_not_tried_again(self, how: Http, kind: type[Exception]) -> None:
        with serving(failing(99, how)) as server:
            with pytest.raises(kind):
                ask(judge_at(server))
            assert len(server.requests) == 1

    def test_a_reply_without_text_or_cut_short(self) -> None:
        with serving(lambda request: Http(body=chat_body("half", "length"))) as server:
            assert ask(judge_at(server)) == Reply("half", cut=True)
        body = chat_body("").replace(b'"content": ""', b'"content": null')
        with serving(lambda request: Http(body=body)) as server:
            assert ask(judge_at(server)) == Reply("")


class TestCosts:
    def test_are_counted_by_the_prices_given_and_kept(self, tmp_path: Path) -> None:
        usage = Usage()
        with serving(lambda _: "fine") as server:
            ask(judge_at(server, prices=[2.0, 10.0], cache_dir=tmp_path), usage)
            ask(judge_at(server, prices=[2.0, 10.0], cache_dir=tmp_path), usage)
            assert judge_at(server, cache_dir=tmp_path).store.spent_usd == pytest.approx(0.006)
        assert usage.cost_usd == pytest.approx(2 * (1000 * 2 + 100 * 10) / 1e6)
        assert (usage.prompt_tokens, usage.completion_tokens, usage.unpriced_calls) == (2000, 200, 0)

    def test_of_a_known_model_are_from_the_table(self) -> None:
        usage = Usage()
        with serving(lambda _: "fine") as server:
            asyncio.run(Judge("openai/gpt-4o", api_base=server.base).ask(HELLO, usage))
        assert 0 < usage.cost_usd < 0.1

    def test_of_an_unknown_model_are_said_to_be_unknown(self) -> None:
        usage = Usage()
        with serving(lambda _: "fine") as server:
            ask(judge_at(server), usage)
        assert (usage.cost_usd, usage.unpriced_calls) == (0.0, 1)

    def test_a_budget_ends_all_calls(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"prices": [2.0, 10.0], "cache_dir": tmp_path, "budget_usd": 0.005}
        with serving(lambda _: "fine") as server:
            ask(judge_at(server, **options))
            ask(judge_at(server, **options))
            with pytest.raises(BudgetSpentError, match=r"0\.0060 of budget_usd=0\.005"):
                ask(judge_at(server, **options))  # another process or run would be told the same
            assert len(server.requests) == 2

    def test_are_added_up_by_several_processes(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from reward_workers.judge_store import JudgeStore\n"
            "store = JudgeStore(Path(sys.argv[1]), 1)\n"
            "for _ in range(100): store.spend(1e-9)"
        )
        processes = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
        assert [process.wait(60) for process in processes] == [0, 0, 0]
        with serving(lambda _: "") as server:
            assert judge_at(server, cache_dir=tmp_path).store.spent_usd == 300e-9


class TestSlots:
    def test_bound_the_calls_of_all_judges_that_share_a_folder(self, tmp_path: Path) -> None:
        async def many(judges: Sequence[Judge]) -> None:
            await asyncio.gather(*(judges[i % 2].ask(HELLO, Usage()) for i in range(12)))

        def rule(request: Request) -> Http:
            return Http(body=chat_body("fine"), after=full if request.number < 3 else None)

        full = threading.Event()
        with serving(rule) as server:
            judges = [judge_at(server, cache_dir=tmp_path, max_concurrency=3) for _ in range(2)]
            threading.Timer(0.5, full.set).start()
            asyncio.run(many(judges))
        assert (len(server.requests), server.busiest) == (12, 3)

    def test_of_a_killed_process_are_free_again(self, tmp_path: Path) -> None:
        script = (
            "import asyncio, sys; from pathlib import Path; from reward_workers.judge_store import JudgeStore\n"
            "async def hold():\n"
            "    async with JudgeStore(Path(sys.argv[1]), 1).slot():\n"
            "        print('held', flush=True); await asyncio.sleep(100)\n"
            "asyncio.run(hold())"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with serving(lambda _: "fine") as server:
                judge = judge_at(server, cache_dir=tmp_path, max_concurrency=1)

                async def waits() -> Reply:
                    task = asyncio.create_task(judge.ask(HELLO, Usage()))
                    await asyncio.wait([task], timeout=0.3)
                    assert not task.done()
                    holder.kill()
                    return await asyncio.wait_for(task, 10)

                assert asyncio.run(waits()) == Reply("fine")


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "options", "problem"),
        [
            ("nonsense", {}, "knows no such model or provider"),
            ("nobody/model", {}, "knows no such model or provider"),
            ("openai/o3", {}, "no credentials for openai; set OPENAI_API_KEY"),
            ("anthropic/claude-3-5-sonnet-20241022", {}, "set ANTHROPIC_API_KEY"),
            ("openai/local", {"api_base": "http://127.0.0.1:9/v1", "budget_usd": 1.0}, "budget_usd=1.0.*prices"),
            ("openai/local", {"api_base": "http://127.0.0.1:9/v1", "tries": 0}, "tries=0"),
            ("openai/local", {"api_base": "http://127.0.0.1:9/v1", "prices": [1.0]}, "prices"),
            (
                "openai/local",
                {"api_base": "http://127.0.0.1:9/v1", "cache_dir": "/dev/null/here"},
                "cache_dir.*can't be",
            ),
        ],
    )
    def test_before_any_call(
        self, model: str, options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(JudgeUnusableError, match=problem):
            Judge(model, **options)

    @pytest.mark.parametrize(
        ("how", "problem"),
        [(error(401, "bad key"), "bad key"), (error(404, "no model"), "no model"), (error(500), "tries")],
    )
    def test_by_asking_the_model(self, how: Http, problem: str) -> None:
        with serving(failing(99, how)) as server, pytest.raises(JudgeUnusableError, match=problem):
            judge_at(server).check()

    def test_none_for_a_model_that_answers(self) -> None:
        async def inside_a_loop() -> None:
            judge_at(server).check()

        with serving(lambda _: "ready") as server:
            judge_at(server).check()
            asyncio.run(inside_a_loop())


def test_a_key_and_parameters_reach_the_server_and_a_schema_only_where_known() -> None:
    async def both() -> None:
        for model in ("openai/gpt-4o", "openai/local"):
            judge = Judge(model, api_base=server.base, litellm_params={"api_key": "secret", "temperature": 0.25})
            await judge.ask(HELLO, Usage(), {"type": "object"})

    with serving(lambda _: "fine") as server:
        asyncio.run(both())
    assert server.keys == ["Bearer secret"] * 2
    assert [request.body["temperature"] for request in server.requests] == [0.25, 0.25]
    assert ["response_format" in request.body for request in server.requests] == [True, False]


def test_a_judge_of_ones_own_needs_no_server() -> None:
    async def own(messages: Sequence[Any]) -> str:
        return messages[0]["content"] + "!"

    assert ask(Judge(own)) == Reply("hello!")
    assert re.search("own$", Judge(own).name)


def test_a_judge_of_ones_own_has_a_limit_too() -> None:
    async def forever(messages: Sequence[Any]) -> str:
        await asyncio.Event().wait()
        return ""

    usage = Usage()
    with pytest.raises(JudgeCallError, match=r"2 tries: TimeoutError: no reply within 0\.05 s"):
        ask(Judge(forever, timeout_s=0.05, tries=2, backoff_s=0.0), usage)
    assert usage.calls == 2
