-- Lanes on SQLite and D1: jobs that cannot all run as soon as they are due, because of a cap, a rate or an order.
--
-- A lane is a task, or a task and a key. A claim visits the lanes of a task that have ready jobs in turn, from the end
-- of the last claim: `:walks` has a task and the lane after which to begin, `:lanes` is the number of lanes. Running
-- jobs are counted from their rows, also after their lease, so no counter can leak. SQLite has one writer, so nothing
-- changes between counting and claiming; PostgreSQL locks the lanes.

-- name: promote_lanes
-- The order within a lane is exact, so due jobs are made ready before any is chosen. Returns nothing: only PostgreSQL
-- locks the token.
update duly_job
   set state = 'ready'
 where id in (
       select id from duly_job
        where state = 'scheduled' and lane is not null and queue = :queue and due_at <= :now
        order by due_at, id
        limit 1000);
select :token as held
 where false;

-- fragment: next_lanes
 where begins is not null
 union all
select walk_task,
       coalesce((select lane from duly_job
                  where state = 'ready' and lane is not null and queue = :queue and suspect = :alone
                    and task = walk_task and lane > walk_lane
                  order by lane limit 1),
                (select lane from duly_job
                  where state = 'ready' and lane is not null and queue = :queue and suspect = :alone
                    and task = walk_task
                  order by lane limit 1)), first_lane, place + 1
  from walk
 where place < :lanes and (place = 1 or walk_lane <> first_lane)

-- fragment: first_lane
coalesce((select lane from duly_job
           where state = 'ready' and lane is not null and queue = :queue and suspect = :alone
             and task = asked_task and lane > after
           order by lane limit 1),
         (select lane from duly_job
           where state = 'ready' and lane is not null and queue = :queue and suspect = :alone
             and task = asked_task
           order by lane limit 1))

-- name: walk_lanes
-- Returns the last lane that a claim visits, for each task that may have more lanes: the claim may empty lanes on the
-- way.
with recursive asked as materialized (
    select value ->> 'task' as asked_task, value ->> 'after' as after
      from json_each(:walks)
     where value ->> 'task' not in ({paused_tasks})
       and not exists ({paused_queue})
),
walk (walk_task, walk_lane, first_lane, place) as (
    select asked_task, begins, begins, 1
      from (select asked_task, {first_lane} as begins from asked)
     {next_lanes}
)
select walk_task as task, walk_lane as lane
  from walk
 where place = :lanes and (place = 1 or walk_lane <> first_lane);

-- name: hold_lanes
-- Only a rate stores anything. Permits of a later time were written before the clock stepped back: they count from now
-- on, or nothing would run until then.
with recursive rated as materialized (
    select value ->> 'task' as asked_task, value ->> 'after' as after
      from json_each(:walks)
     cross join duly_queue on kind = 'task' and name = value ->> 'task'
     where coalesce(set_rate_count, rate_count) > 0
       and (paused_at is null or paused_until <= :now)
       and not exists (
           select 1 from duly_queue as gate
            where gate.kind = 'queue' and gate.name = :queue and gate.paused_at is not null
              and (gate.paused_until is null or gate.paused_until > :now))
),
walk (walk_task, walk_lane, first_lane, place) as (
    select asked_task, begins, begins, 1
      from (select asked_task, {first_lane} as begins from rated)
     {next_lanes}
)
insert into duly_lane (name, task, held_by, used_at)
select walk_lane, walk_task, :token, :now
  from walk
 where place = 1 or walk_lane <> first_lane
    on conflict (name) do update
   set permits = (select json_group_array(json_array(min(value ->> 0, :now), value ->> 1)) from json_each(duly_lane.permits))
 where exists (select 1 from json_each(duly_lane.permits) where value ->> 0 > :now);
select false as passed_by;

-- name: claim_lanes
-- Takes at most as many jobs of each lane as it has room for, one of each lane before a second, tasks in turn. In a
-- lane that keeps an order only its first job counts, whatever that waits for, and none while a dead job blocks the
-- lane.
with recursive asked as materialized (
    select value ->> 'task' as asked_task, value ->> 'after' as after
      from json_each(:walks)
     where value ->> 'task' not in ({paused_tasks})
       and not exists ({paused_queue})
),
walk (walk_task, walk_lane, first_lane, place) as (
    select asked_task, begins, begins, 1
      from (select asked_task, {first_lane} as begins from asked)
     {next_lanes}
),
looked as materialized (
    select walk_task, walk_lane, place, coalesce(set_cap, cap) as most, coalesce(set_rate_count, rate_count) as rate,
           (select count(*) from duly_job where lane = walk_lane and token is not null) as running,
           (select coalesce(sum(value ->> 1), 0)
              from duly_lane
             cross join json_each(permits)
             where name = walk_lane and value ->> 0 > :now - coalesce(set_rate_ms, rate_ms) - 250) as permitted,
           (select id from duly_job where lane = walk_lane and seq is not null order by seq limit 1) as head
      from walk
      left join duly_queue on kind = 'task' and duly_queue.name = walk_task
     where place = 1 or walk_lane <> first_lane
),
free as materialized (
    select walk_task, walk_lane, place, head,
           min(:limit, case when most > 0 then max(most - running, 0) else :limit end,
               case when rate > 0 then max(rate - permitted, 0) else :limit end) as room
      from looked
     where head is null or running = 0
),
-- The limit does not depend on the lane: each may have what is left if every other lane gets one.
share as materialized (
    select cast(max(1, min(max(room), :limit - count(*) + 1)) as integer) as most from free where head is null and room > 0
),
picked as materialized (
    select walk_task, place, room,
           (select json_group_array(id)
              from (select id from duly_job
                     where state = 'ready' and lane is not null and lane = walk_lane and queue = :queue
                       and suspect = :alone and task = walk_task
                       and (expires_at is null or expires_at > :now or attempt > 0)
                     order by priority desc, due_at, id
                     limit (select most from share))) as ids
      from free
     where head is null and room > 0
     union all
    select walk_task, place, 1, json_array(id)
      from free
     cross join duly_job on id = head
     where room > 0 and state = 'ready' and queue = :queue and suspect = :alone
       and (expires_at is null or expires_at > :now or attempt > 0)
       and not exists (
           select 1 from duly_done
            where duly_done.lane = walk_lane and duly_done.state = 'dead' and duly_done.ordering_dead = 'block'
              and replayed_as is null and resolved_at is null and duly_done.seq < duly_job.seq)
),
ranked as materialized (
    select one.value as id, one.key as rank, place, walk_task
      from picked
     cross join json_each(ids) as one
     where one.key < room
)
update duly_job
   set state = 'running', attempt = attempt + 1, token = :token, worker = :worker,
       lease_until = :now + lease_ms, heartbeat_at = null, progress = null, progress_message = null, reason = null
 where id in (select id from ranked order by rank, place, walk_task <= :turn, walk_task limit :limit);
update duly_lane
   set used_at = :now,
       permits = (
           select json_group_array(json_array(at, n))
             from (select value ->> 0 as at, value ->> 1 as n
                     from json_each(duly_lane.permits)
                    where value ->> 0 > :now - taken.window_ms - 250
                    union all
                   select :now, taken.n))
  from (select lane, count(*) as n, max(coalesce(set_rate_ms, rate_ms)) as window_ms
          from duly_job
         cross join duly_queue on kind = 'task' and name = task
         where token = :token and lane is not null and coalesce(set_rate_count, rate_count) > 0
         group by lane) as taken
 where name = taken.lane;
select id, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
       lease_ms, lease_until, due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin,
       lane
  from duly_job
 where token = :token
 order by priority desc, due_at, id;

-- name: laned_tasks
-- The tasks of a queue that have ready or due jobs in lanes, each found by one step along the index. Of due jobs only
-- the first are read: `promote_lanes` makes the rest ready.
with recursive found (is_suspect, found_task) as (
    select is_suspect, ''
      from (select 0 as is_suspect union all select 1)
     union all
    select is_suspect,
           (select task from duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = is_suspect and task > found_task
             order by task limit 1)
      from found
     where found_task is not null
)
select found_task as task
  from found
 where found_task <> ''
 union
select task
  from (select task from duly_job
         where state = 'scheduled' and lane is not null and queue = :queue
         order by due_at, id
         limit 1000);

-- name: next_permit
-- In how many milliseconds the first lane that only its rate holds up may continue.
with recursive rated as materialized (
    select value as asked_task, coalesce(set_rate_count, rate_count) as rate, coalesce(set_rate_ms, rate_ms) as window_ms
      from json_each(:tasks)
     cross join duly_queue on kind = 'task' and name = value
     where coalesce(set_rate_count, rate_count) > 0
),
walk (walk_task, walk_lane, rate, window_ms, place) as (
    select asked_task,
           (select lane from duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = 0 and task = asked_task
             order by lane limit 1), rate, window_ms, 1
      from rated
     union all
    select walk_task,
           (select lane from duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = 0 and task = walk_task
               and lane > walk_lane
             order by lane limit 1), rate, window_ms, place + 1
      from walk
     where walk_lane is not null and place < 1000
)
select min(ends_at) - :now as permit_in_ms
  from (select min(value ->> 0) + window_ms + 250 as ends_at, sum(value ->> 1) as permitted, rate
          from walk
         cross join duly_lane on name = walk_lane
         cross join json_each(permits)
         where walk_lane is not null and value ->> 0 > :now - window_ms - 250
         group by walk_lane)
 where permitted >= rate;

-- name: hand_out
-- Assigns the places of an order in the order of commits: the holder of the lane's row assigns next.
insert into duly_lane (name, task, last_seq, used_at)
select lane, min(task), count(*), :now
  {jobs_by_id}
 where seq is null and ordering_dead is not null
 group by lane
    on conflict (name) do update
   set last_seq = last_seq + excluded.last_seq, used_at = excluded.used_at;
update duly_job
   set seq = handed
  from (select duly_job.id as placed,
               last_seq - count(*) over (partition by lane)
               + row_number() over (partition by lane order by json_each.key) as handed
          {jobs_by_id}
         cross join duly_lane on name = lane
         where seq is null and ordering_dead is not null) as places
 where id = placed;

-- name: declare_limits
-- Stores the limits in the code. Limits that were removed from the code are deleted.
insert into duly_queue (kind, name, cap, rate_count, rate_ms)
select 'task', value ->> 'task', value ->> 'cap', value ->> 'rate_count', value ->> 'rate_ms'
  from json_each(:limits)
 where value ->> 'cap' is not null or value ->> 'rate_count' is not null
    or exists (select 1 from duly_queue where kind = 'task' and name = value ->> 'task')
    on conflict (kind, name) do update
   set cap = excluded.cap, rate_count = excluded.rate_count, rate_ms = excluded.rate_ms
 where duly_queue.cap is not excluded.cap or duly_queue.rate_count is not excluded.rate_count
    or duly_queue.rate_ms is not excluded.rate_ms;

-- name: limit_task
-- A limit set at run time overrides the code until it is reset. A repetition writes one event.
insert into duly_event (at, name, subject, by, why, data)
select :now, 'task.limited', :name, :by, :why,
       json_object('cap', :cap, 'rate_count', :rate_count, 'rate_ms', :rate_ms, 'reset', :reset)
 where not exists (
       select 1 from duly_queue
        where kind = 'task' and name = :name and set_by = :by and set_why = :why and set_at > :now - 60000
          and case when :reset then set_cap is null and set_rate_count is null
                   else set_cap is coalesce(:cap, set_cap) and set_rate_count is coalesce(:rate_count, set_rate_count)
                        and set_rate_ms is coalesce(:rate_ms, set_rate_ms) end);
insert into duly_queue (kind, name, set_cap, set_rate_count, set_rate_ms, set_at, set_by, set_why)
values ('task', :name, :cap, :rate_count, :rate_ms, :now, :by, :why)
    on conflict (kind, name) do update
   set set_cap = case when :reset then null else coalesce(:cap, set_cap) end,
       set_rate_count = case when :reset then null else coalesce(:rate_count, set_rate_count) end,
       set_rate_ms = case when :reset then null else coalesce(:rate_ms, set_rate_ms) end,
       set_at = :now, set_by = :by, set_why = :why;

-- name: task_limits
select name, cap, rate_count, rate_ms, set_cap, set_rate_count, set_rate_ms, set_at, set_by, set_why
  from duly_queue
 where kind = 'task' and (cap is not null or rate_count is not null or set_at is not null)
 order by name;
