"""What is counted about remote prefills and KV transfers, each on its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from components.transfer.reads import ReadResult


class TransferMetrics:
    """The decode side's counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._remote = Counter("headrace_remote_prefills", "Prompts whose KV was pulled", registry=registry)
        self._local = Counter(
            "headrace_local_prefills", "Prompts this worker prefilled itself", ["reason"], registry=registry
        )
        self._tokens = Counter("headrace_kv_moved_tokens", "Prompt tokens whose KV was pulled", registry=registry)
        self._bytes = Counter("headrace_kv_moved_bytes", "KV bytes pulled", registry=registry)
        self._seconds = Counter("headrace_kv_transfer_seconds", "Time of KV READs by part", ["part"], registry=registry)
        self._errors = Counter("headrace_kv_transport_errors", "KV READs the transport failed", registry=registry)
        self._pieces = Counter("headrace_kv_moved_pieces", "Descriptors of KV READs", registry=registry)
        self._bandwidth = Gauge(
            "headrace_kv_link_bytes_per_second", "Measured when a prefill worker connects", ["peer"], registry=registry
        )
        self._slow = Gauge("headrace_kv_link_slow", "1 where the self-test was too slow", ["peer"], registry=registry)
        self._timeouts = Counter(
            "headrace_kv_transfer_timeouts", "KV READs that exceeded kv_transfer_timeout_ms", registry=registry
        )
        self._leases = Counter("headrace_kv_leases_lost", "Pulls whose lease had ended", registry=registry)

    def remote(self, num_tokens: int) -> None:
        """A prompt came from a prefill worker; `num_tokens` of it were pulled."""
        self._remote.inc()
        self._tokens.inc(num_tokens)

    def local(self, reason: str) -> None:
        """A prompt is prefilled here; `reason` is one of few words."""
        self._local.labels(reason).inc()

    def read(self, result: ReadResult) -> None:
        """A READ has ended."""
        if result.error is not None:
            self._errors.inc()
        else:
            self._bytes.inc(result.num_bytes)
            self._pieces.inc(result.descriptors)
        for part, ms in (("waiting", result.wait_ms), ("posting", result.post_ms), ("wire", result.wire_ms)):
            self._seconds.labels(part).inc(ms / 1e3)

    def link(self, peer: str, bytes_per_s: float, *, is_slow: bool) -> None:
        """A connection was tested."""
        self._bandwidth.labels(peer).set(bytes_per_s)
        self._slow.labels(peer).set(is_slow)

    def timed_out(self) -> None:
        """A pull was given up because its READ took too long; the READ itself may still be in flight."""
        self._timeouts.inc()

    def lease_lost(self) -> None:
        """A pull was given up because its lease had ended."""
        self._leases.inc()


class LeaseMetrics:
    """The prefill side's counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._expiries = Counter("headrace_kv_lease_expiries", "Leases that ended without a release", registry=registry)
        self._pinned = Gauge("headrace_kv_leases", "Prompts whose blocks are pinned for decode", registry=registry)

    def expired(self) -> None:
        """A lease ended without a release."""
        self._expiries.inc()

    def pinned(self, num_leases: int) -> None:
        """So many leases are held now."""
        self._pinned.set(num_leases)
