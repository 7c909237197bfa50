"""The program in a completion.

Policy. What counts is what follows the last closed thinking block; an unfinished thought holds no answer. There, fences are
found line by line: a block ends at the first fence of its own kind, at least as long as the one that opened it; without one at the
first line that ends with it, or with the text. The last block that is tagged with the language is the program; without one
the last untagged block is. Blocks of other languages never are. An answer without any fence is a program as it stands. A Python
program that is indented as a whole is moved to the margin.
"""

from __future__ import annotations

import re
import textwrap

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*(.*)")
_ALIASES = {
    "python": ("python", "py", "python3", "python2", "py3"),
    "javascript": ("javascript", "js", "node", "nodejs"),
    "bash": ("bash", "sh", "shell", "zsh"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc", "cxx"),
}


def extract_code(completion: str, language: str = "python") -> str | None:
    """The program in a completion, without a newline at its end; None if there is none."""
    answer = after_thinking(completion)
    if answer is None:
        return None
    tagged, untagged, fenced = None, None, False
    lines = iter([line.removesuffix("\r") for line in answer.removeprefix("\ufeff").split("\n")])
    for line in lines:
        opening = _FENCE.fullmatch(line)
        if opening is None or (opening[2][0] == "`" and "`" in opening[3]):  # inline code that fills a line
            continue
        fenced = True
        body = []
        for inner in lines:
            closing = _FENCE.fullmatch(inner)
            if closing and not closing[3].strip() and closing[2].startswith(opening[2]):
                break
            body.append(inner.removeprefix(opening[1]))
        else:
            body = _until_fence(body, opening[2])
        code = _at_margin("\n".join(body), language)
        words = re.split(r"[\s{},:;]+", opening[3].strip().lstrip("{. ").lower(), maxsplit=1)
        if words[0] in _ALIASES.get(language, (language,)):
            tagged = code
        elif not words[0]:
            untagged = code
    if not fenced:
        return _at_margin(answer, language) if answer.strip() else None
    return tagged if tagged is not None else untagged


def _until_fence(body: list[str], fence: str) -> list[str]:
    """A block that no line of its own closes ends where a line of code runs into the fence."""
    for at, line in enumerate(body):
        if line.rstrip().endswith(fence):
            return [*body[:at], line.rstrip().rstrip(fence[0])]
    return body


def _at_margin(code: str, language: str) -> str:
    """Without a byte order mark and empty lines at both ends. Python that begins indented is an error as it stands, so that
    nothing is lost.
    """
    code = code.removeprefix("\ufeff").strip("\n")
    return textwrap.dedent(code) if language == "python" and code[:1] in (" ", "\t") else code


def after_thinking(completion: str) -> str | None:
    """What follows the last `</think>`, all of it if there is none; None for a thought that was not finished."""
    answer = completion.rpartition("</think>")[2]
    return None if re.search(r"^[ \t]*<think>", answer, re.MULTILINE) else answer
