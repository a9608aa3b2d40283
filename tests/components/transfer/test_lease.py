"""Leases: granted once, renewed, shortened, over."""

from __future__ import annotations

from components.transfer.lease import MARGIN, LeaseTable


def make_table(*, lease_s=10.0):
    table = LeaseTable()
    table.grant("a", "decode/0", lease_s=lease_s, now=0.0)
    return table


def test_prefill_waits_longer_than_decode_believes():
    table = make_table()

    assert table.expired(10.0) == []
    assert table.expired(10.0 * (1 + MARGIN)) == ["a"]


def test_a_second_announcement_does_not_prolong_it():
    table = make_table()

    table.grant("a", "decode/0", lease_s=10.0, now=5.0)

    assert table.next_expiry_s == 12.5


def test_a_renewal_prolongs_and_never_shortens():
    table = make_table()

    assert table.renew("a", lease_s=10.0, now=5.0)
    assert table.next_expiry_s == 17.5
    assert table.renew("a", lease_s=1.0, now=6.0)
    assert table.next_expiry_s == 17.5


def test_a_lease_that_is_over_is_not_revived_even_before_it_is_collected():
    table = make_table()

    assert not table.renew("a", lease_s=10.0, now=12.5)
    assert table.expired(12.5) == ["a"]


def test_ending_is_idempotent_and_unknown_leases_are_not_held():
    table = make_table()

    assert table.end("a")
    assert not table.end("a")
    assert not table.renew("a", lease_s=10.0, now=0.0)
    assert table.next_expiry_s is None
    assert len(table) == 0


def test_shortening_only_shortens():
    table = make_table()

    table.shorten("a", to_s=20.0)
    assert table.next_expiry_s == 12.5
    table.shorten("a", to_s=1.0)
    assert table.next_expiry_s == 1.0
    table.shorten("unknown", to_s=1.0)
    assert "unknown" not in table


def test_leases_are_found_by_peer():
    table = make_table()
    table.grant("b", "decode/1", lease_s=1.0, now=0.0)

    assert table.of_peer("decode/1") == ["b"]
    assert table.of_peer("decode/2") == []
