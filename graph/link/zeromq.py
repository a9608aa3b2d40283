"""The ZeroMQ transport."""


class ZeroMQ:
    """ipc:// and loopback tcp:// sockets of one process."""

    async def close(self) -> None:
        """Closes all sockets."""
