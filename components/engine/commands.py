"""The commands of an engine: queued on any thread, carried out on the engine's own, between steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Command = Callable[[], None]


class Commands:
    """What the engine's thread is told to do, and what it sleeps on while there is nothing."""

    def __init__(self) -> None:
        self._queued: deque[Command] = deque()
        self._awake = threading.Condition()
        self._is_stopping = False
        self._is_closed = False

    def put(self, command: Command) -> bool:
        """Queues a command; False if the thread will not get to it any more."""
        with self._awake:
            if not self._is_closed:
                self._queued.append(command)
                self._awake.notify()
            return not self._is_closed

    def stop(self) -> bool:
        """Lets the thread end after the round it is in; False if it was told so before."""
        with self._awake:
            is_first, self._is_stopping = not self._is_stopping, True
            self._awake.notify()
            return is_first

    def wait(self, *, only_if: bool) -> bool:
        """Sleeps until there is a command, if nothing can be done before; False once the thread is to end."""
        with self._awake:
            while only_if and not self._queued and not self._is_stopping:
                self._awake.wait()
            return not self._is_stopping

    def obey(self) -> None:
        """Carries out what is queued. The engine's thread only."""
        while self._queued:
            self._queued.popleft()()

    def close(self) -> None:
        """Takes no command any more; those that are queued can still be carried out."""
        with self._awake:
            self._is_closed = True
