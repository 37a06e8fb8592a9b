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

-- name: register
insert into duly.duly_worker (id, host, pid, queues, tasks, beat_ms, started_at, seen_at)
values (:id::text, :host, :pid::int, :queues, :tasks, :beat_ms::bigint, :now, :now)
    on conflict (id) do update
   set queues = excluded.queues, tasks = excluded.tasks, beat_ms = excluded.beat_ms, seen_at = excluded.seen_at;

-- name: notify
-- Part of the caller's transaction, so workers hear of it when it commits, and not before.
with told as materialized (select pg_notify('duly', '')::text as told)
select 1 as told from told where told is null;

-- name: leave
delete from duly.duly_worker
 where id = :id;

-- name: workers
select id, host, pid, queues, tasks, beat_ms, started_at, seen_at, (select :now) as now
  from duly.duly_worker
 order by started_at, id;
