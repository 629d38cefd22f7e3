"""HTTP/1.1 on one connection of the endpoint: requests in, replies out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from typing import Any

import h11

MAX_BODY = 4_000_000  # bytes of a request
PATIENCE = 60.0  # seconds for a whole request to arrive, and for the next on a connection
MAX_UNREAD = 16_000_000  # bytes of a refused request that are read before its connection is closed
LINGER = 5.0  # seconds for them


class BadRequest(Exception):
    """A request that is not answered, with the status that says so."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Connection:
    """HTTP/1.1 on a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.SERVER)
        self._method = b""  # of the latest request

    async def head(self) -> h11.Request:
        """The next request, whose body is not read yet. Raises ConnectionError and
        TimeoutError."""
        request = await asyncio.wait_for(self._event(), PATIENCE)
        if not isinstance(request, h11.Request):
            raise ConnectionResetError("the client has closed the connection")
        self._method = request.method
        return request

    async def body(self) -> bytes:
        """The request's body. Raises BadRequest, ConnectionError and TimeoutError."""
        return await asyncio.wait_for(self._body(), PATIENCE)

    async def _body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > MAX_BODY:
                raise BadRequest(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MAX_BODY} bytes"
                )
        return bytes(body)

    async def _event(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            if self._protocol.they_are_waiting_for_100_continue:
                await self._write(
                    h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                )
            self._protocol.receive_data(await self._reader.read(65536))
        return event

    async def unless_gone(self, reply: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """The reply, given up where the client leaves before it is there."""
        answering = asyncio.ensure_future(reply)
        reading = asyncio.ensure_future(self._reader.read(65536))
        try:
            await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                if not (early := reading.result()):
                    raise ConnectionResetError("the client has left")
                self._protocol.receive_data(early)  # of its next request
            return await answering
        finally:
            answering.cancel()
            reading.cancel()
            await asyncio.wait({reading})

    async def send(self, status: HTTPStatus, reply: Mapping[str, Any]) -> bool:
        """Whether the connection stays open."""
        body = json.dumps(reply).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        if self._protocol.their_state not in (h11.DONE, h11.MUST_CLOSE):
            headers.append(("connection", "close"))
        await self._write(
            h11.Response(status_code=int(status), headers=headers, reason=status.phrase),
            *([] if self._method == b"HEAD" else [h11.Data(data=body)]),
            h11.EndOfMessage(),
        )
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return True

    async def discard(self) -> None:
        """Read what the client still sends, within limits. A connection that is closed with input
        unread is reset, and the client may never see the reply."""
        if self._protocol.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            return
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._read_to_end(), LINGER)

    async def _read_to_end(self) -> None:
        left = MAX_UNREAD
        while left > 0 and (part := await self._reader.read(65536)):
            left -= len(part)

    async def _write(self, *events: Any) -> None:
        for event in events:
            self._writer.write(self._protocol.send(event) or b"")
        await self._writer.drain()
