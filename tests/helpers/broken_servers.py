"""A server of raw bytes, for what no well-behaved library sends: drips, lies, redirects, bodies that inflate."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Talk: TypeAlias = Callable[[socket.socket], None]
"""What a server does on a connection that has sent the head of a request."""

OK = b"HTTP/1.1 200 OK\r\n"


@dataclass
class Server:
    """A server of raw bytes. ``paths``: what it does, by path; ``requests``: what it was sent."""

    url: str
    paths: dict[str, Talk] = field(default_factory=dict)
    requests: list[bytes] = field(default_factory=list)
    num_connections: int = 0

    def talk(self, connection: socket.socket) -> None:
        self.num_connections += 1
        with connection, contextlib.suppress(OSError):  # the client has gone
            while head := _head(connection):
                self.requests.append(head)
                self.paths[head.split()[1].decode()](connection)


def _head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        if not piece:
            return b""
        head += piece
    return head


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server on the loopback, a thread for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=made.talk, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield made
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def sends(*pieces: bytes, closes: bool = False) -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(b"".join(pieces))
        if closes:
            connection.shutdown(socket.SHUT_WR)

    return talk


def answers(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> Talk:
    length = b"Content-Length: %d" % len(body)
    return sends(b"HTTP/1.1 ", status, b"\r\n", b"\r\n".join([*headers, length]), b"\r\n\r\n", body)


def redirects(location: str, *headers: bytes, body: bytes = b"") -> Talk:
    return answers(body, b"Location: " + location.encode(), *headers, status=b"302 Found")


def repeats(begin: bytes, again: bytes, pause: float = 0.0) -> Talk:
    """For ever, and every read of the client makes progress."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(again)
            time.sleep(pause)

    return talk
