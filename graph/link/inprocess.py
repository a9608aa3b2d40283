"""The in-process transport."""


class InProcess:
    """Joins the links of one process by address."""

    async def close(self) -> None:
        """Forgets all addresses."""
