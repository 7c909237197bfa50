"""A judge by rule behind a real chat server: stands for a judge model where there is none, for experiment=judge_rag.

    python scripts/rule_judge.py [--port 8123] &
    headway train experiment=judge_rag

It speaks OpenAI's chat API (POST /v1/chat/completions), reads a judge's sheet (`reward_workers.judge_prompt`), works out from
the notes which attempt answers the question, and replies as a judge model would: scores under the attempts' ids, the same for
the same text whatever the order.
"""

from __future__ import annotations

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUMBER = re.compile(r"\d+")
STOP_WORDS = {"the", "a", "is", "does", "do", "for", "how", "when", "many", "much", "what"}
UNKNOWN = re.compile(r"not in the notes|not (?:say|stated|mentioned|given)|n't (?:say|mention)", re.IGNORECASE)
# A question's own word -> the word of the note that answers it.
SAME = {"open": "opens", "far": "km", "much": "costs", "rooms": "rooms"}


def expected(prompt: str) -> tuple[str | None, set[str]]:
    """The number that the notes give for the question (None: they give none), and all numbers of the notes."""
    notes, _, question = prompt.partition("Question:")
    question = question.partition("\n")[0].lower()
    lines = [line.lower() for line in notes.splitlines() if line.startswith("- ")]
    words = set(re.findall(r"\w+", question))
    key = next((note for asked, note in SAME.items() if asked in words), "")
    places = words - STOP_WORDS - SAME.keys() - {"ticket", "away", "have", "rooms"}
    found = [line for line in lines if key in re.findall(r"\w+", line) and places & set(re.findall(r"\w+", line))]
    numbers = {number for line in lines for number in NUMBER.findall(line)}
    return (NUMBER.findall(found[0])[0] if found else None), numbers


def grade(prompt: str, answer: str) -> tuple[float, str]:
    """A score from 0 to 1 and the reason. Short answers score higher among equally right ones."""
    right, known = expected(prompt)
    answer = answer.rpartition("</think>")[2]
    if "<think>" in answer:
        return 0.0, "does not end its thought"
    said = NUMBER.findall(answer)
    brevity = max(0.0, 1 - len(answer.split()) / 30)
    if right is None:
        if UNKNOWN.search(answer) and not said:
            return round(0.7 + 0.3 * brevity, 3), "says that the notes do not tell"
        return (0.0, "gives a number that no note answers with") if said else (0.2, "claims nothing, admits nothing")
    if not said:
        return (0.0, "denies what the notes say") if UNKNOWN.search(answer) else (0.1, "gives no number")
    if said[0] != right:
        return (0.15, "takes the wrong note") if said[0] in known else (0.0, "makes a number up")
    if set(said) != {right}:
        return 0.5, "right at first, then other numbers"
    return round(0.7 + 0.3 * brevity, 3), "right"


def judge(body: dict[str, Any]) -> str:
    """The reply to a judge's sheet; one word to anything else."""
    messages = body["messages"]
    markers = [word for word in messages[0]["content"].split() if word.startswith("@")]
    if len(messages) < 2 or not markers:
        return "ready"
    frames: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for line in messages[1]["content"].split("\n"):
        if line.startswith(markers[0]):
            title = line.removeprefix(markers[0]).strip()
            frames[title] = []
        else:
            frames[title].append(json.loads(line))
    shared = frames.get("what all attempts begin with", [])
    graded = {
        title.removeprefix("attempt "): grade([*shared, *own][-2]["content"], own[-1].get("content") or "")
        for title, own in frames.items()
        if title.startswith("attempt ")
    }
    if "two attempts" in messages[0]["content"]:
        (a, (score_a, _)), (b, (score_b, _)) = graded.items()
        return json.dumps({"explanation": "", "better": "tie" if score_a == score_b else a if score_a > score_b else b})
    return json.dumps(
        {"scores": [{"id": name, "explanation": why, "score": score} for name, (score, why) in graded.items()]}
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Requests are not worth a line each."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = judge(body)
        words = sum(len(str(message.get("content")).split()) for message in body["messages"])
        response = {
            "id": "rule",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": words, "completion_tokens": len(text.split()), "total_tokens": words},
        }
        data = json.dumps(response).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8123)
    port = parser.parse_args().port
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"a judge by rule at http://127.0.0.1:{port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
