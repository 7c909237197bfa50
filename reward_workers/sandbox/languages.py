"""Languages of programs that read standard input and write standard output.

Python runs in a forked interpreter; the others are compiled (where they are) and executed in confined processes of their
own. Toolchains are the machine's: a language whose tools aren't there is an error that names them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from reward_workers.sandbox.session import SandboxError

SOURCE, BINARY = "{source}", "{binary}"
COMPILE_TIMEOUT_S = 20.0
COMPILE_MEMORY_MB = 2048
# What programs that run out of memory say, by their runtimes: C++, JavaScript, bash and the system's tools.
OUT_OF_MEMORY = ("std::bad_alloc", "heap out of memory", "memory exhausted", "annot allocate", "ut of memory")


@dataclass(frozen=True)
class Language:
    """How a program is compiled (empty: not at all) and run; `{source}` and `{binary}` stand for files, `{memory_mb}` for a
    number. `memory_limit` is the field of `Setup` that limits memory: some runtimes can't bear a limited address
    space. `overhead_mb` is what a runtime needs for itself.
    """

    suffix: str
    compile: tuple[str, ...]
    run: tuple[str, ...]
    memory_limit: str = "address_space_bytes"
    overhead_mb: int = 0

    def command(self, template: tuple[str, ...], **values: object) -> tuple[str, ...]:
        """The command with its values, its program by full path. Raises SandboxError when the machine lacks it."""
        first, *rest = (part.format(**values) for part in template)
        found = shutil.which(first, path="/usr/local/bin:/usr/bin:/bin") if "/" not in first else first
        if found is None:
            raise SandboxError(f"{first} is not installed on this machine")
        return (found, *rest)


LANGUAGES = {
    # errexit: a command that fails ends a script, as an exception would.
    "bash": Language(".sh", (), ("bash", "--noprofile", "--norc", "-e", SOURCE)),
    "c": Language(".c", ("gcc", "-O2", "-std=gnu17", "-o", BINARY, SOURCE, "-lm"), (BINARY,)),
    "cpp": Language(".cpp", ("g++", "-O2", "-std=gnu++20", "-o", BINARY, SOURCE), (BINARY,)),
    "javascript": Language(
        ".js", (), ("node", "--max-old-space-size={memory_mb}", SOURCE), "data_bytes", overhead_mb=512
    ),
}
