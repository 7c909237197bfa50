"""The learner's state in files, on one rank without ZeRO; other ranks and stages are in test_learner_rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from learner import state
from learner.policy import Policy, PolicySettings
from learner.state import LearnerState
from learner.tensor_files import save_tensors


def learner(tiny_path: str, lora_rank: int = 0) -> tuple[Policy, torch.optim.AdamW, LearnerState]:
    policy = Policy(PolicySettings(tiny_path, "float32", lora_rank=lora_rank))
    adamw = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2, fused=True)
    return policy, adamw, LearnerState(policy, adamw, adamw, zero_stage=0, rank=0)


def step(policy: Policy, adamw: torch.optim.AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    adamw.step()


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_steps_go_on_bit_by_bit_from_several_files(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora_rank: int
) -> None:
    monkeypatch.setattr(state, "FILE_BYTES", 100_000)
    policy, adamw, of_it = learner(tiny_path, lora_rank)
    step(policy, adamw, 1)
    step(policy, adamw, 2)
    names = of_it.save(tmp_path, 2)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.safetensors"))
    assert sorted(names) == files
    assert len(files) > 2
    drawn = torch.rand(3)
    step(policy, adamw, 3)

    other, its_adamw, its_state = learner(tiny_path, lora_rank)
    assert its_state.load(tmp_path) == 2
    assert torch.equal(torch.rand(3), drawn)
    step(other, its_adamw, 3)
    for (name, found), (_, expected) in zip(other.named_parameters(), policy.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_state_from_before_the_first_step_is_one(tiny_path: str, tmp_path: Path) -> None:
    policy, adamw, of_it = learner(tiny_path)
    of_it.save(tmp_path, 0)
    step(policy, adamw, 1)
    other, its_adamw, its_state = learner(tiny_path)
    assert its_state.load(tmp_path) == 0
    step(other, its_adamw, 1)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), policy.parameters(), strict=True))


def test_what_is_not_this_model_s_is_refused(tiny_path: str, tmp_path: Path) -> None:
    *_, of_it = learner(tiny_path)
    with pytest.raises(FileNotFoundError):
        of_it.load(tmp_path)
    of_it.save(tmp_path, 0)
    *_, adapters = learner(tiny_path, 4)
    with pytest.raises(ValueError, match=r"holds other parameters .* the first is .*: there none, here \(4, "):
        adapters.load(tmp_path)


def test_a_part_that_is_missing_is_named(tiny_path: str, tmp_path: Path) -> None:
    *_, of_it = learner(tiny_path)
    of_it.save(tmp_path, 0)
    [part] = (tmp_path / "learner").glob("part-*")
    with safe_open(part, "pt") as file:
        about = file.metadata()
    tensors = load_file(part)
    name = "model.model.norm.weight"
    tensors |= {key: values[1:] for key, values in tensors.items() if key.endswith(f"|{name}")}
    save_tensors(tensors, part, about)
    with pytest.raises(ValueError, match=rf"lacks 1 of \d+ elements of {name}"):
        of_it.load(tmp_path)
