"""Where actors go: shares of cores and GPUs, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config import Config, ConfigError, RolloutConfig
from orchestrator.placement import Placement, plan


def lay_out(
    nodes: list[dict[str, float]],
    mode: str = "split",
    device: str = "auto",
    reward_gpus: Sequence[float] = (),
    references: int = 0,
    **sizes: int,
) -> Placement:
    """`sizes`: replicas, tensor_parallel_size, rollout_threads, ranks, learner_threads."""
    config = Config()
    config.placement.mode, config.placement.device = mode, device
    config.rollout.replicas = sizes.get("replicas", 1)
    config.rollout.tensor_parallel_size = sizes.get("tensor_parallel_size", 1)
    config.rollout.threads = sizes.get("rollout_threads")
    config.learner.ranks = sizes.get("ranks", 1)
    config.learner.threads = sizes.get("learner_threads")
    config.algorithm.kl_coefficient = 0.1 if references else 0.0
    config.learner.reference, config.learner.reference_ranks = ("own", references) if references else ("ranks", 1)
    return plan(config, nodes, reward_gpus)


def cpu(*counts: float) -> list[dict[str, float]]:
    return [{"CPU": count} for count in counts]


def gpu(*counts: float) -> list[dict[str, float]]:
    return [{"CPU": 32.0, "GPU": count} for count in counts]


class TestCpu:
    def test_split_shares_out_the_cores(self) -> None:
        placement = lay_out(cpu(8), replicas=2, ranks=2)
        assert (placement.device, placement.rollout_threads, placement.learner_threads) == ("cpu", 2, 2)
        assert placement.bundles == [{"CPU": 2.0}] * 4

    def test_shared_gives_each_side_all_cores_in_turn(self) -> None:
        placement = lay_out(cpu(2), "shared", replicas=1, ranks=2)
        assert (placement.rollout_threads, placement.learner_threads) == (2, 1)
        assert placement.bundles == [{"CPU": 1.0}, {"CPU": 0.5}, {"CPU": 0.5}]
        assert not placement.engines_sleep  # threads just idle

    def test_configured_threads_are_kept(self) -> None:
        placement = lay_out(cpu(8), rollout_threads=6, learner_threads=2)
        assert (placement.rollout_threads, placement.learner_threads) == (6, 2)
        assert lay_out(cpu(8), rollout_threads=7).learner_threads == 1

    def test_more_than_there_is(self) -> None:
        with pytest.raises(ConfigError) as caught:
            lay_out(cpu(2), replicas=2, ranks=3)
        message = str(caught.value)
        for part in ("asks for 5 CPU cores", "rollout.replicas=2", "learner.ranks=3", "the cluster has 2"):
            assert part in message
        with pytest.raises(ConfigError, match="asks for 3 CPU cores"):
            lay_out(cpu(2), "shared", rollout_threads=3)

    def test_an_actor_is_never_cut_over_nodes(self) -> None:
        """Four cores each would be the even share, but only one node has them."""
        placement = lay_out(cpu(4, 2, 2))
        assert (placement.rollout_threads, placement.learner_threads) == (2, 2)
        with pytest.raises(ConfigError, match=r"the cluster has 4 \(2 \+ 2\)"):
            lay_out(cpu(2, 2), rollout_threads=3, learner_threads=1)

    def test_nccl_needs_gpus(self) -> None:
        config = Config(rollout=RolloutConfig())
        config.rollout.weights.transport = "nccl"
        with pytest.raises(ConfigError, match=r"rollout\.weights\.transport=nccl needs GPUs"):
            plan(config, cpu(8))

    @given(
        nodes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        mode=st.sampled_from(["split", "shared"]),
        replicas=st.integers(1, 4),
        ranks=st.integers(1, 4),
    )
    @settings(max_examples=200, deadline=None)
    def test_what_is_planned_fits(self, nodes: list[int], mode: str, replicas: int, ranks: int) -> None:
        try:
            placement = lay_out(cpu(*nodes), mode, replicas=replicas, ranks=ranks)
        except ConfigError:
            needed = max(replicas, ranks) if mode == "shared" else replicas + ranks
            assert sum(nodes) < needed  # one core each always fits where there are as many
            return
        assert len(placement.bundles) == replicas + ranks
        assert sum(bundle["CPU"] for bundle in placement.bundles) <= sum(nodes)
        assert max(placement.rollout_threads, placement.learner_threads) <= max(nodes)


class TestGpu:
    def test_found_by_themselves(self) -> None:
        placement = lay_out(gpu(8), replicas=2, tensor_parallel_size=2, ranks=4)
        assert placement.device == "gpu"
        assert placement.bundles == [{"GPU": 2.0, "CPU": 1.0}] * 2 + [{"GPU": 1.0, "CPU": 1.0}] * 4

    def test_shared_engines_sleep_while_the_learner_works(self) -> None:
        placement = lay_out(gpu(2), "shared", replicas=2, ranks=2)
        assert placement.engines_sleep
        assert sum(bundle["GPU"] for bundle in placement.bundles) == 2
        assert not lay_out(gpu(4), "split", replicas=2, ranks=2).engines_sleep

    def test_a_cpu_run_on_a_gpu_machine(self) -> None:
        assert lay_out(gpu(8), device="cpu").bundles == [{"CPU": 16.0}] * 2

    def test_more_than_there_is(self) -> None:
        with pytest.raises(ConfigError) as caught:
            lay_out(gpu(4), replicas=2, tensor_parallel_size=2, ranks=1)
        message = str(caught.value)
        for part in ("asks for 5 GPUs", "rollout.replicas=2", "rollout.tensor_parallel_size=2", "the cluster has 4"):
            assert part in message
        with pytest.raises(ConfigError, match="the largest has 0"):
            lay_out(cpu(8), device="gpu")

    def test_an_engine_is_never_cut_over_nodes(self) -> None:
        with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel_size=4 .* on one node, the largest has 2"):
            lay_out(gpu(2, 2), tensor_parallel_size=4, ranks=1)
        with pytest.raises(ConfigError, match="room for 2 engines"):
            lay_out(gpu(3, 3), replicas=3, tensor_parallel_size=2, ranks=1)


class TestReferenceActors:
    """learner.reference=own."""

    def test_have_gpus_of_their_own(self) -> None:
        placement = lay_out(gpu(6), ranks=2, references=2, reward_gpus=[1.0])
        assert placement.bundles[1:] == [{"GPU": 1.0, "CPU": 1.0}] * 5
        shared = lay_out(gpu(3), "shared", replicas=2, ranks=2, references=1)
        assert shared.bundles[-1] == {"GPU": 1.0, "CPU": 1.0}
        assert sum(bundle["GPU"] for bundle in shared.bundles) == 3

    def test_count_in_what_the_run_asks_for(self) -> None:
        with pytest.raises(
            ConfigError, match=r"asks for 5 GPUs .*learner\.ranks=2, learner\.reference_ranks=2, placement"
        ):
            lay_out(gpu(4), ranks=2, references=2)
        with pytest.raises(ConfigError, match=r"asks for 3 CPU cores .*learner\.reference_ranks=1 with as many"):
            lay_out(cpu(2), references=1)
        with pytest.raises(ConfigError, match="asks for 2 CPU cores"):
            lay_out(cpu(1), "shared", references=1)

    def test_have_as_many_cores_as_a_rank_and_take_no_turns(self) -> None:
        split = lay_out(cpu(8), ranks=2, references=1)
        assert split.bundles == [{"CPU": 2.0}] * 4
        shared = lay_out(cpu(2), "shared", references=1)
        assert shared.bundles == [{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 1.0}]

    @pytest.mark.parametrize("mode", ["split", "shared"])
    def test_are_never_cut_over_nodes(self, mode: str) -> None:
        placement = lay_out(cpu(4, 4), mode, ranks=2, references=2)
        assert max(placement.learner_threads, placement.rollout_threads) <= 4
        assert sum(bundle["CPU"] for bundle in placement.bundles) <= 8

    def test_there_are_none_without_a_kl_term_or_with_an_adapter(self) -> None:
        config = Config()
        config.learner.reference = "own"
        assert plan(config, cpu(8)).references == 0
        config.algorithm.kl_coefficient = 0.1
        assert plan(config, cpu(8)).references == 1
        config.model.lora.rank = 8
        assert plan(config, cpu(8)).references == 0

    def test_one_that_is_offloaded_needs_a_gpu(self) -> None:
        config = Config()
        config.learner.reference, config.algorithm.kl_coefficient = "offload", 0.1
        with pytest.raises(ConfigError, match=r"learner\.reference=offload .* leave it at ranks"):
            plan(config, cpu(8))
        assert plan(config, gpu(2)).references == 0


class TestRewardModels:
    def test_have_gpus_of_their_own_behind_the_others(self) -> None:
        placement = lay_out(gpu(8), replicas=2, tensor_parallel_size=2, ranks=2, reward_gpus=[1.0, 0.5, 0.5])
        assert placement.bundles[4:] == [{"GPU": gpus, "CPU": 1.0} for gpus in (1.0, 0.5, 0.5)]
        assert sum(bundle["GPU"] for bundle in placement.bundles) == 8
        shared = lay_out(gpu(3), "shared", replicas=2, ranks=2, reward_gpus=[1.0])
        assert sum(bundle["GPU"] for bundle in shared.bundles) == 3

    def test_count_in_what_the_run_asks_for(self) -> None:
        for reward_gpus, devices in (([1.0], 1), ([0.5] * 3, 2), ([0.6, 0.4, 0.6], 2), ([2.0, 0.25], 3)):
            lay_out(gpu(2 + devices), reward_gpus=reward_gpus)
            with pytest.raises(ConfigError) as caught:
                lay_out(gpu(1 + devices), reward_gpus=reward_gpus)
            message = str(caught.value)
            assert f"the run asks for {2 + devices} GPUs" in message
            assert f"reward.models: {devices} for {len(reward_gpus)} replicas" in message

    def test_are_never_cut_over_nodes(self) -> None:
        lay_out(gpu(2, 2), reward_gpus=[2.0])
        with pytest.raises(ConfigError, match=r"reward\.models: 2 for 1 replicas"):
            lay_out(gpu(1, 1, 1, 1), reward_gpus=[2.0])

    def test_reserve_nothing_on_cpus(self) -> None:
        placement = lay_out(cpu(2), reward_gpus=[1.0, 1.0])
        assert placement.reward_gpus == ()
        assert placement.bundles == [{"CPU": 1.0}] * 2
