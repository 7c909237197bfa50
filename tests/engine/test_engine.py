"""One real vLLM engine: exact tokens, exact logprobs, numbered weights. Plain transformers is the judge."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from replicas import Replica, changed, reference_logprobs

from orchestrator.cluster import engine_seed
from orchestrator.placement import actor_environment
from rollout_workers.engine import CPU_BLOCK_TOKENS, PARKED, Answer, EngineDied, EngineSettings
from rollout_workers.trajectory import Trajectory, VersionSpan
from rollout_workers.weights.bucket import pack
from rollout_workers.weights.spool import Spool
from rollout_workers.worker import MemberReport, RolloutRequest, SamplingSettings

pytestmark = pytest.mark.engine

TOLERANCE_NATS = 1e-4  # float32 against float32
START = 7  # the version that the engine is started with
AT_ONCE = 32  # answers; further ones wait in the engine's queue
PROMPT = list(range(3, 103))  # three blocks of the prefix cache and a part
Run = Callable[[Any], Any]


def options(index: int) -> dict[str, Any]:
    return {"num_cpus": 0, "max_concurrency": 100, "runtime_env": {"env_vars": actor_environment(1, "cpu")}}


def settings(tiny: str, index: int) -> EngineSettings:
    return EngineSettings(
        model_path=tiny,
        dtype="float32",
        device="cpu",
        max_model_tokens=1024,
        max_concurrent_answers=AT_ONCE,
        seed=engine_seed(0, index),
        kv_cache_mib=64,
        recompute_kv=index == 1,
    )


@pytest.fixture(scope="module")
def actors(tiny: str, run: Run) -> Iterator[tuple[Any, Any]]:
    """Replicas 0 and 1 of a run. At an update, the first keeps the keys and values of requests in flight."""
    import ray

    started = [ray.remote(Replica).options(**options(i)).remote(settings(tiny, i)) for i in range(2)]
    for reference in [actor.start.remote(START) for actor in started]:
        run(reference)
    yield started[0], started[1]
    for actor in started:
        run(actor.close.remote())
        ray.kill(actor)


@pytest.fixture(scope="module")
def engine(actors: tuple[Any, Any]) -> Any:
    return actors[0]


@pytest.fixture(scope="module")
def worker(actors: tuple[Any, Any]) -> Any:
    return actors[1]


@pytest.fixture(scope="module")
def model(tiny: str) -> Any:
    """The policy in plain transformers, at the engine's start."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype="float32").eval()


def publish(engine: Any, run: Run, model: Any, version: int) -> Mapping[str, int]:
    """Give the engine a model's weights as `version`; the checksums that it received."""
    spool = Spool()
    spool.add(pack(list(model.named_parameters())))
    try:
        return run(engine.load.remote(version, spool.update_infos())).received
    finally:
        spool.clear()


def sample(engine: Any, prompt: Sequence[int], count: int = 1, **arguments: Any) -> list[Any]:
    """References to answers that the engine writes at the same time."""
    defaults = {"name": "", "prompt_ids": prompt, "temperature": 1.0, "max_tokens": 32, "eos_ids": [], "seed": None}
    return [engine.write.remote(**defaults | arguments) for _ in range(count)]


def gap(answer: Answer, reference: np.ndarray) -> float:
    return float(np.abs(answer.logprobs - reference).max())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_the_models_at_the_sampling_temperature(
    engine: Any, run: Run, model: Any, temperature: float
) -> None:
    for reference in sample(engine, PROMPT, 8, temperature=temperature):
        answer = run(reference)
        assert len(answer.token_ids) == len(answer.logprobs) > 0
        assert gap(answer, reference_logprobs(model, PROMPT, answer.token_ids, temperature)) < TOLERANCE_NATS


def test_before_the_first_update_the_version_is_the_started_one(engine: Any, run: Run) -> None:
    """Case f15: what an engine writes is labelled with the weights it has, not with those it was promised."""
    [reference] = sample(engine, PROMPT)
    answer = run(reference)
    assert answer.version_spans == (VersionSpan(0, len(answer.token_ids), START),)


def test_a_prompt_seen_before_is_answered_exactly(engine: Any, run: Run, model: Any) -> None:
    """Within a version the prefix cache may serve the prompt's keys and values: nothing changes by it."""
    prompt = [5, *PROMPT]
    for _ in range(2):
        [reference] = sample(engine, prompt)
        answer = run(reference)
        assert gap(answer, reference_logprobs(model, prompt, answer.token_ids, 1.0)) < TOLERANCE_NATS


def test_a_seeded_request_repeats_and_another_seed_differs(engine: Any, run: Run) -> None:
    first, second, other = (run(sample(engine, PROMPT, seed=seed)[0]) for seed in (11, 11, 12))
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist()


def test_engines_of_one_run_write_different_answers(engine: Any, worker: Any, run: Run) -> None:
    """Case f12: engines that share a seed give identical samples for the same prompt."""
    trajectories = group(worker, run, "f12", members=4)
    prompt = trajectories[0].token_ids[~trajectories[0].response_mask].tolist()
    theirs = {tuple(t.token_ids[t.response_mask].tolist()) for t in trajectories}
    ours = {tuple(run(reference).token_ids.tolist()) for reference in sample(engine, prompt, 4, max_tokens=24)}
    assert len(theirs) == len(ours) == 4
    assert not theirs & ours
    assert len({engine_seed(7, replica) for replica in range(4)}) == 4


def request(name: str, indexes: Sequence[int], max_response_tokens: int, **fields: Any) -> RolloutRequest:
    seed = fields.pop("seed", None)
    return RolloutRequest(
        group_id=name,
        prompt_id="p0",
        epoch=0,
        messages=({"role": "user", "content": "Write a line about the sea."},),
        indexes=tuple(indexes),
        sampling=SamplingSettings(1.0, max_response_tokens, seed_base=seed),
        timeout_s=60.0,
        **fields,
    )


def ask(worker: Any, request: RolloutRequest, *partials: Any) -> tuple[Any, Any]:
    """References to the report and to the trajectories."""
    report, payload = worker.generate.options(num_returns=2).remote(request, *partials)
    return report, payload


def outcome(run: Run, report: Any, payload: Any) -> tuple[dict[int, MemberReport], dict[int, Trajectory]]:
    """By member; every report fits its trajectory."""
    members = {m.index: m for m in run(report).members}
    written = {t.index: t for t in run(payload)}
    assert [m.error for m in members.values()] == [None] * len(members)
    assert list(written) == [index for index, m in members.items() if m.in_payload]
    for index, trajectory in written.items():
        m, versions = members[index], trajectory.token_versions[trajectory.response_mask]
        assert m.response_length == trajectory.response_length
        assert m.parked == (trajectory.finish_reason == PARKED)
        assert dict(m.token_versions) == {int(v): int((versions == v).sum()) for v in set(versions.tolist())}
    return members, written


def group(worker: Any, run: Run, name: str, members: int, attempt: int = 0, seed: int | None = None) -> tuple[Any, ...]:
    """Answers of up to 24 tokens under the first version."""
    _, written = outcome(run, *ask(worker, request(name, range(members), 24, attempt=attempt, seed=seed)))
    assert len(written) == members
    for trajectory in written.values():
        assert {span.version for span in trajectory.version_spans} == {START}
    return tuple(written.values())


@pytest.mark.parametrize("seed", [None, 3])
def test_a_groups_trajectories_are_exact_and_differ(
    worker: Any, run: Run, model: Any, tiny: str, seed: int | None
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    trajectories = group(worker, run, f"g-{seed}", members=6, seed=seed)
    assert len({tuple(t.token_ids.tolist()) for t in trajectories}) == 6
    for trajectory in trajectories:
        total, prompt = len(trajectory.token_ids), int((~trajectory.response_mask).sum())
        assert len(trajectory.response_mask) == len(trajectory.behaviour_logprobs) == total
        assert not trajectory.response_mask[:prompt].any()
        assert trajectory.response_mask[prompt:].all()
        assert trajectory.version_spans == (VersionSpan(prompt, total, START),)
        assert not trajectory.behaviour_logprobs[:prompt].any()
        ids = trajectory.token_ids.tolist()
        assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == trajectory.completion
        expected = reference_logprobs(model, ids[:prompt], ids[prompt:], 1.0)
        assert np.abs(trajectory.behaviour_logprobs[prompt:] - expected).max() < TOLERANCE_NATS


def test_a_seeded_group_repeats_until_it_is_sampled_again(worker: Any, run: Run) -> None:
    first, again, resampled = (
        [t.token_ids.tolist() for t in group(worker, run, "seeded", 3, attempt, seed=5)] for attempt in (0, 0, 1)
    )
    assert first == again
    assert all(a != b for a, b in zip(first, resampled, strict=True))


def test_requests_in_flight_survive_an_update_and_name_the_token_where_it_took_over(
    engine: Any, run: Run, model: Any
) -> None:
    """And a prompt of the old version, asked again, never meets its keys and values (case f18)."""
    new = changed(model, seed=1)
    prompt = [9, *PROMPT]
    warm = run(sample(engine, prompt)[0])
    assert gap(warm, reference_logprobs(model, prompt, warm.token_ids, 1.0)) < TOLERANCE_NATS

    in_flight = sample(engine, prompt, 6, max_tokens=800)
    run(sample(engine, prompt, max_tokens=20)[0])  # written in step with the others: they have about 20 tokens now
    run(engine.stand_still.remote(True))
    received = publish(engine, run, new, START + 1)
    assert received.keys() == {name for name, _ in new.named_parameters()}
    again = run(sample(engine, prompt)[0])

    crossed = 0
    for reference in in_flight:
        answer = run(reference)
        length = len(answer.token_ids)
        if len(answer.version_spans) == 1:
            continue  # a random model may end an answer at any token
        old_span, new_span = answer.version_spans
        crossed += 1
        assert (old_span.start, old_span.version) == (0, START)
        assert (new_span.start, new_span.end, new_span.version) == (old_span.end, length, START + 1)
        # The token before the first new one is the first input of the new weights; what came earlier keeps its KV.
        old_inputs = len(prompt) + old_span.end - 1
        expected = reference_logprobs(new, prompt, answer.token_ids, 1.0, old=model, old_tokens=old_inputs)
        assert gap(answer, expected) < TOLERANCE_NATS
        moved = reference_logprobs(new, prompt, answer.token_ids, 1.0, old=model, old_tokens=old_inputs + 1)
        assert gap(answer, moved) > 10 * TOLERANCE_NATS  # one token off would show
    assert crossed >= 2

    assert again.version_spans == (VersionSpan(0, len(again.token_ids), START + 1),)
    assert gap(again, reference_logprobs(new, prompt, again.token_ids, 1.0)) < TOLERANCE_NATS
    assert gap(again, reference_logprobs(model, prompt, again.token_ids, 1.0)) > 0.1
    publish(engine, run, model, START)


def in_step(engine: Any, run: Run, tokens: int) -> None:
    """Until what was asked before has about so many tokens: one more answer, written in step with it."""
    run(sample(engine, PROMPT, max_tokens=tokens)[0])


def assert_idle(engine: Any, run: Run) -> None:
    """The engine process holds no request; what is left of an aborted one is a step that clears it away."""
    assert any(not run(engine.busy.remote()) for _ in range(50))


def test_a_parked_group_goes_on_at_another_engine_under_newer_weights(
    engine: Any, worker: Any, run: Run, model: Any, tiny: str
) -> None:
    """Case e11: old tokens and new ones are all the policy's; the spans say which version wrote them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    asked = request("moved", range(8), 60)
    report, payload = ask(engine, asked)
    in_step(engine, run, 20)
    run(engine.stand_still.remote(True))
    count = run(engine.park.remote(["moved"]))
    run(engine.stand_still.remote(False))
    members, parked = outcome(run, report, payload)
    assert count == sum(m.parked for m in members.values()) >= 2
    assert run(engine.park.remote(["moved"])) == 0
    assert_idle(engine, run)

    new = changed(model, seed=2)
    publish(worker, run, new, START + 1)
    report, resumed = ask(worker, asked, payload)
    members, whole = outcome(run, report, resumed)
    assert list(whole) == list(range(8))
    for index, trajectory in whole.items():
        before, length = parked[index], len(parked[index].token_ids)
        if before.finish_reason != PARKED:
            assert trajectory.token_ids.tolist() == before.token_ids.tolist()
            assert trajectory.finish_reason == before.finish_reason
            continue
        assert trajectory.token_ids[:length].tolist() == before.token_ids.tolist()
        assert trajectory.behaviour_logprobs[:length].tolist() == before.behaviour_logprobs.tolist()
        ids, total = trajectory.token_ids.tolist(), len(trajectory.token_ids)
        prompt = total - trajectory.response_length
        assert trajectory.version_spans == (VersionSpan(prompt, length, START), VersionSpan(length, total, START + 1))
        assert trajectory.response_mask.tolist() == [False] * prompt + [True] * (total - prompt)
        assert trajectory.finish_reason == "stop" or total - prompt == 60
        assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == trajectory.completion
        old_part = reference_logprobs(model, ids[:prompt], ids[prompt:length])
        new_part = reference_logprobs(new, ids[:length], ids[length:])  # nothing of the old weights' keys and values
        expected = np.concatenate([np.zeros(prompt), old_part, new_part])
        assert np.abs(trajectory.behaviour_logprobs - expected).max() < TOLERANCE_NATS
    publish(worker, run, model, START)


def test_parking_under_load_meets_answers_that_wait_in_the_engines_queue(engine: Any, run: Run, model: Any) -> None:
    others = sample(engine, PROMPT, 2, max_tokens=60)
    companion = sample(engine, PROMPT, max_tokens=10)[0]
    report, payload = ask(engine, request("crowd", range(AT_ONCE + 8), 300))
    run(companion)
    run(engine.stand_still.remote(True))
    count = run(engine.park.remote(["crowd", "nobody"]))
    run(engine.stand_still.remote(False))
    members, parked = outcome(run, report, payload)
    waiting = [index for index, m in members.items() if m.response_length == 0]
    assert len(waiting) >= 8
    assert all(members[index].parked for index in waiting)
    assert count == sum(m.parked for m in members.values()) >= 8
    assert not set(waiting) & set(parked)
    for answer in map(run, others):  # others' answers are none of it
        assert gap(answer, reference_logprobs(model, PROMPT, answer.token_ids)) < TOLERANCE_NATS
    assert_idle(engine, run)

    unfinished = [index for index, m in members.items() if m.parked]
    members, whole = outcome(run, *ask(engine, request("crowd", unfinished, 30), payload))
    assert list(whole) == unfinished
    for index, trajectory in whole.items():
        assert trajectory.response_length <= 30
        assert not members[index].parked
        assert len(trajectory.version_spans) == 1  # it went on under the version that it began under
        ids, prompt = trajectory.token_ids.tolist(), len(trajectory.token_ids) - trajectory.response_length
        expected = reference_logprobs(model, ids[:prompt], ids[prompt:])
        assert np.abs(trajectory.behaviour_logprobs[prompt:] - expected).max() < TOLERANCE_NATS


def test_a_probe_does_not_wait_behind_answers_and_old_groups_come_before_young_ones(engine: Any, run: Run) -> None:
    """The engine writes 32 answers at a time, and the loop stands still while it waits for a probe."""
    import ray

    young = sample(engine, PROMPT, 40, name="young", max_tokens=200, priority=9)
    waiting = sample(engine, PROMPT, 40, name="waiting", max_tokens=200, priority=9)
    in_step(engine, run, 3)
    old = sample(engine, PROMPT, 4, name="old", max_tokens=8, priority=8)
    assert len(run(engine.logprobs.remote([PROMPT]))[0]) == len(PROMPT) - 1
    for reference in old:
        run(reference)
    unfinished = [r for r in (*young, *waiting) if not ray.wait([r], timeout=0)[0]]
    assert len(unfinished) >= 80 - 2 * 32  # of the first come at most those that had a place
    run(engine.park.remote(["young", "waiting"]))
    assert_idle(engine, run)


def test_an_answer_that_the_engine_gave_up_is_an_error_not_a_short_answer(engine: Any, run: Run) -> None:
    report, payload = ask(engine, request("given-up", range(2), 800))
    in_step(engine, run, 10)
    run(engine.give_up.remote("given-up"))
    errors = {m.error for m in run(report).members if m.error is not None}
    assert errors == {"RuntimeError: the engine gave a request up: abort"}
    assert len(run(payload)) == sum(m.error is None for m in run(report).members)


def test_a_group_parked_before_its_first_token_leaves_nothing(engine: Any, run: Run) -> None:
    import ray

    run(engine.stand_still.remote(True))
    asked = request("early", range(4), 20)
    report, payload = ask(engine, asked)
    count = 0
    while not ray.wait([report], timeout=0.05)[0]:
        count += run(engine.park.remote(["early"]))
    members, parked = outcome(run, report, payload)
    assert (count, parked) == (4, {})
    assert all(m.parked and not m.in_payload and m.token_versions == () for m in members.values())
    run(engine.stand_still.remote(False))
    assert_idle(engine, run)
    members, whole = outcome(run, *ask(engine, asked, payload))
    assert list(whole) == [0, 1, 2, 3]
    assert not any(m.parked for m in members.values())


def test_parking_during_an_update_leaves_nothing_behind(engine: Any, run: Run, model: Any) -> None:
    """And parking twice at once: each answer is interrupted once."""
    asked = [ask(engine, request(name, range(4), 300)) for name in ("one", "two")]
    in_step(engine, run, 5)
    run(engine.stand_still.remote(True))  # however long the next lines take, the answers are in flight then
    spool = Spool()
    spool.add(pack(list(model.named_parameters())))
    updating = engine.load.remote(START, spool.update_infos())
    parking = [engine.park.remote(["one", "two"]), engine.park.remote(["two"])]
    count = sum(map(run, parking))
    assert run(updating).version == START
    spool.clear()
    members = [m for report, payload in asked for m in outcome(run, report, payload)[0].values()]
    assert count == sum(m.parked for m in members) >= 2
    assert_idle(engine, run)


def test_a_prompt_that_comes_again_meets_only_its_own_versions_keys_and_values(
    engine: Any, run: Run, model: Any
) -> None:
    """Case f18: before, during and after an update."""
    new, prompt = changed(model, seed=3), [11, *PROMPT]
    blocks = len(prompt) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS

    def again(name: str) -> Any:
        return sample(engine, prompt, name=name)[0]

    before = [run(again(name)) for name in ("first", "second")]
    run(engine.stand_still.remote(True))
    during = again("during")  # asked before the new version is acknowledged, written after it is there
    publish(engine, run, new, START + 1)
    after = [run(again(name)) for name in ("third", "fourth")]
    during = run(during)

    names = ["first", "second", "during", "third", "fourth"]
    cached = dict(zip(names, run(engine.cached_tokens.remote(names)), strict=True))
    assert [cached[name] for name in ("first", "second")] == [0, blocks]
    assert [cached[name] for name in ("third", "fourth")] == [0, blocks]
    for answer in before:
        assert gap(answer, reference_logprobs(model, prompt, answer.token_ids)) < TOLERANCE_NATS
    for answer in after:
        assert answer.version_spans == (VersionSpan(0, len(answer.token_ids), START + 1),)
        assert gap(answer, reference_logprobs(new, prompt, answer.token_ids)) < TOLERANCE_NATS
    assert during.version_spans == (VersionSpan(0, len(during.token_ids), START + 1),)
    expected = reference_logprobs(new, prompt, during.token_ids, old=model, old_tokens=cached["during"])
    assert gap(during, expected) < TOLERANCE_NATS
    publish(engine, run, model, START)


def test_with_recompute_kv_what_follows_an_update_is_the_new_models_over_the_whole_text(
    worker: Any, run: Run, model: Any
) -> None:
    new, prompt = changed(model, seed=4), [13, *PROMPT]
    companion = sample(worker, prompt, max_tokens=20)[0]
    in_flight = sample(worker, prompt, AT_ONCE + 4, max_tokens=80)  # some wait in the engine's queue
    run(companion)
    run(worker.stand_still.remote(True))  # however long the update takes to begin, they are in flight then
    publish(worker, run, new, START + 1)
    crossed = 0
    for answer in map(run, in_flight):
        split = sum(span.end - span.start for span in answer.version_spans if span.version == START)
        assert [span.version for span in answer.version_spans] in ([START], [START, START + 1], [START + 1])
        crossed += 0 < split < len(answer.token_ids)
        old_part = reference_logprobs(model, prompt, answer.token_ids)[:split]
        new_part = reference_logprobs(new, prompt, answer.token_ids)[split:]
        assert gap(answer, np.concatenate([old_part, new_part])) < TOLERANCE_NATS
    assert crossed >= 2
    publish(worker, run, model, START)


def test_after_a_failed_update_no_token_comes_from_half_loaded_weights(engine: Any, run: Run) -> None:
    """Last: the engine stays paused."""
    import ray

    with pytest.raises(ray.exceptions.RayTaskError, match="no/such/file"):
        run(engine.load.remote(START + 2, [{"path": "no/such/file", "slots": []}]))
    ready, _ = ray.wait(sample(engine, PROMPT, max_tokens=1), timeout=1.0)
    assert not ready


def test_a_dead_engine_can_not_park(worker: Any, run: Run) -> None:
    """Last of this engine. It dies while it is being parked: its answers are there, and whoever parks hears of it."""
    import ray

    report, payload = ask(worker, request("doomed", range(4), 800))
    in_step(worker, run, 5)
    run(worker.signal_engine.remote(signal.SIGSTOP))
    parking = worker.park.remote(["doomed"])
    members, written = outcome(run, report, payload)
    assert any(m.parked and m.response_length > 1 for m in members.values())
    assert len(written) == 4
    run(worker.signal_engine.remote(signal.SIGKILL))
    for calling in (parking, worker.load.remote(START + 1, [])):
        with pytest.raises(ray.exceptions.RayTaskError) as raised:
            run(calling)
        assert isinstance(raised.value.cause, EngineDied)
