-- Queues, tasks and workers on SQLite and D1: what is paused, who is alive.

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
-- Asked after a lost answer.
select name
  from duly_queue
 where kind = :kind and name = :name and paused_at is null;

-- name: paused
select kind, name, paused_at, paused_by, paused_why, paused_until
  from duly_queue
 where paused_at is not null and (paused_until is null or paused_until > :now)
 order by kind, name;

-- name: hold
-- What is to be stopped is counted first. What is paused for good stays paused by whom it was. The token is kept
-- negated, as in a rescue, so that its worker, should it live, is told that it lost. With an expiry left, upkeep would
-- end what waits.
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
-- Asked after a lost answer.
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

-- name: notify
-- Only PostgreSQL has somebody to tell: here workers watch the file.
select 1 as told
 where false;

-- name: leave
delete from duly_worker
 where id = :id;

-- name: workers
-- What runs in a child of a worker runs in that worker.
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
