"""One setting to simulate: which GPUs do what, and how stale answers may be; everything else is the configuration's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config import Config, ConfigError
from orchestrator.derived import queue_settings
from orchestrator.simulation.hardware import Layout, Machines
from orchestrator.simulation.types import SimulationSettings


@dataclass(frozen=True)
class Scenario:
    layout: Layout
    staleness: int  # staleness.max

    @classmethod
    def of(cls, config: Config) -> Scenario:
        """What the keys say. Raises ConfigError as `Layout.of` does."""
        return cls(Layout.of(config), config.staleness.max)

    def synchronous(self) -> Scenario:
        """The same GPUs, each doing the same, without running ahead."""
        return replace(self, staleness=0)

    def taking_turns(self) -> Scenario:
        """The same GPUs, all of them generating and then all of them learning, without running ahead."""
        return Scenario(self.layout.taking_turns(), staleness=0)

    def settings(self, config: Config, machines: Machines, *, steps: int, seed: int) -> SimulationSettings:
        """Ready to simulate. Raises ConfigError where the machines can't do it, or the keys contradict each other."""
        try:
            queue = queue_settings(config)
            return SimulationSettings(
                # A workload's answers failed after all retries, so the queue asks for none again.
                queue=replace(queue, max_staleness=self.staleness, member_retries=0),
                timing=machines.timing(self.layout),
                workload=machines.workload(queue.answers_per_group),
                engines=self.layout.engines,
                steps=steps,
                seed=seed,
            )
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def gpus(self) -> str:
        """As a table names them."""
        layout = self.layout
        return f"{layout.total_gpus} in turns" if layout.shared else f"{layout.rollout_gpus} + {layout.learner_gpus}"
