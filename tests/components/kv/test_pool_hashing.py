"""Chained block hashes: equal exactly for equal prefixes under the same salt."""

from __future__ import annotations

from components.kv.hashing import chain_hashes, root_hash
from components.messages import BLOCK_HASH_BYTES, pack_ids


def hashes(tokens: list[int], *, unit: int = 4, salt: str | None = None) -> list[bytes]:
    return chain_hashes(pack_ids(tokens), unit, parent=root_hash(salt))


def test_only_full_units_are_hashed() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]
    assert {len(h) for h in hashes(list(range(40)))} == {BLOCK_HASH_BYTES}


def test_a_hash_depends_on_all_tokens_before_it_and_on_none_after() -> None:
    base, other_end, other_start = (
        hashes([1, 2, 3, 4, 5, 6, 7, 8]),
        hashes([1, 2, 3, 4, 5, 6, 7, 9]),
        hashes([0, 2, 3, 4, 5, 6, 7, 8]),
    )
    assert base[0] == other_end[0]
    assert base[1] != other_end[1]
    assert set(base).isdisjoint(other_start)


def test_a_chain_continues_from_any_of_its_hashes() -> None:
    tokens = list(range(16))
    whole = hashes(tokens)
    assert chain_hashes(pack_ids(tokens[8:]), 4, parent=whole[1]) == whole[2:]


def test_salts_keep_tenants_apart() -> None:
    assert len({hashes([1, 2, 3, 4], salt=salt)[0] for salt in (None, "a", "b")}) == 3
    assert hashes([1, 2, 3, 4], salt="") == hashes([1, 2, 3, 4])
