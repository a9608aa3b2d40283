"""Words of messages: counts with their nouns."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """`0 replicas`, `1 replica`, `1.5 GPUs`: for nouns whose plural only adds an s."""
    told = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{told} {noun}" if number == 1 else f"{told} {noun}s"


def there_are(number: int) -> str:
    """`there is 1`, `there are 2`."""
    return f"there is {number}" if number == 1 else f"there are {number}"
