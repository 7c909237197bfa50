"""Makes our weight transports known to vLLM.

vLLM calls `register` in every process that it starts (entry point `vllm.general_plugins`), possibly more
than once.
"""

SHARED_MEMORY_BACKEND = "headway_shared_memory"
NCCL_BACKEND = "headway_nccl"
ENGINE_EXTENSION = "rollout_workers.weights.engine_side.EngineExtension"


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    module = "rollout_workers.weights.engine_side"
    for backend, name in (
        (SHARED_MEMORY_BACKEND, "SharedMemoryEngine"),
        (NCCL_BACKEND, "RecordingNCCLEngine"),
    ):
        if backend not in Factory._registry:
            Factory.register_engine(backend, module, name)
