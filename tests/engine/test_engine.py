"""One real vLLM engine: exact tokens, exact logprobs, numbered weights. Plain transformers is the judge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from orchestrator.cluster import engine_seed
from orchestrator.placement import actor_environment
from rollout_workers.engine import Answer, Engine, EngineSettings
from rollout_workers.trajectory import VersionSpan
from rollout_workers.weights.bucket import pack
from rollout_workers.weights.spool import Spool
from rollout_workers.worker import RolloutRequest, RolloutWorker, SamplingSettings

pytestmark = pytest.mark.engine

TOLERANCE_NATS = 1e-4  # float32 against float32
START = 7  # the version that the engine is started with
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
        max_concurrent_answers=32,
        seed=engine_seed(0, index),
        kv_cache_mib=64,
    )


@pytest.fixture(scope="module")
def run(runner: asyncio.Runner, ray_session: None) -> Run:
    """Wait for a reference or a coroutine."""

    async def wait(awaitable: Any) -> Any:
        return await asyncio.wait_for(awaitable, 120)

    return lambda awaitable: runner.run(wait(awaitable))


@pytest.fixture(scope="module")
def actors(tiny: str, run: Run) -> Iterator[tuple[Any, Any]]:
    """An engine, and a rollout worker with another; replicas 0 and 1 of a run."""
    import ray

    engine = ray.remote(Engine).options(**options(0)).remote(settings(tiny, 0))
    worker = ray.remote(RolloutWorker).options(**options(1)).remote(settings(tiny, 1), {})
    starting = [engine.start.remote(START), worker.start.remote(START)]
    for reference in starting:
        run(reference)
    yield engine, worker
    for actor in (engine, worker):
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


def changed(model: Any, seed: int) -> Any:
    """A copy of the model with every weight moved, far enough that nothing old could be taken for new."""
    import copy

    import torch

    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return copied


def publish(engine: Any, run: Run, model: Any, version: int) -> Mapping[str, int]:
    """Give the engine a model's weights as `version`; the checksums that it received."""
    spool = Spool()
    spool.add(pack(list(model.named_parameters())))
    try:
        return run(engine.update.remote(version, spool.update_infos())).received
    finally:
        spool.clear()


def reference_logprobs(
    model: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    temperature: float,
    *,
    old: Any = None,
    old_tokens: int = 0,
) -> np.ndarray:
    """Logprobs of the answer's tokens by one transformers forward; the first `old_tokens` inputs go through `old`."""
    import torch

    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        if old is None:
            logits = model(ids).logits
        else:
            first = old(ids[:, :old_tokens], use_cache=True)
            rest = model(ids[:, old_tokens:], past_key_values=first.past_key_values)
            logits = torch.cat([first.logits, rest.logits], dim=1)
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def sample(engine: Any, prompt: Sequence[int], count: int = 1, **arguments: Any) -> list[Any]:
    """References to answers that the engine writes at the same time."""
    defaults = {"temperature": 1.0, "max_tokens": 32, "eos_ids": [], "seed": None}
    return [engine.generate.remote(prompt, **defaults | arguments) for _ in range(count)]


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


def group(worker: Any, run: Run, name: str, members: int, attempt: int = 0, seed: int | None = None) -> tuple[Any, ...]:
    request = RolloutRequest(
        group_id=name,
        prompt_id="p0",
        epoch=0,
        messages=({"role": "user", "content": "Write a line about the sea."},),
        indexes=tuple(range(members)),
        sampling=SamplingSettings(1.0, 24, seed_base=seed),
        timeout_s=60.0,
        attempt=attempt,
    )
    report, trajectories = worker.generate.options(num_returns=2).remote(request)
    reports = run(report).members
    assert [m.error for m in reports] == [None] * members
    written = run(trajectories)
    for m, trajectory in zip(reports, written, strict=True):
        assert m.response_length == trajectory.response_length
        assert m.token_versions == ((START, trajectory.response_length),)
    return written


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


def test_after_a_failed_update_no_token_comes_from_half_loaded_weights(engine: Any, run: Run) -> None:
    """Last: the engine stays paused."""
    import ray

    with pytest.raises(ray.exceptions.RayTaskError, match="no/such/file"):
        run(engine.update.remote(START + 2, [{"path": "no/such/file", "slots": []}]))
    ready, _ = ray.wait(sample(engine, PROMPT, max_tokens=1), timeout=1.0)
    assert not ready
