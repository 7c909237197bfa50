"""Writing safetensors files as the folder around them asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors from any device, for whoever may read the folder. Raises OSError where the disk does not take them."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, dict(metadata))
    except SafetensorError as error:  # which is no OSError, whatever the system said
        raise OSError(f"{path} could not be written: {error}") from error
    with contextlib.suppress(PermissionError):  # on mounts that have rights of their own
        path.chmod(path.parent.stat().st_mode & 0o666)  # it is made for its owner alone
