"""What a run needs to go on learning, in files that any ranks can read: master weights, AdamW's moments, step and random state.

Contract. Every rank writes the parts of the trainable parameters that its optimizer holds, as they are, in float32, and exchanges
nothing; a reader takes what it needs from all files. So what two ranks with ZeRO-2 have written goes on on one, or on eight with
ZeRO-3, and on as many as before bit by bit. Frozen weights are the model's own and are not kept.

    learner/state.safetensors                  torch's random state, and the optimizer step in its metadata
    learner/part-00003-00000.safetensors       of rank 3: `master|NAME`, `exp_avg|NAME`, `exp_avg_sq|NAME`, float32 [length];
                                               metadata `parts` says for each NAME where it starts, and the parameter's shape
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from learner.policy import Policy
from learner.shards import Part, drop_gathered, full_shape, grouped, local_values, parts, trainable
from learner.tensor_files import save_tensors

FOLDER = "learner"
STATE = "state.safetensors"
FILE_BYTES = 2**31  # of one part file: what is copied to the host at a time
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS)


class LearnerState:
    """Of one rank: `zero` is DeepSpeed's optimizer around `adamw`."""

    def __init__(self, policy: Policy, adamw: torch.optim.AdamW, zero: Any, *, zero_stage: int, rank: int) -> None:
        self._policy = policy
        self._adamw = adamw
        self._zero = zero
        self._zero_stage = zero_stage
        self._rank = rank

    def save(self, folder: Path, optimizer_step: int) -> list[str]:
        """Write this rank's files below `folder`; their names, relative to it. Raises OSError where the disk does not take them."""
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        names = []
        if self._rank == 0:
            names.append(f"{FOLDER}/{STATE}")
            save_tensors(
                {"torch_rng": torch.get_rng_state()}, folder / names[0], {"optimizer_step": str(optimizer_step)}
            )
        elif self._zero_stage == 0:
            return []  # every rank has the same
        files = grouped(self._parts(), lambda part: len(KINDS) * 4 * part.length, FILE_BYTES)
        for number, held in enumerate(files):
            names.append(f"{FOLDER}/part-{self._rank:05d}-{number:05d}.safetensors")
            tensors = {}
            for part in held:
                for kind, values in self._values(part).items():
                    tensors[f"{kind}|{part.name}"] = values.float()
            about = {part.name: {"start": part.start, "shape": full_shape(part.parameter)} for part in held}
            save_tensors(tensors, folder / names[-1], {"parts": json.dumps(about)})
        return names

    def load(self, folder: Path) -> int:
        """Take over what `save` wrote on any ranks, on every rank of these; the optimizer step.

        Raises FileNotFoundError if there is nothing, ValueError if it is of other parameters.
        """
        with safe_open(folder / FOLDER / STATE, "pt") as file:
            optimizer_step = int(file.metadata()["optimizer_step"])
            random_state = file.get_tensor("torch_rng")
        written = _Written(folder / FOLDER)
        written.check({name: full_shape(parameter) for name, parameter in trainable(self._policy)})
        for part in self._parts():
            for kind, values in self._values(part).items():
                values.copy_(written.read(kind, part.name, part.start, part.length))
            self._adamw.state[part.stepped]["step"].fill_(optimizer_step)
            if self._zero_stage == 3:
                shard = part.parameter.ds_tensor  # type: ignore[attr-defined]
                shard.data.view(-1)[: part.length].copy_(part.of(part.stepped))
        if self._zero_stage in (1, 2):
            for (name, _), values in zip(trainable(self._policy), local_values(self._policy), strict=True):
                values.copy_(written.read("master", name, 0, values.numel()).view_as(values))
        drop_gathered(self._policy, zero_stage=self._zero_stage)
        torch.set_rng_state(random_state)
        return optimizer_step

    def _parts(self) -> Iterator[Part]:
        return parts(self._policy, self._zero, zero_stage=self._zero_stage, rank=self._rank)

    def _values(self, part: Part) -> dict[str, torch.Tensor]:
        """Views of what the optimizer holds of the part, by kind."""
        state, stepped = self._adamw.state[part.stepped], part.stepped
        if not state:  # as AdamW itself makes it at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=stepped.device)
            state |= {kind: torch.zeros_like(stepped) for kind in MOMENTS}
        return {"master": part.of(stepped)} | {kind: part.of(state[kind]) for kind in MOMENTS}


class _Written:
    """The part files of all ranks as one."""

    def __init__(self, folder: Path) -> None:
        self._parts: dict[str, list[tuple[int, int, Path]]] = collections.defaultdict(list)  # start, length, file
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._folder = folder
        for path in sorted(folder.glob("part-*.safetensors")):
            with safe_open(path, "pt") as file:
                for name, about in json.loads(file.metadata()["parts"]).items():
                    [length] = file.get_slice(f"master|{name}").get_shape()
                    self._parts[name].append((about["start"], length, path))
                    self._shapes[name] = tuple(about["shape"])

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises ValueError unless these are the parameters."""
        if differing := sorted(n for n in shapes.keys() | self._shapes.keys() if shapes.get(n) != self._shapes.get(n)):
            name = differing[0]
            raise ValueError(
                f"{self._folder} holds other parameters than this model has, {len(differing)} of them; the first is {name}: there "
                f"{self._shapes.get(name, 'none')}, here {shapes.get(name, 'none')}"
            )

    def read(self, kind: str, name: str, start: int, length: int) -> torch.Tensor:
        """Elements of a flattened parameter, float32 [length]. Raises ValueError where no file has them."""
        found = torch.empty(length)
        missing = length
        for at, its_length, path in self._parts[name]:
            first, last = max(start, at), min(start + length, at + its_length)
            if first < last:
                with safe_open(path, "pt") as file:  # not all at once: there may be a thousand
                    found[first - start : last - start] = file.get_slice(f"{kind}|{name}")[first - at : last - at]
                missing -= last - first
        if missing:
            raise ValueError(f"{self._folder} lacks {missing} of {length} elements of {name} from {start} on")
        return found
