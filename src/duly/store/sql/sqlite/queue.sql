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

-- name: register
insert into duly_worker (id, host, pid, queues, tasks, beat_ms, started_at, seen_at)
values (:id, :host, :pid, :queues, :tasks, :beat_ms, :now, :now)
    on conflict (id) do update
   set queues = excluded.queues, tasks = excluded.tasks, beat_ms = excluded.beat_ms, seen_at = excluded.seen_at;

-- name: notify
-- Only PostgreSQL has somebody to tell: here workers watch the file.
select 1 as told
 where false;

-- name: leave
delete from duly_worker
 where id = :id;

-- name: workers
select id, host, pid, queues, tasks, beat_ms, started_at, seen_at, :now as now
  from duly_worker
 order by started_at, id;
