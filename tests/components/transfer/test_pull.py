"""One remote prefill as a state machine: every event in every state, and random walks against what must hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.messages import PrefillDone, PrefillProgress, pack_ids
from components.transfer.actions import Adopt, Ask, Finish, Poll, Read, Recompute, Release, Renew, Reserve, Settle
from components.transfer.pull import ENDS, Phase, Prompt, Pull, PullRules

RULES = PullRules(lease_s=9.0, timeout_s=30.0, silence_s=2.0)
TOTAL, CACHED, SIZE = 100, 32, 16


def make_pull(*, rules=RULES, max_new_tokens=10, stop_token_ids=()):
    return Pull(Prompt(TOTAL, CACHED, SIZE, max_new_tokens, stop_token_ids=stop_token_ids), rules)


def make_progress(num_tokens, first_token=CACHED):
    blocks = -(-(num_tokens - first_token) // SIZE)
    return PrefillProgress(pack_ids(range(7, 7 + blocks)), first_token, num_tokens, 0, 0.0)


def make_done(token=5, num_tokens=TOTAL):
    return PrefillDone(make_progress(num_tokens), token, None, 0.0, 0.0)


def make_pull_in(phase, *, reading=False):
    """A pull brought into `phase` by ordinary events, at time 0."""
    pull = make_pull(stop_token_ids=(99,))
    if phase is Phase.CREDIT:
        return pull
    pull.granted(0.0)
    if phase is Phase.ASKED:
        return pull
    pull.progressed(make_progress(64), 0.0)
    if phase is Phase.RESERVING:
        return pull
    pull.reserved(0.0)
    if not reading:
        pull.read_done(64, 0.0)
    match phase:
        case Phase.ADOPTED:
            pull.completed(make_done(), 0.0)
            pull.read_done(TOTAL, 0.0)
        case Phase.LOCAL:
            pull.prefill_failed("it died")
        case Phase.FINISHED:
            pull.completed(make_done(99), 0.0)
        case Phase.CANCELLED:
            pull.cancelled()
    assert pull.phase is phase
    return pull


def kinds(actions):
    return [type(action) for action in actions]


def test_the_whole_way_with_reads_while_prefill_goes_on():
    pull = make_pull()

    assert kinds(pull.granted(0.0)) == [Ask]
    assert kinds(pull.progressed(make_progress(40), 0.1)) == [Reserve]
    assert pull.reserved(0.2) == []  # only 8 tokens of a block are ready
    assert pull.progressed(make_progress(70), 0.3) == [Read(32, 64, (7, 8, 9), 32)]
    assert pull.progressed(make_progress(90), 0.4) == []  # one READ at a time
    assert pull.completed(make_done(), 0.5) == []
    assert pull.read_done(64, 0.6) == [Read(64, 100, (7, 8, 9, 10, 11), 32)]
    assert pull.read_done(100, 0.7) == [Adopt(5, None), Release()]
    assert pull.is_quiet


def test_without_overlap_the_read_waits_for_the_last_chunk():
    pull = make_pull(rules=PullRules(9.0, 30.0, overlap=False))
    pull.granted(0.0)
    pull.progressed(make_progress(64), 0.0)

    assert pull.reserved(0.0) == []
    assert kinds(pull.completed(make_done(), 0.1)) == [Read]


def test_an_announcement_that_was_lost_is_made_up_for_by_the_next():
    pull = make_pull_in(Phase.ASKED)

    assert kinds(pull.completed(make_done(), 0.1)) == [Reserve]
    assert pull.reserved(0.2) == [Read(32, 100, (7, 8, 9, 10, 11), 32)]


def test_announcements_that_come_late_or_twice_change_nothing():
    pull = make_pull_in(Phase.PULLING)

    assert pull.progressed(make_progress(64), 0.1) == []
    assert pull.progressed(make_progress(40), 0.1) == []
    assert pull.progress.num_tokens == 64


@pytest.mark.parametrize(("token", "max_new_tokens", "reason"), [(99, 10, "stop"), (5, 1, "length")])
def test_a_first_token_that_is_the_last_needs_no_kv(token, max_new_tokens, reason):
    pull = make_pull(max_new_tokens=max_new_tokens, stop_token_ids=(99,))
    pull.granted(0.0)

    actions = pull.completed(make_done(token), 0.1)

    assert actions == [Finish(token, None, reason), Release()]


def test_nothing_is_reserved_for_a_single_token():
    pull = make_pull(max_new_tokens=1)
    pull.granted(0.0)

    assert pull.progressed(make_progress(64), 0.1) == []


def test_a_stop_token_first_settles_what_was_lent_after_the_read():
    pull = make_pull_in(Phase.PULLING, reading=True)

    assert kinds(pull.completed(make_done(99), 0.1)) == [Finish, Release]
    assert kinds(pull.read_done(64, 0.2)) == [Settle]


def test_the_lease_is_renewed_at_a_third_of_its_time():
    pull = make_pull_in(Phase.PULLING)
    pull.progressed(make_progress(70), 2.9)

    assert pull.ticked(2.9) == []
    assert kinds(pull.ticked(3.0)) == [Renew]
    assert pull.ticked(6.5)[:1] != [Renew()]  # the answer is still to come
    pull.lease_answered(True, sent_at=3.0, now=6.5)
    assert Renew() in pull.ticked(6.6)


def test_data_that_arrive_after_the_lease_wait_for_its_renewal():
    pull = make_pull_in(Phase.PULLING)
    pull.completed(make_done(), 0.0)

    assert kinds(pull.read_done(TOTAL, 9.0)) == [Renew]
    assert kinds(pull.lease_answered(True, sent_at=9.0, now=9.1)) == [Adopt, Release]


def test_data_that_arrive_after_a_lost_lease_are_discarded():
    pull = make_pull_in(Phase.PULLING)
    pull.completed(make_done(), 0.0)
    pull.read_done(TOTAL, 9.0)

    actions = pull.lease_answered(False, sent_at=9.0, now=9.1)

    assert kinds(actions) == [Recompute, Release, Settle]
    assert "lease" in actions[0].reason


def test_a_renewal_is_counted_from_when_it_was_sent():
    pull = make_pull_in(Phase.PULLING)
    pull.ticked(3.0)
    pull.lease_answered(True, sent_at=3.0, now=5.0)
    pull.completed(make_done(), 5.0)

    assert kinds(pull.read_done(TOTAL, 12.0)) == [Renew]  # 3 + 9


def test_an_unanswered_renewal_counts_only_once_the_lease_is_over():
    pull = make_pull_in(Phase.PULLING)
    pull.ticked(3.0)

    assert pull.lease_answered(None, sent_at=3.0, now=5.0) == []
    pull.ticked(6.0)
    assert kinds(pull.lease_answered(None, sent_at=6.0, now=9.0)) == [Recompute, Release, Settle]


def test_renewals_do_not_end_the_silence():
    pull = make_pull(rules=PullRules(lease_s=1.0, timeout_s=30.0, silence_s=2.0))
    pull.granted(0.0)
    pull.progressed(make_progress(64), 0.0)
    for tenth in range(1, 20):
        if Renew() in pull.ticked(tenth / 10):
            pull.lease_answered(True, sent_at=tenth / 10, now=tenth / 10)

    assert Poll() in pull.ticked(2.0)


def test_silence_makes_it_ask_once_until_the_answer():
    pull = make_pull_in(Phase.ASKED)

    assert pull.ticked(1.9) == []
    assert pull.ticked(2.0) == [Poll()]
    assert pull.ticked(5.0) == []
    pull.poll_answered()
    assert pull.progressed(PrefillProgress(b"", 0, 0, 0, 0.0), 5.0) == []  # still queued there
    assert pull.ticked(7.0) == [Poll()]


def test_a_read_that_takes_too_long_is_given_up_and_settled_when_it_ends():
    pull = make_pull_in(Phase.PULLING, reading=True)

    actions = pull.ticked(30.0)

    assert kinds(actions) == [Recompute, Release]
    assert "kv_transfer_timeout_ms" in actions[0].reason
    assert not pull.is_quiet
    assert kinds(pull.read_failed("at last")) == [Settle]
    assert pull.is_quiet


@pytest.mark.parametrize(
    "progress",
    [
        make_progress(TOTAL + 1),
        make_progress(64, first_token=CACHED + SIZE),
        PrefillProgress(b"12345", CACHED, 64, 0, 0.0),
    ],
)
def test_announcements_that_cannot_be_true_are_not_believed(progress):
    pull = make_pull_in(Phase.ASKED)

    assert kinds(pull.progressed(progress, 0.1)) == [Recompute, Release]


def test_an_end_before_the_whole_prompt_is_not_believed():
    pull = make_pull_in(Phase.PULLING)

    assert kinds(pull.completed(make_done(num_tokens=90), 0.1)) == [Recompute, Release, Settle]


def test_the_death_of_prefill_is_harmless_once_everything_is_here():
    pull = make_pull_in(Phase.PULLING)
    pull.completed(make_done(), 0.0)
    pull.read_done(TOTAL, 9.0)  # waits for a renewal

    assert pull.prefill_failed("it died") == []


EVENTS = {
    "granted": lambda pull: pull.granted(0.5),
    "progressed": lambda pull: pull.progressed(make_progress(80), 0.5),
    "completed": lambda pull: pull.completed(make_done(), 0.5),
    "reserved": lambda pull: pull.reserved(0.5),
    "lease held": lambda pull: pull.lease_answered(True, sent_at=0.4, now=0.5),
    "lease lost": lambda pull: pull.lease_answered(False, sent_at=0.4, now=0.5),
    "no lease answer": lambda pull: pull.lease_answered(None, sent_at=0.4, now=0.5),
    "poll failed": lambda pull: pull.poll_failed("silent"),
    "prefill failed": lambda pull: pull.prefill_failed("it died"),
    "cancelled": lambda pull: pull.cancelled(),
    "ticked": lambda pull: pull.ticked(0.5),
}
EXPECTED = {
    (Phase.CREDIT, "granted"): [Ask],
    (Phase.CREDIT, "poll failed"): [Recompute, Release],
    (Phase.CREDIT, "prefill failed"): [Recompute, Release],
    (Phase.CREDIT, "cancelled"): [Release],
    (Phase.ASKED, "progressed"): [Reserve],
    (Phase.ASKED, "completed"): [Reserve],
    (Phase.ASKED, "lease lost"): [Recompute, Release],
    (Phase.ASKED, "poll failed"): [Recompute, Release],
    (Phase.ASKED, "prefill failed"): [Recompute, Release],
    (Phase.ASKED, "cancelled"): [Release],
    (Phase.RESERVING, "reserved"): [Read],
    (Phase.RESERVING, "lease lost"): [Recompute, Release, Settle],
    (Phase.RESERVING, "poll failed"): [Recompute, Release, Settle],
    (Phase.RESERVING, "prefill failed"): [Recompute, Release, Settle],
    (Phase.RESERVING, "cancelled"): [Release, Settle],
    (Phase.PULLING, "progressed"): [Read],
    (Phase.PULLING, "completed"): [Read],
    (Phase.PULLING, "lease lost"): [Recompute, Release, Settle],
    (Phase.PULLING, "poll failed"): [Recompute, Release, Settle],
    (Phase.PULLING, "prefill failed"): [Recompute, Release, Settle],
    (Phase.PULLING, "cancelled"): [Release, Settle],
}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(phase, event):
    pull = make_pull_in(phase)

    actions = EVENTS[event](pull)

    assert kinds(actions) == EXPECTED.get((phase, event), [])
    if phase in ENDS:
        assert pull.phase is phase


@pytest.mark.parametrize("event", EVENTS)
def test_events_while_a_read_of_an_ended_pull_is_in_flight_wait_for_it(event):
    pull = make_pull_in(Phase.PULLING, reading=True)
    pull.cancelled()

    assert EVENTS[event](pull) == []
    assert kinds(pull.read_done(64, 1.0)) == [Settle]


class Walk:
    """Applies random events and checks what must hold after each."""

    def __init__(self):
        self.pull = make_pull(stop_token_ids=(99,))
        self.actions = []
        self.now = 0.0
        self.reading = None

    def step(self, event, number):
        self.now += number / 10
        before = self.pull.is_over
        match event:
            case "read done" | "read failed" if self.reading is None:
                return
            case "read done":
                read, self.reading = self.reading, None
                actions = self.pull.read_done(read.stop, self.now)
            case "read failed":
                self.reading = None
                actions = self.pull.read_failed("broken")
            case "progressed":
                actions = self.pull.progressed(make_progress(CACHED + number * 2), self.now)
            case "completed":
                actions = self.pull.completed(make_done(99 if number == 7 else 5), self.now)
            case "lease held" | "lease lost" | "no lease answer":
                held = {"lease held": True, "lease lost": False}.get(event)
                actions = self.pull.lease_answered(held, sent_at=self.now - 0.1, now=self.now)
            case "granted":
                actions = self.pull.granted(self.now)
            case "ticked":
                actions = self.pull.ticked(self.now)
            case "reserved":
                actions = self.pull.reserved(self.now) if Reserve() in self.actions else []
            case _:
                actions = EVENTS[event](self.pull)
        if before:
            assert kinds(actions) in ([], [Settle])
        for action in actions:
            self.check(action)
            self.actions.append(action)

    def check(self, action):
        match action:
            case Read():
                assert self.reading is None
                assert action.start == self.pull.have < action.stop
                self.reading = action
            case Adopt():
                assert self.pull.have == TOTAL
                assert self.now < self.pull._lease_until
            case Settle():
                assert self.reading is None

    def finish(self):
        if self.reading is not None:
            self.step("read failed", 0)
        self.step("cancelled", 0)
        found = kinds(self.actions)
        assert self.pull.is_quiet
        assert found.count(Release) == 1
        assert sum(found.count(kind) for kind in (Adopt, Finish, Recompute)) <= 1
        assert found.count(Settle) == (Reserve in found and Adopt not in found)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*EVENTS, "read done", "read done", "read failed"]), st.integers(0, 34))))
def test_random_walks_end_well(steps):
    walk = Walk()
    walk.step("granted", 0)
    for event, number in steps:
        walk.step(event, number)
    walk.finish()
