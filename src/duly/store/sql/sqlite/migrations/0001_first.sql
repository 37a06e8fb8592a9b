-- The tables of duly on SQLite and D1. Times are whole milliseconds UTC, payloads and results JSON text,
-- ids UUIDv7 text made by the client.
--
-- A job lives in duly_job until it has ended, then in duly_done. The states of an ended job appear in
-- duly_job only inside the transaction that ends it: the sections `ended_*` find it there, and its last
-- one moves it out.

create table duly_meta (
    name text not null primary key,
    value text not null
) strict;

-- The number of this schema, and the oldest code that can work with it.
insert into duly_meta (name, value) values ('schema', '1'), ('works_with', '1');

create table duly_job (
    id text not null primary key,
    task text not null check (task <> ''),
    queue text not null check (queue <> ''),
    priority integer not null,
    state text not null,
    key text,
    fingerprint text,
    key_ttl_ms integer,
    attempt integer not null default 0,
    max_attempts integer not null check (max_attempts > 0),
    crashes integer not null default 0,
    -- Its last worker stopped beating while it ran: it runs alone until one attempt ends.
    suspect integer not null default 0 check (suspect in (0, 1)),
    -- Parked until a worker comes that knows its task in this schema version or a later one.
    parked_version integer,
    created_at integer not null,
    due_at integer,
    expires_at integer,
    lease_ms integer not null check (lease_ms > 0),
    token integer,
    worker text,
    lease_until integer,
    last_token integer,
    heartbeat_at integer,
    progress real check (progress between 0 and 100),
    progress_message text,
    cancel_requested_at integer,
    reason text,
    error text,
    result text,
    finished_at integer,
    keep_ms integer not null check (keep_ms >= 0),
    result_ttl_ms integer not null check (result_ttl_ms >= 0),
    batch_id text,
    schedule text,
    on_dead text,
    origin text,
    replay_of text,
    replay_count integer not null default 0,
    -- Last, so that nothing has to be read past a large one.
    envelope text,
    payload text not null,
    constraint a_key_has_its_terms check ((key is null) = (fingerprint is null) and (key is null) = (key_ttl_ms is null)),
    constraint what_is_parked_waits check (parked_version is null or state not in ('scheduled', 'ready', 'running')),
    -- The shape of a row follows from its state. The two that are written most come first.
    constraint shape_of_its_state check (case state
        when 'running' then token is not null and lease_until is not null and finished_at is null
                            and attempt between 1 and max_attempts
        when 'ready' then token is null and lease_until is null and finished_at is null and due_at is not null
                          and attempt between 0 and max_attempts - 1
        when 'scheduled' then token is null and lease_until is null and finished_at is null and due_at is not null
                              and attempt between 0 and max_attempts - 1
        when 'waiting' then token is null and lease_until is null and finished_at is null
                            and attempt between 0 and max_attempts - 1
        when 'succeeded' then token is null and lease_until is null and finished_at is not null
        when 'partial' then token is null and lease_until is null and finished_at is not null
        when 'dead' then token is null and lease_until is null and finished_at is not null
        when 'cancelled' then token is null and lease_until is null and finished_at is not null
        else 0 end)
) strict, without rowid;

-- What a claim walks, in its order; suspects stand apart. Every other index is partial and small.
create index duly_job_ready on duly_job (queue, suspect, priority desc, due_at, id) where state = 'ready';
create index duly_job_scheduled on duly_job (queue, due_at, id) where state = 'scheduled';
create index duly_job_waiting on duly_job (queue, due_at) where state = 'waiting' and parked_version is null;
create index duly_job_parked on duly_job (queue, task, parked_version) where parked_version is not null;
-- Rescue reads all of it, recall one token. Beats change neither, so they leave it alone.
create index duly_job_running on duly_job (token) where token is not null;
create index duly_job_expires on duly_job (expires_at) where expires_at is not null;
create index duly_job_batch on duly_job (batch_id) where batch_id is not null;

create table duly_done (
    id text not null primary key,
    task text not null,
    queue text not null,
    priority integer not null,
    state text not null check (state in ('succeeded', 'partial', 'dead', 'cancelled')),
    key text,
    fingerprint text,
    key_ttl_ms integer,
    attempt integer not null,
    max_attempts integer not null,
    crashes integer not null,
    created_at integer not null,
    due_at integer,
    expires_at integer,
    lease_ms integer not null,
    token integer,
    worker text,
    progress real,
    progress_message text,
    cancel_requested_at integer,
    reason text,
    error text,
    result text,
    result_until integer,
    finished_at integer not null,
    keep_ms integer not null,
    result_ttl_ms integer not null,
    -- When prune next has something to take from this row: its result, or all of it. Never for a dead one.
    prune_at integer,
    batch_id text,
    schedule text,
    on_dead text,
    origin text,
    replay_of text,
    replay_count integer not null,
    replayed_as text,
    resolved_at integer,
    resolved_by text,
    resolved_why text,
    -- Last, so that nothing has to be read past a large one.
    envelope text,
    payload text not null,
    constraint dead_is_kept check (state <> 'dead' or prune_at is null)
) strict, without rowid;

create index duly_done_prune on duly_done (prune_at) where prune_at is not null;
create index duly_done_dead on duly_done (id) where state = 'dead';
create index duly_done_partial on duly_done (id) where state = 'partial';
create index duly_done_batch on duly_done (batch_id) where batch_id is not null;

create table duly_key (
    task text not null,
    key text not null,
    job_id text not null,
    state text not null check (state in ('live', 'succeeded')),
    fingerprint text not null,
    result text,
    -- The result was too large to be kept with the key.
    result_dropped integer not null default 0 check (result_dropped in (0, 1)),
    expires_at integer,
    primary key (task, key),
    constraint live_does_not_expire check ((state = 'live') = (expires_at is null))
) strict, without rowid;

create index duly_key_expires on duly_key (expires_at) where expires_at is not null;

create table duly_attempt (
    job_id text not null,
    attempt integer not null,
    at integer not null,
    worker text,
    outcome text not null check (outcome in ('failed', 'crashed')),
    error text,
    traceback text,
    primary key (job_id, attempt)
) strict, without rowid;

create table duly_step (
    job_id text not null,
    name text not null,
    kind text not null,
    state text not null check (state in ('started', 'done', 'failed', 'unknown', 'held')),
    attempt integer not null default 0,
    key text,
    result text,
    error text,
    created_at integer not null,
    changed_at integer not null,
    primary key (job_id, name)
) strict, without rowid;

create table duly_batch (
    id text not null primary key,
    name text not null,
    created_at integer not null,
    sealed_at integer,
    open integer not null default 0 check (open >= 0),
    succeeded integer not null default 0 check (succeeded >= 0),
    partial integer not null default 0 check (partial >= 0),
    dead integer not null default 0 check (dead >= 0),
    cancelled integer not null default 0 check (cancelled >= 0),
    -- Callbacks are whole jobs as JSON, their ids made with the batch, so that each is inserted once.
    on_complete text,
    on_success text,
    on_first_dead text,
    completed_at integer,
    first_dead_at integer
) strict;

create index duly_batch_completed on duly_batch (completed_at) where completed_at is not null;

create table duly_schedule (
    name text not null primary key,
    task text not null,
    spec text not null,
    mode text not null check (mode in ('cron', 'rate', 'delay', 'rrule')),
    interval_ms integer,
    next_at integer,
    dead_runs integer not null default 0,
    paused_at integer,
    paused_by text,
    paused_why text
) strict;

create table duly_fire (
    schedule text not null,
    due_at integer not null,
    until_at integer,
    count integer not null default 1,
    outcome text not null check (outcome in ('fired', 'skipped')),
    job_id text,
    reason text,
    at integer not null,
    primary key (schedule, due_at)
) strict, without rowid;

create index duly_fire_at on duly_fire (at);

create table duly_queue (
    kind text not null check (kind in ('queue', 'task')),
    name text not null,
    paused_at integer,
    paused_by text,
    paused_why text,
    paused_until integer,
    primary key (kind, name)
) strict, without rowid;

create table duly_worker (
    id text not null primary key,
    host text not null,
    pid integer not null,
    queues text not null,
    tasks text not null,
    beat_ms integer not null,
    started_at integer not null,
    seen_at integer not null,
    -- How many jobs it runs at once, and how its attempts have ended since it began.
    slots integer not null default 0,
    succeeded integer not null default 0,
    failed integer not null default 0
) strict;

create table duly_event (
    id integer primary key autoincrement,
    at integer not null,
    name text not null,
    job_id text,
    subject text,
    by text,
    why text,
    data text
) strict;

create index duly_event_at on duly_event (at);
create index duly_event_job on duly_event (job_id) where job_id is not null;

-- For people: live and finished jobs together, times as text, the envelope spread out.
create view duly_jobs as
select id, task, queue, priority, state, payload,
       coalesce(envelope ->> 'correlation_id', id) as correlation_id,
       envelope ->> 'causation_id' as causation_id,
       envelope ->> 'subject' as subject,
       coalesce(envelope ->> 'schema_version', 1) as schema_version,
       key, attempt, max_attempts, crashes, worker, progress, progress_message, reason, error,
       null as result, batch_id, schedule, origin, replay_of, replay_count,
       created_at, strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') as created,
       due_at, strftime('%Y-%m-%dT%H:%M:%fZ', due_at / 1000.0, 'unixepoch') as due,
       lease_until, strftime('%Y-%m-%dT%H:%M:%fZ', lease_until / 1000.0, 'unixepoch') as lease_ends,
       null as finished_at, null as finished
  from duly_job
 union all
select id, task, queue, priority, state, payload,
       coalesce(envelope ->> 'correlation_id', id),
       envelope ->> 'causation_id',
       envelope ->> 'subject',
       coalesce(envelope ->> 'schema_version', 1),
       key, attempt, max_attempts, crashes, worker, progress, progress_message, reason, error,
       case when result_until is null or result_until > cast((julianday('now') - 2440587.5) * 86400000 as integer)
            then result end,
       batch_id, schedule, origin, replay_of, replay_count,
       created_at, strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch'),
       due_at, strftime('%Y-%m-%dT%H:%M:%fZ', due_at / 1000.0, 'unixepoch'),
       null, null,
       finished_at, strftime('%Y-%m-%dT%H:%M:%fZ', finished_at / 1000.0, 'unixepoch')
  from duly_done;

-- Dead letters that nobody has replayed or resolved yet.
create view duly_dead as
select id, task, queue, payload, key, attempt, max_attempts, crashes, reason, error, batch_id, origin, replay_count,
       finished_at, strftime('%Y-%m-%dT%H:%M:%fZ', finished_at / 1000.0, 'unixepoch') as finished
  from duly_done
 where state = 'dead' and replayed_as is null and resolved_at is null;

create view duly_attempts as
select job_id, attempt, outcome, worker, error, traceback,
       at, strftime('%Y-%m-%dT%H:%M:%fZ', at / 1000.0, 'unixepoch') as ended
  from duly_attempt;

create view duly_events as
select id, name, job_id, subject, by, why, data,
       at, strftime('%Y-%m-%dT%H:%M:%fZ', at / 1000.0, 'unixepoch') as happened
  from duly_event;

create view duly_fires as
select schedule, outcome, job_id, count, reason,
       due_at, strftime('%Y-%m-%dT%H:%M:%fZ', due_at / 1000.0, 'unixepoch') as due,
       until_at, strftime('%Y-%m-%dT%H:%M:%fZ', until_at / 1000.0, 'unixepoch') as until
  from duly_fire;
