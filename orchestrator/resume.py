"""Which checkpoint a run goes on from, and whether it is one of this run: known before anything starts.

Contract: what would go on wrongly without a word (an adapter of another shape or weight, other prompts) is a ConfigError; what
a person may mean (a run that has ended, a model folder that was moved) is a warning.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from orchestrator.checkpoint import Checkpoint, CheckpointStore
from orchestrator.config import Config, ConfigError
from orchestrator.journal import JOURNAL
from orchestrator.prepare import Prepared
from orchestrator.prompts import PromptStream

logger = logging.getLogger(__name__)


def begun(folder: Path) -> bool:
    """Whether a run in this folder came as far as to train on a batch; one that starved before that has outcomes alone."""
    return any((folder / JOURNAL / "trajectories").glob("*.parquet"))


def to_resume(prepared: Prepared, folder: Path, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint that the run in `folder` goes on from by `checkpoint.resume`, None for a start.

    Raises ConfigError where there must be one, or where it is of another adapter or other data.
    """
    config = prepared.config
    if config.checkpoint.resume == "never":
        return None
    checkpoint = store.latest()
    if checkpoint is not None:
        _check(prepared, checkpoint)
    elif config.checkpoint.resume == "must":
        raise ConfigError(f"checkpoint.resume=must: there is no whole checkpoint in {folder / 'checkpoints'}")
    elif begun(folder):
        logger.warning(
            "checkpoint.resume=auto: there is no whole checkpoint in %s; the run starts anew at version 0, and what it recorded "
            "before counts no more",
            folder / "checkpoints",
        )
    return checkpoint


def model_state(config: Config) -> dict[str, Any]:
    """What a checkpoint's weights belong to, for its run state."""
    return {"path": config.model.path, "lora": dataclasses.asdict(config.model.lora)}


def _check(prepared: Prepared, checkpoint: Checkpoint) -> None:
    config, model = prepared.config, checkpoint.run_state.get("model")
    if model is None:
        raise ConfigError(
            f"checkpoint.resume={config.checkpoint.resume}: the checkpoint {checkpoint.path} was written by an older version, "
            "which did not note its model; choose another run.name"
        )
    adapted = config.model.lora.rank or model["lora"]["rank"]  # without an adapter its other settings have no effect
    for name, before in model["lora"].items():
        if adapted and (now := getattr(config.model.lora, name)) != before:
            raise ConfigError(f"model.lora.{name}={now}: the checkpoint {checkpoint.path} was taken with {before}")
    if model["path"] != config.model.path:
        logger.warning(
            "model.path=%s: the checkpoint was taken with %s; the run goes on right only if that is the same model",
            config.model.path,
            model["path"],
        )
    PromptStream.from_config(prepared.train, config.data).restore(checkpoint.run_state["prompts"])
    if checkpoint.version >= config.run.batches:
        logger.warning(
            "run.batches=%d: the checkpoint is of version %d, nothing is left to train; raise run.batches to go on",
            config.run.batches,
            checkpoint.version,
        )
