"""The policy as ordinary Hugging Face folders, which transformers, peft and vLLM load without Headway."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

from learner.policy import Policy
from learner.weight_source import PolicyWeightSource


def export_folder(policy: Policy, source: PolicyWeightSource, model_path: str, folder: Path, *, write: bool) -> None:
    """Write weights (adapters merged), configuration and tokenizer to `folder`.

    Every rank calls it, because gathering a bucket is collective; the one with `write` writes. `model_path` is where the
    tokenizer comes from. Weights are split into files by the source's buckets.
    """
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    if not write:
        for _ in source.buckets():
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total_bytes = 0
    for number, named in enumerate(source.buckets()):
        file = f"model-{number:05d}.safetensors"
        tensors = {name: tensor.cpu().contiguous() for name, tensor in named}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
    files = set(index.values())
    if len(files) == 1:
        os.replace(folder / files.pop(), folder / "model.safetensors")
    else:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    policy.causal_lm.config.save_pretrained(folder)
    if policy.causal_lm.can_generate():
        policy.causal_lm.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)


def export_adapter(
    policy: Policy, source: PolicyWeightSource, model_path: str, folder: Path, *, write: bool
) -> list[str]:
    """Write a LoRA policy's adapter alone to `folder`, in peft's format; the names of the files that this rank wrote.

    `source` yields the adapter's tensors, `model_path` is the base that it names. As with `export_folder`, every rank calls it
    and the one with `write` writes.
    """
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().clone() for named in source.buckets() if write for name, tensor in named}
    if not write:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    config = copy.deepcopy(policy.model.peft_config["default"])
    config.base_model_name_or_path = model_path
    config.inference_mode = True
    config.save_pretrained(folder)
    return [CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME]
