-- Reading for people and programs, on PostgreSQL. Nothing here changes a row.

-- fragment: filters
      (:task::text is null or task = :task) and (:queue::text is null or queue = :queue)
  and (:batch_id::uuid is null or batch_id = :batch_id::uuid) and (:since::bigint is null or created_at >= :since::bigint)
  and (:error::text is null or strpos(error, :error) > 0 or strpos(reason, :error) > 0)
order by id desc limit :limit::int

-- name: list
-- Newest first over live and finished jobs. Both ends of the id range are given, so one job and a page of jobs take the
-- same walk along the primary key. States that few rows have use their own index: one dead job is found without reading
-- ten million successes.
with running as materialized (  -- apart, or its order would have all live jobs walked for the few that run
    select id, task, queue, batch_id, created_at, error, reason
      from duly.duly_job
     where :state::text = 'running' and token between 1 and 9223372036854775807  -- see `expired_leases`
), page as materialized (
    (
        select id from duly.duly_job
         where id between :first::uuid and :last::uuid
           and (:state::text is null or :state::text in ('scheduled', 'ready', 'waiting')) and (:state::text is null or state = :state)
           and {filters})
     union all
    (
        select id from running
         where id between :first::uuid and :last::uuid
           and {filters})
     union all
    (
        select id from duly.duly_done
         where id between :first::uuid and :last::uuid
           and (:state::text is null or :state::text in ('succeeded', 'cancelled')) and (:state::text is null or state = :state)
           and {filters})
     union all
    (
        select id from duly.duly_done
         where id between :first::uuid and :last::uuid
           and :state::text = 'dead' and state = 'dead'
           and {filters})
     union all
    (
        select id from duly.duly_done
         where id between :first::uuid and :last::uuid
           and :state::text = 'partial' and state = 'partial'
           and {filters})
     order by id desc
     limit :limit::int
)
select page.id::text, task, queue, priority, state, payload, envelope, key, attempt, max_attempts, crashes, created_at, due_at,
       expires_at, worker, lease_until, heartbeat_at, progress, progress_message, cancel_requested_at,
       null::bigint as finished_at, null::text as result, null::bigint as result_until, reason, error, batch_id::text, schedule, lane, origin::text, replay_of::text,
       replay_count, null::text as replayed_as, null::bigint as resolved_at, null::text as resolved_by,
       null::text as resolved_why, (select :now) as now
  from page
  join duly.duly_job on duly_job.id = page.id
 union all
select page.id::text, task, queue, priority, state, payload, envelope, key, attempt, max_attempts, crashes, created_at, due_at,
       expires_at, worker, null::bigint, null::bigint, progress, progress_message, cancel_requested_at, finished_at, result,
       result_until, reason, error, batch_id::text, schedule, lane, origin::text, replay_of::text, replay_count,
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
-- Reads all gates of one job in one snapshot; the first that is shut is the answer. The lane is judged as a claim
-- judges it: by running rows, by valid permits, and in an order by its first job and those that block it. Counts are
-- ordered like their index, or a plan may read all jobs.
with clock as materialized (select :now as now),
job as materialized (
    select id, task, queue, state, due_at, expires_at, attempt, max_attempts, worker, lease_until, reason, error,
           suspect, parked_version, priority, cancel_requested_at, lane, seq
      from duly.duly_job where id = :id::uuid
     union all
    select id, task, queue, state, due_at, expires_at, attempt, max_attempts, worker, null, reason, error, false, null,
           priority, cancel_requested_at, lane, seq
      from duly.duly_done where id = :id::uuid
),
limits as materialized (
    select nullif(coalesce(set_cap, cap), 0) as cap, case when set_cap is not null then set_by end as cap_set_by,
           case when set_cap is not null then set_why end as cap_set_why,
           nullif(coalesce(set_rate_count, rate_count), 0) as rate_count, coalesce(set_rate_ms, rate_ms) as rate_ms,
           case when set_rate_count is not null then set_by end as rate_set_by,
           case when set_rate_count is not null then set_why end as rate_set_why
      from duly.duly_queue
     where kind = 'task' and name = (select task from job where lane is not null)
),
permit as materialized (
    select least((permit ->> 0)::bigint, now) as at, sum((permit ->> 1)::int) as jobs
      from limits
     cross join clock
     cross join duly.duly_lane
     cross join lateral json_array_elements(permits::json) as permit
     where duly_lane.name = (select lane from job)
       and rate_count is not null and (permit ->> 0)::bigint > now - rate_ms - 250
     group by 1
),
runs as materialized (
    select id, worker
      from duly.duly_job
     where lane = (select lane from job) and token is not null
),
-- The first job in the order of the lane, whatever it waits for.
head as materialized (
    select id, state, due_at, worker
      from duly.duly_job
     where lane = (select lane from job) and seq is not null
     order by seq
     limit 1
)
select job.id::text, job.task, job.queue, job.state, job.due_at, job.expires_at, job.attempt, job.max_attempts, job.worker,
       job.lease_until, job.reason, job.error, job.suspect, job.parked_version, now,
       queue_gate.paused_by as queue_paused_by, queue_gate.paused_why as queue_paused_why,
       queue_gate.paused_at as queue_paused_at, queue_gate.paused_until as queue_paused_until,
       task_gate.paused_by as task_paused_by, task_gate.paused_why as task_paused_why,
       task_gate.paused_at as task_paused_at, task_gate.paused_until as task_paused_until,
       (select count(*) from duly.duly_worker
         where seen_at > now - 3 * beat_ms
           and tasks::jsonb ? job.task
           and queues::jsonb ? job.queue) as knowing_workers,
       (select count(*) from duly.duly_worker where seen_at > now - 3 * beat_ms) as living_workers,
       least(10001, (select count(*) from (
        select 1 from duly.duly_job as ahead
         where ahead.state = 'ready' and ahead.lane is null and ahead.queue = job.queue and job.state = 'ready'
           and job.lane is null
           and ahead.suspect = job.suspect and ahead.priority > job.priority
         order by ahead.priority desc, ahead.due_at, ahead.id
         limit 10001) as higher)
       + (select count(*) from (
        select 1 from duly.duly_job as ahead
         where ahead.state = 'ready' and ahead.lane is null and ahead.queue = job.queue and job.state = 'ready'
           and job.lane is null
           and ahead.suspect = job.suspect and ahead.priority = job.priority and (ahead.due_at, ahead.id) < (job.due_at, job.id)
         order by ahead.due_at, ahead.id
         limit 10001) as earlier)
       + (select count(*) from (
        select 1 from duly.duly_job as ahead
         where ahead.state = 'ready' and ahead.lane = job.lane and ahead.queue = job.queue and ahead.task = job.task
           and job.seq is null and job.state in ('scheduled', 'ready')
           and ahead.suspect = job.suspect and ahead.priority > job.priority
         order by ahead.priority desc, ahead.due_at, ahead.id
         limit 10001) as higher)
       + (select count(*) from (
        select 1 from duly.duly_job as ahead
         where ahead.state = 'ready' and ahead.lane = job.lane and ahead.queue = job.queue and ahead.task = job.task
           and job.seq is null and job.state in ('scheduled', 'ready')
           and ahead.suspect = job.suspect and ahead.priority = job.priority and (ahead.due_at, ahead.id) < (job.due_at, job.id)
         order by ahead.due_at, ahead.id
         limit 10001) as earlier)
       + (select count(*) from (
        select 1 from duly.duly_job as ahead
         where ahead.lane = job.lane and ahead.seq is not null and ahead.seq < job.seq
           and job.state in ('scheduled', 'ready', 'waiting')
         order by ahead.seq
         limit 10001) as before)) as ahead, job.cancel_requested_at,
       job.lane, job.seq, limits.cap, limits.cap_set_by, limits.cap_set_why,
       limits.rate_count, limits.rate_ms, limits.rate_set_by, limits.rate_set_why,
       (select count(*) from runs) as running,
       (select coalesce(json_agg(json_build_object('id', id, 'worker', worker))::text, '[]')
          from (select id, worker from runs order by id limit 5) as held) as holders,
       (select coalesce(sum(jobs), 0)::bigint from permit) as permits,
       -- When enough permits expire.
       (select min(at) + limits.rate_ms + 250
          from (select at, sum(jobs) over (order by at desc) - jobs as later, sum(jobs) over () as permitted
                  from permit) as counted
         where later < limits.rate_count and permitted >= limits.rate_count) as permit_at,
       head.id::text as head_id, head.state as head_state, head.due_at as head_due_at, head.worker as head_worker,
       (select id::text from duly.duly_done as dead
         where dead.lane = job.lane and dead.state = 'dead' and dead.ordering_dead = 'block'
           and dead.replayed_as is null and dead.resolved_at is null and dead.seq < job.seq
         order by dead.seq
         limit 1) as blocked_by, told.ageing_ms, told.retry_share
  from job
 cross join clock
  left join limits on true
  left join head on true
  left join duly.duly_queue as told on told.kind = 'queue' and told.name = job.queue
  left join duly.duly_queue as queue_gate
    on queue_gate.kind = 'queue' and queue_gate.name = job.queue and queue_gate.paused_at is not null
   and (queue_gate.paused_until is null or queue_gate.paused_until > now)
  left join duly.duly_queue as task_gate
    on task_gate.kind = 'task' and task_gate.name = job.task and task_gate.paused_at is not null
   and (task_gate.paused_until is null or task_gate.paused_until > now);

-- name: uncompiled
-- For walks whose estimated cost is far too high: compiling them takes a second, running them a tenth. Only for this
-- transaction. Returns nothing.
with off as materialized (select set_config('jit', 'off', true) as said)
select 1 as told
  from off
 where said is null;

-- name: queues
-- Each step of `live` looks up the next name in every index, and each of `level` the next priority, lowest first: the
-- oldest jobs are there. So the cost depends on the number of queues and priorities, not of jobs, and counting stops
-- early. Counts are ordered like their index, or a plan may read all jobs to find those of a small queue. Differs from
-- SQLite: see `expired_leases` for the tokens.
with recursive clock as materialized (select :now as now),
live (queue_name) as (
    select ''::text
     union all
    select (select min(next_name)
              from (select (select queue from duly.duly_job
                             where state = 'ready' and lane is null and queue > queue_name
                             order by queue limit 1) as next_name
                     union all
                    select (select queue from duly.duly_job
                             where state = 'ready' and lane is not null and queue > queue_name
                             order by queue limit 1)
                     union all
                    select (select queue from duly.duly_job
                             where state = 'scheduled' and lane is not null and queue > queue_name
                             order by queue limit 1)
                     union all
                    select (select queue from duly.duly_job
                             where state = 'scheduled' and lane is null and queue > queue_name
                             order by queue limit 1)
                     union all
                    select (select queue from duly.duly_job
                             where state = 'waiting' and parked_version is null and queue > queue_name
                             order by queue limit 1)
                     union all
                    select (select queue from duly.duly_job
                             where parked_version is not null and queue > queue_name
                             order by queue limit 1)) as seen)
      from live
     where queue_name is not null
),
running as materialized (
    select queue as queue_name, count(*) as count
      from duly.duly_job
     where token between 1 and 9223372036854775807
     group by queue
),
shown as materialized (
    select queue_name from live where queue_name <> ''
     union
    select queue_name from running
     union
    select name from duly.duly_queue
     where kind = 'queue' and paused_at is not null and (paused_until is null or paused_until > (select now from clock))
     union
    select json_array_elements_text(queues::json) from duly.duly_worker
     where seen_at > (select now from clock) - 3 * beat_ms
),
level (queue_name, is_suspect, level_priority, depth) as (
    select queue_name, is_suspect,
           (select priority from duly.duly_job
             where state = 'ready' and lane is null and queue = queue_name and suspect = is_suspect
             order by priority limit 1), 1
      from shown
     cross join (values (false), (true)) as which (is_suspect)
     union all
    select queue_name, is_suspect,
           (select priority from duly.duly_job
             where state = 'ready' and lane is null and queue = queue_name and suspect = is_suspect and priority > level_priority
             order by priority limit 1), depth + 1
      from level
     where level_priority is not null and depth < 1000
),
first as materialized (
    select queue_name,
           (select due_at from duly.duly_job
             where state = 'ready' and lane is null and queue = queue_name and suspect = is_suspect and priority = level_priority
             order by due_at limit 1) as first_due_at
      from level
     where level_priority is not null
     union all
    select queue_name,
           (select due_at from duly.duly_job
             where state = 'scheduled' and lane is null and queue = queue_name and due_at <= (select now from clock)
             order by due_at limit 1)
      from shown
     union all
    -- In lanes, the oldest of the jobs that are counted.
    select queue_name,
           (select min(due_at) from (
            select due_at from duly.duly_job
             where state = 'ready' and lane is not null and queue = queue_name
             order by suspect, task, lane, priority desc, due_at, id
             limit :enough::int) as counted)
      from shown
),
oldest as materialized (
    select queue_name, min(first_due_at) as oldest_at
      from first
     group by queue_name
)
select shown.queue_name as name,
       least((select count(*) from (
             select 1 from duly.duly_job
              where state = 'ready' and lane is null and queue = shown.queue_name
              order by suspect, priority desc, due_at, id
              limit :enough::int) as counted)
           + (select count(*) from (
             select 1 from duly.duly_job
              where state = 'ready' and lane is not null and queue = shown.queue_name
              order by suspect, task, lane, priority desc, due_at, id
              limit :enough::int) as counted), :enough::int) as ready,
       least((select count(*) from (
             select 1 from duly.duly_job
              where state = 'scheduled' and lane is null and queue = shown.queue_name
              order by due_at, id
              limit :enough::int) as counted)
           + (select count(*) from (
             select 1 from duly.duly_job
              where state = 'scheduled' and lane is not null and queue = shown.queue_name
              order by due_at, id
              limit :enough::int) as counted), :enough::int) as scheduled,
       least(coalesce(running.count, 0), :enough::int) as running,
       least((select count(*) from (
             select 1 from duly.duly_job
              where state = 'waiting' and parked_version is null and queue = shown.queue_name
              order by due_at
              limit :enough::int) as counted)
           + (select count(*) from (
             select 1 from duly.duly_job
              where parked_version is not null and queue = shown.queue_name
              order by task, parked_version
              limit :enough::int) as counted), :enough::int) as waiting,
       greatest((select now from clock) - oldest_at, case when oldest_at is not null then 0 end) as oldest_ms
  from shown
  left join running on running.queue_name = shown.queue_name
  left join oldest on oldest.queue_name = shown.queue_name;

-- name: parked
-- The same walk, over the tasks of each queue.
with recursive live (queue_name) as (
    select ''::text
     union all
    select (select queue from duly.duly_job
             where parked_version is not null and queue > queue_name
             order by queue limit 1)
      from live
     where queue_name is not null
),
pair (queue_name, task_name) as (
    select queue_name,
           (select task from duly.duly_job
             where parked_version is not null and queue = queue_name
             order by task limit 1)
      from live
     where queue_name is not null
     union all
    select queue_name,
           (select task from duly.duly_job
             where parked_version is not null and queue = queue_name and task > task_name
             order by task limit 1)
      from pair
     where task_name is not null
)
select task_name as task, queue_name as queue,
       (select count(*) from (
        select 1 from duly.duly_job
         where parked_version is not null and queue = queue_name and task = task_name
         order by parked_version
         limit :enough::int) as counted) as count
  from pair
 where task_name is not null;

-- name: clock
select :now as now;
