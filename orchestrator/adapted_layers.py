"""Which layers of a model the LoRA adapter is put on, known from the model's configuration before anything starts."""

from __future__ import annotations

import functools
import re

from orchestrator.config import ConfigError


@functools.cache
def adapted_layers(model_path: str, targets: str) -> tuple[str, ...]:
    """The names of the layers that peft adapts, as they are in the Hugging Face model; no weights are loaded.

    Raises ConfigError where `targets` (model.lora.targets) matches nothing, or something that can't be adapted: the learner
    computes logprobs with the output head itself, and adapters are merged into plain linear layers.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
        head = model.get_output_embeddings()
        try:
            get_peft_model(model, LoraConfig(r=1, target_modules=targets, task_type="CAUSAL_LM"))
        except (ValueError, re.error) as error:
            raise ConfigError(f"model.lora.targets={targets}: {error}") from error
    layers = {name: module.base_layer for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    refused = [name for name, layer in layers.items() if layer is head or not isinstance(layer, torch.nn.Linear)]
    if refused:
        raise ConfigError(
            f"model.lora.targets={targets}: {', '.join(refused[:3])} can't be adapted, only linear layers other than the output "
            "head can; leave it at all-linear, or give a regular expression that does not match them"
        )
    return tuple(layers)
