"""What tests of several folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray for all tests that hold actors themselves. Its CPUs are only counted, not owned."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "engine"), str(HERE.parent)]))  # for stale_head.py
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()
