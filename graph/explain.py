"""What `graph explain` does: asks a running graph how it would place a message, and prints the answer."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from graph.errors import LaunchError

_TIMEOUT_S = 30.0


def ask(url: str, message: str) -> dict[str, Any]:
    """The graph's explanation. Raises `LaunchError` if it gives none."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_S)
    body = json.dumps({"messages": [{"role": "user", "content": message}]})
    try:
        connection.request("POST", "/router/explain", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        told: dict[str, Any] = json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LaunchError(f"{url} gives no explanation: {error}") from error
    finally:
        connection.close()
    if reply.status != 200:
        raise LaunchError(f"{url} gives no explanation: {told.get('error', {}).get('message', reply.reason)}")
    return told


def print_explanation(told: dict[str, Any], console: Console) -> None:
    """A table of the workers, the chosen ones marked, and the reason."""
    choice = told["choice"] or {}
    console.print(
        f"policy {told['policy']}: {told['prompt_tokens']} tokens, "
        f"{told['prompt_blocks']} blocks of {told['tokens_per_block']}",
        highlight=False,
    )
    terms = list(told["workers"][0]["terms"]) if told["workers"] else []
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("", "worker", "cached", "overlap", "load", *terms, "cost"):
        table.add_column(name, justify="left" if name in ("", "worker") else "right")
    for worker in told["workers"]:
        table.add_row(
            "->" if worker["worker"] in (choice.get("worker"), choice.get("prefill_worker")) else "",
            worker["worker"] + (" (full)" if worker["is_full"] else ""),
            *(str(worker[name]) for name in ("cached_blocks", "overlap_blocks")),
            "{running}+{waiting}".format(**worker["load"]),
            *(f"{worker['terms'][name]:.0f}" for name in terms),
            f"{worker['cost']:.0f}",
        )
    console.print(table)
    console.print(choice.get("reason", "no worker has room, or none is ready"), highlight=False)
