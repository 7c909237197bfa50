"""Files that are there whole or not at all.

Contract: once `whole_file` ends without an error, the file holds everything that was written and outlives a
power cut. Whatever ends it earlier (an exception, a full disk, kill -9), the name holds what it held before.
A kill leaves a hidden temporary file beside it, which no reader looks at and `remove_temporaries` takes away.

Any filesystem with atomic renames and fsync will do, shared ones included.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".temporary"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write `path` through the yielded binary file, which replaces what was there when the block ends.

    Raises OSError that names `path` and the bytes free (a full disk, a quota, no permission).
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        free_bytes = bytes_free(path)
        temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        message = f"{reason}: {path} could not be written ({free_bytes} bytes free)"
        raise OSError(error.errno, message) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all. Raises TypeError if JSON can't hold it."""
    data = json.dumps(value, indent=1).encode()
    with whole_file(path) as file:
        file.write(data)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left in `folder` and below. Nobody may be writing there."""
    for path in folder.rglob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename alone may be lost in a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the contents of a file durable that somebody else wrote and closed."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def cut_off_half_line(path: Path) -> None:
    """Truncate a file of lines, if it exists, after its last newline: a kill may have cut the last line short."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        logger.warning("%s ended in half a line (%d bytes), cut off", path, len(content) - whole)
        os.truncate(path, whole)


def bytes_free(path: Path) -> int:
    """Bytes that an ordinary user may still write at `path`, which need not exist."""
    existing = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
    return shutil.disk_usage(existing).free
