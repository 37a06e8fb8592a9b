-- Upkeep on PostgreSQL: changes of a job outside of its attempts. Workers rescue jobs whose lease expired, promote due
-- jobs, park those that no worker knows, wake them again, and expire those that did not start in time. Users cancel and
-- retry.

-- name: expired_leases
-- A lease that ends more than two heartbeats later than a full one was written before the clock stepped back. Differs
-- from SQLite: `is not null` would read the whole table until it is analyzed.
select id::text, token, lease_until, lease_ms, worker
  from duly.duly_job
 cross join (select :now as now offset 0) as clock
 where token between 1 and 9223372036854775807
   and (lease_until <= now or lease_until > now + lease_ms + 2 * (lease_ms / 3))
 order by lease_until
 limit :limit::int;

-- name: rescue
-- Only rows still running, still that token, still the lease end that was seen, still expired. A crash counts only if
-- the job ran alone, so that other jobs are not blamed, and only in the worker itself: a worker notices if a child
-- dies. The token is kept negated: a repetition recognizes its own rescue, and a worker that returns finds its lease
-- lost. Differs from SQLite: a locked row is being extended or finished, and is skipped.
with clock as materialized (select :now as now),
seen as materialized (
    select id, token, lease_until
      from json_to_recordset(:seen::json) as seen (id uuid, token bigint, lease_until bigint)
),
expired as materialized (
    select duly_job.id, (suspect and worker not like '%/child')::int as crashed
      from seen
      join duly.duly_job on duly_job.id = seen.id and duly_job.token is not distinct from seen.token
       and duly_job.lease_until = seen.lease_until
     cross join clock
     where duly_job.id = any (array(select id from seen)) and duly_job.state = 'running'
       and (duly_job.lease_until <= now or duly_job.lease_until > now + lease_ms + 2 * (lease_ms / 3))
     order by duly_job.id
       for update of duly_job skip locked
)
update duly.duly_job
   set state = case when cancel_requested_at is not null then 'cancelled'
                    when crashes + crashed >= 3 or attempt >= max_attempts then 'dead'
                    else 'ready' end,
       finished_at = case when cancel_requested_at is not null or crashes + crashed >= 3 or attempt >= max_attempts
                          then (select now from clock) end,
       reason = case when cancel_requested_at is not null then 'cancelled on request'
                     when crashes + crashed >= 3 then 'killed its worker'
                     when attempt >= max_attempts then 'worker lost on the last attempt' end,
       error = 'worker ' || worker || ' stopped beating',
       crashes = crashes + crashed, suspect = true, token = null, lease_until = null, last_token = -token
  from expired
 where duly_job.id = expired.id and duly_job.id = any (array(select id from expired))
returning duly_job.id::text, state;

-- name: crashed_attempts
insert into duly.duly_attempt (job_id, attempt, at, worker, outcome, error)
select duly_job.id, attempt, :now, worker, 'crashed', error
  from json_to_recordset(:seen::json) as seen (id uuid, token bigint)
  join duly.duly_job on duly_job.id = seen.id
 where duly_job.id = any (array(select id from json_to_recordset(:seen::json) as seen (id uuid)))
   and last_token = -seen.token and state <> 'running'
    on conflict (job_id, attempt) do nothing;

-- name: rescued
-- After a lost answer: which of these leases were rescued, and the states of their jobs.
select duly_job.id::text, state
  from json_to_recordset(:seen::json) as seen (id uuid, token bigint)
  join duly.duly_job on duly_job.id = seen.id
 where last_token = -seen.token
 union all
select duly_done.id::text, state
  from json_to_recordset(:seen::json) as seen (id uuid, token bigint)
  join duly.duly_done on duly_done.id = seen.id
 where duly_done.token = -seen.token;

-- name: promote
-- Without `:retries`, retries stay scheduled: in a queue where they have a budget, the claim takes them from there.
with clock as materialized (select :now as now),
due as materialized (
    select id from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= (select now from clock)
       and (:retries::boolean or attempt = 0)
     order by due_at, id
     limit :limit::int
       for update skip locked
)
update duly.duly_job
   set state = 'ready'
 where id = any (array(select id from due))
returning id::text;
with clock as materialized (select :now as now),
due as materialized (
    select id from duly.duly_job
     where state = 'scheduled' and lane is not null and queue = :queue and due_at <= (select now from clock)
     order by due_at, id
     limit :limit::int
       for update skip locked
)
update duly.duly_job
   set state = 'ready'
 where id = any (array(select id from due))
returning id::text;
with clock as materialized (select :now as now),
due as materialized (
    select id from duly.duly_job
     where state = 'waiting' and parked_version is null and queue = :queue and due_at <= (select now from clock)
     order by due_at
     limit :limit::int
       for update skip locked
)
update duly.duly_job
   set state = 'ready', reason = 'timed out'
 where id = any (array(select id from due))
returning id::text;

-- name: park
-- Parks jobs at the head of the queue that none of its workers knows. The rest is not read, so the cost does not depend
-- on the length of the queue. Without workers for the queue, nothing is parked. Differs from SQLite: only rows to be
-- parked are locked, so that claims can take the rest, and are then checked again. In lanes, the tasks are read one by
-- one.
with recursive clock as materialized (select :now as now),
known as materialized (
    select tasks
      from duly.duly_worker, clock
     where seen_at > now - 3 * beat_ms and queues::jsonb ? :queue
),
ready as materialized (
    select id, task
      from duly.duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = false
     order by priority desc, due_at, id
     limit :limit::int
),
suspects as materialized (
    select id, task
      from duly.duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = true
     order by priority desc, due_at, id
     limit :limit::int
),
due as materialized (
    select id, task
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= (select now from clock)
     order by due_at, id
     limit :limit::int
),
laned (is_suspect, lane_task) as (
    select is_suspect, ''::text
      from (values (false), (true)) as which (is_suspect)
     union all
    select is_suspect,
           (select task from duly.duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = is_suspect and task > lane_task
             order by task limit 1)
      from laned
     where lane_task is not null
),
in_lanes as materialized (
    select job.id, job.task
      from laned
     cross join lateral (
           select id, task
             from duly.duly_job
            where state = 'ready' and lane is not null and queue = :queue and suspect = is_suspect and task = lane_task
            limit :limit::int) as job
     where lane_task not in (select json_array_elements_text(tasks::json) from known)
     limit :limit::int
),
unknown as materialized (
    select id
      from (select id, task from ready
             union all
            select id, task from suspects
             union all
            select id, task from due
             union all
            select id, task from in_lanes) as head
     where exists (select 1 from known)
       and task not in (select json_array_elements_text(tasks::json) from known)
),
locked as materialized (
    select id
      from duly.duly_job
     where id = any (array(select id from unknown))
       and (state = 'ready' or state = 'scheduled' and due_at <= (select now from clock))
     order by id
       for update skip locked
)
update duly.duly_job
   set state = 'waiting', reason = :reason, parked_version = coalesce((envelope::json ->> 'schema_version')::bigint, 1)
 where id = any (array(select id from locked))
returning id::text;

-- name: wake
-- A job keeps the due time that it had when parked, and so its place. The types make the planner expect one task and
-- one queue, not a hundred, for which it would compile the plan: a fifth of a second.
with parked as materialized (
    select job.id
      from json_each(:versions::json) as knows (task, version)
     cross join json_array_elements(:queues::json) as serves (queue)
     cross join lateral (
           select id
             from duly.duly_job
            where duly_job.queue = serves.queue #>> '{}' and duly_job.task = knows.task
              and parked_version <= (knows.version #>> '{}')::bigint and state = 'waiting'
            limit :limit::int
              for update skip locked) as job
     where json_typeof(knows.version) = 'number' and json_typeof(serves.queue) = 'string'
     limit :limit::int
)
update duly.duly_job
   set state = 'ready', reason = null, parked_version = null
 where id = any (array(select id from parked))
returning id::text;

-- name: next_due
-- Overdue jobs are ignored: a worker that could claim them would have. But a job may have become due a moment ago.
-- Differs from SQLite: with a `with`, the least value would not be read from the index, but from all rows.
select least(
           (select min(due_at)
              from duly.duly_job
             where state = 'scheduled' and lane is null and queue = :queue and due_at > now - 50),
           (select min(due_at)
              from duly.duly_job
             where state = 'scheduled' and lane is not null and queue = :queue and due_at > now - 50)) - now as due_in_ms
  from (select :now as now offset 0) as clock;

-- name: expirable
select id::text
  from duly.duly_job
 where expires_at <= (select :now) and attempt = 0 and state in ('scheduled', 'ready', 'waiting')
 order by expires_at
 limit :limit::int;

-- name: expire
with clock as materialized (select :now as now),
late as materialized (
    select id from duly.duly_job, clock
     where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
       and expires_at <= now and attempt = 0 and state in ('scheduled', 'ready', 'waiting')
     order by id
       for update of duly_job skip locked
)
update duly.duly_job
   set state = 'cancelled', finished_at = (select now from clock), reason = 'expired'
 where id = any (array(select id from late))
returning id::text;

-- name: cancel
-- A running job is only asked to stop, so that no effect is forgotten. Differs from SQLite: the row is locked before
-- its state is read, so that a job that starts or ends meanwhile is seen.
with clock as materialized (select :now as now),
live as materialized (
    select id, task, state, cancel_requested_at from duly.duly_job
     where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
       and finished_at is null
     order by id
       for update
),
told as (
    insert into duly.duly_event (at, name, job_id, subject, by, why)
    select now, 'job.cancel_requested', id, task, :by::text, :why::text
      from live, clock
     where state = 'running' and cancel_requested_at is null
)
update duly.duly_job
   set cancel_requested_at = coalesce(cancel_requested_at, (select now from clock)),
       finished_at = case when state <> 'running' then (select now from clock) end,
       reason = case when state <> 'running' then coalesce(:why::text, 'cancelled') else reason end,
       state = case when state <> 'running' then 'cancelled' else state end
 where id = any (array(select id from live))
returning id::text, state;

-- name: cancelled
-- After a lost answer.
select id::text, state
  from duly.duly_done
 where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked)) and state = 'cancelled';

-- name: retry
-- Differs from SQLite: the row is locked before its state is read, as in `cancel`.
with clock as materialized (select :now as now),
late as materialized (
    select id, task, state from duly.duly_job
     where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
       and state in ('scheduled', 'waiting')
     order by id
       for update
),
told as (
    insert into duly.duly_event (at, name, job_id, subject, by, why, data)
    select now, 'job.retried', id, task, :by::text, :why::text, json_build_object('from', state)::text
      from late, clock
)
update duly.duly_job
   set state = 'ready', due_at = (select now from clock), reason = null, parked_version = null
 where id = any (array(select id from late))
returning id::text, state;

-- name: retried
-- After a lost answer: the audit log has the jobs that were made due, which may have run since.
select distinct job_id::text as id, 'ready' as state
  from duly.duly_event
 where name = 'job.retried'
   and job_id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
   and by is not distinct from :by::text and why is not distinct from :why::text;
