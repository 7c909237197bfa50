"""One real vLLM engine with an adapter: base model plus the LoRA adapter of the version that each span names. transformers
with peft is the judge; nothing of ours makes the adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from replicas import Replica, reference_logprobs

from orchestrator.adapted_layers import adapted_layers
from orchestrator.placement import actor_environment
from rollout_workers.engine import PARKED, AdapterNotServed, AdapterSettings, Answer, EngineSettings
from rollout_workers.trajectory import VersionSpan
from rollout_workers.weights.bucket import pack
from rollout_workers.weights.spool import Spool

pytestmark = pytest.mark.engine

TOLERANCE_NATS = 1e-4  # float32 against float32
RANK, ALPHA = 5, 20.0  # vLLM's own choice of ranks has 8
AT_ONCE = 16  # answers; further ones wait in the engine's queue
PROMPT = list(range(3, 103))  # three blocks of the prefix cache and a part
Run = Callable[[Any], Any]


def settings(tiny: str) -> EngineSettings:
    return EngineSettings(
        model_path=tiny,
        dtype="float32",
        device="cpu",
        max_model_tokens=1024,
        max_concurrent_answers=AT_ONCE,
        seed=0,
        kv_cache_mib=64,
        recompute_kv=True,
        adapter=AdapterSettings(RANK, ALPHA, adapted_layers(tiny, "all-linear")),
    )


def options() -> dict[str, Any]:
    return {"num_cpus": 0, "max_concurrency": 100, "runtime_env": {"env_vars": actor_environment(1, "cpu")}}


@pytest.fixture(scope="module")
def engine(tiny: str, run: Run) -> Iterator[Any]:
    import ray

    actor = ray.remote(Replica).options(**options()).remote(settings(tiny))
    run(actor.start.remote(0))
    yield actor
    run(actor.close.remote())
    ray.kill(actor)


def adapted(tiny: str, seed: int | None, targets: str = "all-linear") -> Any:
    """The base model with an adapter far from zero; with none for `seed` None."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32").eval()
    if seed is None:
        return base
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.07)
    return model.eval()


def publish(engine: Any, run: Run, model: Any, version: int) -> Mapping[str, int]:
    """Give the engine a model's adapter as `version`, in two buckets; the checksums that it received."""
    from peft import get_peft_model_state_dict

    named = list(get_peft_model_state_dict(model).items())
    spool = Spool()
    spool.add(pack(named[:7]))
    spool.add(pack(named[7:]))
    try:
        received = run(engine.load.remote(version, spool.update_infos())).received
    finally:
        spool.clear()
    assert received.keys() == dict(named).keys()
    return received


def sample(engine: Any, prompt: Sequence[int], count: int = 1, **arguments: Any) -> list[Any]:
    """References to answers that the engine writes at the same time."""
    defaults = {"name": "", "prompt_ids": prompt, "temperature": 1.0, "max_tokens": 32, "eos_ids": [], "seed": None}
    return [engine.write.remote(**defaults | arguments) for _ in range(count)]


def assert_written_by(models: Mapping[int, Any], prompt: Sequence[int], answer: Answer) -> list[int]:
    """Each span's logprobs are those of its version's model over the whole text (recompute_kv); the versions."""
    expected = {version: reference_logprobs(model, prompt, answer.token_ids) for version, model in models.items()}
    for span in answer.version_spans:
        for version, logprobs in expected.items():
            apart = np.abs(answer.logprobs - logprobs)[span.start : span.end]
            if version == span.version:
                assert apart.max() < TOLERANCE_NATS
            elif span.end - span.start > 3:
                assert apart.max() > 0.05, "the versions are too near to be told apart"
    return [span.version for span in answer.version_spans]


def test_before_the_first_update_the_engine_is_the_base_model(engine: Any, run: Run, tiny: str) -> None:
    for answer in map(run, sample(engine, PROMPT, 4)):
        assert assert_written_by({0: adapted(tiny, None)}, PROMPT, answer) == [0]


def test_whoever_is_in_flight_goes_on_under_the_new_adapter_at_the_token_that_its_span_names(
    engine: Any, run: Run, tiny: str
) -> None:
    """Over two updates; with answers that were asked for during one, some that are parked and continued, new ones, and a prompt
    that the prefix cache knows from the old version."""
    prompt = [9, *PROMPT]
    models = {version: adapted(tiny, version or None) for version in (0, 1, 2)}
    warm = [run(sample(engine, prompt, name=name)[0]) for name in ("cold", "warm")]
    in_flight = sample(engine, prompt, AT_ONCE - 6, max_tokens=80)
    parked = sample(engine, prompt, 4, name="moved", max_tokens=80)
    for version in (1, 2):
        run(sample(engine, prompt, max_tokens=20)[0])  # written in step with the others
        run(engine.stand_still.remote(True))  # however long the update takes to begin, they are in flight then
        during = sample(engine, prompt, version)
        publish(engine, run, models[version], version)
        if version == 1:
            run(sample(engine, prompt, max_tokens=10)[0])
            run(engine.park.remote(["moved"]))
    fresh = [run(sample(engine, prompt, name=name)[0]) for name in ("third", "fourth")]

    seen = [assert_written_by(models, prompt, answer) for answer in map(run, in_flight)]
    assert sum(versions == [0, 1, 2] for versions in seen) >= 2
    assert [assert_written_by(models, prompt, run(answer)) for answer in during] == [[2], [2]]
    for answer in [*warm, *fresh]:
        assert_written_by(models, prompt, answer)
    assert [a.version_spans for a in fresh] == [(VersionSpan(0, len(a.token_ids), 2),) for a in fresh]
    cached = run(engine.cached_tokens.remote(["cold", "warm", "third", "fourth"]))
    assert [cached[0] == 0, cached[1] > 0, cached[2] == 0, cached[3] > 0] == [True] * 4

    interrupted = [answer for answer in map(run, parked) if answer.finish_reason == PARKED]
    assert interrupted
    for answer in interrupted:
        assert 2 not in assert_written_by(models, prompt, answer)
        text = [*prompt, *answer.token_ids.tolist()]
        assert assert_written_by(models, text, run(sample(engine, text)[0])) == [2]


def test_probes_are_computed_with_the_adapter(engine: Any, run: Run, tiny: str) -> None:
    model = adapted(tiny, 3)
    publish(engine, run, model, 3)
    [found] = run(engine.logprobs.remote([PROMPT]))
    assert np.abs(found - reference_logprobs(model, PROMPT[:1], PROMPT[1:])).max() < TOLERANCE_NATS


def test_layers_that_the_next_adapter_leaves_out_are_the_base_models_again(engine: Any, run: Run, tiny: str) -> None:
    """Nothing of an adapter outlives it: not a part of a packed layer, not a whole one."""
    model = adapted(tiny, 4, targets=r".*(q_proj|up_proj)")
    publish(engine, run, model, 4)
    assert assert_written_by({4: model}, PROMPT, run(sample(engine, PROMPT)[0])) == [4]


def test_layers_that_vllm_can_not_adapt_are_refused_by_name(engine: Any, run: Run) -> None:
    import ray

    wanted = AdapterSettings(RANK, ALPHA, ("model.layers.0.self_attn.q_proj", "model.layers.9.mlp.odd_proj"))
    with pytest.raises(
        ray.exceptions.RayTaskError, match=r"can't serve an adapter on model.layers.9.mlp.odd_proj;"
    ) as raised:
        run(engine.begin_adapter.remote(wanted))
    assert isinstance(raised.value.cause, AdapterNotServed)
