-- Queues, tasks and workers on SQLite and D1: pauses, limits and registrations.

-- name: pause
insert into duly_event (at, name, subject, by, why)
select :now, :kind || '.paused', :name, :by, :why
 where not exists (
       select 1 from duly_queue
        where kind = :kind and name = :name and paused_at is not null and paused_by = :by and paused_why = :why
          and (paused_until is null or paused_until > :now));
insert into duly_queue (kind, name, paused_at, paused_by, paused_why, paused_until)
values (:kind, :name, :now, :by, :why, :now + :until_ms)
    on conflict (kind, name) do update
   set paused_at = excluded.paused_at, paused_by = excluded.paused_by, paused_why = excluded.paused_why,
       paused_until = excluded.paused_until;

-- name: resume
insert into duly_event (at, name, subject, by, why)
select :now, :kind || '.resumed', :name, :by, :why
  from duly_queue
 where kind = :kind and name = :name and paused_at is not null;
update duly_queue
   set paused_at = null, paused_by = null, paused_why = null, paused_until = null
 where kind = :kind and name = :name and paused_at is not null
returning name;

-- name: resumed
-- After a lost answer.
select name
  from duly_queue
 where kind = :kind and name = :name and paused_at is null;

-- name: paused
select kind, name, paused_at, paused_by, paused_why, paused_until
  from duly_queue
 where paused_at is not null and (paused_until is null or paused_until > :now)
 order by kind, name;

-- name: hold
-- Counts first. A pause without an end is not changed. The token is kept negated, as in a rescue, so that its worker,
-- if alive, finds the lease lost. The expiry is removed, or upkeep would end the waiting jobs.
insert into duly_event (at, name, by, why, data)
select :now, 'database.held', :by, :why, json_object('jobs', jobs, 'queues', queues, 'schedules', schedules)
  from (select (select count(*) from duly_job where token is not null) as jobs,
               (select count(*) from (
                select queue from duly_job
                except
                select name from duly_queue
                 where kind = 'queue' and paused_at is not null and paused_until is null)) as queues,
               (select count(*) from duly_schedule where paused_at is null) as schedules)
 where jobs + queues + schedules > 0
returning data;
insert into duly_queue (kind, name, paused_at, paused_by, paused_why)
select distinct 'queue', queue, :now, :by, :why
  from duly_job
 where true
    on conflict (kind, name) do update
   set paused_at = excluded.paused_at, paused_by = excluded.paused_by, paused_why = excluded.paused_why,
       paused_until = null
 where duly_queue.paused_at is null or duly_queue.paused_until is not null;
update duly_job
   set state = 'waiting', attempt = attempt - 1, reason = :reason, due_at = null, expires_at = null,
       token = null, lease_until = null, last_token = -token
 where token is not null;
update duly_schedule
   set paused_at = :now, paused_by = :by, paused_why = :why, revision = revision + 1
 where paused_at is null;

-- name: held
-- After a lost answer.
select data
  from duly_event
 where name = 'database.held' and by = :by and why = :why
 order by id desc
 limit 1;

-- name: register
insert into duly_worker (
    id, host, pid, queues, tasks, schedules, beat_ms, started_at, seen_at, slots, succeeded, failed)
values (:id, :host, :pid, :queues, :tasks, :schedules, :beat_ms, :now, :now, :slots, :succeeded, :failed)
    on conflict (id) do update
   set queues = excluded.queues, tasks = excluded.tasks, schedules = excluded.schedules, beat_ms = excluded.beat_ms, seen_at = excluded.seen_at,
       slots = excluded.slots, succeeded = excluded.succeeded, failed = excluded.failed;

-- name: leave
delete from duly_worker
 where id = :id;

-- name: workers
-- Jobs that run in a child process count for its worker.
with running as materialized (
    select replace(worker, '/child', '') as holder, count(*) as count
      from duly_job
     where token is not null
     group by holder
)
select id, host, pid, queues, tasks, beat_ms, started_at, seen_at, slots, coalesce(running.count, 0) as running,
       succeeded, failed, :now as now
  from duly_worker
  left join running on holder = id
 order by started_at, id;

-- name: limit_queue
-- Null leaves a limit unchanged, a negative value removes it. A depth that was counted up to another limit is useless.
with old as (
    select max_depth, ageing_ms, retry_share
      from (select 1)
      left join duly_queue on kind = 'queue' and name = :name
),
changed as (
    select max_depth, ageing_ms, retry_share,
           case when :max_depth is null then max_depth when :max_depth >= 0 then cast(:max_depth as integer) end
               as new_depth,
           case when :ageing_ms is null then ageing_ms when :ageing_ms >= 0 then cast(:ageing_ms as integer) end
               as new_ageing,
           case when :retry_share is null then retry_share when :retry_share >= 0 then cast(:retry_share as real) end
               as new_share
      from old
)
insert into duly_event (at, name, subject, by, why, data)
select :now, 'queue.limited', :name, :by, :why,
       json_object('before', json_object('depth', max_depth, 'ageing_ms', ageing_ms, 'retry_share', retry_share),
                   'after', json_object('depth', new_depth, 'ageing_ms', new_ageing, 'retry_share', new_share))
  from changed
 where max_depth is not new_depth or ageing_ms is not new_ageing or retry_share is not new_share;
insert into duly_queue (kind, name, max_depth, ageing_ms, retry_share, set_at, set_by, set_why)
values ('queue', :name, case when :max_depth >= 0 then :max_depth end, case when :ageing_ms >= 0 then :ageing_ms end,
        case when :retry_share >= 0 then :retry_share end, :now, :by, :why)
    on conflict (kind, name) do update
   set max_depth = case when :max_depth is null then duly_queue.max_depth else excluded.max_depth end,
       ageing_ms = case when :ageing_ms is null then duly_queue.ageing_ms else excluded.ageing_ms end,
       retry_share = case when :retry_share is null then duly_queue.retry_share else excluded.retry_share end,
       depth = case when :max_depth is null or duly_queue.max_depth is excluded.max_depth then duly_queue.depth end,
       depth_at = case when :max_depth is null or duly_queue.max_depth is excluded.max_depth then duly_queue.depth_at end,
       set_at = excluded.set_at, set_by = excluded.set_by, set_why = excluded.set_why
 where (:max_depth is not null and duly_queue.max_depth is not excluded.max_depth)
    or (:ageing_ms is not null and duly_queue.ageing_ms is not excluded.ageing_ms)
    or (:retry_share is not null and duly_queue.retry_share is not excluded.retry_share);

-- name: limits
select kind, name, max_depth, depth, depth_at, ageing_ms, retry_share, set_at, set_by, set_why,
       :now - depth_at as depth_age_ms
  from duly_queue
 where kind = 'queue' and (max_depth is not null or ageing_ms is not null or retry_share is not null)
 order by name;

-- name: depth
-- Counts the waiting jobs of a queue up to a limit, in the order of the index: see `queues`.
select count(*) as depth
  from (select 1 from (
        select 1 from duly_job
         where state = 'ready' and lane is null and queue = :queue
         order by suspect, priority desc, due_at, id limit :enough)
         union all
        select 1 from (
        select 1 from duly_job
         where state = 'scheduled' and lane is null and queue = :queue
         order by due_at, id limit :enough)
         union all
        select 1 from (
        select 1 from (
        select 1 from duly_job
         where state = 'ready' and lane is not null and queue = :queue
         order by suspect, task, lane, priority desc, due_at, id limit :enough)
         union all
        select 1 from (
        select 1 from duly_job
         where state = 'scheduled' and lane is not null and queue = :queue
         order by due_at, id limit :enough))
         union all
        select 1 from (
        select 1 from duly_job
         where state = 'waiting' and parked_version is null and queue = :queue
         order by due_at limit :enough)
         union all
        select 1 from (
        select 1 from duly_job
         where parked_version is not null and queue = :queue
         order by task, parked_version limit :enough)
         limit :enough);

-- name: note_depth
-- One count a second is enough for all workers, and a count that stopped at another limit is useless.
update duly_queue
   set depth = :depth, depth_at = :now
 where kind = 'queue' and name = :queue and max_depth = :max_depth
   and (depth_at is null or depth_at <= :now - 1000 or depth_at > :now)
returning name;
