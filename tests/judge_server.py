"""A chat server on localhost that misbehaves as it is told, and reads a judge's sheet as any judge could.

A judge of the tests is a rule: from the attempts on the sheet, by name, to the text of a reply, or to an `Http` answer.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    """What a judge was sent, taken apart: `attempts` are each name's own messages, in the order shown."""

    body: Mapping[str, Any]
    context: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    attempts: dict[str, list[dict[str, Any]]]
    number: int  # of the request, from 0

    @property
    def is_pair(self) -> bool:
        return "two attempts" in self.body["messages"][0]["content"]

    @property
    def is_repair(self) -> bool:
        return len(self.body["messages"]) == 4

    @property
    def texts(self) -> dict[str, str]:
        """Each attempt's last message."""
        return {name: messages[-1]["content"] for name, messages in self.attempts.items()}


def read_sheet(body: Mapping[str, Any], number: int = 0) -> Request:
    """By the rules that the system message states, and nothing else."""
    system, user = (message["content"] for message in body["messages"][:2])
    marker = next(word for word in system.split() if word.startswith("@"))
    frames: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for line in user.split("\n"):
        if line.startswith(marker):
            title = line.removeprefix(marker).strip()
            frames[title] = []
        else:
            frames[title].append(json.loads(line))
    assert frames.pop("end") == []
    attempts = {
        title.removeprefix("attempt "): messages for title, messages in frames.items() if title.startswith("attempt ")
    }
    assert attempts.keys() == set(names_in(system))
    return Request(
        body,
        frames.get("what all attempts begin with", []),
        frames.get("tools that the attempts could call", []),
        attempts,
        number,
    )


def names_in(system: str) -> list[str]:
    """The ids that the system message asks for."""
    last = system.rpartition("letter by letter:")[2] or ""
    if "two attempts" in system:
        last = system.rpartition("one of the ids")[2].partition(', or "tie"')[0]
    return [name.strip() for name in last.split(",")]


@dataclass(frozen=True)
class Http:
    """An answer below the level of chat. `cut` sends half of it and hangs up."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    after: threading.Event | None = None  # not before this is set


Rule = Callable[[Request], str | Http]


class ChatServer:
    """`requests` are those that came, in order; `busiest` how many were under way at once at most."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.requests: list[Request] = []
        self.keys: list[str] = []
        self.busiest = 0
        self._busy = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                owner._answer(self)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.base = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        assert handler.path == "/v1/chat/completions"
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            number = len(self.requests)
            request = (
                read_sheet(body, number)
                if body["messages"][0]["role"] == "system"
                else Request(body, [], [], {}, number)
            )
            self.requests.append(request)
            self.keys.append(handler.headers.get("authorization", ""))
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        answer = self.rule(request)
        if isinstance(answer, str):
            answer = Http(body=chat_body(answer))
        if answer.after is not None:
            answer.after.wait(10.0)
        with self._lock:
            self._busy -= 1
        try:
            handler.send_response(answer.status)
            handler.send_header("content-type", "application/json")
            handler.send_header("content-length", str(len(answer.body)))
            for name, value in answer.headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(answer.body[: len(answer.body) // 2] if answer.cut else answer.body)
            handler.wfile.flush()
            if answer.cut:
                handler.close_connection = True
                handler.connection.shutdown(socket.SHUT_RDWR)
        except (BrokenPipeError, ConnectionResetError):  # the client did not wait
            handler.close_connection = True

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def chat_body(text: str, finish_reason: str = "stop") -> bytes:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    response = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(response).encode()


def error(status: int, message: str = "no", **headers: str) -> Http:
    return Http(status, json.dumps({"error": {"message": message}}).encode(), headers)


@contextmanager
def serving(rule: Rule) -> Iterator[ChatServer]:
    server = ChatServer(rule)
    try:
        yield server
    finally:
        server.close()


def scores_reply(scores: Mapping[str, Any]) -> str:
    return json.dumps({"scores": [{"id": n, "explanation": f"because {s}", "score": s} for n, s in scores.items()]})


def stated(request: Request) -> str:
    """The honest judge: an attempt's text is the score that it deserves."""
    if request.is_pair:
        (a, text_a), (b, text_b) = request.texts.items()
        better = "tie" if float(text_a) == float(text_b) else a if float(text_a) > float(text_b) else b
        return json.dumps({"explanation": "", "better": better})
    return scores_reply({name: float(text) for name, text in request.texts.items()})
