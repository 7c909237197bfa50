"""An engine with a fault, for the tests: it goes on using the packed copy of its first output head.

vLLM imports this module in the engine's process, as the worker extension that `rollout.engine_options` names.
"""

from rollout_workers.weights import engine_side
from rollout_workers.weights.engine_side import EngineExtension

engine_side.refresh_packed_head = lambda model: None


class StaleHead(EngineExtension):
    """Nothing of its own."""
