"""`headway replay` from its overrides to a `Replay`.

The configuration is the one that the run wrote down. Other keys than `replay.*` may be given too, for a model or data that
have moved, or to see what another objective would have made of the same batch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from orchestrator.checkpoint import Checkpoint, CheckpointStore
from orchestrator.compose import changed, flat, given, refuse_unknown
from orchestrator.config import Config, ConfigError
from orchestrator.prepare import prepare
from orchestrator.replay import Replay, Scored, plan_of, replay_batch, score
from orchestrator.replay_journal import RecordedBatch, read_batch, recorded_versions

logger = logging.getLogger(__name__)


def configuration(overrides: Sequence[str]) -> Config:
    """The run's configuration with the overrides. Raises ConfigError naming the key."""
    from orchestrator.simulation.recording import run_config

    overrides = flat(overrides)
    refuse_unknown(overrides)
    run = given(overrides, "replay.run")
    if run is None:
        raise ConfigError("replay.run: which run is to be replayed? Give replay.run=runs/NAME")
    folder = Path(run).expanduser()
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"replay.run={run}: is not the folder of a run, there is no config.yaml in it")
    return changed(run_config(folder), overrides)


async def carry_out(config: Config, folder: Path) -> Replay:
    """Replay what `config.replay` names of the run in `folder`. Raises ConfigError when that does not have it."""
    version = config.replay.version
    if version is None:
        version = max(recorded_versions(folder), default=0)
    recorded = read_batch(folder, version)
    if not recorded.learner_logprobs:
        raise ConfigError(
            f"replay.version={version}: no answer of that batch entered the loss, there is nothing to replay"
        )
    if not config.replay.forward:
        return replay_batch(folder, config, recorded, plan_of(config, recorded))
    return await _with_forward_pass(folder, config, recorded, _weights_at(folder, version))


def _weights_at(folder: Path, version: int) -> Checkpoint | None:
    """The checkpoint of that version; None for version 0, which is the initial model."""
    store = CheckpointStore(folder / "checkpoints", 1)
    checkpoint = store.at(version)
    if checkpoint is None and version > 0:
        kept = ", ".join(map(str, store.versions())) or "none"
        raise ConfigError(
            f"replay.forward=true: the weights of version {version} are not kept. There are checkpoints of versions: {kept}; "
            "and version 0 is the initial model"
        )
    return checkpoint


async def _with_forward_pass(
    folder: Path, config: Config, recorded: RecordedBatch, checkpoint: Checkpoint | None
) -> Replay:
    from orchestrator.cluster import Cluster
    from orchestrator.derived import prefix_sharing

    # Nothing is asked and nothing is judged: of data and rewards it needs none.
    alone = dataclasses.replace(config, data=dataclasses.replace(config.data, eval={}))
    prepared = prepare(alone, _judges_nothing, training=False)
    plan = plan_of(config, recorded, prefix_sharing(prepared))
    logger.info("starting the learner")
    async with Cluster(prepared, on_change=lambda: None, engines=False) as cluster:
        assert cluster.learner is not None
        if checkpoint is not None:
            await cluster.learner.load(checkpoint.path)
        scored: Scored = await score(cluster.learner, plan, recorded, config.learner.step_timeout_s)
    return replay_batch(folder, config, recorded, plan, scored)


def _judges_nothing(completion: str) -> None:
    return None
