-- Claim on SQLite and D1: a worker leases due jobs with a token that it made. While a job runs, the worker extends the
-- lease, and the handler writes progress. Every such write names the token, so a worker that lost its lease changes
-- nothing. `lane.sql` claims jobs with a cap, a rate or an order.

-- fragment: known_tasks
    (:tasks is null or task in (select value from json_each(:tasks)))
and task not in (
    select name from duly_queue
     where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))

-- fragment: paused_queue
select 1 from duly_queue
 where kind = 'queue' and name = :queue and paused_at is not null
   and (paused_until is null or paused_until > :now)

-- name: claim
-- Ready rows in their order, then due scheduled ones, so that nothing has to be promoted first (no scheduled one is a
-- suspect). If the token holds jobs, the claim is a repetition and takes no more. Differs from PostgreSQL: each job is
-- one value, because fetching a value takes the driver longer than finding it takes SQLite.
with asked as materialized (
    select case when exists (select 1 from duly_job where token = :token) then 0 else :limit end as room
     where not exists ({paused_queue})
),
ready as materialized (
    select id
      from duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = :alone
       and {known_tasks}
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by priority desc, due_at, id
     limit coalesce((select room from asked), 0)
),
due as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and not :alone and due_at <= :now
       and {known_tasks}
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by due_at, id
     limit coalesce((select room from asked), 0) - (select count(*) from ready)
)
update duly_job
   set state = 'running', attempt = attempt + 1, token = :token, worker = :worker,
       lease_until = :now + lease_ms, heartbeat_at = null, progress = null, progress_message = null, reason = null
 where id in (select id from ready union all select id from due);
select json_array(
       id, token, task, queue, priority, payload, key, attempt, max_attempts, crashes, suspect, lease_ms, lease_until,
       due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane,
       envelope) as job
  from duly_job
 where token = :token;

-- name: claim_marked
-- same as: claim
-- Differs from PostgreSQL: SQLite walks over no deleted rows, so marks save nothing.

-- fragment: paused_tasks
select name from duly_queue
 where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now)

-- name: claim_shaped
-- `claim` for a queue whose priorities age (`:ageing_ms`) or whose retries have a budget (`:retries`). `walk` merges
-- the priorities, best first: each row is followed by the next of the same priority. Due retries within the budget come
-- before the rest of the queue, further ones after it. If many retries are due, other due jobs are sought among the
-- first only: promoting finds the rest.
with recursive asked as materialized (
    select case when exists (select 1 from duly_job where token = :token) then 0 else :limit end as room
     where not exists ({paused_queue})
),
budgeted as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and attempt > 0 and due_at <= :now
       and {known_tasks}
     order by due_at, id
     limit min(coalesce(:retries, 0), coalesce((select room from asked), 0))
),
level (level_priority, place) as (
    select (select priority from duly_job
             where state = 'ready' and lane is null and queue = :queue and suspect = 0
             order by priority desc limit 1), 1
     union all
    select (select priority from duly_job
             where state = 'ready' and lane is null and queue = :queue and suspect = 0 and priority < level_priority
             order by priority desc limit 1), place + 1
      from level
     where level_priority is not null and place < 1000
),
walk (rank, beside, walk_id, walk_priority, walk_due_at) as (
    select case when :ageing_ms is null then - priority else due_at - priority * :ageing_ms end,
           case when :ageing_ms is null then due_at end, id, priority, due_at
      from level
     cross join duly_job on id = (
           select one.id
             from duly_job as one
            where one.state = 'ready' and one.lane is null and one.queue = :queue and one.suspect = 0
              and one.priority = level_priority
              and (:tasks is null or one.task in (select value from json_each(:tasks)))
              and one.task not in ({paused_tasks})
              and (one.expires_at is null or one.expires_at > :now or one.attempt > 0)
            order by one.due_at, one.id
            limit 1)
     union all
    select case when :ageing_ms is null then - priority else due_at - priority * :ageing_ms end,
           case when :ageing_ms is null then due_at end, id, priority, due_at
      from walk
     cross join duly_job on id = (
           select one.id
             from duly_job as one
            where one.state = 'ready' and one.lane is null and one.queue = :queue and one.suspect = 0
              and one.priority = walk_priority and (one.due_at, one.id) > (walk_due_at, walk_id)
              and (:tasks is null or one.task in (select value from json_each(:tasks)))
              and one.task not in ({paused_tasks})
              and (one.expires_at is null or one.expires_at > :now or one.attempt > 0)
            order by one.due_at, one.id
            limit 1)
     order by 1, 2, 3
     limit coalesce((select room from asked), 0) - (select count(*) from budgeted)
),
ready as materialized (
    select walk_id as id from walk
),
fresh as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= :now
       and (:retries is null
            or (attempt = 0 and due_at <= coalesce(
                (select due_at from duly_job
                  where state = 'scheduled' and lane is null and queue = :queue and due_at <= :now
                  order by due_at, id limit 1 offset 100), :now)))
       and {known_tasks}
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by due_at, id
     limit coalesce((select room from asked), 0) - (select count(*) from budgeted) - (select count(*) from ready)
),
further as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and attempt > 0 and due_at <= :now
       and :retries is not null and id not in (select id from budgeted)
       and {known_tasks}
     order by due_at, id
     limit coalesce((select room from asked), 0) - (select count(*) from budgeted) - (select count(*) from ready)
           - (select count(*) from fresh)
)
update duly_job
   set state = 'running', attempt = attempt + 1, token = :token, worker = :worker,
       lease_until = :now + lease_ms, heartbeat_at = null, progress = null, progress_message = null, reason = null
 where id in (
       select id from budgeted union all select id from ready union all select id from fresh
        union all select id from further);
select id, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
       lease_ms, lease_until, due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin,
       lane
  from duly_job
 where token = :token
 order by case when :ageing_ms is null then - priority else due_at - priority * :ageing_ms end,
          case when :ageing_ms is null then due_at end, id;

-- name: recall
select json_array(
       id, token, task, queue, priority, payload, key, attempt, max_attempts, crashes, suspect, lease_ms, lease_until,
       due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane,
       envelope) as job
  from duly_job
 where token = :token
 order by priority desc, due_at, id;

-- name: head
-- Differs from PostgreSQL: SQLite walks over no deleted rows, so the first job is found quickly.
select priority, due_at, id, null as took_ms
  from duly_job
 where state = 'ready' and lane is null and queue = :queue and suspect = 0
   and {known_tasks}
   and (expires_at is null or expires_at > :now or attempt > 0)
 order by priority desc, due_at, id
 limit 1;

-- name: extend
-- Only the token counts: a worker that is late still holds jobs that were not taken from it.
update duly_job
   set lease_until = :now + lease_ms
  from (select value ->> 'id' as id, value ->> 'token' as token from json_each(:held)) as held
 where duly_job.id = held.id and duly_job.token = held.token and duly_job.state = 'running'
returning id, cancel_requested_at;

-- name: progress
update duly_job
   set progress = :progress, progress_message = :message
 where id = :id and token = :token and state = 'running'
returning id;

-- name: heartbeat
update duly_job
   set heartbeat_at = :now
 where id = :id and token = :token and state = 'running'
returning id;
