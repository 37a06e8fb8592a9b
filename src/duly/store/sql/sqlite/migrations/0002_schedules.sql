-- Schedules: all that a worker needs to fire one, whether or not it has it in its code. Nothing could make one before.

drop table duly_schedule;
create table duly_schedule (
    name text not null primary key,
    task text not null,
    mode text not null check (mode in ('cron', 'rate', 'delay', 'rrule')),
    spec text not null,
    tz text not null default 'UTC',
    interval_ms integer check (interval_ms > 0),
    -- From when a rule counts that does not say so itself.
    anchor_at integer,
    catchup text not null default 'skip' check (catchup in ('skip', 'last', 'all')),
    grace_ms integer check (grace_ms >= 0),
    overlap text not null default 'allow' check (overlap in ('allow', 'skip', 'queue', 'cancel_running')),
    jitter_ms integer not null default 0 check (jitter_ms >= 0),
    pause_after integer check (pause_after > 0),
    -- Defined by code, and paused when no living worker has it in its code any more.
    in_code integer not null default 0 check (in_code in (0, 1)),
    -- Another one after every write that matters to who fires: who decided by what he read names it.
    revision integer not null default 1,
    created_at integer not null default 0,
    changed_at integer not null default 0,
    next_at integer,
    last_at integer,
    dead_runs integer not null default 0 check (dead_runs >= 0),
    paused_at integer,
    paused_by text,
    paused_why text,
    -- The job to be enqueued: its terms as JSON, its envelope, its payload.
    terms text not null default '{}',
    envelope text,
    payload text not null default '{}',
    constraint an_interval_where_one_counts check (interval_ms is not null or mode in ('cron', 'rrule'))
) strict;

create index duly_schedule_due on duly_schedule (next_at, name) where next_at is not null and paused_at is null;
create index duly_job_schedule on duly_job (schedule) where schedule is not null;

alter table duly_worker add column schedules text not null default '[]';

create view duly_schedules as
select name, task, mode, spec, tz, catchup, overlap, in_code, dead_runs, paused_by, paused_why,
       next_at, strftime('%Y-%m-%dT%H:%M:%fZ', next_at / 1000.0, 'unixepoch') as next,
       last_at, strftime('%Y-%m-%dT%H:%M:%fZ', last_at / 1000.0, 'unixepoch') as last,
       paused_at, strftime('%Y-%m-%dT%H:%M:%fZ', paused_at / 1000.0, 'unixepoch') as paused
  from duly_schedule;

update duly_meta set value = '2' where name = 'schema';
