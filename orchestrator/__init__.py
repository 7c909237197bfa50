"""The run: config, prompts, sampling queue, placement, supervision, checkpoints, journal, metrics, command line.

`from orchestrator import train, evaluate, check_rewards`; they are looked up when asked for, so that importing the package
costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import RunResult, check_rewards, evaluate, train

__all__ = ["RunResult", "check_rewards", "evaluate", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from orchestrator import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
