-- Reading for people and programs, on PostgreSQL. Nothing here changes a row.

-- name: list
-- Newest first over live and finished jobs. Both ends of the id range are given, so that one job and a page of
-- jobs are the same walk along the primary key.
with page as materialized (
    (
        select id from duly.duly_job
         where id between :first::uuid and :last::uuid
           and (:state::text is null or :state in ('scheduled', 'ready', 'running', 'waiting') and state = :state)
           and (:task::text is null or task = :task) and (:queue::text is null or queue = :queue)
           and (:batch_id::uuid is null or batch_id = :batch_id::uuid) and (:since::bigint is null or created_at >= :since::bigint)
           and (:error::text is null or strpos(error, :error) > 0 or strpos(reason, :error) > 0)
         order by id desc limit :limit::int)
     union all
    (
        select id from duly.duly_done
         where id between :first::uuid and :last::uuid
           and (:state::text is null or :state in ('succeeded', 'partial', 'dead', 'cancelled') and state = :state)
           and (:task::text is null or task = :task) and (:queue::text is null or queue = :queue)
           and (:batch_id::uuid is null or batch_id = :batch_id::uuid) and (:since::bigint is null or created_at >= :since::bigint)
           and (:error::text is null or strpos(error, :error) > 0 or strpos(reason, :error) > 0)
         order by id desc limit :limit::int)
     order by id desc
     limit :limit::int
)
select page.id::text, task, queue, priority, state, payload, envelope, key, attempt, max_attempts, crashes, created_at, due_at,
       expires_at, worker, lease_until, heartbeat_at, progress, progress_message, cancel_requested_at,
       null::bigint as finished_at, null::text as result, null::bigint as result_until, reason, error, batch_id::text, schedule, origin::text, replay_of::text,
       replay_count, null::text as replayed_as, null::bigint as resolved_at, null::text as resolved_by,
       null::text as resolved_why, (select :now) as now
  from page
  join duly.duly_job on duly_job.id = page.id
 union all
select page.id::text, task, queue, priority, state, payload, envelope, key, attempt, max_attempts, crashes, created_at, due_at,
       expires_at, worker, null::bigint, null::bigint, progress, progress_message, cancel_requested_at, finished_at, result,
       result_until, reason, error, batch_id::text, schedule, origin::text, replay_of::text, replay_count,
       replayed_as::text, resolved_at, resolved_by, resolved_why, (select :now)
  from page
  join duly.duly_done on duly_done.id = page.id
 order by 1 desc;

-- name: attempts
select job_id::text, attempt, at, worker, outcome, error, traceback
  from duly.duly_attempt
 where job_id = :id::uuid
 order by attempt;

-- name: steps
select job_id::text, name, kind, state, attempt, key, result, error, created_at, changed_at
  from duly.duly_step
 where job_id = :id::uuid
 order by created_at, name;

-- name: events
select id, at, name, job_id::text, subject, by, why, data
  from duly.duly_event
 where id > :after::bigint
 order by id
 limit :limit::int;

-- name: job_events
select id, at, name, job_id::text, subject, by, why, data
  from duly.duly_event
 where job_id = :job_id::uuid and id > :after::bigint
 order by id
 limit :limit::int;

-- name: why
-- All gates of one job in one snapshot; the first that is shut is the answer.
select job.id::text, job.task, job.queue, job.state, job.due_at, job.expires_at, job.attempt, job.max_attempts, job.worker,
       job.lease_until, job.reason, job.error, job.suspect, job.parked_version, now as now,
       queue_gate.paused_by as queue_paused_by, queue_gate.paused_why as queue_paused_why,
       queue_gate.paused_at as queue_paused_at, queue_gate.paused_until as queue_paused_until,
       task_gate.paused_by as task_paused_by, task_gate.paused_why as task_paused_why,
       task_gate.paused_at as task_paused_at, task_gate.paused_until as task_paused_until,
       (select count(*) from duly.duly_worker
         where seen_at > now - 3 * beat_ms
           and tasks::jsonb ? job.task
           and queues::jsonb ? job.queue) as knowing_workers,
       (select count(*) from duly.duly_worker where seen_at > now - 3 * beat_ms) as living_workers,
       (select count(*) from (
        select 1 from duly.duly_job as ahead
         where ahead.state = 'ready' and ahead.queue = job.queue and job.state = 'ready'
           and ahead.suspect = job.suspect and ahead.priority > job.priority
         limit 10001) as higher)
       + (select count(*) from (
        select 1 from duly.duly_job as ahead
         where ahead.state = 'ready' and ahead.queue = job.queue and job.state = 'ready'
           and ahead.suspect = job.suspect and ahead.priority = job.priority and (ahead.due_at, ahead.id) < (job.due_at, job.id)
         limit 10001) as earlier) as ahead
  from (select id, task, queue, state, due_at, expires_at, attempt, max_attempts, worker, lease_until, reason, error,
               suspect, parked_version, priority
          from duly.duly_job where id = :id::uuid
         union all
        select id, task, queue, state, due_at, expires_at, attempt, max_attempts, worker, null, reason, error, false, null,
               priority
          from duly.duly_done where id = :id::uuid) as job
 cross join (select :now as now offset 0) as clock
  left join duly.duly_queue as queue_gate
    on queue_gate.kind = 'queue' and queue_gate.name = job.queue and queue_gate.paused_at is not null
   and (queue_gate.paused_until is null or queue_gate.paused_until > now)
  left join duly.duly_queue as task_gate
    on task_gate.kind = 'task' and task_gate.name = job.task and task_gate.paused_at is not null
   and (task_gate.paused_until is null or task_gate.paused_until > now);

-- name: clock
select :now as now;
