-- Schedules: all that a worker needs to fire one, whether or not it has it in its code. Differs from SQLite: the table is
-- kept, and with it the rights that somebody has granted on it.

alter table duly.duly_schedule
    add column tz text not null default 'UTC',
    -- From when a rule counts that does not say so itself.
    add column anchor_at bigint,
    add column catchup text not null default 'skip' check (catchup in ('skip', 'last', 'all')),
    add column grace_ms bigint check (grace_ms >= 0),
    add column overlap text not null default 'allow' check (overlap in ('allow', 'skip', 'queue', 'cancel_running')),
    add column jitter_ms bigint not null default 0 check (jitter_ms >= 0),
    add column pause_after integer check (pause_after > 0),
    -- Defined by code, and paused when no living worker has it in its code any more.
    add column in_code boolean not null default false,
    -- Another one after every write that matters to who fires: who decided by what he read names it.
    add column revision bigint not null default 1,
    add column created_at bigint not null default 0,
    add column changed_at bigint not null default 0,
    add column last_at bigint,
    -- The job to be enqueued: its terms as JSON, its envelope, its payload.
    add column terms text not null default '{}',
    add column envelope text,
    add column payload text not null default '{}',
    add constraint an_interval_where_one_counts check (interval_ms is not null or mode in ('cron', 'rrule')),
    add constraint an_interval_takes_time check (interval_ms > 0),
    add constraint dead_runs_are_counted check (dead_runs >= 0);

create index duly_schedule_due on duly.duly_schedule (next_at, name) where next_at is not null and paused_at is null;
create index duly_job_schedule on duly.duly_job (schedule) where schedule is not null;

alter table duly.duly_worker add column schedules text not null default '[]';

create view duly.duly_schedules as
select name, task, mode, spec, tz, catchup, overlap, in_code, dead_runs, paused_by, paused_why,
       next_at, to_timestamp(next_at / 1000.0) as next,
       last_at, to_timestamp(last_at / 1000.0) as last,
       paused_at, to_timestamp(paused_at / 1000.0) as paused
  from duly.duly_schedule;

update duly.duly_meta set value = '2' where name = 'schema';
