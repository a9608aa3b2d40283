"""Ports: where a component meets the world, with the types of what passes through.

Three pairs, each linked in the direction of the arrow:

    Calls      >> Serves        requests, each answered by a stream of replies (or one)
    Publishes  >> Subscribes    events, numbered, with a snapshot for whoever missed some
    Sends      >> Receives      bulk data that travels outside the links (KV blocks); the edge
                                declares who exchanges it, the components bring the transport

A port is a class attribute of a component and does nothing by itself. Message types are
`Message` structs; the check of a graph compares them by identity, never by guessing.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that crosses a link: frozen, tagged by class name, packed as an array.

    New fields are appended with a default, so that a replica one version behind still reads them.
    """


Types = type[Message] | tuple[type[Message], ...]


def _types(types: Types) -> tuple[type[Message], ...]:
    return types if isinstance(types, tuple) else (types,)


class Port:
    """Base of all ports. `name` is the attribute's name, `required` whether a graph must link it."""

    def __init__(self, *, required: bool) -> None:
        self.name = ""
        self.required = required

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def mismatch(self, target: Port) -> str | None:
        """Why an edge from this port to `target` cannot work, or None."""
        return f"a {type(self).__name__} port cannot be linked to a {type(target).__name__} port"


class Calls(Port):
    """Sends requests to, and takes replies from, every replica at the other end."""

    def __init__(self, requests: Types, replies: Types, *, required: bool = True) -> None:
        super().__init__(required=required)
        self.requests = _types(requests)
        self.replies = _types(replies)

    def mismatch(self, target: Port) -> str | None:
        if not isinstance(target, Serves):
            return super().mismatch(target)
        unknown = _missing(self.requests, target.requests)
        if unknown:
            return f"the server does not take {unknown}"
        surprising = _missing(target.replies, self.replies)
        return f"the caller does not expect the reply {surprising}" if surprising else None


class Serves(Port):
    """Answers requests; linked from any number of callers, none included."""

    def __init__(self, requests: Types, replies: Types, *, required: bool = False) -> None:
        super().__init__(required=required)
        self.requests = _types(requests)
        self.replies = _types(replies)


class Publishes(Port):
    """Publishes numbered events; `snapshot` is the type that replaces all events so far."""

    def __init__(self, events: Types, snapshot: type[Message], *, required: bool = False) -> None:
        super().__init__(required=required)
        self.events = _types(events)
        self.snapshot = snapshot

    def mismatch(self, target: Port) -> str | None:
        if not isinstance(target, Subscribes):
            return super().mismatch(target)
        unknown = _missing((*self.events, self.snapshot), (*target.events, target.snapshot))
        return f"the subscriber does not take {unknown}" if unknown else None


class Subscribes(Port):
    """Follows the events of every replica at the other end."""

    def __init__(self, events: Types, snapshot: type[Message], *, required: bool = False) -> None:
        super().__init__(required=required)
        self.events = _types(events)
        self.snapshot = snapshot


class Sends(Port):
    """The source of bulk data of one `kind`, a word both ends must share."""

    def __init__(self, kind: str, *, required: bool = False) -> None:
        super().__init__(required=required)
        self.kind = kind

    def mismatch(self, target: Port) -> str | None:
        if not isinstance(target, Receives):
            return super().mismatch(target)
        return (
            None if target.kind == self.kind else f"the source carries {self.kind!r}, the target takes {target.kind!r}"
        )


class Receives(Port):
    """The target of bulk data of one `kind`."""

    def __init__(self, kind: str, *, required: bool = False) -> None:
        super().__init__(required=required)
        self.kind = kind


def _missing(sent: tuple[type[Any], ...], taken: tuple[type[Any], ...]) -> str:
    return ", ".join(t.__name__ for t in sent if t not in taken)
