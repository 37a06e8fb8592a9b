-- Queues, tasks and workers on PostgreSQL: pauses, limits and registrations.

-- name: pause
insert into duly.duly_event (at, name, subject, by, why)
select :now, :kind::text || '.paused', :name::text, :by::text, :why::text
 where not exists (
       select 1 from duly.duly_queue
        where kind = :kind and name = :name and paused_at is not null and paused_by = :by and paused_why = :why
          and (paused_until is null or paused_until > :now));
insert into duly.duly_queue (kind, name, paused_at, paused_by, paused_why, paused_until)
values (:kind::text, :name::text, :now, :by::text, :why::text, :now + :until_ms::bigint)
    on conflict (kind, name) do update
   set paused_at = excluded.paused_at, paused_by = excluded.paused_by, paused_why = excluded.paused_why,
       paused_until = excluded.paused_until;

-- name: resume
insert into duly.duly_event (at, name, subject, by, why)
select :now, :kind::text || '.resumed', :name::text, :by::text, :why::text
  from duly.duly_queue
 where kind = :kind and name = :name and paused_at is not null;
update duly.duly_queue
   set paused_at = null, paused_by = null, paused_why = null, paused_until = null
 where kind = :kind and name = :name and paused_at is not null
returning name;

-- name: resumed
-- After a lost answer.
select name
  from duly.duly_queue
 where kind = :kind and name = :name and paused_at is null;

-- name: paused
select kind, name, paused_at, paused_by, paused_why, paused_until
  from duly.duly_queue
 where paused_at is not null and (paused_until is null or paused_until > :now)
 order by kind, name;

-- name: hold
-- A pause without an end is not changed. The token is kept negated, as in a rescue, so that its worker, if alive, finds
-- the lease lost. The expiry is removed, or upkeep would end the waiting jobs. Differs from SQLite: one statement, so
-- that the counts match the changes.
with clock as materialized (select :now as now),
running as materialized (
    select id
      from duly.duly_job
     where token between 1 and 9223372036854775807
     order by id
       for update
),
stopped as (
    update duly.duly_job
       set state = 'waiting', attempt = attempt - 1, reason = :reason, due_at = null, expires_at = null,
           token = null, lease_until = null, last_token = -token
     where id = any (array(select id from running))
    returning id
),
closed as (
    insert into duly.duly_queue (kind, name, paused_at, paused_by, paused_why)
    select 'queue', queue, now, :by::text, :why::text
      from (select distinct queue from duly.duly_job) as live, clock
     order by queue
        on conflict (kind, name) do update
       set paused_at = excluded.paused_at, paused_by = excluded.paused_by, paused_why = excluded.paused_why,
           paused_until = null
     where duly_queue.paused_at is null or duly_queue.paused_until is not null
    returning name
),
unscheduled as (
    update duly.duly_schedule
       set paused_at = (select now from clock), paused_by = :by::text, paused_why = :why::text, revision = revision + 1
     where paused_at is null
    returning name
),
figure as (
    select (select count(*) from stopped) as jobs, (select count(*) from closed) as queues,
           (select count(*) from unscheduled) as schedules
)
insert into duly.duly_event (at, name, by, why, data)
select now, 'database.held', :by::text, :why::text,
       json_build_object('jobs', jobs, 'queues', queues, 'schedules', schedules)::text
  from figure, clock
 where jobs + queues + schedules > 0
returning data;

-- name: held
-- After a lost answer.
select data
  from duly.duly_event
 where name = 'database.held' and by = :by and why = :why
 order by id desc
 limit 1;

-- name: register
insert into duly.duly_worker (
    id, host, pid, queues, tasks, schedules, beat_ms, started_at, seen_at, slots, succeeded, failed)
values (:id::text, :host, :pid::int, :queues, :tasks, :schedules, :beat_ms::bigint, :now, :now, :slots::int,
        :succeeded::bigint, :failed::bigint)
    on conflict (id) do update
   set queues = excluded.queues, tasks = excluded.tasks, schedules = excluded.schedules, beat_ms = excluded.beat_ms, seen_at = excluded.seen_at,
       slots = excluded.slots, succeeded = excluded.succeeded, failed = excluded.failed;

-- name: notify
-- Part of the caller's transaction, so workers are notified at its commit.
with told as materialized (select pg_notify('duly', '')::text as told)
select 1 as told from told where told is null;

-- name: leave
delete from duly.duly_worker
 where id = :id;

-- name: workers
-- Jobs that run in a child process count for its worker. Differs from SQLite: see `expired_leases` for the tokens.
with running as materialized (
    select replace(worker, '/child', '') as holder, count(*) as count
      from duly.duly_job
     where token between 1 and 9223372036854775807
     group by holder
)
select id, host, pid, queues, tasks, beat_ms, started_at, seen_at, slots, coalesce(running.count, 0) as running,
       succeeded, failed, (select :now) as now
  from duly.duly_worker
  left join running on holder = id
 order by started_at, id;

-- name: limit_queue
-- Null leaves a limit unchanged, a negative value removes it. A depth that was counted up to another limit is useless.
with old as (
    select max_depth, ageing_ms, retry_share
      from (select 1) as one
      left join duly.duly_queue on kind = 'queue' and name = :name
),
changed as (
    select max_depth, ageing_ms, retry_share,
           case when :max_depth::bigint is null then max_depth when :max_depth::bigint >= 0 then :max_depth::bigint end
               as new_depth,
           case when :ageing_ms::bigint is null then ageing_ms when :ageing_ms::bigint >= 0 then :ageing_ms::bigint end
               as new_ageing,
           case when :retry_share::float8 is null then retry_share
                when :retry_share::float8 >= 0 then :retry_share::float8 end as new_share
      from old
)
insert into duly.duly_event (at, name, subject, by, why, data)
select :now, 'queue.limited', :name::text, :by::text, :why::text,
       json_build_object(
           'before', json_build_object('depth', max_depth, 'ageing_ms', ageing_ms, 'retry_share', retry_share),
           'after', json_build_object('depth', new_depth, 'ageing_ms', new_ageing, 'retry_share', new_share))::text
  from changed
 where max_depth is distinct from new_depth or ageing_ms is distinct from new_ageing
    or retry_share is distinct from new_share;
insert into duly.duly_queue (kind, name, max_depth, ageing_ms, retry_share, set_at, set_by, set_why)
values ('queue', :name::text, case when :max_depth::bigint >= 0 then :max_depth::bigint end,
        case when :ageing_ms::bigint >= 0 then :ageing_ms::bigint end,
        case when :retry_share::float8 >= 0 then :retry_share::float8 end, :now, :by::text, :why::text)
    on conflict (kind, name) do update
   set max_depth = case when :max_depth::bigint is null then duly_queue.max_depth else excluded.max_depth end,
       ageing_ms = case when :ageing_ms::bigint is null then duly_queue.ageing_ms else excluded.ageing_ms end,
       retry_share = case when :retry_share::float8 is null then duly_queue.retry_share else excluded.retry_share end,
       depth = case when :max_depth::bigint is null or duly_queue.max_depth is not distinct from excluded.max_depth
                    then duly_queue.depth end,
       depth_at = case when :max_depth::bigint is null or duly_queue.max_depth is not distinct from excluded.max_depth
                       then duly_queue.depth_at end,
       set_at = excluded.set_at, set_by = excluded.set_by, set_why = excluded.set_why
 where (:max_depth::bigint is not null and duly_queue.max_depth is distinct from excluded.max_depth)
    or (:ageing_ms::bigint is not null and duly_queue.ageing_ms is distinct from excluded.ageing_ms)
    or (:retry_share::float8 is not null and duly_queue.retry_share is distinct from excluded.retry_share);

-- name: limits
select kind, name, max_depth, depth, depth_at, ageing_ms, retry_share, set_at, set_by, set_why,
       :now - depth_at as depth_age_ms
  from duly.duly_queue
 where kind = 'queue' and (max_depth is not null or ageing_ms is not null or retry_share is not null)
 order by name;

-- name: depth
-- Counts the waiting jobs of a queue up to a limit, in the order of the index: see `queues`.
select count(*) as depth
  from ((select 1 from duly.duly_job
          where state = 'ready' and lane is null and queue = :queue
          order by suspect, priority desc, due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'scheduled' and lane is null and queue = :queue
          order by due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'ready' and lane is not null and queue = :queue
          order by suspect, task, lane, priority desc, due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'scheduled' and lane is not null and queue = :queue
          order by due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'waiting' and parked_version is null and queue = :queue
          order by due_at limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where parked_version is not null and queue = :queue
          order by task, parked_version limit :enough::bigint)
         limit :enough::bigint) as waiting;

-- name: note_depth
-- One count a second is enough for all workers, and a count that stopped at another limit is useless.
update duly.duly_queue
   set depth = :depth::bigint, depth_at = now
  from (select :now as now) as clock
 where kind = 'queue' and name = :queue and max_depth = :max_depth::bigint
   and (depth_at is null or depth_at <= now - 1000 or depth_at > now)
returning name;
