-- Upkeep on SQLite and D1: changes of a job outside of its attempts. Workers rescue jobs whose lease expired, promote
-- due jobs, park those that no worker knows, wake them again, and expire those that did not start in time. Users cancel
-- and retry.

-- name: expired_leases
-- A lease that ends more than two heartbeats later than a full one was written before the clock stepped back.
select id, token, lease_until, lease_ms, worker
  from duly_job
 where token is not null
   and (lease_until <= :now or lease_until > :now + lease_ms + 2 * (lease_ms / 3))
 order by lease_until
 limit :limit;

-- name: rescue
-- Only rows still running, still that token, still the lease end that was seen, still expired. A crash counts only if
-- the job ran alone, so that other jobs are not blamed, and only in the worker itself: a worker notices if a child
-- dies. The token is kept negated: a repetition recognizes its own rescue, and a worker that returns finds its lease
-- lost.
update duly_job
   set state = case when cancel_requested_at is not null then 'cancelled'
                    when crashes + crashed >= 3 or attempt >= max_attempts then 'dead'
                    else 'ready' end,
       finished_at = case when cancel_requested_at is not null or crashes + crashed >= 3 or attempt >= max_attempts
                          then :now end,
       reason = case when cancel_requested_at is not null then 'cancelled on request'
                     when crashes + crashed >= 3 then 'killed its worker'
                     when attempt >= max_attempts then 'worker lost on the last attempt' end,
       error = 'worker ' || worker || ' stopped beating',
       crashes = crashes + crashed, suspect = 1, token = null, lease_until = null, last_token = -token
  from (select value ->> 'id' as seen_id, value ->> 'token' as seen_token, value ->> 'lease_until' as seen_until,
               suspect and worker not like '%/child' as crashed
          from json_each(:seen)
         cross join duly_job on duly_job.id = value ->> 'id') as seen
 where duly_job.id = seen_id and state = 'running' and token = seen_token and lease_until = seen_until
   and (lease_until <= :now or lease_until > :now + lease_ms + 2 * (lease_ms / 3))
returning id, state;

-- name: crashed_attempts
insert into duly_attempt (job_id, attempt, at, worker, outcome, error)
select duly_job.id, attempt, :now, worker, 'crashed', error
  from json_each(:seen)
 cross join duly_job on duly_job.id = value ->> 'id'
 where last_token = -(value ->> 'token') and state <> 'running'
    on conflict (job_id, attempt) do nothing;

-- name: rescued
-- After a lost answer: which of these leases were rescued, and the states of their jobs.
select duly_job.id, state
  from json_each(:seen)
 cross join duly_job on duly_job.id = value ->> 'id'
 where last_token = -(value ->> 'token')
 union all
select duly_done.id, state
  from json_each(:seen)
 cross join duly_done on duly_done.id = value ->> 'id'
 where token = -(value ->> 'token');

-- name: promote
-- Without `:retries`, retries stay scheduled: in a queue where they have a budget, the claim takes them from there.
update duly_job
   set state = 'ready'
 where id in (
       select id from duly_job
        where state = 'scheduled' and lane is null and queue = :queue and due_at <= :now
          and (:retries or attempt = 0)
        order by due_at, id
        limit :limit)
returning id;
update duly_job
   set state = 'ready'
 where id in (
       select id from duly_job
        where state = 'scheduled' and lane is not null and queue = :queue and due_at <= :now
        order by due_at, id
        limit :limit)
returning id;
update duly_job
   set state = 'ready', reason = 'timed out'
 where id in (
       select id from duly_job
        where state = 'waiting' and parked_version is null and queue = :queue and due_at <= :now
        order by due_at
        limit :limit)
returning id;

-- name: park
-- Parks jobs at the head of the queue that none of its workers knows. The rest is not read, so the cost does not depend
-- on the length of the queue. Without workers for the queue, nothing is parked. In lanes, the tasks are read one by
-- one.
with recursive known as materialized (
    select tasks
      from duly_worker
     where seen_at > :now - 3 * beat_ms and exists (select 1 from json_each(queues) where value = :queue)
),
ready as materialized (
    select id, task
      from duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = 0
     order by priority desc, due_at, id
     limit :limit
),
suspects as materialized (
    select id, task
      from duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = 1
     order by priority desc, due_at, id
     limit :limit
),
due as materialized (
    select id, task
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= :now
     order by due_at, id
     limit :limit
),
laned (is_suspect, lane_task) as (
    select is_suspect, ''
      from (select 0 as is_suspect union all select 1)
     union all
    select is_suspect,
           (select task from duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = is_suspect and task > lane_task
             order by task limit 1)
      from laned
     where lane_task is not null
),
in_lanes as materialized (
    select id, task
      from laned
     cross join duly_job
        on state = 'ready' and lane is not null and queue = :queue and suspect = is_suspect and task = lane_task
     where lane_task not in (select value from known cross join json_each(tasks))
     limit :limit
)
update duly_job
   set state = 'waiting', reason = :reason, parked_version = coalesce(envelope ->> 'schema_version', 1)
 where exists (select 1 from known)
   and id in (
       select id
         from (select id, task from ready
                union all
               select id, task from suspects
                union all
               select id, task from due
                union all
               select id, task from in_lanes)
        where task not in (select value from known cross join json_each(tasks)))
returning id;

-- name: wake
-- A job keeps the due time that it had when parked, and so its place.
update duly_job
   set state = 'ready', reason = null, parked_version = null
 where id in (
       select duly_job.id
         from json_each(:versions) as knows
        cross join json_each(:queues) as serves
        cross join duly_job
           on duly_job.queue = serves.value and duly_job.task = knows.key and parked_version <= knows.value
        where state = 'waiting'
        limit :limit)
returning id;

-- name: next_due
-- Overdue jobs are ignored: a worker that could claim them would have. But a job may have become due a moment ago.
select min(due_at) - :now as due_in_ms
  from (select min(due_at) as due_at
          from duly_job
         where state = 'scheduled' and lane is null and queue = :queue and due_at > :now - 50
         union all
        select min(due_at)
          from duly_job
         where state = 'scheduled' and lane is not null and queue = :queue and due_at > :now - 50);

-- name: expirable
select id
  from duly_job
 where expires_at <= :now and attempt = 0 and state in ('scheduled', 'ready', 'waiting')
 order by expires_at
 limit :limit;

-- name: expire
update duly_job
   set state = 'cancelled', finished_at = :now, reason = 'expired'
 where id in (select value from json_each(:ids))
   and expires_at <= :now and attempt = 0 and state in ('scheduled', 'ready', 'waiting')
returning id;

-- name: cancel
-- A running job is only asked to stop, so that no effect is forgotten.
insert into duly_event (at, name, job_id, subject, by, why)
select :now, 'job.cancel_requested', duly_job.id, task, :by, :why
  {jobs_by_id}
 where state = 'running' and cancel_requested_at is null;
update duly_job
   set cancel_requested_at = coalesce(cancel_requested_at, :now),
       finished_at = case when state <> 'running' then :now end,
       reason = case when state <> 'running' then coalesce(:why, 'cancelled') else reason end,
       state = case when state <> 'running' then 'cancelled' else state end
 where id in (select value from json_each(:ids)) and finished_at is null
returning id, state;

-- name: cancelled
-- After a lost answer.
select id, state
  from duly_done
 where id in (select value from json_each(:ids)) and state = 'cancelled';

-- name: retry
insert into duly_event (at, name, job_id, subject, by, why, data)
select :now, 'job.retried', duly_job.id, task, :by, :why, json_object('from', state)
  {jobs_by_id}
 where state in ('scheduled', 'waiting');
update duly_job
   set state = 'ready', due_at = :now, reason = null, parked_version = null
 where id in (select value from json_each(:ids)) and state in ('scheduled', 'waiting')
returning id, state;

-- name: retried
-- After a lost answer: the audit log has the jobs that were made due, which may have run since.
select distinct job_id as id, 'ready' as state
  from duly_event
 where name = 'job.retried' and job_id in (select value from json_each(:ids)) and by is :by and why is :why;
