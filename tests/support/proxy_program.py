"""The proxies themselves, in a program of their own: `servers.py` starts it, `proxy.Proxy` steers one.

It runs without anything installed: nothing but the standard library is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from proxy import OF_THE_REQUEST, Request, Rule, is_meant

PIECE = 1 << 16


class _CutError(Exception):
    """The connection ends here, by a reset or in order."""

    def __init__(self, *, is_reset: bool = True) -> None:
        super().__init__(is_reset)
        self.is_reset = is_reset


@dataclass
class _Head:
    raw: bytes
    first: list[str]
    fields: dict[str, str]

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.fields.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int:
        return int(self.fields.get("content-length", 0))


@dataclass(eq=False)
class _Line:
    """One connection, of the client to us or of us to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def end(self, *, is_reset: bool) -> None:
        if is_reset:
            with contextlib.suppress(OSError):
                # Without this an abort ends in order wherever everything was read, and a reset would be none.
                self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()

    def is_open(self) -> bool:
        # What nobody reads hides the end that comes after it: only the kernel's state tells that it is there.
        try:
            return self._socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1
        except OSError:
            return False

    def _socket(self) -> Any:
        return self.writer.get_extra_info("socket")


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    named = (line.partition(":") for line in lines)
    return _Head(raw, first.split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in named})


async def _body(reader: asyncio.StreamReader, head: _Head) -> AsyncIterator[bytes]:
    """Yield a body as it is on the wire, chunk sizes and trailers included."""
    if not head.is_chunked:
        async for piece in _exactly(reader, head.length):
            yield piece
        return
    size = -1
    while size != 0:
        line = await reader.readuntil(b"\r\n")
        yield line
        size = int(line.split(b";")[0], 16)
        async for piece in _exactly(reader, size + 2 if size else 0):
            yield piece
    while line != b"\r\n":
        line = await reader.readuntil(b"\r\n")
        yield line


async def _exactly(reader: asyncio.StreamReader, count: int) -> AsyncIterator[bytes]:
    while count:
        piece = await reader.read(min(PIECE, count))
        if not piece:
            raise _CutError
        count -= len(piece)
        yield piece


async def _cut(pieces: AsyncIterator[bytes], at: int, *, is_reset: bool) -> AsyncIterator[bytes]:
    async for piece in pieces:
        if len(piece) > at:
            yield piece[:at]
            # A reset throws away what the other side has not read yet: let the half arrive
            await asyncio.sleep(0.01)
            raise _CutError(is_reset=is_reset)
        at -= len(piece)
        yield piece


async def _flip(pieces: AsyncIterator[bytes], at: int) -> AsyncIterator[bytes]:
    async for piece in pieces:
        if 0 <= at < len(piece):
            piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
        at -= len(piece)
        yield piece


async def _slow(pieces: AsyncIterator[bytes], speed: int) -> AsyncIterator[bytes]:
    step = max(1, speed // 20)
    async for piece in pieces:
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            await asyncio.sleep(len(part) / speed)
            yield part


def _broken(pieces: AsyncIterator[bytes], head: _Head, rule: Rule | None, side: str) -> AsyncIterator[bytes]:
    """Return a body with what a rule does to this side of it ("request" or "answer")."""
    if rule is None:
        return pieces
    # How long a body in chunks will be nobody knows yet; its first bytes are sizes, not data
    at = 1000 if head.is_chunked else int(head.length * rule.at)
    if rule.fault == f"flip-{side}":
        return _flip(pieces, at)
    if rule.fault in (f"reset-{side}", f"truncate-{side}"):
        return _cut(pieces, at, is_reset=rule.fault == f"reset-{side}")
    return _slow(pieces, rule.speed) if rule.fault == "slow" else pieces


class _Chosen:
    """A rule with what it has met and struck."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.met, self.struck = rule, 0, 0
        self.dice = random.Random(rule.seed)

    def strikes(self, head: _Head) -> bool:
        rule = self.rule
        if not is_meant(head.first[0], head.first[1], rule.method, rule.path):
            return False
        if rule.fault in OF_THE_REQUEST and not (head.length or head.is_chunked):
            return False
        self.met += 1
        is_due = self.met > rule.after and (rule.count is None or self.struck < rule.count)
        is_struck = is_due and self.dice.random() < rule.rate
        self.struck += is_struck
        return is_struck


_WORDS = {
    403: ("Forbidden", "SignatureDoesNotMatch"),
    500: ("Internal Server Error", "InternalError"),
    503: ("Service Unavailable", "SlowDown"),
}


def _refusal(status: int, method: str, *, is_last: bool) -> bytes:
    reason, code = _WORDS.get(status, ("Refused", "Refused"))
    xml = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{reason}</Message></Error>"
    )
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\n"
    head += f"Content-Length: {len(xml)}\r\n" + ("Connection: close\r\n" if is_last else "")
    return f"{head}\r\n{'' if method == 'HEAD' else xml}".encode()


class _Program:
    """A proxy itself."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.rules: list[_Chosen] = []
        self.requests: list[Request] = []
        self.clients: set[_Line] = set()
        self.going: list[tuple[Request, _Line]] = []
        self.server: asyncio.AbstractServer | None = None
        # Bound for good, but never listening: else another process may have the port while we are closed.
        self.held = socket.socket()
        self.held.bind(("127.0.0.1", 0))
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    async def obey(self, command: str, about: Any) -> Any:
        if command == "add":
            self.rules.append(_Chosen(Rule(**about)))
        elif command == "clear":
            self.rules.clear()
        elif command == "forget":
            self.requests.clear()
        elif command == "seen":
            self.end_what_was_left()
            return [asdict(one) for one in self.requests]
        elif command == "close":
            self.close()
        elif command == "open":
            await self.open()
        elif command == "end":
            self.rules.clear()
            self.close()
            self.held.close()
            return None
        return self.held.getsockname()[1]

    async def open(self) -> None:
        if self.server is None:
            port = self.held.getsockname()[1]
            self.server = await asyncio.start_server(self.serve, "127.0.0.1", port, limit=1 << 20)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.server = None
        for client in self.clients:
            client.end(is_reset=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Line(reader, writer)
        self.clients.add(client)
        server: _Line | None = None
        is_reset = False
        try:
            while head := await _read_head(reader):
                # The server ends a connection that was idle for half a minute
                if server is None or server.reader.at_eof():
                    server = _Line(*await asyncio.open_connection("127.0.0.1", self.upstream, limit=1 << 20))
                await self.exchange(head, client, server)
        except _CutError as exc:
            is_reset = exc.is_reset
        except (OSError, asyncio.IncompleteReadError):
            is_reset = True
        finally:
            self.clients.discard(client)
            client.end(is_reset=is_reset)
            if server is not None:
                server.end(is_reset=is_reset)

    async def exchange(self, head: _Head, client: _Line, server: _Line) -> None:
        await self.end_what_was_left()
        one = Request(head.first[0], head.first[1], time.monotonic())
        self.requests.append(one)
        self.going.append((one, client))
        rule = next((chosen.rule for chosen in self.rules if chosen.strikes(head)), None)
        one.fault = rule.fault if rule else ""
        try:
            if rule and rule.fault in ("status", "reset", "stall"):
                await self.refuse(head, client, rule, one)
            else:
                await self.forward(head, client, server, rule, one)
        finally:
            one.ended = one.ended or time.monotonic()
            self.going.remove((one, client))

    async def end_what_was_left(self) -> None:
        """End what has no client any more: one that tries again at once would seem to be there twice."""
        if self.going:
            # On a busy machine this request may be read before the end of the one that was left
            await asyncio.sleep(0.02)
        for one, client in self.going:
            if one.ended is None and not client.is_open():
                one.ended = time.monotonic()

    async def refuse(self, head: _Head, client: _Line, rule: Rule, one: Request) -> None:
        while rule.fault == "stall" and client.is_open():
            await asyncio.sleep(0.02)
        if rule.fault != "status":
            raise _CutError
        # Who asked whether to send its body is still waiting: to read that body would never end.
        is_last = "expect" in head.fields
        if not is_last:
            async for piece in _body(client.reader, head):
                one.received += len(piece)
        one.status, one.ended = rule.status, time.monotonic()
        await client.send(_refusal(rule.status, one.method, is_last=is_last))
        if is_last:
            raise _CutError(is_reset=False)

    async def forward(
        self, head: _Head, client: _Line, server: _Line, rule: Rule | None, one: Request
    ) -> None:
        await server.send(head.raw)
        # At the same time: a server may answer, or ask for the body, before it has read the body.
        sending = asyncio.create_task(self.send_body(head, client, server, rule, one))
        answering = asyncio.create_task(self.pass_answer(client, server, rule, one))
        try:
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_EXCEPTION)
            for task in (sending, answering):
                if task.done():
                    task.result()
        finally:
            sending.cancel()
            answering.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def send_body(
        self, head: _Head, client: _Line, server: _Line, rule: Rule | None, one: Request
    ) -> None:
        async for piece in _broken(_body(client.reader, head), head, rule, "request"):
            one.received += len(piece)
            await server.send(piece)

    async def pass_answer(self, client: _Line, server: _Line, rule: Rule | None, one: Request) -> None:
        answer = await _read_head(server.reader)
        while answer and answer.first[1] == "100":
            await client.send(answer.raw)
            answer = await _read_head(server.reader)
        if answer is None:
            raise _CutError
        is_lost = rule is not None and rule.fault == "lose-answer"
        if not is_lost:
            # Before it is sent: the client may ask for the next thing before we are here again.
            one.status, one.ended = int(answer.first[1]), time.monotonic()
            await client.send(answer.raw)
        if one.method != "HEAD" and answer.first[1] not in ("204", "304"):
            async for piece in _broken(_body(server.reader, answer), answer, rule, "answer"):
                if not is_lost:
                    one.sent, one.ended = one.sent + len(piece), time.monotonic()
                    await client.send(piece)
        if is_lost or answer.fields.get("connection", "").lower() == "close":
            raise _CutError(is_reset=is_lost)


async def _main(upstream: int) -> None:
    programs: list[_Program] = []
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        number, command, about = json.loads(line)
        if command == "begin":
            programs.append(_Program(upstream))
            answer: Any = len(programs) - 1
        else:
            answer = await programs[number].obey(command, about)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
