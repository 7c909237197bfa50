"""The rollout actor with a scripted engine: budgets, seeds, failures that stay failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rollout_workers.worker
from rollout_workers.chat import ChatTemplate
from rollout_workers.engine import PARKED, Answer, EngineDied, EngineSettings, UpdateReport
from rollout_workers.trajectory import Trajectory, VersionSpan
from rollout_workers.weights.bucket import Bucket, pack
from rollout_workers.worker import RolloutRequest, RolloutWorker, SamplingSettings, member_seed

DATA = Path(__file__).parent.parent / "data" / "reported_bugs.jsonl"
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, DATA.read_text().splitlines())}

EOS = 2
REQUEST = RolloutRequest(
    group_id="g",
    prompt_id="p",
    epoch=0,
    messages=({"role": "user", "content": "2 + 2?"},),
    indexes=(0, 1, 2),
    sampling=SamplingSettings(temperature=0.7, max_response_tokens=50, seed_base=11),
    timeout_s=5.0,
)


def answer(ids: Sequence[int] = (5, 6, EOS), *, version: int = 0, finish_reason: str = "stop") -> Answer:
    logprobs = np.linspace(-1.0, -0.1, len(ids)).astype(np.float32)
    return Answer(np.array(ids, dtype=np.int32), logprobs, (VersionSpan(0, len(ids), version),), finish_reason)


class ScriptedEngine:
    """In the engine's place: `script` makes the answer of a call, or raises; `calls` are what was asked."""

    script: Callable[[int], Answer] = staticmethod(lambda call: answer())

    def __init__(self, settings: EngineSettings) -> None:
        self.calls: list[dict[str, Any]] = []
        self.version = 0
        self.update_error: Exception | None = None
        self.loaded: list[bytes] = []
        self.parked: list[list[str]] = []

    async def start(self, version: int) -> None:
        self.version = version

    async def generate(self, name: str, prompt_ids: Sequence[int], **options: Any) -> Answer:
        self.calls.append({"name": name, "prompt_ids": list(prompt_ids), **options})
        result = self.script(len(self.calls) - 1)
        if result.finish_reason == "never":
            await asyncio.sleep(60)
        return result

    async def park(self, names: Sequence[str]) -> int:
        self.parked.append(list(names))
        return 3

    async def update(self, version: int, update_infos: Sequence[dict[str, Any]]) -> UpdateReport:
        self.loaded = [contents(info["path"]) for info in update_infos]
        if self.update_error is not None:
            raise self.update_error
        self.version = version
        return UpdateReport(version, {}, 0.0)


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


class Words:
    """A tokenizer whose text does not lead back to its ids, as real ones' may not."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join("word" for token in ids if token != EOS)


class Template:
    """A chat template whose prompts have `length` tokens."""

    tokenizer, eos_ids = Words(), (EOS,)

    def __init__(self, length: int) -> None:
        self.length = length

    def prompt_ids(self, messages: Sequence[Any]) -> list[int]:
        return [9] * self.length


def make_worker(
    patch: pytest.MonkeyPatch,
    script: Callable[[int], Answer] | None = None,
    *,
    prompt_length: int = 4,
    context: int = 100,
    version: int = 0,
) -> tuple[RolloutWorker, ScriptedEngine]:
    engines: list[ScriptedEngine] = []

    class Engine(ScriptedEngine):
        def __init__(self, settings: EngineSettings) -> None:
            super().__init__(settings)
            engines.append(self)
            if script is not None:
                self.script = script

    patch.setattr(rollout_workers.worker, "Engine", Engine)
    patch.setattr(ChatTemplate, "from_pretrained", lambda path, kwargs: Template(prompt_length))
    worker = RolloutWorker(EngineSettings("unused", "float32", "cpu", context, 8, seed=0), {})
    asyncio.run(worker.start(version))
    return worker, engines[0]


@pytest.fixture
def worker_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RolloutWorker, ScriptedEngine]]:
    return lambda *arguments, **named: make_worker(monkeypatch, *arguments, **named)


Worker = Callable[..., tuple[RolloutWorker, ScriptedEngine]]


def test_tokens_of_an_answer_are_those_that_were_sampled(worker_of: Worker) -> None:
    spans = (VersionSpan(0, 2, 3), VersionSpan(2, 3, 4))
    worker, _ = worker_of(lambda call: replace(answer(), version_spans=spans))
    report, trajectories = asyncio.run(worker.generate(replace(REQUEST, indexes=(6,))))
    (trajectory,) = trajectories
    assert trajectory.token_ids.tolist() == [9, 9, 9, 9, 5, 6, EOS]
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.response_mask.tolist() == [False] * 4 + [True] * 3
    np.testing.assert_allclose(trajectory.behaviour_logprobs, [0, 0, 0, 0, -1.0, -0.55, -0.1], rtol=1e-6)
    assert trajectory.behaviour_logprobs.dtype == np.float32
    assert trajectory.token_versions.tolist() == [-1] * 4 + [3, 3, 4]
    assert (trajectory.group_id, trajectory.index, trajectory.prompt_id) == ("g", 6, "p")
    assert trajectory.completion == "word word"
    assert trajectory.prompt_messages == REQUEST.messages
    (member,) = report.members
    assert (member.index, member.error) == (6, None)
    assert member.token_versions == ((3, 2), (4, 1))
    assert (member.prompt_length, member.response_length, member.truncated) == (4, 3, False)
    assert report.started_at <= report.finished_at


def test_the_engine_is_asked_for_exactly_the_sampling_that_was_configured(worker_of: Worker) -> None:
    worker, engine = worker_of()
    asyncio.run(worker.generate(REQUEST))
    assert len(engine.calls) == 3
    for index, call in enumerate(engine.calls):
        assert call == {
            "name": "g",
            "prompt_ids": [9] * 4,
            "temperature": 0.7,
            "max_tokens": 50,
            "eos_ids": (EOS,),
            "seed": member_seed(11, "p", 0, index, 0, 0),
            "priority": 0,
        }


def test_without_a_seed_base_the_engine_draws_its_own_seeds(worker_of: Worker) -> None:
    worker, engine = worker_of()
    asyncio.run(worker.generate(replace(REQUEST, sampling=replace(REQUEST.sampling, seed_base=None))))
    assert [call["seed"] for call in engine.calls] == [None] * 3


def test_a_member_that_fails_is_a_report_and_the_others_are_answers(worker_of: Worker) -> None:
    def script(call: int) -> Answer:
        if call == 1:
            raise RuntimeError("the engine ended a request without any output")
        return answer((5 + call, EOS))

    worker, _ = worker_of(script)
    report, trajectories = asyncio.run(worker.generate(REQUEST))
    assert [m.index for m in report.members] == [0, 1, 2]
    assert report.members[1].error == "RuntimeError: the engine ended a request without any output"
    assert report.members[1].token_versions == ()
    assert report.members[1].response_length == 0
    assert [t.index for t in trajectories] == [0, 2]
    assert [int(t.token_ids[4]) for t in trajectories] == [5, 7]


def test_a_dead_engine_fails_the_whole_request(worker_of: Worker) -> None:
    def script(call: int) -> Answer:
        if call == 2:
            raise EngineDied("the vLLM engine process died")
        return answer()

    worker, _ = worker_of(script)
    with pytest.raises(EngineDied):
        asyncio.run(worker.generate(REQUEST))


def test_an_answer_that_takes_too_long_is_a_report_that_says_so(worker_of: Worker) -> None:
    worker, _ = worker_of(lambda call: answer(finish_reason="never" if call == 0 else "stop"))
    report, trajectories = asyncio.run(worker.generate(replace(REQUEST, indexes=(0, 1), timeout_s=0.05)))
    assert [m.error for m in report.members] == ["TimeoutError: no answer within 0.05 s", None]
    assert len(trajectories) == 1


def test_an_answer_that_ran_out_of_room_is_truncated(worker_of: Worker) -> None:
    worker, _ = worker_of(lambda call: answer((5, 6), finish_reason="length"))
    report, trajectories = asyncio.run(worker.generate(REQUEST))
    assert [m.truncated for m in report.members] == [True] * 3
    assert all(t.truncated for t in trajectories)


def test_an_answer_without_any_token_is_a_member_that_failed(worker_of: Worker) -> None:
    """Not one of length 0, which could be judged and be neither trained on nor asked for again."""
    nothing = replace(answer(()), version_spans=())
    worker, _ = worker_of(lambda call: nothing if call == 1 else answer())
    report, trajectories = asyncio.run(worker.generate(REQUEST))
    assert [m.error is None for m in report.members] == [True, False, True]
    assert "finished an answer without a token" in str(report.members[1].error)
    assert [t.index for t in trajectories] == [0, 2]


def test_e09_a_logprob_too_many_fails_that_member_by_name(worker_of: Worker) -> None:
    case = CASES["e09"]["input"]

    def script(call: int) -> Answer:
        good = answer(range(10, 10 + case["token_ids_len"]))
        return replace(good, logprobs=np.zeros(case["logprobs_len"], dtype=np.float32)) if call == 1 else good

    worker, _ = worker_of(script)
    report, trajectories = asyncio.run(worker.generate(REQUEST))
    assert [m.error is None for m in report.members] == [True, False, True]
    assert report.members[1].error == (
        "ValueError: trajectory g/1 (prompt p): 14 token ids, 14 mask entries and 15 logprobs must be equally many"
    )
    assert len(trajectories) == 2


def test_e12_a_second_attempt_keeps_nothing_of_the_first(worker_of: Worker) -> None:
    case = CASES["e12"]["input"]
    lengths = [case["attempt1"]["ids"], case["attempt2"]["ids"]]
    worker, engine = worker_of(lambda call: answer(range(lengths[call])))
    asyncio.run(worker.generate(replace(REQUEST, indexes=(0,))))
    _, (second,) = asyncio.run(worker.generate(replace(REQUEST, indexes=(0,), attempt=1)))
    expected = CASES["e12"]["expected"]
    assert second.response_length == expected["mask"]
    assert len(second.token_ids) - 4 == expected["ids"]
    assert len(second.behaviour_logprobs) - 4 == expected["logprobs"]
    assert engine.calls[0]["seed"] != engine.calls[1]["seed"]


E13 = CASES["e13"]["input"]


def test_e13_an_answer_gets_what_the_context_leaves(worker_of: Worker) -> None:
    worker, engine = worker_of(prompt_length=E13["input_tokens"], context=E13["context"])
    sampling = replace(REQUEST.sampling, max_response_tokens=E13["max_response"])
    asyncio.run(worker.generate(replace(REQUEST, indexes=(0,), sampling=sampling)))
    (call,) = engine.calls
    assert call["max_tokens"] == min(E13["max_response"], E13["context"] - E13["input_tokens"]) == 21758


@given(st.integers(1, E13["input_tokens"] - 1))
@example(1)
@example(24576 - 21758)
@example(E13["input_tokens"] - 1)
def test_e13_a_continued_answer_gets_what_is_left_of_the_budget(written: int) -> None:
    """Of 19202 tokens in the context `written` are the answer's own, and count against its budget of 24576."""
    prompt_length = E13["input_tokens"] - written
    with pytest.MonkeyPatch.context() as patch:
        worker, engine = make_worker(patch, prompt_length=prompt_length, context=E13["context"])
        partial = parked(prompt_length, written)
        sampling = replace(REQUEST.sampling, max_response_tokens=E13["max_response"])
        asyncio.run(worker.generate(replace(REQUEST, indexes=(0,), sampling=sampling), [partial]))
    (call,) = engine.calls
    assert len(call["prompt_ids"]) == E13["input_tokens"]
    assert call["max_tokens"] == min(E13["max_response"] - written, 21758)


def test_e16_a_reply_ended_by_a_stop_string_is_not_truncated(worker_of: Worker) -> None:
    case = CASES["e16"]
    worker, _ = worker_of(lambda call: answer((5, 6, 7), finish_reason=case["input"]["finish_reason"]))
    report, trajectories = asyncio.run(worker.generate(REQUEST))
    assert {m.truncated for m in report.members} == {case["expected"]["truncated"]}
    assert all(t.response_length == 3 for t in trajectories)


def test_e17_a_prompt_longer_than_the_context_never_reaches_the_engine(worker_of: Worker) -> None:
    case = CASES["e17"]["input"]
    worker, engine = worker_of(prompt_length=case["prompt_len"], context=case["max_model_len"])
    report, trajectories = asyncio.run(worker.generate(REQUEST))
    assert engine.calls == []
    assert trajectories == ()
    assert {m.error for m in report.members} == {"ValueError: the prompt's 3353 tokens leave no room to answer in 2560"}


def test_a_prompt_that_fills_the_context_but_for_one_token_gets_one(worker_of: Worker) -> None:
    worker, engine = worker_of(lambda call: answer((5,), finish_reason="length"), prompt_length=99, context=100)
    report, _ = asyncio.run(worker.generate(REQUEST))
    assert [call["max_tokens"] for call in engine.calls] == [1] * 3
    assert all(m.error is None for m in report.members)


# Parking


def parked(prompt_length: int = 4, written: int = 4, index: int = 0, version: int = 3, **fields: Any) -> Trajectory:
    """A partial answer of group g."""
    total = prompt_length + written
    mask = np.arange(total) >= prompt_length
    spans = (VersionSpan(prompt_length, total, version),) if written else ()
    defaults = {
        "group_id": "g",
        "index": index,
        "prompt_id": "p",
        "messages": (*REQUEST.messages, {"role": "assistant", "content": "some"}),
        "token_ids": np.where(mask, 100 + np.arange(total), 9).astype(np.int32),
        "response_mask": mask,
        "behaviour_logprobs": np.where(mask, -2.0, 0.0).astype(np.float32),
        "version_spans": spans,
        "finish_reason": PARKED,
        "metadata": {"prompt_length_messages": 1},
    }
    return Trajectory(**(defaults | fields))


def generated(worker: RolloutWorker, request: RolloutRequest, *partials: Any) -> tuple[Any, tuple[Trajectory, ...]]:
    return asyncio.run(worker.generate(request, *partials))


def test_an_interrupted_answer_is_parked_with_what_it_has(worker_of: Worker) -> None:
    answers = [answer((5, 6), finish_reason=PARKED), answer((), finish_reason=PARKED), answer()]
    worker, _ = worker_of(lambda call: replace(answers[call], version_spans=answers[call].version_spans[: call != 1]))
    report, trajectories = generated(worker, REQUEST)
    assert [(m.parked, m.truncated, m.error, m.response_length, m.prompt_length) for m in report.members] == [
        (True, False, None, 2, 4),
        (True, False, None, 0, 4),
        (False, False, None, 3, 4),
    ]
    assert [m.token_versions for m in report.members] == [((0, 2),), (), ((0, 3),)]
    assert [m.in_payload for m in report.members] == [True, False, True]
    assert [(t.index, t.finish_reason, t.token_ids[4:].tolist()) for t in trajectories] == [
        (0, PARKED, [5, 6]),
        (2, "stop", [5, 6, EOS]),
    ]


def test_park_interrupts_the_groups_by_name(worker_of: Worker) -> None:
    worker, engine = worker_of()
    assert asyncio.run(worker.park(["g", "h"])) == 3
    assert engine.parked == [["g", "h"]]


def test_e11_a_continued_answer_is_the_old_tokens_and_the_new_ones(worker_of: Worker) -> None:
    case = CASES["e11"]["input"]
    old, new = case["old_tokens"], case["new_tokens"]
    worker, engine = worker_of(lambda call: answer((5, 6, EOS)[:new], version=4))
    report, (whole,) = generated(worker, replace(REQUEST, indexes=(0,)), [parked(written=old)])
    (call,) = engine.calls
    assert call["prompt_ids"] == [9, 9, 9, 9, 104, 105, 106, 107]  # the very ids: `Words` could not encode them again
    assert call["max_tokens"] == 50 - old
    assert call["seed"] == member_seed(11, "p", 0, 0, 0, old) != member_seed(11, "p", 0, 0, 0, 0)
    assert whole.token_ids.tolist() == [*call["prompt_ids"], 5, 6, EOS]
    np.testing.assert_allclose(whole.behaviour_logprobs, [0] * 4 + [-2] * old + [-1.0, -0.55, -0.1], rtol=1e-6)
    assert whole.version_spans == (VersionSpan(4, 4 + old, 3), VersionSpan(4 + old, 4 + old + new, 4))
    # All of it is the policy's; whoever leaves out the tokens of other versions keeps exactly the new ones.
    response = whole.response_mask[4:]
    assert response.tolist() == [True] * (old + new)
    assert (response & (whole.token_versions[4:] == 4)).tolist() == [
        bool(m) for m in CASES["e11"]["expected"]["loss_mask"]
    ]
    assert whole.completion == " ".join(["word"] * (old + new - 1))
    assert (whole.finish_reason, whole.prompt_messages) == ("stop", REQUEST.messages)
    (member,) = report.members
    assert (member.token_versions, member.response_length, member.prompt_length) == (((3, old), (4, new)), old + new, 4)
    assert (member.parked, member.truncated) == (False, False)


def test_an_answer_continued_under_its_own_version_has_one_span(worker_of: Worker) -> None:
    spans = (VersionSpan(0, 1, 3), VersionSpan(1, 3, 4))
    worker, _ = worker_of(lambda call: replace(answer(), version_spans=spans))
    _, (whole,) = generated(worker, replace(REQUEST, indexes=(0,)), [parked()])
    assert whole.version_spans == (VersionSpan(4, 9, 3), VersionSpan(9, 11, 4))


def test_an_answer_can_be_parked_again_and_again(worker_of: Worker) -> None:
    worker, engine = worker_of(lambda call: answer((50 + call,), version=call, finish_reason=PARKED))
    request, partials = replace(REQUEST, indexes=(0,)), ()
    for _ in range(3):
        report, partials = generated(worker, request, partials)
        assert report.members[0].parked
    assert [call["prompt_ids"] for call in engine.calls] == [[9] * 4, [9, 9, 9, 9, 50], [9, 9, 9, 9, 50, 51]]
    assert [call["max_tokens"] for call in engine.calls] == [50, 49, 48]
    assert len({call["seed"] for call in engine.calls}) == 3
    (last,) = partials
    assert last.token_ids.tolist() == [9, 9, 9, 9, 50, 51, 52]
    assert last.version_spans == (VersionSpan(4, 5, 0), VersionSpan(5, 6, 1), VersionSpan(6, 7, 2))


def test_members_are_continued_begun_or_left_as_they_are(worker_of: Worker) -> None:
    """One request for a whole group: one is parked, one has finished, one has nothing, one is not asked for."""
    worker, engine = worker_of()
    earlier = (parked(index=0, written=2), parked(index=1, finish_reason="stop"), parked(index=3))
    report, trajectories = generated(worker, replace(REQUEST, indexes=(2, 1, 0)), earlier)
    assert [len(call["prompt_ids"]) for call in engine.calls] == [4, 6]
    assert [m.index for m in report.members] == [t.index for t in trajectories] == [2, 1, 0]
    assert trajectories[1] is earlier[1]
    assert report.members[1].token_versions == ((3, 4),)
    assert [m.response_length for m in report.members] == [3, 4, 5]


def test_of_a_member_with_several_partials_the_later_counts(worker_of: Worker) -> None:
    worker, engine = worker_of()
    generated(worker, replace(REQUEST, indexes=(0,)), [parked(written=2)], [parked(written=6)], [parked(index=1)])
    assert [len(call["prompt_ids"]) for call in engine.calls] == [10]


@pytest.mark.parametrize(("budget", "context"), [(4, 100), (3, 100), (50, 8)])
def test_a_partial_without_room_to_go_on_is_truncated_and_not_asked_again(
    worker_of: Worker, budget: int, context: int
) -> None:
    worker, engine = worker_of(context=context)
    sampling = replace(REQUEST.sampling, max_response_tokens=budget)
    report, (whole,) = generated(worker, replace(REQUEST, indexes=(0,), sampling=sampling), [parked()])
    assert engine.calls == []
    assert (whole.finish_reason, whole.response_length) == ("length", 4)
    assert (report.members[0].truncated, report.members[0].parked) == (True, False)


def test_a_continued_member_that_fails_is_a_report_like_any_other(worker_of: Worker) -> None:
    worker, _ = worker_of(lambda call: answer(finish_reason="never"))
    report, trajectories = generated(worker, replace(REQUEST, indexes=(0,), timeout_s=0.05), [parked()])
    assert trajectories == ()
    (member,) = report.members
    assert (member.error, member.response_length) == ("TimeoutError: no answer within 0.05 s", 0)
    assert not member.parked
    assert not member.in_payload


def test_another_groups_answers_are_refused(worker_of: Worker) -> None:
    worker, engine = worker_of()
    with pytest.raises(ValueError, match="group g can't be continued from answers of other"):
        generated(worker, REQUEST, [parked(group_id="other")])
    assert engine.calls == []


# Seeds

Names = st.tuples(
    st.integers(0, 2**32),
    st.text(max_size=8),
    st.integers(0, 50),
    st.integers(0, 500),
    st.integers(0, 9),
    st.integers(0, 40_000),
)


@given(Names, Names)
def test_two_answers_of_a_run_never_share_a_seed(one: Any, other: Any) -> None:
    assert 0 <= member_seed(*one) < 2**63
    assert (member_seed(*one) == member_seed(*other)) == (one == other)


def test_seeds_are_the_same_in_every_process() -> None:
    assert member_seed(0, "arithmetic/3", 1, 2, 0, 17) == 121490867623946250


# Weights


def bucket_of(*values: float) -> Bucket:
    import torch

    return pack([("w", torch.tensor(values))])


def test_an_update_loads_what_was_spooled_and_empties_the_spool(worker_of: Worker) -> None:
    worker, engine = worker_of(version=4)
    assert engine.version == 4
    first, second = bucket_of(1.0, 2.0), bucket_of(3.0)
    asyncio.run(worker.add_bucket(first))
    asyncio.run(worker.add_bucket(second))
    report = asyncio.run(worker.update(5))
    assert report.version == 5
    assert engine.loaded == [first.data.tobytes(), second.data.tobytes()]
    assert engine.version == 5
    asyncio.run(worker.update(6))
    assert engine.loaded == []


def test_a_failed_update_empties_the_spool_as_well(worker_of: Worker) -> None:
    worker, engine = worker_of()
    engine.update_error = RuntimeError("no")
    asyncio.run(worker.add_bucket(bucket_of(1.0)))
    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(worker.update(1))
    assert engine.version == 0
    engine.update_error = None
    asyncio.run(worker.update(1))
    assert engine.loaded == []
