-- Queues, tasks and workers on PostgreSQL: what is paused, who is alive.

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
-- Asked after a lost answer.
select name
  from duly.duly_queue
 where kind = :kind and name = :name and paused_at is null;

-- name: paused
select kind, name, paused_at, paused_by, paused_why, paused_until
  from duly.duly_queue
 where paused_at is not null and (paused_until is null or paused_until > :now)
 order by kind, name;

-- name: hold
-- What is paused for good stays paused by whom it was. The token is kept negated, as in a rescue, so that its worker,
-- should it live, is told that it lost. With an expiry left, upkeep would end what waits. Differs from SQLite: all in
-- one statement, so that what is counted is what was stopped.
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
-- Asked after a lost answer.
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
-- Part of the caller's transaction, so workers hear of it when it commits, and not before.
with told as materialized (select pg_notify('duly', '')::text as told)
select 1 as told from told where told is null;

-- name: leave
delete from duly.duly_worker
 where id = :id;

-- name: workers
-- What runs in a child of a worker runs in that worker. Differs from SQLite: see `expired_leases` for the tokens.
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
