"""The policy as ordinary Hugging Face folders, which transformers, peft and vLLM load without Headway."""

from __future__ import annotations

import copy
import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from learner.policy import Policy
from learner.tensor_files import save_tensors
from learner.weight_source import PolicyWeightSource

if TYPE_CHECKING:
    import torch


def export_folder(policy: Policy, source: PolicyWeightSource, model_path: str, folder: Path, *, write: bool) -> None:
    """Write weights (adapters merged), configuration and tokenizer to `folder`.

    Every rank calls it, because gathering a bucket is collective; the one with `write` writes. `model_path` is where the
    tokenizer comes from. Weights are split into files by the source's buckets.
    """
    from transformers import AutoTokenizer
    from transformers.utils import GENERATION_CONFIG_NAME

    if not write:
        for _ in source.buckets():
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total_bytes = 0
    for number, named in enumerate(itertools.chain(source.buckets(), filter(None, [_kept_buffers(policy)]))):
        file = f"model-{number:05d}.safetensors"
        tensors = dict(named)
        save_tensors(tensors, folder / file, {"format": "pt"})
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
        # Not save_pretrained, which refuses what many models come with, such as a temperature without do_sample.
        policy.causal_lm.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)


def _kept_buffers(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """What the checkpoint holds besides parameters, such as the bias of a router. It does not learn: engines have it already."""
    kept = policy.causal_lm.state_dict().keys()
    return [(name, buffer) for name, buffer in policy.causal_lm.named_buffers() if name in kept]


def export_adapter(
    policy: Policy, source: PolicyWeightSource, model_path: str, folder: Path, *, write: bool
) -> list[str]:
    """Write a LoRA policy's adapter alone to `folder`, in peft's format; the names of the files that this rank wrote.

    `source` yields the adapter's tensors, `model_path` is the base that it names. As with `export_folder`, every rank calls it
    and the one with `write` writes.
    """
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

    tensors = {name: tensor.cpu().clone() for named in source.buckets() if write for name, tensor in named}
    if not write:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / SAFETENSORS_WEIGHTS_NAME, {"format": "pt"})
    config = copy.deepcopy(policy.model.peft_config["default"])
    config.base_model_name_or_path = model_path
    config.inference_mode = True
    config.save_pretrained(folder)
    return [CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME]
