"""Several vLLM servers of one model, as one: requests are spread, adapters are on each of them.

Requests whose prompts begin alike go to one server, whose cache then holds the common prefix:
servers are ranked by a hash of the server and of what the prompts have in common (rendezvous
hashing, Thaler and Ravishankar 1998). A server that has more than its share under way is passed
over (bounded loads, Mirrokni et al. 2018).

A server that does not answer is left out, and its requests are sampled by the others. A thread
asks for it until it answers again; its adapters are brought up to date before it gets requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from comlrl.errors import notice
from comlrl.files import raise_open_limit
from comlrl.rollout import daemon_threads
from comlrl.rollout.vllm.replies import KEY, MAX_REPLY, ServerError
from comlrl.rollout.vllm.server import SHORT, Refused, Server, Unanswered

LOAD = 1.25  # requests under way that a server may have, as a multiple of the mean
LONGEST_WAIT = 30.0  # seconds between two looks at a server that is away
RELOADS = 3  # of an adapter that a restarted server does not have


class _Member(Server):
    """One of several servers, and what is known of it."""

    def __init__(self, url: str, wait: float) -> None:
        super().__init__(url)
        self.away = False
        self.returns = 0  # how often it has been taken back
        self.reported = False  # as away, and it has answered no request since then
        self.wait = wait  # seconds before it is asked for again once it is away
        self.under_way = 0  # requests
        self.stale: set[str] = set()  # adapters to unload when it is back
        self.reloading = threading.Lock()

    def rank(self, prefix: str) -> bytes:
        """The greatest of all servers' is the first choice for requests of this prefix."""
        return hashlib.blake2b(f"{self.url}\n{prefix}".encode(), digest_size=8).digest()


class Servers:
    """Servers of one model; may be used by several threads."""

    def __init__(self, urls: Sequence[str], patience: float, first_wait: float = 1.0) -> None:
        """``patience``: seconds that an answer may take, and after which servers that are all
        away are given up. ``first_wait``: seconds before a server that is away is first asked for
        again; doubled each time."""
        self.patience, self.first_wait = patience, first_wait
        self.members = tuple(_Member(url, first_wait) for url in urls)
        self._adapters: dict[str, str] = {}  # name → folder, of those that all shall have
        self._failure = ""  # the latest
        self._left = False
        self._changed = threading.Condition()  # guards all of these and the members' fields

    def __len__(self) -> int:
        return len(self.members)

    def begin(self, adapters: Mapping[str, str]) -> None:
        """Load the first adapters on all servers. Raises ServerError where one does not take
        them."""
        raise_open_limit()  # each request has a connection
        self._adapters |= adapters
        daemon_threads.run([partial(self._load_first, m, adapters) for m in self.members])

    def load(self, adapters: Mapping[str, str]) -> None:
        """Load adapters, name → folder, on all servers at once. Raises Refused."""
        with self._changed:
            self._adapters |= adapters
            here = self._here()
        daemon_threads.run([partial(self._load, member, adapters) for member in here])

    def unload(self, names: Collection[str]) -> None:
        """Unload adapters everywhere; a server that is away does so when it is back."""
        with self._changed:
            for name in names:
                self._adapters.pop(name, None)
            here = self._here()
            for member in set(self.members) - set(here):
                member.stale |= set(names)
        daemon_threads.run([partial(_unload, member, names) for member in here])

    def ask(
        self, prefix: str, path: str, body: Mapping[str, Any], most: int = MAX_REPLY
    ) -> tuple[str, Any]:
        """Who has answered a request, and the answer. ``prefix``: what its prompt has in common
        with others. ``body["model"]`` names an adapter that was loaded. Raises ServerError where
        no server has answered from the first failure on for ``patience`` seconds, Refused and
        BadReply."""
        failed: set[_Member] = set()
        deadline = math.inf
        while True:
            member, returns = self._take(prefix, failed, deadline)
            try:
                reply = self._answer(member, path, body, most)
                self._has_answered(member)
                return member.url, reply
            except Unanswered as error:
                failure = f"{KEY}: '{member.url}': {error}"
            except Refused as error:
                if not error.may_pass:
                    raise
                failure = str(error)
            finally:
                with self._changed:
                    member.under_way -= 1
            deadline = min(deadline, time.monotonic() + self.patience)
            failed.add(member)
            self._lose(member, returns, failure)

    def leave(self) -> None:
        """Nothing is waited for any more; requests that are under way raise ServerError."""
        with self._changed:
            if self._left:  # the adapters may be being unloaded, which is not to be cut
                return
            self._left = True
            self._changed.notify_all()
        for member in self.members:
            member.cut()

    def _here(self) -> list[_Member]:
        return [member for member in self.members if not member.away]

    def _take(
        self, prefix: str, failed: AbstractSet[_Member], deadline: float
    ) -> tuple[_Member, int]:
        """Who gets a request, which the servers ``failed`` have not answered, and its ``returns``.
        Waits for one that is there. Raises ServerError."""
        with self._changed:
            while not self._left:
                here = self._here()
                over = time.monotonic() >= deadline
                if here and not (over and failed >= set(here)):
                    member = _choice(here, prefix)
                    member.under_way += 1
                    return member, member.returns
                if over:
                    raise ServerError(f"{self._failure}, and no better for {self.patience:g} s")
                deadline = min(deadline, time.monotonic() + self.patience)
                self._changed.wait(deadline - time.monotonic())
            raise ServerError(f"{KEY}: '{self.members[0].url}' is not asked any more")

    def _answer(self, member: _Member, path: str, body: Mapping[str, Any], most: int) -> Any:
        name = body["model"]
        for _ in range(RELOADS):
            try:
                return member.ask(path, body, SHORT if self._left else self.patience, most)
            except Refused as error:
                folder = self._adapters.get(name)
                if error.status != 404 or self._left or folder is None:
                    raise
            with member.reloading:  # the server was restarted
                member.load(name, folder, self.patience)
        raise ServerError(f"{KEY}: '{member.url}' does not keep the adapter {name}")

    def _load_first(self, member: _Member, adapters: Mapping[str, str]) -> None:
        try:
            for name, folder in adapters.items():
                member.load(name, folder, self.patience)
        except Unanswered as error:
            raise ServerError(f"{KEY}: '{member.url}': {error}") from error

    def _load(self, member: _Member, adapters: Mapping[str, str]) -> None:
        returns = member.returns
        try:
            for name, folder in adapters.items():
                member.load(name, folder, self.patience)
        except Unanswered as error:
            self._lose(member, returns, f"{KEY}: '{member.url}': {error}")
        except Refused as error:
            if not error.may_pass:
                raise
            self._lose(member, returns, str(error))

    def _lose(self, member: _Member, returns: int, failure: str) -> None:
        """Leave a server out until it answers again. ``returns``: the member's when it was asked;
        if it was taken back since then, the failure is an old one."""
        with self._changed:
            self._failure = failure
            if member.away or member.returns > returns or self._left:
                return
            member.away, known, member.reported = True, member.reported, True
            left = len(self._here())
        if len(self) > 1 and not known:
            others = f"{left} of {len(self)} servers continue" if left else "no other is there"
            notice(f"{failure}; it is left out until it answers, {others}")
        threading.Thread(target=self._look_for, args=(member,), daemon=True).start()

    def _has_answered(self, member: _Member) -> None:
        with self._changed:
            member.wait = self.first_wait
            again, member.reported = member.reported, False
        if len(self) > 1 and again:
            notice(f"{KEY}: '{member.url}' answers again")

    def _look_for(self, member: _Member) -> None:
        """Take a server back once it answers and has the adapters."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._left, member.wait):
                    return
            member.wait = min(2 * member.wait, LONGEST_WAIT)
            try:
                self._catch_up(member)
            except (Unanswered, ServerError) as error:
                named = isinstance(error, ServerError)
                self._failure = str(error) if named else f"{KEY}: '{member.url}': {error}"
            else:
                return

    def _catch_up(self, member: _Member) -> None:
        """Load what a server that was away lacks, then let it have requests."""
        while True:
            with self._changed:
                wanted, stale = dict(self._adapters), set(member.stale)
            present = set(member.names())
            _unload(member, stale & present)
            for name, folder in wanted.items():
                if name not in present:
                    member.load(name, folder, self.patience)
            with self._changed:
                member.stale -= stale
                if wanted == self._adapters and not member.stale:  # else they moved meanwhile
                    member.away = False
                    member.returns += 1
                    self._changed.notify_all()
                    return


def _choice(members: Iterable[_Member], prefix: str) -> _Member:
    """The first of a prefix's ranking that has no more than its share under way."""
    ranking = sorted(members, key=lambda member: member.rank(prefix), reverse=True)
    under_way = sum(member.under_way for member in ranking)
    bound = math.ceil(LOAD * (under_way + 1) / len(ranking))
    return next(member for member in ranking if member.under_way < bound)


def _unload(server: Server, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(ServerError, Unanswered):  # gone, or another process has
            server.unload(name)
