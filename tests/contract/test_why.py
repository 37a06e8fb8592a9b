"""`why`: the gates that keep a job from running, named from one snapshot, each alone and every two of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator

import pytest

from duly.model import HELD, PARKED, Change, Claimed, Envelope, NewJob, State, TaskLimits, Terms
from duly.rules.why import Holder
from duly.store import lanes, ops
from duly.store.lanes import Walk
from duly.store.ops import Replay
from tests.contract.stores import Store, new_id, new_token


def why(store: Store, job_id: str):
    return store.run(ops.why(job_id, now=store.now))


def alive(store: Store, tasks=("work",), queues=("default",)) -> None:
    store.run(ops.register("w1", host="h", pid=1, queues=queues, tasks=tasks, beat_ms=10_000, now=store.now))


def test_b10_an_unknown_job_has_no_gate(store):
    assert why(store, new_id()) is None


def test_b10_not_due_names_the_time_and_how_long_it_is(store):
    [job] = store.enqueue(delay_ms=90_000)
    assert why(store, job).gate == "not_due"
    assert "in 1m 30s" in why(store, job).sentence
    store.now += 90_000
    assert why(store, job).gate == "no_worker"


def test_b10_a_retry_names_the_failure_it_waits_after(store):
    [job] = store.enqueue()
    store.retry(*store.claim(), message="the other side hung up")
    answer = why(store, job)
    assert (answer.gate, "the other side hung up" in answer.sentence) == ("not_due", True)


@pytest.mark.parametrize(("kind", "name"), [("queue", "default"), ("task", "work")])
def test_b10_a_pause_has_its_author_reason_and_end(store, kind, name):
    alive(store)
    [job] = store.enqueue()
    store.run(ops.pause(kind, name, by="ann", why="the mail server is down", until_ms=60_000, now=store.now))
    answer = why(store, job)
    assert answer.gate == "paused"
    assert answer.sentence == f"{kind} '{name}' is paused by ann until 2027-01-15 08:01:00 UTC: the mail server is down"
    store.now += 60_000
    alive(store)
    assert why(store, job).gate == "turn"


def test_b10_both_pauses_are_named(store):
    alive(store)
    [job] = store.enqueue()
    for kind, name in (("task", "work"), ("queue", "default")):
        store.run(ops.pause(kind, name, by="ann", why="so", now=store.now))
    answer = why(store, job)
    assert answer.sentence == "queue 'default' is paused by ann: so"
    assert [other.sentence for other in answer.others] == ["task 'work' is paused by ann: so"]


def test_b10_a_task_that_no_living_worker_knows_is_named(store):
    [job] = store.enqueue()
    alive(store, tasks=["other"])
    assert why(store, job).gate == "unknown_task"
    alive(store, queues=["other"])
    assert why(store, job).gate == "unknown_task"
    alive(store)
    assert why(store, job).gate == "turn"
    store.now += 30_000
    assert why(store, job).gate == "no_worker"


def test_b10_a_lease_names_its_holder_and_its_end(store):
    [job] = store.enqueue(lease_ms=30_000)
    store.claim()
    assert why(store, job).sentence == "it runs, attempt 1 of 5, on lease to w1 until 2027-01-15 08:00:30 UTC"
    store.now += 40_000
    assert "whose lease ended 10s ago: no worker is alive to rescue it" in why(store, job).sentence
    alive(store)
    assert "whose lease ended 10s ago: it is rescued when that is seen twice" in why(store, job).sentence
    store.run(ops.cancel([job], now=store.now))
    assert "; it was asked to stop at 20" in why(store, job).sentence


def test_b10_the_jobs_ahead_are_counted(store):
    alive(store)
    first, second = store.enqueue(2)
    [urgent] = store.enqueue(priority=5)
    assert why(store, urgent).sentence == "it is next in queue 'default'"
    assert why(store, first).sentence == "1 job is ahead of it in queue 'default'"
    assert why(store, second).facts.ahead == 2


def test_b10_a_suspect_waits_to_run_alone(store):
    [job] = store.enqueue()
    store.claim()
    store.now += 31_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    alive(store)
    assert why(store, job).gate == "suspect"


def test_b10_an_ended_job_names_its_end(store):
    [dead] = store.dead()
    assert why(store, dead).sentence.startswith("it is dead because:")
    [late] = store.enqueue(expires_ms=1000)
    store.now += 1000
    assert why(store, late).gate == "expired"
    store.run(ops.expire([late], now=store.now))
    assert why(store, late).sentence == "it is cancelled because: expired"


def test_b10_a_waiting_job_names_its_reason(store):
    [job] = store.enqueue()
    store.finish(*store.claim(), Change(State.WAITING, reason="approval", give_back_attempt=True))
    assert why(store, job).sentence == "it waits for: approval"


def test_b10_waiting_until_a_time_is_not_reported_as_not_due(store):
    [job] = store.enqueue()
    alive(store)
    store.finish(*store.claim(), Change(State.WAITING, reason="approval", after_ms=60_000, give_back_attempt=True))
    answer = why(store, job)
    assert answer.sentence == "it waits for: approval, until 2027-01-15 08:01:00 UTC at the latest"
    assert answer.others == ()


def test_j19_a_parked_job_names_the_worker_it_needs(store):
    [job] = store.enqueue()
    alive(store, tasks=["other"])
    store.run(ops.park("default", now=store.now))
    answer = why(store, job)
    assert answer.gate == "parked"
    assert answer.sentence == (
        "it is parked (no worker knows this task): start a worker that knows task 'work' "
        "and serves queue 'default', and it is ready at its next beat"
    )
    store.run(ops.wake({"work": 1}, ["default"]))
    alive(store)
    assert why(store, job).gate == "turn"


def test_j19_a_job_parked_for_its_schema_version_names_the_version(store):
    job = NewJob(new_id(), "{}", envelope=Envelope(schema_version=2))
    store.run(ops.enqueue(Terms("work"), [job], now=store.now))
    reason = f"{PARKED}needs schema version 2 of task 'work'"
    store.finish(*store.claim(), Change(State.WAITING, reason=reason, give_back_attempt=True))
    alive(store)
    answer = why(store, job.id)
    assert answer.gate == "parked"
    assert answer.sentence == (
        "it is parked (needs schema version 2 of task 'work'): start a worker that knows task 'work' "
        "in schema version 2 and serves queue 'default', and it is ready at its next beat"
    )


# Lanes


LANE = "send:acme"
MINUTE = 60_000


def limit(store: Store, cap: int | None = None, rate: int | None = None, *, task: str = "send") -> None:
    store.run(lanes.declare({task: TaskLimits(task, cap, rate, MINUTE if rate else None)}))


def add(store: Store, count: int = 1, *, lane: str = LANE, ordering_dead: str | None = None, **terms) -> list[str]:
    jobs = [NewJob(new_id(), "{}", lane=lane) for _ in range(count)]
    asked = Terms(**{"task": "send", **terms}, ordering_dead=ordering_dead)
    store.run(ops.enqueue(asked, jobs, now=store.now))
    return [job.id for job in jobs]


def take(store: Store, limit: int = 100, *, task: str = "send", queue: str = "default", **more) -> list[Claimed]:
    walks = [Walk(task, ordered=more.pop("ordered", False))]
    asked = {"limit": limit, "lanes": 100, "token": new_token(), "worker": "host:1", "now": store.now, **more}
    return store.run(lanes.claim(queue, walks, **asked)).jobs


def sending(store: Store) -> None:
    alive(store, tasks=["send"])


def test_b10_a_full_cap_names_its_holders(store):
    limit(store, cap=2)
    first, second, third = add(store, 3)
    sending(store)
    take(store)
    answer = why(store, third)
    assert answer.gate == "cap"
    assert answer.sentence == (
        f"2 of 2 jobs of lane 'send:acme' run, the most its cap allows: {first} on host:1, {second} on host:1"
    )
    assert answer.facts.holders == (Holder(first, "host:1"), Holder(second, "host:1"))
    [elsewhere] = add(store, lane="send:else")
    assert why(store, elsewhere).sentence == "it is next in lane 'send:else'"
    limit(store, cap=3)
    assert why(store, third).sentence == "it is next in lane 'send:acme'"
    limit(store)
    assert why(store, third).gate == "turn"


def test_b10_a_cap_set_at_run_time_names_its_author(store):
    limit(store, cap=9)
    *held, last = add(store, 8)
    sending(store)
    take(store, 7)
    store.run(lanes.limit("send", cap=5, by="ops", why="provider slow", now=store.now))
    answer = why(store, last)
    assert answer.sentence.startswith(
        "7 of 5 jobs of lane 'send:acme' run, the most its cap allows (set by ops at run time: provider slow): "
        f"{held[0]} on host:1, "
    )
    assert answer.sentence.endswith(f"{held[4]} on host:1, and 2 more")
    assert (answer.facts.cap, answer.facts.cap_set_by, answer.facts.cap_set_why) == (5, "ops", "provider slow")
    assert (answer.facts.running, len(answer.facts.holders)) == (7, 5)
    store.run(lanes.limit("send", cap=0, by="ops", why="", now=store.now))
    assert (why(store, last).gate, why(store, last).facts.cap) == ("turn", None)


def test_b10_a_used_up_rate_names_its_end(store):
    limit(store, rate=2)
    *_, last = add(store, 4)
    sending(store)
    assert why(store, last).facts.permits == 0
    take(store, 1)
    store.now += 10_000
    sending(store)
    assert (why(store, last).gate, why(store, last).facts.permits, why(store, last).facts.permit_at) == (
        "turn",
        1,
        None,
    )
    take(store, 1)
    answer = why(store, last)
    assert answer.gate == "rate"
    assert answer.sentence == "its rate of 2/min is used up until 2027-01-15 08:01:00 UTC, in 50s 250ms"
    store.now = answer.facts.permit_at - 1
    sending(store)
    assert (why(store, last).gate, len(take(store))) == ("rate", 0)
    store.now += 1
    assert (why(store, last).gate, why(store, last).facts.permits) == ("turn", 1)
    assert len(take(store)) == 1


def test_b10_a_lowered_rate_names_the_time_of_the_next_start(store):
    limit(store, rate=9)
    *_, last = add(store, 7)
    sending(store)
    for _ in range(3):
        take(store, 2)
        store.now += 1000
    store.run(lanes.limit("send", rate_count=3, rate_ms=MINUTE, by="ops", why="too fast", now=store.now))
    answer = why(store, last)
    assert "its rate of 3/min (set by ops at run time: too fast) is used up until" in answer.sentence
    assert (answer.facts.permits, answer.facts.rate_set_by, answer.facts.cap_set_by) == (6, "ops", None)
    store.now = answer.facts.permit_at - 1
    sending(store)
    assert take(store) == []
    store.now += 1
    assert why(store, last).facts.permits == 2
    assert len(take(store)) == 1


def test_b10_permits_of_an_hour_that_has_not_come_count_from_now(store):
    limit(store, rate=1)
    *_, last = add(store, 2)
    take(store, 1)
    store.now -= 3_600_000
    sending(store)
    store.query("update duly_job set due_at = 1")
    answer = why(store, last)
    assert (answer.gate, answer.facts.permit_at - store.now) == ("rate", MINUTE + 250)


def test_b10_an_order_names_its_first_job(store):
    first, second, third = add(store, 3, ordering_dead="block")
    sending(store)
    assert why(store, first).sentence == "it is next in lane 'send:acme'"
    answer = why(store, third)
    assert answer.gate == "order"
    due = "2027-01-15 08:00:00 UTC"
    assert answer.sentence == f"it waits behind job {first} (ready, due {due}) in the order of 'send:acme'"
    assert (answer.facts.ahead, answer.facts.head_id, answer.facts.seq) == (2, first, 3)
    [job] = take(store, ordered=True)
    assert f"behind job {first} (running on host:1) in" in why(store, second).sentence
    store.retry(job, after_ms=90_000)
    assert f"behind job {first} (scheduled, due 2027-01-15 08:01:30 UTC) in" in why(store, second).sentence
    store.query("update duly_job set state = 'waiting' where id = ?", first)
    assert f"behind job {first} (waiting) in" in why(store, second).sentence


def test_b10_a_dead_job_that_blocks_its_order_is_named_with_what_to_do(store):
    dead, job, later = add(store, 3, ordering_dead="block")
    sending(store)
    store.kill(*take(store, ordered=True))
    for blocked in (job, later):
        answer = why(store, blocked)
        assert (answer.gate, answer.facts.blocked_by) == ("order", dead)
        assert answer.sentence == (
            f"job {dead} of its order is dead and blocks it: replay or resolve that one "
            f"(duly dead replay {dead}, or duly dead resolve {dead} --why …)"
        )
    again = new_id()
    store.run(ops.replay([Replay(dead, again)], now=store.now))
    assert why(store, job).facts.blocked_by is None
    assert f"it waits behind job {again} (ready" in why(store, job).sentence
    store.kill(*take(store, ordered=True))
    store.run(ops.resolve([again], by="ann", why="done by hand", now=store.now))
    assert why(store, job).gate == "turn"


def test_b10_a_dead_job_that_is_skipped_blocks_nothing(store):
    add(store, ordering_dead="skip")
    store.kill(*take(store, ordered=True))
    [job] = add(store, ordering_dead="skip")
    sending(store)
    assert why(store, job).gate == "turn"


def test_b10_a_dead_job_behind_it_in_the_order_blocks_nothing(store):
    dead, job = add(store, 2, ordering_dead="block")
    sending(store)
    store.kill(*take(store, ordered=True))
    store.query("update duly_done set seq = 9 where id = ?", dead)
    assert why(store, job).gate == "turn"
    store.now = store.run(ops.clock())
    store.query("update duly_job set due_at = 1")
    sending(store)
    assert store.query("select gate from duly_why") == [("turn",)]


def test_b10_jobs_enqueued_before_a_lane_kept_an_order_are_waited_for(store):
    [old] = add(store)
    sending(store)
    take(store)
    [job] = add(store, ordering_dead="block")
    assert take(store, ordered=True) == []
    assert why(store, job).sentence == f"it waits behind job {old} (running on host:1) in the order of 'send:acme'"


def test_b10_the_jobs_ahead_in_a_lane_are_counted_in_its_order(store):
    sending(store)
    first, second = add(store, 2)
    [urgent] = add(store, priority=5)
    add(store, 3, lane="send:else")
    store.enqueue(3, task="send")
    assert why(store, urgent).sentence == "it is next in lane 'send:acme'"
    assert why(store, first).sentence == "1 job is ahead of it in lane 'send:acme'"
    assert why(store, second).facts.ahead == 2
    [plain] = store.enqueue(task="send")
    assert why(store, plain).facts.ahead == 3


# Every gate alone, and every two of them


def shut(store: Store, gates: Collection[str], name: str) -> str:
    """Enqueue a job of a task, queue and lane of that name, before which just these gates are shut."""
    ordered = bool({"dead before it", "head"} & set(gates))
    terms = {"task": name, "queue": name, "lane": f"{name}:k", "ordering_dead": "block" if ordered else None}
    limit(store, rate=100, task=name)
    for gate in BEFORE:
        if gate in gates:
            BEFORE[gate](store, terms)
    limit(store, 1 if "cap" in gates else None, 1 if "rate" in gates else None, task=name)
    [job] = add(store, **terms, **{key: value for gate in gates for key, value in TERMS.get(gate, {}).items()})
    for gate in gates:
        for statement in CHANGED.get(gate, ()):
            store.query(statement, job)
    for gate, kind in (("queue paused", "queue"), ("task paused", "task")):
        if gate in gates:
            store.run(ops.pause(kind, name, by="ann", why="so", now=store.now))
    store.query("delete from duly_worker")
    if "no worker" not in gates:
        alive(store, tasks=["other" if "unknown task" in gates else name], queues=[name])
    return job


def one_runs(store: Store, terms: dict) -> None:
    add(store, **{**terms, "ordering_dead": None})
    assert take(store, 1, task=terms["task"], queue=terms["queue"])


def one_has_run(store: Store, terms: dict) -> None:
    add(store, **{**terms, "ordering_dead": None})
    store.succeed(*take(store, 1, task=terms["task"], queue=terms["queue"]))


def one_has_died(store: Store, terms: dict) -> None:
    add(store, **terms)
    store.kill(*take(store, 1, task=terms["task"], queue=terms["queue"], ordered=True))


def one_comes_first(store: Store, terms: dict) -> None:
    add(store, **terms)


# In the order in which they can be shut.
BEFORE: dict[str, Callable[[Store, dict], None]] = {
    "rate": one_has_run,
    "dead before it": one_has_died,
    "cap": one_runs,
    "head": one_comes_first,
}
TERMS = {"not due": {"delay_ms": 90_000}, "expired": {"expires_ms": 0}}
RUNNING = "state = 'running', token = 1000000000, worker = 'w1', attempt = 1, lease_until = 1900000000000"
CHANGED = {
    "suspect": ["update duly_job set suspect = true where id = ?"],
    "running": [f"update duly_job set {RUNNING} where id = ?"],
    "parked": [f"update duly_job set state = 'waiting', parked_version = 1, reason = '{PARKED}so' where id = ?"],
    "held": [f"update duly_job set state = 'waiting', reason = '{HELD}so' where id = ?"],
    "waiting": ["update duly_job set state = 'waiting', reason = 'approval' where id = ?"],
}
# The gates in their order, and what they are called in the answer.
GATES = {
    "running": "lease",
    "parked": "parked",
    "held": "held",
    "waiting": "waiting",
    "expired": "expired",
    "not due": "not_due",
    "queue paused": "paused",
    "task paused": "paused",
    "no worker": "no_worker",
    "unknown task": "unknown_task",
    "suspect": "suspect",
    "dead before it": "order",
    "head": "order",
    "cap": "cap",
    "rate": "rate",
}
STATES = ("running", "parked", "held", "waiting")
NEVER = {("no worker", "unknown task")}
SENTENCES = {
    "lease": "it runs, attempt 1 of 5, on lease to w1 until",
    "parked": "it is parked (so): start a worker",
    "held": "it is held (so): look whether",
    "waiting": "it waits for: approval",
    "expired": "it was to start by 20",
    "not_due": "it is not due before 20",
    "no_worker": "no worker is alive",
    "unknown_task": "no living worker knows task",
    "suspect": "its last worker stopped beating",
    "cap": "1 of 1 job of lane",
    "rate": "its rate of 1/min is used up until 20",
}


def worlds() -> Iterator[tuple[str, ...]]:
    yield ()
    for gate in GATES:
        yield (gate,)
    for one, two in itertools.combinations(GATES, 2):
        both_are_states = one in STATES and two in STATES  # and these wait for no due time
        if not both_are_states and not (one in STATES and two == "not due") and (one, two) not in NEVER:
            yield one, two


def expected(gates: Collection[str]) -> list[str]:
    """The answers in their order, each once."""
    if not gates:
        return ["turn"]
    if "running" in gates:
        return ["lease"]
    found = {GATES[gate] for gate in gates}
    if "parked" in gates:  # its own sentence asks for a worker
        found -= {"no_worker", "unknown_task"}
    if "cap" in gates and {"dead before it", "head"} & set(gates):
        found.add("order")  # in an order, what runs comes first
    return [name for name in dict.fromkeys(GATES.values()) if name in found]


@pytest.mark.slow
def test_b10_every_gate_is_named_alone_and_beside_every_other(store):
    wrong = {}
    for number, gates in enumerate(worlds()):
        answer = why(store, shut(store, gates, f"t{number}"))
        told = [(answer.gate, answer.sentence), *((other.gate, other.sentence) for other in answer.others)]
        if list(dict.fromkeys(gate for gate, _ in told)) != expected(gates):
            wrong[gates] = told
        for gate, sentence in told:
            if not sentence.startswith(SENTENCES.get(gate, "")):
                wrong[gates] = told
    assert wrong == {}


@pytest.mark.slow
def test_b10_the_view_names_the_same_gate_for_every_live_job(store):
    store.now = store.run(ops.clock())
    wrong = {}
    for number, gates in enumerate(worlds()):
        job = shut(store, gates, f"t{number}")
        [(task, queue, state, gate, detail)] = store.query(
            "select task, queue, state, gate, detail from duly_why where id = ?", job
        )
        if (task, queue, gate) != (f"t{number}", f"t{number}", expected(gates)[0]) or not detail:
            wrong[gates] = (state, gate, detail)
    assert wrong == {}
    [(live,)] = store.query("select count(*) from duly_job")
    assert len(store.query("select id from duly_why")) == live


def test_b10_the_view_has_a_word_for_each_gate(store):
    store.now = store.run(ops.clock())
    seen = {}
    for number, gates in enumerate([(), *((gate,) for gate in GATES)]):
        job = shut(store, gates, f"t{number}")
        [(detail,)] = store.query("select detail from duly_why where id = ?", job)
        seen[gates[0] if gates else "turn"] = re.sub(
            r"[0-9a-f-]{36}", "ID", re.sub(r"\d{4}-\S+ \S+ UTC", "THEN", detail)
        )
    assert seen == {
        "turn": "in lane t0:k",
        "running": "w1 has it until THEN",
        "parked": "so",
        "held": "so",
        "waiting": "for: approval",
        "expired": "it was to start by THEN",
        "not due": "before THEN",
        "queue paused": "the queue, by ann: so",
        "task paused": "the task, by ann: so",
        "no worker": "no worker is alive",
        "unknown task": "no living worker knows it and serves its queue",
        "suspect": "it waits to run alone",
        "dead before it": "job ID is dead and blocks it",
        "head": "job ID comes first",
        "cap": "1 of 1 run",
        "rate": "1 of 1 have begun within 60000 ms",
    }


def test_b10_an_ended_job_has_one_gate_and_is_not_in_the_view(store):
    [job] = add(store, ordering_dead="block")
    store.kill(*take(store, ordered=True))
    store.run(ops.pause("task", "send", by="ann", why="so", now=store.now))
    assert (why(store, job).gate, why(store, job).others) == ("ended", ())
    assert store.query("select id from duly_why") == []
