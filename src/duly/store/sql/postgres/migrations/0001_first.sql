-- The tables of duly on PostgreSQL. Times are whole milliseconds UTC, payloads and results JSON text,
-- ids UUIDv7 made by the client. Names are written in the schema `duly` and moved to the one that is set.
--
-- A job lives in duly_job until it has ended, then in duly_done. The states of an ended job appear in
-- duly_job only inside the transaction that ends it: the sections `ended_*` find it there, and its last
-- one moves it out.

create table duly.duly_meta (
    name text not null primary key,
    value text not null
);

-- The number of this schema, and the oldest code that can work with it.
insert into duly.duly_meta (name, value) values ('schema', '1'), ('works_with', '1');

-- What never changes comes first and what a claim and a beat change comes last, side by side: an update then
-- logs only its own few bytes. Columns of eight bytes stand together, so that none is padded.
create table duly.duly_job (
    id uuid not null primary key,
    created_at bigint not null,
    keep_ms bigint not null check (keep_ms >= 0),
    result_ttl_ms bigint not null check (result_ttl_ms >= 0),
    key_ttl_ms bigint,
    expires_at bigint,
    batch_id uuid,
    origin uuid,
    replay_of uuid,
    lease_ms integer not null check (lease_ms > 0),
    priority integer not null,
    max_attempts integer not null check (max_attempts > 0),
    replay_count integer not null default 0,
    task text not null check (task <> ''),
    queue text not null check (queue <> ''),
    payload text not null,
    envelope text,
    key text,
    fingerprint text,
    schedule text,
    on_dead text,
    reason text,
    error text,
    result text,
    progress_message text,
    due_at bigint,
    finished_at bigint,
    cancel_requested_at bigint,
    -- Parked until a worker comes that knows its task in this schema version or a later one.
    parked_version bigint,
    last_token bigint,
    token bigint,
    lease_until bigint,
    heartbeat_at bigint,
    attempt integer not null default 0,
    crashes integer not null default 0,
    progress real check (progress between 0 and 100),
    -- Its last worker stopped beating while it ran: it runs alone until one attempt ends.
    suspect boolean not null default false,
    state text not null,
    worker text,
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
        else false end)
);

-- What a claim walks, in its order; suspects stand apart. Every other index is partial and small.
create index duly_job_ready on duly.duly_job (queue, suspect, priority desc, due_at, id) where state = 'ready';
create index duly_job_scheduled on duly.duly_job (queue, due_at, id) where state = 'scheduled';
create index duly_job_waiting on duly.duly_job (queue, due_at) where state = 'waiting' and parked_version is null;
create index duly_job_parked on duly.duly_job (queue, task, parked_version) where parked_version is not null;
-- Rescue reads all of it, recall one token. Beats change neither, so they leave it alone.
create index duly_job_running on duly.duly_job (token) where token is not null;
create index duly_job_expires on duly.duly_job (expires_at) where expires_at is not null;
create index duly_job_batch on duly.duly_job (batch_id) where batch_id is not null;

create table duly.duly_done (
    id uuid not null primary key,
    created_at bigint not null,
    due_at bigint,
    finished_at bigint not null,
    keep_ms bigint not null,
    result_ttl_ms bigint not null,
    -- When prune next has something to take from this row: its result, or all of it. Never for a dead one.
    prune_at bigint,
    token bigint,
    result_until bigint,
    key_ttl_ms bigint,
    expires_at bigint,
    cancel_requested_at bigint,
    resolved_at bigint,
    batch_id uuid,
    origin uuid,
    replay_of uuid,
    replayed_as uuid,
    lease_ms integer not null,
    priority integer not null,
    attempt integer not null,
    max_attempts integer not null,
    crashes integer not null,
    replay_count integer not null,
    progress real,
    state text not null check (state in ('succeeded', 'partial', 'dead', 'cancelled')),
    task text not null,
    queue text not null,
    payload text not null,
    worker text,
    envelope text,
    key text,
    fingerprint text,
    schedule text,
    on_dead text,
    progress_message text,
    reason text,
    error text,
    result text,
    resolved_by text,
    resolved_why text,
    constraint dead_is_kept check (state <> 'dead' or prune_at is null)
);

create index duly_done_prune on duly.duly_done (prune_at) where prune_at is not null;
create index duly_done_dead on duly.duly_done (id) where state = 'dead';
create index duly_done_partial on duly.duly_done (id) where state = 'partial';
create index duly_done_batch on duly.duly_done (batch_id) where batch_id is not null;

create table duly.duly_key (
    task text not null,
    key text not null,
    job_id uuid not null,
    state text not null check (state in ('live', 'succeeded')),
    fingerprint text not null,
    result text,
    -- The result was too large to be kept with the key.
    result_dropped boolean not null default false,
    expires_at bigint,
    primary key (task, key),
    constraint live_does_not_expire check ((state = 'live') = (expires_at is null))
);

create index duly_key_expires on duly.duly_key (expires_at) where expires_at is not null;

create table duly.duly_attempt (
    job_id uuid not null,
    attempt integer not null,
    at bigint not null,
    worker text,
    outcome text not null check (outcome in ('failed', 'crashed')),
    error text,
    traceback text,
    primary key (job_id, attempt)
);

create table duly.duly_step (
    job_id uuid not null,
    name text not null,
    kind text not null,
    state text not null check (state in ('started', 'done', 'failed', 'unknown', 'held')),
    attempt integer not null default 0,
    key text,
    result text,
    error text,
    created_at bigint not null,
    changed_at bigint not null,
    primary key (job_id, name)
);

create table duly.duly_batch (
    id uuid not null primary key,
    name text not null,
    created_at bigint not null,
    sealed_at bigint,
    open bigint not null default 0 check (open >= 0),
    succeeded bigint not null default 0 check (succeeded >= 0),
    partial bigint not null default 0 check (partial >= 0),
    dead bigint not null default 0 check (dead >= 0),
    cancelled bigint not null default 0 check (cancelled >= 0),
    -- Callbacks are whole jobs as JSON, their ids made with the batch, so that each is inserted once.
    on_complete text,
    on_success text,
    on_first_dead text,
    completed_at bigint,
    first_dead_at bigint
);

create index duly_batch_completed on duly.duly_batch (completed_at) where completed_at is not null;

create table duly.duly_schedule (
    name text not null primary key,
    task text not null,
    spec text not null,
    mode text not null check (mode in ('cron', 'rate', 'delay', 'rrule')),
    interval_ms bigint,
    next_at bigint,
    dead_runs integer not null default 0,
    paused_at bigint,
    paused_by text,
    paused_why text
);

create table duly.duly_fire (
    schedule text not null,
    due_at bigint not null,
    until_at bigint,
    count integer not null default 1,
    outcome text not null check (outcome in ('fired', 'skipped')),
    job_id uuid,
    reason text,
    at bigint not null,
    primary key (schedule, due_at)
);

create index duly_fire_at on duly.duly_fire (at);

create table duly.duly_queue (
    kind text not null check (kind in ('queue', 'task')),
    name text not null,
    paused_at bigint,
    paused_by text,
    paused_why text,
    paused_until bigint,
    primary key (kind, name)
);

create table duly.duly_worker (
    id text not null primary key,
    host text not null,
    pid integer not null,
    queues text not null,
    tasks text not null,
    beat_ms bigint not null,
    started_at bigint not null,
    seen_at bigint not null,
    -- How many jobs it runs at once, and how its attempts have ended since it began.
    slots integer not null default 0,
    succeeded bigint not null default 0,
    failed bigint not null default 0
);

create table duly.duly_event (
    id bigint generated always as identity primary key,
    at bigint not null,
    name text not null,
    job_id uuid,
    subject text,
    by text,
    why text,
    data text
);

create index duly_event_at on duly.duly_event (at);
create index duly_event_job on duly.duly_event (job_id) where job_id is not null;

-- Beats rewrite a row in place only where its page has room (fillfactor), and a queue makes dead rows all day:
-- vacuum by their number, not by a share of a table that may be large.
alter table duly.duly_job set (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0);
alter table duly.duly_done set (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02);
alter table duly.duly_key set (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);
alter table duly.duly_batch set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
alter table duly.duly_worker set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- For people: live and finished jobs together, times as such, the envelope spread out.
create view duly.duly_jobs as
select id, task, queue, priority, state, payload,
       coalesce(envelope::json ->> 'correlation_id', id::text) as correlation_id,
       envelope::json ->> 'causation_id' as causation_id,
       envelope::json ->> 'subject' as subject,
       coalesce((envelope::json ->> 'schema_version')::int, 1) as schema_version,
       key, attempt, max_attempts, crashes, worker, progress, progress_message, reason, error,
       null::text as result, batch_id, schedule, origin, replay_of, replay_count,
       created_at, to_timestamp(created_at / 1000.0) as created,
       due_at, to_timestamp(due_at / 1000.0) as due,
       lease_until, to_timestamp(lease_until / 1000.0) as lease_ends,
       null::bigint as finished_at, null::timestamptz as finished
  from duly.duly_job
 union all
select id, task, queue, priority, state, payload,
       coalesce(envelope::json ->> 'correlation_id', id::text),
       envelope::json ->> 'causation_id',
       envelope::json ->> 'subject',
       coalesce((envelope::json ->> 'schema_version')::int, 1),
       key, attempt, max_attempts, crashes, worker, progress, progress_message, reason, error,
       case when result_until is null or result_until > (extract(epoch from clock_timestamp()) * 1000)::bigint
            then result end,
       batch_id, schedule, origin, replay_of, replay_count,
       created_at, to_timestamp(created_at / 1000.0),
       due_at, to_timestamp(due_at / 1000.0),
       null, null,
       finished_at, to_timestamp(finished_at / 1000.0)
  from duly.duly_done;

-- Dead letters that nobody has replayed or resolved yet.
create view duly.duly_dead as
select id, task, queue, payload, key, attempt, max_attempts, crashes, reason, error, batch_id, origin, replay_count,
       finished_at, to_timestamp(finished_at / 1000.0) as finished
  from duly.duly_done
 where state = 'dead' and replayed_as is null and resolved_at is null;

create view duly.duly_attempts as
select job_id, attempt, outcome, worker, error, traceback, at, to_timestamp(at / 1000.0) as ended
  from duly.duly_attempt;

create view duly.duly_events as
select id, name, job_id, subject, by, why, data, at, to_timestamp(at / 1000.0) as happened
  from duly.duly_event;

create view duly.duly_fires as
select schedule, outcome, job_id, count, reason, due_at, to_timestamp(due_at / 1000.0) as due,
       until_at, to_timestamp(until_at / 1000.0) as until
  from duly.duly_fire;
