"""A scripted chat server on 127.0.0.1 that records what it receives and misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Body = dict[str, Any]


class Reply:
    """What the server sends back; `delay` in seconds, `drop` cuts the connection instead of answering."""

    def __init__(
        self,
        content: str | None = "",
        *,
        status: int = 200,
        body: bytes | None = None,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
        delay: float = 0.0,
        drop: bool = False,
        tokens: tuple[int, int] = (10, 5),
    ):
        choice = {
            "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}
        }  # fmt: skip
        usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
        self.body = json.dumps({"choices": [choice], "usage": usage}).encode() if body is None else body
        self.status, self.kind, self.headers, self.delay, self.drop = status, kind, headers or {}, delay, drop


def failure(status: int, message: str = "broken", **options: Any) -> Reply:
    return Reply(status=status, body=json.dumps({"error": {"message": message}}).encode(), **options)


class ScriptedServer:
    """Answers POST /v1/chat/completions by `script(request body, number of the call)`; a context manager.

    `posts`: (arrival in seconds, body, headers) of each chat call; `gets`: paths asked for; `peak`: the most calls in
    flight at once; `busy`: seconds of all calls together, from arrival to answer.
    """

    def __init__(self, script: Callable[[Body, int], Reply], models: tuple[str, ...] = ("tiny",)):
        self.posts: list[tuple[float, Body, dict[str, str]]] = []
        self.gets: list[str] = []
        self.peak, self.busy = 0, 0.0
        self._now, self._lock, self._script, self._models = 0, threading.Lock(), script, models
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                server.gets.append(self.path)
                listed = {
                    "object": "list",
                    "data": [{"id": name, "object": "model"} for name in server._models],
                }
                self.send(Reply(body=json.dumps(listed).encode()))

            def do_POST(self) -> None:
                start = time.perf_counter()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    number = len(server.posts)
                    server.posts.append((start, body, {k.lower(): v for k, v in self.headers.items()}))
                    server._now += 1
                    server.peak = max(server.peak, server._now)
                reply = server._script(body, number)
                time.sleep(reply.delay)
                with server._lock:
                    server._now -= 1
                    server.busy += time.perf_counter() - start
                if reply.drop:
                    self.close_connection = True
                    self.connection.close()
                else:
                    self.send(reply)

            def send(self, reply: Reply) -> None:
                self.send_response(reply.status)
                for name, value in {"Content-Type": reply.kind, **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)
                self.wfile.flush()

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:  # the client hung up first
                pass

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def prompts(self) -> list[str]:
        """The last message of each call."""
        return [body["messages"][-1]["content"] for _, body, _ in self.posts]
