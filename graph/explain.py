"""What `graph explain` does: asks a running graph how it would place a message, and prints the answer."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from graph.errors import LaunchError
from graph.tables import aligned, print_lines
from graph.words import counted

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
        f"policy {told['policy']}: {counted(told['prompt_tokens'], 'token')}, "
        f"{counted(told['prompt_blocks'], 'block')} of {told['tokens_per_block']}",
        highlight=False,
        soft_wrap=True,
    )
    chosen = (choice.get("worker"), choice.get("prefill_worker"))
    terms = list(told["workers"][0]["terms"]) if told["workers"] else []
    head = [Text(name, style="bold") for name in ("", "worker", "cached", "overlap", "load", *terms, "cost")]
    rows = [_row(worker, is_chosen=worker["worker"] in chosen) for worker in told["workers"]]
    print_lines(aligned([head, *rows], "<<" + ">" * (len(head) - 2)), console)
    console.print(choice.get("reason", "no worker has room, or none is ready"), highlight=False, soft_wrap=True)


def _row(worker: dict[str, Any], *, is_chosen: bool) -> list[str]:
    return [
        "->" if is_chosen else "",
        worker["worker"] + (" (full)" if worker["is_full"] else ""),
        str(worker["cached_blocks"]),
        str(worker["overlap_blocks"]),
        "{running}+{waiting}".format(**worker["load"]),
        *(f"{term:.0f}" for term in worker["terms"].values()),
        f"{worker['cost']:.0f}",
    ]
