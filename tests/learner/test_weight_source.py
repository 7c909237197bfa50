"""What leaves the learner is the Hugging Face checkpoint: its names, its values, adapters merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from learner.export import export_adapter, export_folder
from learner.policy import Policy, PolicySettings
from learner.weight_source import PolicyWeightSource

HUGE = 2**40

Tensors = dict[str, torch.Tensor]


def checkpoint(path: str) -> Tensors:
    """The tensors of a model folder as its file has them: a tied head is not among them."""
    from safetensors.torch import load_file

    tensors: Tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def contents(source: PolicyWeightSource) -> Tensors:
    return {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}


def moved(policy: Policy) -> Policy:
    """The policy after what an optimizer might do to it."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)
    return policy


@pytest.fixture(params=["tied", "untied"])
def path(request: pytest.FixtureRequest, tiny_path: str, untied_path: str) -> str:
    return tiny_path if request.param == "tied" else untied_path


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_fresh_policy_is_its_checkpoint(path: str, lora_rank: int) -> None:
    source = PolicyWeightSource(
        Policy(PolicySettings(path, "float32", lora_rank=lora_rank)), zero_stage=0, bucket_bytes=HUGE
    )
    expected, found = checkpoint(path), contents(source)
    assert found.keys() == expected.keys()
    assert ("lm_head.weight" in found) == ("untied" in path)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_merged_adapters_are_base_plus_scaled_product(tiny_path: str) -> None:
    policy = moved(Policy(PolicySettings(tiny_path, "float32", lora_rank=4, lora_alpha=12.0)))
    found = contents(PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE))
    base, adapters = checkpoint(tiny_path), dict(policy.causal_lm.named_parameters())
    adapted = 0
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.default.weight" in adapters:
            a, b = adapters[f"{module}.lora_A.default.weight"], adapters[f"{module}.lora_B.default.weight"]
            tensor = tensor.double() + 12.0 / 4 * (b.double() @ a.double())
            adapted += 1
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=1e-6, atol=1e-6)
    assert adapted == 2 * 7  # every linear layer of both blocks, the head not
    # The policy itself stays unmerged: it goes on learning.
    torch.testing.assert_close(contents(PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE)), found)


def test_merging_rounds_once(tiny_path: str) -> None:
    """In bfloat16 the product is added in float32 and rounded with the sum."""
    policy = moved(Policy(PolicySettings(tiny_path, "bfloat16", lora_rank=4)))
    found = contents(PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE))
    name = "model.layers.0.mlp.up_proj.weight"
    parameters = dict(policy.causal_lm.named_parameters())
    a, b, base = (
        parameters[f"model.layers.0.mlp.up_proj.{part}.weight"].float()
        for part in ("lora_A.default", "lora_B.default", "base_layer")
    )
    assert found[name].dtype == torch.bfloat16
    assert torch.equal(found[name], (base + 32.0 / 4 * (b @ a)).bfloat16())


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_buckets_keep_their_size_and_metadata_their_order(tiny_path: str, lora_rank: int) -> None:
    policy = Policy(PolicySettings(tiny_path, "float32", lora_rank=lora_rank))
    limit = 150_000
    source = PolicyWeightSource(policy, zero_stage=0, bucket_bytes=limit)
    buckets = list(source.buckets())
    assert len(buckets) > 3
    for bucket in buckets:
        assert bucket
        assert sum(t.numel() * t.element_size() for _, t in bucket) <= limit or len(bucket) == 1
    named = [(name, tensor.dtype, tuple(tensor.shape)) for bucket in buckets for name, tensor in bucket]
    assert source.metadata() == named
    whole = PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE)
    assert len(list(whole.buckets())) == 1
    assert whole.metadata() == named
    assert [name for bucket in source.buckets() for name, _ in bucket] == [name for name, _, _ in named], "re-iterable"


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("bucket_bytes", [150_000, HUGE])
def test_an_exported_model_is_an_ordinary_one(path: str, lora_rank: int, bucket_bytes: int, tmp_path: Path) -> None:
    """Plain transformers loads the folder and computes the same logits."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    settings = PolicySettings(path, "float32", lora_rank=lora_rank)
    policy = moved(Policy(settings))
    folder = tmp_path / "model"
    export_folder(policy, PolicyWeightSource(policy, zero_stage=0, bucket_bytes=bucket_bytes), path, folder, write=True)

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    ids = torch.tensor([[1, 5, 9, 200, 31]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy.model(ids).logits, rtol=0, atol=1e-5)
    written, original = (json.loads((Path(p) / "config.json").read_text()) for p in (folder, path))
    assert written == original
    assert GenerationConfig.from_pretrained(folder).eos_token_id == AutoConfig.from_pretrained(path).eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(path).chat_template
    index = folder / "model.safetensors.index.json"
    if bucket_bytes == HUGE:
        assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
        assert not index.exists()
    else:
        content = json.loads(index.read_text())
        assert content["weight_map"].keys() == checkpoint(str(folder)).keys()
        assert content["metadata"]["total_size"] == sum(
            t.numel() * t.element_size() for t in checkpoint(str(folder)).values()
        )


def test_a_model_whose_generation_defaults_contradict_themselves_is_exported(tiny_path: str, tmp_path: Path) -> None:
    """A temperature without do_sample, as many models have it: transformers refuses to save that, at the end of a run."""
    defaults = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    source = tmp_path / "source"
    shutil.copytree(tiny_path, source)
    (source / "generation_config.json").write_text(json.dumps(defaults))
    policy, folder = Policy(PolicySettings(str(source), "float32")), tmp_path / "model"
    weights = PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE)
    export_folder(policy, weights, str(source), folder, write=True)
    assert json.loads((folder / "generation_config.json").read_text()).items() >= defaults.items()


def test_what_is_kept_beside_the_parameters_is_exported_too(tmp_path: Path, tiny_path: str) -> None:
    """The bias of a router does not learn, but routes: without it another model would be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=64, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, **sizes, **experts
    )
    source, folder = tmp_path / "source", tmp_path / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    for bias in biases:
        bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0]))
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(source)
    policy = Policy(PolicySettings(str(source), "float32"))
    weights = PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE)
    export_folder(policy, weights, str(source), folder, write=True)
    ids = torch.tensor([[1, 5, 9, 20, 31]])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        torch.testing.assert_close(found, model.eval()(ids).logits, rtol=0, atol=1e-5)


def test_tied_heads_stay_tied(tiny_path: str, tmp_path: Path) -> None:
    """The head is the embedding: it moves with it, and a second tensor of it is never written."""
    policy = moved(Policy(PolicySettings(tiny_path, "float32")))
    found = contents(PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE))
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.embed_tokens.weight"], policy.model.get_output_embeddings().weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_alone_is_what_peft_saves(path: str, tmp_path: Path, dtype: str) -> None:
    """Its file loads in peft, and the base with it computes what the policy computes."""
    from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict

    policy = moved(Policy(PolicySettings(path, dtype, lora_rank=4, lora_alpha=12.0)))
    source = PolicyWeightSource(policy, zero_stage=0, bucket_bytes=20_000, adapter=True)
    found = contents(source)
    torch.testing.assert_close(found, get_peft_model_state_dict(policy.model))
    assert len(list(source.buckets())) > 1
    assert [name for name, _, _ in source.metadata()] == list(found)

    written = export_adapter(policy, source, path, tmp_path / "adapter", write=True)
    assert sorted(written) == sorted(file.name for file in (tmp_path / "adapter").iterdir())
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=getattr(torch, dtype))
    ids = torch.tensor([[1, 5, 9, 200, 31]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy.model(ids).logits, rtol=0, atol=1e-5)


def test_a_rank_that_does_not_write_leaves_no_file(tiny_path: str, tmp_path: Path) -> None:
    policy = Policy(PolicySettings(tiny_path, "float32", lora_rank=4))
    source = PolicyWeightSource(policy, zero_stage=0, bucket_bytes=HUGE, adapter=True)
    assert export_adapter(policy, source, tiny_path, tmp_path / "adapter", write=False) == []
    assert not (tmp_path / "adapter").exists()
