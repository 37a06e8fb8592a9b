-- The tables of duly on SQLite and D1. Times are integer milliseconds UTC. Payloads and results are JSON text.
-- The client creates ids (UUIDv7 as text).
--
-- A job is a row of duly_job until it ends, then a row of duly_done. An ended state is visible in duly_job only inside
-- the transaction that ends the job: the sections `ended_*` read the row there, and the last one moves it to duly_done.

create table duly_meta (
    name text not null primary key,
    value text not null
) strict;

-- The number of this schema, and the oldest schema whose code works with it.
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
    -- The end of a key window (`unique_for`): it does not depend on when or how the job ends.
    key_until integer,
    attempt integer not null default 0,
    max_attempts integer not null check (max_attempts > 0),
    crashes integer not null default 0,
    -- Its last worker stopped sending heartbeats during the attempt. It runs alone until one attempt ends.
    suspect integer not null default 0 check (suspect in (0, 1)),
    -- Set while the job is parked. A worker that knows its task in this schema version or a later one wakes it.
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
    -- The task, or the task and a key; its place in a lane that keeps an order; 'block' or 'skip': whether its death
    -- stops the jobs behind it.
    lane text,
    seq integer,
    ordering_dead text,
    -- Last, because SQLite reads a column past the pages of all columns before it.
    envelope text,
    payload text not null,
    -- The job to enqueue when this one ends, as JSON: a debounced call that came while it ran.
    next text,
    constraint a_key_has_its_terms check (
        (key is null) = (fingerprint is null) and (key is null) = (key_ttl_ms is null)),
    constraint what_is_parked_waits check (parked_version is null or state not in ('scheduled', 'ready', 'running')),
    -- The state decides which columns are set. The two states that are written most come first.
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

-- Claims read these two in their order. Suspects stand apart, and so do jobs with a lane.
create index duly_job_ready on duly_job (queue, suspect, priority desc, due_at, id)
 where state = 'ready' and lane is null;
create index duly_job_scheduled on duly_job (queue, due_at, id) where state = 'scheduled' and lane is null;
create index duly_job_lane_ready on duly_job (queue, suspect, task, lane, priority desc, due_at, id)
 where state = 'ready' and lane is not null;
create index duly_job_lane_scheduled on duly_job (queue, due_at, id) where state = 'scheduled' and lane is not null;
create index duly_job_lane_running on duly_job (lane) where lane is not null and token is not null;
create index duly_job_seq on duly_job (lane, seq) where seq is not null;
create index duly_job_waiting on duly_job (queue, due_at) where state = 'waiting' and parked_version is null;
create index duly_job_parked on duly_job (queue, task, parked_version) where parked_version is not null;
-- Rescue reads all of it, `recall` one token. A heartbeat changes no indexed column, so it writes no index.
create index duly_job_running on duly_job (token) where token is not null;
create index duly_job_expires on duly_job (expires_at) where expires_at is not null;
create index duly_job_batch on duly_job (batch_id) where batch_id is not null;
create index duly_job_schedule on duly_job (schedule) where schedule is not null;

create table duly_done (
    id text not null primary key,
    task text not null,
    queue text not null,
    priority integer not null,
    state text not null check (state in ('succeeded', 'partial', 'dead', 'cancelled')),
    key text,
    fingerprint text,
    key_ttl_ms integer,
    key_until integer,
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
    -- When `prune` next takes something from this row: its result, or the row. Null for a dead job, which is kept.
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
    lane text,
    seq integer,
    ordering_dead text,
    envelope text,
    payload text not null,
    constraint dead_is_kept check (state <> 'dead' or prune_at is null)
) strict, without rowid;

create index duly_done_prune on duly_done (prune_at) where prune_at is not null;
create index duly_done_dead on duly_done (id) where state = 'dead';
create index duly_done_partial on duly_done (id) where state = 'partial';
create index duly_done_batch on duly_done (batch_id) where batch_id is not null;
create index duly_done_blocks on duly_done (lane)
 where state = 'dead' and ordering_dead = 'block' and replayed_as is null and resolved_at is null;

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
    -- The id of the call that last debounced under the key, so that a repeated call changes nothing.
    debounced_by text,
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
    -- With a key, a batch is found again, and its filling continues where it stopped.
    key text,
    created_at integer not null,
    sealed_at integer,
    -- The number of places that are filled; counted only for a batch with a key.
    filled integer not null default 0,
    open integer not null default 0 check (open >= 0),
    succeeded integer not null default 0 check (succeeded >= 0),
    partial integer not null default 0 check (partial >= 0),
    dead integer not null default 0 check (dead >= 0),
    cancelled integer not null default 0 check (cancelled >= 0),
    -- The share of its jobs that must succeed for the batch to be a success.
    ok_at real not null default 1,
    -- Callbacks are whole jobs as JSON. Their ids are made with the batch, so each is inserted once.
    on_complete text,
    on_success text,
    on_first_dead text,
    completed_at integer,
    first_dead_at integer,
    -- A batch cancelled before it was complete is no success, whatever its jobs did.
    cancelled_at integer,
    cancelled_by text,
    cancelled_why text
) strict;

create index duly_batch_completed on duly_batch (completed_at) where completed_at is not null;
create unique index duly_batch_key on duly_batch (key) where key is not null;

-- All that a worker needs to fire a schedule, whether or not its code defines it.
create table duly_schedule (
    name text not null primary key,
    task text not null,
    mode text not null check (mode in ('cron', 'rate', 'delay', 'rrule')),
    spec text not null,
    tz text not null default 'UTC',
    interval_ms integer check (interval_ms > 0),
    -- The start of a rule that names none.
    anchor_at integer,
    catchup text not null default 'skip' check (catchup in ('skip', 'last', 'all')),
    grace_ms integer check (grace_ms >= 0),
    overlap text not null default 'allow' check (overlap in ('allow', 'skip', 'queue', 'cancel_running')),
    jitter_ms integer not null default 0 check (jitter_ms >= 0),
    pause_after integer check (pause_after > 0),
    -- Defined by code: paused when the code of no living worker defines it.
    in_code integer not null default 0 check (in_code in (0, 1)),
    -- Raised by each write that matters to a scheduler. A scheduler names the revision it read, so a decision on old
    -- values changes nothing.
    revision integer not null default 1,
    created_at integer not null default 0,
    changed_at integer not null default 0,
    next_at integer,
    last_at integer,
    dead_runs integer not null default 0 check (dead_runs >= 0),
    paused_at integer,
    paused_by text,
    paused_why text,
    -- The job to enqueue: its terms as JSON, its envelope, its payload.
    terms text not null default '{}',
    envelope text,
    payload text not null default '{}',
    constraint an_interval_where_one_counts check (interval_ms is not null or mode in ('cron', 'rrule'))
) strict;

create index duly_schedule_due on duly_schedule (next_at, name) where next_at is not null and paused_at is null;

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
    -- Of a task: the limits that its code defines, then those set at run time, which win (0: no limit).
    cap integer,
    rate_count integer,
    rate_ms integer,
    set_cap integer,
    set_rate_count integer,
    set_rate_ms integer,
    set_at integer,
    set_by text,
    set_why text,
    -- Of a queue: how many jobs it takes, and how many it had at the last count; how much longer a job waits for each
    -- priority less; the share of a claim that retries get while other jobs wait.
    max_depth integer,
    depth integer,
    depth_at integer,
    ageing_ms integer,
    retry_share real,
    primary key (kind, name)
) strict, without rowid;

-- Lanes that were claimed from, or enqueued to in order. `permits` is [[time, jobs], …]: the starts that still count
-- against the rate. `last_seq` is the last place handed out. `held_by` is the token of the claim that made the row.
create table duly_lane (
    name text not null primary key,
    task text not null,
    last_seq integer not null default 0,
    permits text not null default '[]',
    held_by integer,
    used_at integer not null
) without rowid;

create index duly_lane_used on duly_lane (used_at);

create table duly_worker (
    id text not null primary key,
    host text not null,
    pid integer not null,
    queues text not null,
    tasks text not null,
    schedules text not null default '[]',
    beat_ms integer not null,
    started_at integer not null,
    seen_at integer not null,
    -- How many jobs it runs at once, and how its attempts have ended since it started.
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

-- Views for people: times as text, the envelope as columns. First live and finished jobs together.
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

-- Dead letters that are neither replayed nor resolved.
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

create view duly_schedules as
select name, task, mode, spec, tz, catchup, overlap, in_code, dead_runs, paused_by, paused_why,
       next_at, strftime('%Y-%m-%dT%H:%M:%fZ', next_at / 1000.0, 'unixepoch') as next,
       last_at, strftime('%Y-%m-%dT%H:%M:%fZ', last_at / 1000.0, 'unixepoch') as last,
       paused_at, strftime('%Y-%m-%dT%H:%M:%fZ', paused_at / 1000.0, 'unixepoch') as paused
  from duly_schedule;

create view duly_batches as
select id, name, key, open, succeeded, partial, dead, cancelled,
       open + succeeded + partial + dead + cancelled as total,
       created_at, strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') as created,
       sealed_at, strftime('%Y-%m-%dT%H:%M:%fZ', sealed_at / 1000.0, 'unixepoch') as sealed,
       completed_at, strftime('%Y-%m-%dT%H:%M:%fZ', completed_at / 1000.0, 'unixepoch') as completed
  from duly_batch;

-- What each live job waits for, with a detail. `duly why` shows all gates. Everything is found by an index, so the cost
-- of a row does not grow with the tables.
create view duly_why as
with looked as (
    select job.id, job.task, job.queue, job.state, job.worker, job.parked_version, job.reason, job.attempt, job.suspect,
           job.expires_at, job.due_at, job.lane, clock.now,
           strftime('%Y-%m-%d %H:%M:%S UTC', lease_until / 1000, 'unixepoch') as lease_ends,
           strftime('%Y-%m-%d %H:%M:%S UTC', expires_at / 1000, 'unixepoch') as expires,
           strftime('%Y-%m-%d %H:%M:%S UTC', due_at / 1000, 'unixepoch') as due,
           queue_gate.paused_by as queue_paused_by, coalesce(': ' || queue_gate.paused_why, '') as queue_paused_why,
           task_gate.paused_by as task_paused_by, coalesce(': ' || task_gate.paused_why, '') as task_paused_why,
           nullif(coalesce(limits.set_cap, limits.cap), 0) as cap,
           nullif(coalesce(limits.set_rate_count, limits.rate_count), 0) as rate_count,
           coalesce(limits.set_rate_ms, limits.rate_ms) as rate_ms,
           exists (select 1 from duly_worker where seen_at > now - 3 * beat_ms) as is_anybody_here,
           exists (select 1 from duly_worker
                    where seen_at > now - 3 * beat_ms
                      and exists (select 1 from json_each(tasks) where value = job.task)
                      and exists (select 1 from json_each(queues) where value = job.queue)) as is_known,
           (select count(*) from duly_job as mate
             where mate.lane = job.lane and mate.token is not null) as running,
           (select coalesce(sum(value ->> 1), 0)
              from duly_lane
             cross join json_each(permits)
             where duly_lane.name = job.lane
               and value ->> 0 > now - coalesce(limits.set_rate_ms, limits.rate_ms) - 250) as permitted,
           (select mate.id from duly_job as mate
             where mate.lane = job.lane and mate.seq is not null
             order by mate.seq
             limit 1) as head_id,
           (select dead.id from duly_done as dead
             where dead.lane = job.lane and dead.state = 'dead' and dead.ordering_dead = 'block'
               and dead.replayed_as is null and dead.resolved_at is null and dead.seq < job.seq
             order by dead.seq
             limit 1) as blocked_by
      from duly_job as job
     cross join (select cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) as now) as clock
      left join duly_queue as queue_gate
        on queue_gate.kind = 'queue' and queue_gate.name = job.queue and queue_gate.paused_at is not null
       and (queue_gate.paused_until is null or queue_gate.paused_until > clock.now)
      left join duly_queue as task_gate
        on task_gate.kind = 'task' and task_gate.name = job.task and task_gate.paused_at is not null
       and (task_gate.paused_until is null or task_gate.paused_until > clock.now)
      left join duly_queue as limits
        on limits.kind = 'task' and limits.name = job.task and job.lane is not null
),
judged as (
    select id, task, queue, state,
           case when state = 'running' then json_array('lease', coalesce(worker, '-') || ' has it until ' || lease_ends)
                when parked_version is not null then json_array('parked', substr(reason, 9))
                when state = 'waiting' and substr(reason, 1, 6) = 'held: ' then json_array('held', substr(reason, 7))
                when state = 'waiting' then json_array('waiting', 'for: ' || coalesce(reason, 'something outside'))
                when attempt = 0 and expires_at <= now then json_array('expired', 'it was to start by ' || expires)
                when due_at > now then json_array('not_due', 'before ' || due)
                when queue_paused_by is not null
                then json_array('paused', 'the queue, by ' || queue_paused_by || queue_paused_why)
                when task_paused_by is not null
                then json_array('paused', 'the task, by ' || task_paused_by || task_paused_why)
                when not is_anybody_here then json_array('no_worker', 'no worker is alive')
                when not is_known then json_array('unknown_task', 'no living worker knows it and serves its queue')
                when suspect then json_array('suspect', 'it waits to run alone')
                when blocked_by is not null then json_array('order', 'job ' || blocked_by || ' is dead and blocks it')
                when head_id <> id then json_array('order', 'job ' || head_id || ' comes first')
                when head_id is not null and running > 0 then json_array('order', 'another job of its lane runs')
                when running >= cap then json_array('cap', running || ' of ' || cap || ' run')
                when permitted >= rate_count
                then json_array('rate', permitted || ' of ' || rate_count || ' have begun within ' || rate_ms || ' ms')
                else json_array('turn', 'in ' || coalesce('lane ' || lane, 'queue ' || queue)) end as said
      from looked
)
select id, task, queue, state, said ->> 0 as gate, said ->> 1 as detail
  from judged;
