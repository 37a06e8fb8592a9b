-- The tables of duly on PostgreSQL. Times are integer milliseconds UTC. Payloads and results are JSON text.
-- The client creates ids (UUIDv7). Names stand in the schema `duly`; `duly migrate --schema` puts them in another one.
--
-- A job is a row of duly_job until it ends, then a row of duly_done. An ended state is visible in duly_job only inside
-- the transaction that ends the job: the sections `ended_*` read the row there, and the last one moves it to duly_done.

create table duly.duly_meta (
    name text not null primary key,
    value text not null
);

-- The number of this schema, and the oldest schema whose code works with it.
insert into duly.duly_meta (name, value) values ('schema', '1'), ('works_with', '1');

-- An update logs the bytes between the first and the last change. So columns that never change come first, and columns
-- that a claim or a heartbeat changes come last. Columns of eight bytes stand together, so that none is padded.
create table duly.duly_job (
    id uuid not null primary key,
    created_at bigint not null,
    keep_ms bigint not null,
    result_ttl_ms bigint not null,
    key_ttl_ms bigint,
    -- The end of a key window (`unique_for`): it does not depend on when or how the job ends.
    key_until bigint,
    expires_at bigint,
    -- The place in a lane that keeps an order.
    seq bigint,
    batch_id uuid,
    origin uuid,
    replay_of uuid,
    lease_ms integer not null,
    priority integer not null,
    max_attempts integer not null,
    replay_count integer not null default 0,
    task text not null,
    queue text not null,
    payload text not null,
    envelope text,
    key text,
    fingerprint text,
    schedule text,
    on_dead text,
    -- The task, or the task and a key. Collated by bytes: claims visit lanes in this order on every server.
    lane text collate "C",
    -- 'block' or 'skip': whether its death stops the jobs behind it.
    ordering_dead text,
    -- The job to enqueue when this one ends, as JSON: a debounced call that came while it ran.
    next text,
    reason text,
    error text,
    result text,
    progress_message text,
    due_at bigint,
    finished_at bigint,
    cancel_requested_at bigint,
    -- Set while the job is parked. A worker that knows its task in this schema version or a later one wakes it.
    parked_version bigint,
    last_token bigint,
    token bigint,
    lease_until bigint,
    heartbeat_at bigint,
    attempt integer not null default 0,
    crashes integer not null default 0,
    progress real,
    -- Its last worker stopped sending heartbeats during the attempt. It runs alone until one attempt ends.
    suspect boolean not null default false,
    state text not null,
    worker text,
    -- The server reads and prepares all checks for each statement that writes, so they are few and short.
    constraint its_terms_make_sense check (
        task <> '' and queue <> '' and least(keep_ms, result_ttl_ms, lease_ms - 1) >= 0),
    constraint a_key_has_its_terms check (num_nulls(key, fingerprint, key_ttl_ms) = any ('{0,3}')),
    constraint progress_is_a_percentage check (progress between '0' and '100'),
    constraint what_is_parked_waits check (parked_version is null or state <> all ('{ready,running,scheduled}')),
    -- A running job has a token and a lease, an ended job has the time of its end, no other job has these. Attempts
    -- count from the claim, so a job that does not run has at least one left. So max_attempts is at least 1.
    constraint shape_of_its_state check (
        (token is null) = (state <> 'running') and (lease_until is null) = (token is null)
        and state = any (case when finished_at is null then '{running,ready,scheduled,waiting}'::text[]
                              else '{succeeded,partial,dead,cancelled}'::text[] end)
        and (due_at is not null or state <> all ('{ready,scheduled}'))
        and num_nonnulls(token) <= attempt
        and attempt - num_nonnulls(token, finished_at) < max_attempts)
)
-- A heartbeat rewrites a row in place only where its page has room. Vacuum starts by the number of dead rows, because a
-- share of a table that may be large starts too late.
with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
      autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 10000, autovacuum_vacuum_cost_delay = 0);

-- Claims read these two in their order. Suspects stand apart, and so do jobs with a lane. Every entry holds an id, so
-- none are equal, and a search for equal ones would find nothing.
create index duly_job_ready on duly.duly_job (queue, suspect, priority desc, due_at, id)
  with (deduplicate_items = off) where state = 'ready' and lane is null;
create index duly_job_scheduled on duly.duly_job (queue, due_at, id)
  with (deduplicate_items = off) where state = 'scheduled' and lane is null;
create index duly_job_lane_ready on duly.duly_job (queue, suspect, task, lane, priority desc, due_at, id)
 where state = 'ready' and lane is not null;
create index duly_job_lane_scheduled on duly.duly_job (queue, due_at, id)
 where state = 'scheduled' and lane is not null;
create index duly_job_lane_running on duly.duly_job (lane) where lane is not null and token is not null;
create index duly_job_seq on duly.duly_job (lane, seq) where seq is not null;
create index duly_job_waiting on duly.duly_job (queue, due_at) where state = 'waiting' and parked_version is null;
create index duly_job_parked on duly.duly_job (queue, task, parked_version) where parked_version is not null;
-- Rescue reads all of it, `recall` one token. A heartbeat changes no indexed column, so it writes no index.
create index duly_job_running on duly.duly_job (token) where token is not null;
create index duly_job_expires on duly.duly_job (expires_at) where expires_at is not null;
create index duly_job_batch on duly.duly_job (batch_id) where batch_id is not null;
create index duly_job_schedule on duly.duly_job (schedule) where schedule is not null;

create table duly.duly_done (
    id uuid not null primary key,
    created_at bigint not null,
    due_at bigint,
    finished_at bigint not null,
    keep_ms bigint not null,
    result_ttl_ms bigint not null,
    -- When `prune` next takes something from this row: its result, or the row. Null for a dead job, which is kept.
    prune_at bigint,
    token bigint,
    result_until bigint,
    key_ttl_ms bigint,
    key_until bigint,
    expires_at bigint,
    cancel_requested_at bigint,
    resolved_at bigint,
    seq bigint,
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
    lane text collate "C",
    ordering_dead text,
    progress_message text,
    reason text,
    error text,
    result text,
    resolved_by text,
    resolved_why text,
    constraint dead_is_kept check (state <> 'dead' or prune_at is null)
)
with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,
      autovacuum_analyze_scale_factor = 0.02);

create index duly_done_prune on duly.duly_done (prune_at) where prune_at is not null;
create index duly_done_dead on duly.duly_done (id) where state = 'dead';
create index duly_done_partial on duly.duly_done (id) where state = 'partial';
create index duly_done_batch on duly.duly_done (batch_id) where batch_id is not null;
create index duly_done_blocks on duly.duly_done (lane)
 where state = 'dead' and ordering_dead = 'block' and replayed_as is null and resolved_at is null;

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
    -- The id of the call that last debounced under the key, so that a repeated call changes nothing.
    debounced_by uuid,
    primary key (task, key),
    constraint live_does_not_expire check ((state = 'live') = (expires_at is null))
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);

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
    -- With a key, a batch is found again, and its filling continues where it stopped.
    key text,
    created_at bigint not null,
    sealed_at bigint,
    -- The number of places that are filled; counted only for a batch with a key.
    filled bigint not null default 0 check (filled >= 0),
    open bigint not null default 0 check (open >= 0),
    succeeded bigint not null default 0 check (succeeded >= 0),
    partial bigint not null default 0 check (partial >= 0),
    dead bigint not null default 0 check (dead >= 0),
    cancelled bigint not null default 0 check (cancelled >= 0),
    -- The share of its jobs that must succeed for the batch to be a success.
    ok_at double precision not null default 1 check (ok_at between 0 and 1),
    -- Callbacks are whole jobs as JSON. Their ids are made with the batch, so each is inserted once.
    on_complete text,
    on_success text,
    on_first_dead text,
    completed_at bigint,
    first_dead_at bigint,
    -- A batch cancelled before it was complete is no success, whatever its jobs did.
    cancelled_at bigint,
    cancelled_by text,
    cancelled_why text
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

create index duly_batch_completed on duly.duly_batch (completed_at) where completed_at is not null;
create unique index duly_batch_key on duly.duly_batch (key) where key is not null;

-- All that a worker needs to fire a schedule, whether or not its code defines it.
create table duly.duly_schedule (
    name text not null primary key,
    task text not null,
    mode text not null check (mode in ('cron', 'rate', 'delay', 'rrule')),
    spec text not null,
    tz text not null default 'UTC',
    interval_ms bigint constraint an_interval_takes_time check (interval_ms > 0),
    -- The start of a rule that names none.
    anchor_at bigint,
    catchup text not null default 'skip' check (catchup in ('skip', 'last', 'all')),
    grace_ms bigint check (grace_ms >= 0),
    overlap text not null default 'allow' check (overlap in ('allow', 'skip', 'queue', 'cancel_running')),
    jitter_ms bigint not null default 0 check (jitter_ms >= 0),
    pause_after integer check (pause_after > 0),
    -- Defined by code: paused when the code of no living worker defines it.
    in_code boolean not null default false,
    -- Raised by each write that matters to a scheduler. A scheduler names the revision it read, so a decision on old
    -- values changes nothing.
    revision bigint not null default 1,
    created_at bigint not null default 0,
    changed_at bigint not null default 0,
    next_at bigint,
    last_at bigint,
    dead_runs integer not null default 0 constraint dead_runs_are_counted check (dead_runs >= 0),
    paused_at bigint,
    paused_by text,
    paused_why text,
    -- The job to enqueue: its terms as JSON, its envelope, its payload.
    terms text not null default '{}',
    envelope text,
    payload text not null default '{}',
    constraint an_interval_where_one_counts check (interval_ms is not null or mode in ('cron', 'rrule'))
);

create index duly_schedule_due on duly.duly_schedule (next_at, name) where next_at is not null and paused_at is null;

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
    -- Of a task: the limits that its code defines, then those set at run time, which win (0: no limit).
    cap integer check (cap > 0),
    rate_count integer check (rate_count > 0),
    rate_ms bigint check (rate_ms > 0),
    set_cap integer check (set_cap >= 0),
    set_rate_count integer check (set_rate_count >= 0),
    set_rate_ms bigint check (set_rate_ms >= 0),
    set_at bigint,
    set_by text,
    set_why text,
    -- Of a queue: how many jobs it takes, and how many it had at the last count; how much longer a job waits for each
    -- priority less; the share of a claim that retries get while other jobs wait.
    max_depth bigint check (max_depth >= 0),
    depth bigint,
    depth_at bigint,
    ageing_ms bigint check (ageing_ms >= 0),
    retry_share double precision check (retry_share between 0 and 1),
    primary key (kind, name)
);

-- Lanes that were claimed from, or enqueued to in order. `permits` is [[time, jobs], …]: the starts that still count
-- against the rate. `last_seq` is the last place handed out. `held_by` is the token of the claim that locked the lane.
create table duly.duly_lane (
    name text collate "C" not null primary key,
    task text not null,
    last_seq bigint not null default 0,
    permits text not null default '[]',
    held_by bigint,
    used_at bigint not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

create index duly_lane_used on duly.duly_lane (used_at);

create table duly.duly_worker (
    id text not null primary key,
    host text not null,
    pid integer not null,
    queues text not null,
    tasks text not null,
    schedules text not null default '[]',
    beat_ms bigint not null,
    started_at bigint not null,
    seen_at bigint not null,
    -- How many jobs it runs at once, and how its attempts have ended since it started.
    slots integer not null default 0,
    succeeded bigint not null default 0,
    failed bigint not null default 0
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

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

-- Views for people: times as timestamps, the envelope as columns. First live and finished jobs together.
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

-- Dead letters that are neither replayed nor resolved.
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

create view duly.duly_schedules as
select name, task, mode, spec, tz, catchup, overlap, in_code, dead_runs, paused_by, paused_why,
       next_at, to_timestamp(next_at / 1000.0) as next,
       last_at, to_timestamp(last_at / 1000.0) as last,
       paused_at, to_timestamp(paused_at / 1000.0) as paused
  from duly.duly_schedule;

create view duly.duly_batches as
select id, name, key, open, succeeded, partial, dead, cancelled,
       open + succeeded + partial + dead + cancelled as total,
       created_at, to_timestamp(created_at / 1000.0) as created,
       sealed_at, to_timestamp(sealed_at / 1000.0) as sealed,
       completed_at, to_timestamp(completed_at / 1000.0) as completed
  from duly.duly_batch;

-- What each live job waits for, with a detail. `duly why` shows all gates. Everything is found by an index, so the cost
-- of a row does not grow with the tables. Differs from SQLite: the time is the time of the statement. With the clock
-- itself in the view, all jobs would be judged before one is chosen.
create view duly.duly_why as
with looked as (
    select job.id, job.task, job.queue, job.state, job.worker, job.parked_version, job.reason, job.attempt, job.suspect,
           job.expires_at, job.due_at, job.lane, clock.now,
           to_char(to_timestamp(lease_until / 1000) at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"') as lease_ends,
           to_char(to_timestamp(expires_at / 1000) at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"') as expires,
           to_char(to_timestamp(due_at / 1000) at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"') as due,
           queue_gate.paused_by as queue_paused_by, coalesce(': ' || queue_gate.paused_why, '') as queue_paused_why,
           task_gate.paused_by as task_paused_by, coalesce(': ' || task_gate.paused_why, '') as task_paused_why,
           nullif(coalesce(limits.set_cap, limits.cap), 0) as cap,
           nullif(coalesce(limits.set_rate_count, limits.rate_count), 0) as rate_count,
           coalesce(limits.set_rate_ms, limits.rate_ms) as rate_ms,
           exists (select 1 from duly.duly_worker where seen_at > now - 3 * beat_ms) as is_anybody_here,
           exists (select 1 from duly.duly_worker
                    where seen_at > now - 3 * beat_ms
                      and tasks::jsonb ? job.task
                      and queues::jsonb ? job.queue) as is_known,
           (select count(*) from duly.duly_job as mate
             where mate.lane = job.lane and mate.token is not null) as running,
           (select coalesce(sum((permit ->> 1)::int), 0)
              from duly.duly_lane
             cross join lateral json_array_elements(permits::json) as permit
             where duly_lane.name = job.lane
               and (permit ->> 0)::bigint > now - coalesce(limits.set_rate_ms, limits.rate_ms) - 250) as permitted,
           (select mate.id from duly.duly_job as mate
             where mate.lane = job.lane and mate.seq is not null
             order by mate.seq
             limit 1) as head_id,
           (select dead.id from duly.duly_done as dead
             where dead.lane = job.lane and dead.state = 'dead' and dead.ordering_dead = 'block'
               and dead.replayed_as is null and dead.resolved_at is null and dead.seq < job.seq
             order by dead.seq
             limit 1) as blocked_by
      from duly.duly_job as job
     cross join (select (extract(epoch from statement_timestamp()) * 1000)::bigint as now) as clock
      left join duly.duly_queue as queue_gate
        on queue_gate.kind = 'queue' and queue_gate.name = job.queue and queue_gate.paused_at is not null
       and (queue_gate.paused_until is null or queue_gate.paused_until > clock.now)
      left join duly.duly_queue as task_gate
        on task_gate.kind = 'task' and task_gate.name = job.task and task_gate.paused_at is not null
       and (task_gate.paused_until is null or task_gate.paused_until > clock.now)
      left join duly.duly_queue as limits
        on limits.kind = 'task' and limits.name = job.task and job.lane is not null
),
judged as (
    select id, task, queue, state,
           case when state = 'running' then array['lease', coalesce(worker, '-') || ' has it until ' || lease_ends]
                when parked_version is not null then array['parked', substr(reason, 9)]
                when state = 'waiting' and substr(reason, 1, 6) = 'held: ' then array['held', substr(reason, 7)]
                when state = 'waiting' then array['waiting', 'for: ' || coalesce(reason, 'something outside')]
                when attempt = 0 and expires_at <= now then array['expired', 'it was to start by ' || expires]
                when due_at > now then array['not_due', 'before ' || due]
                when queue_paused_by is not null
                then array['paused', 'the queue, by ' || queue_paused_by || queue_paused_why]
                when task_paused_by is not null
                then array['paused', 'the task, by ' || task_paused_by || task_paused_why]
                when not is_anybody_here then array['no_worker', 'no worker is alive']
                when not is_known then array['unknown_task', 'no living worker knows it and serves its queue']
                when suspect then array['suspect', 'it waits to run alone']
                when blocked_by is not null then array['order', 'job ' || blocked_by || ' is dead and blocks it']
                when head_id <> id then array['order', 'job ' || head_id || ' comes first']
                when head_id is not null and running > 0 then array['order', 'another job of its lane runs']
                when running >= cap then array['cap', running || ' of ' || cap || ' run']
                when permitted >= rate_count
                then array['rate', permitted || ' of ' || rate_count || ' have begun within ' || rate_ms || ' ms']
                else array['turn', 'in ' || coalesce('lane ' || lane, 'queue ' || queue)] end as said
      from looked
)
select id, task, queue, state, said[1] as gate, said[2] as detail
  from judged;
