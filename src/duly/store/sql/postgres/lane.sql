-- Lanes on PostgreSQL: jobs that cannot all run as soon as they are due, because of a cap, a rate or an order.
--
-- A lane is a task, or a task and a key. A claim visits the lanes of a task that have ready jobs in turn, from the end
-- of the last claim: `:walks` has a task and the lane after which to begin, `:lanes` is the number of lanes. Running
-- jobs are counted from their rows, also after their lease, so no counter can leak. Differs from SQLite: a separate
-- statement locks the lanes and writes its token into them. In one statement with the claim, running jobs would be
-- counted before the lock, and a cap of 3 let 12 run. The visited lanes are passed on in a setting of the transaction.

-- name: promote_lanes
-- The order within a lane is exact, so due jobs are made ready before any is chosen. The lock of
-- the token is for `await_claim`; it is taken in the outermost select, because a plan may skip it if it finds no row.
-- Returns nothing.
with clock as materialized (select :now as now, pg_try_advisory_xact_lock(:token::bigint) as held),
due as materialized (
    select id from duly.duly_job
     where state = 'scheduled' and lane is not null and queue = :queue and due_at <= (select now from clock where held)
     order by due_at, id
     limit 1000
       for update skip locked
),
promoted as (
    update duly.duly_job
       set state = 'ready'
     where id = any (array(select id from due))
)
select held from clock where held is null;

-- name: walk_lanes
-- Visits lanes, stores them for the next statements, and returns the last one of each task that may have more lanes: a
-- claim may empty lanes on the way.
with recursive clock as materialized (select :now as now),
{paused},
asked as materialized (
    select task as asked_task, after, ordered
      from json_to_recordset(:walks::json) as asked (task text, after text, ordered boolean)
     where task not in (select name from gate where kind = 'task')
       and not exists (select 1 from gate where kind = 'queue' and name = :queue)
),
walk (walk_task, ordered, walk_lane, first_lane, place) as (
    select asked_task, ordered, begins, begins, 1
      from asked
     cross join lateral (
           select coalesce((select lane from duly.duly_job
                             where state = 'ready' and lane is not null and queue = :queue and suspect = :alone::boolean
                               and task = asked_task and lane > after collate "C"
                             order by lane limit 1),
                           (select lane from duly.duly_job
                             where state = 'ready' and lane is not null and queue = :queue and suspect = :alone::boolean
                               and task = asked_task
                             order by lane limit 1)) as begins) as first
     where begins is not null
     union all
    select walk_task, ordered,
           coalesce((select lane from duly.duly_job
                      where state = 'ready' and lane is not null and queue = :queue and suspect = :alone::boolean
                        and task = walk_task and lane > walk_lane
                      order by lane limit 1),
                    (select lane from duly.duly_job
                      where state = 'ready' and lane is not null and queue = :queue and suspect = :alone::boolean
                        and task = walk_task
                      order by lane limit 1)), first_lane, place + 1
      from walk
     where place < :lanes::int and (place = 1 or walk_lane <> first_lane)
),
kept as materialized (
    select set_config('duly.walk', coalesce(json_agg(json_build_object(
               'task', walk_task, 'lane', walk_lane, 'place', place, 'ordered', ordered))::text, '[]'), true) as walk
      from walk
     where place = 1 or walk_lane <> first_lane
)
select task, lane
  from kept
 cross join lateral json_to_recordset(kept.walk::json) as walk (task text, lane text, place int)
 where place = :lanes::int;

-- name: wait_for_lanes
-- For tasks without an order: only claims lock their lanes, and briefly. Another claim may be inserting the same rows,
-- so this statement inserts all of them, in the common order.
with clock as materialized (select :now as now)
insert into duly.duly_lane (name, task, held_by, used_at)
select lane, task, :token::bigint, now
  from json_to_recordset(current_setting('duly.walk')::json) as walk (task text, lane text collate "C", ordered boolean)
 cross join clock
 where not ordered or (select name from duly.duly_lane where name = lane) is null
 order by lane
    on conflict (name) do update
   set held_by = excluded.held_by;

-- name: hold_lanes
-- Skips locked lanes, or workers would move from lane to lane together, each waiting for the other. An enqueue into an
-- order locks its lane until its commit, which wakes a worker. Returns whether lanes were skipped. A separate statement
-- inserts lanes: while it waits for another insert, it has locked none. Permits of a later hour were written before the
-- clock stepped back: they count from now on, or nothing would run for that hour. `:now` is read after any wait for a
-- lane: permits of an earlier time would end too early.
with clock as materialized (select :now as now)
insert into duly.duly_lane (name, task, used_at)
select lane, task, now
  from json_to_recordset(current_setting('duly.walk')::json) as walk (task text, lane text collate "C")
 cross join clock
 where (select name from duly.duly_lane where name = lane) is null
 order by lane
    on conflict (name) do nothing;
with free as materialized (
    select name
      from duly.duly_lane
     where name = any (array(
           select lane from json_to_recordset(current_setting('duly.walk')::json) as walk (lane text)))
     order by name
       for update skip locked
)
update duly.duly_lane
   set held_by = :token::bigint,
       permits = case when permits = '[]' then permits
                 else (select json_agg(json_build_array(least((permit ->> 0)::bigint, :now), permit -> 1))::text
                         from json_array_elements(permits::json) as permit) end
 where name = any (array(select name from free));
select exists (
       select 1
         from json_to_recordset(current_setting('duly.walk')::json) as walk (lane text collate "C", ordered boolean)
        where not ordered and (select held_by from duly.duly_lane where name = lane) is distinct from :token::bigint)
       as passed_by;

-- name: claim_lanes
-- Takes at most as many jobs of each lane as it has room for, one of each lane before a second, tasks in turn. In a
-- lane that keeps an order only its first job counts, whatever that waits for, and none while a dead job blocks the
-- lane. Skips tasks that were paused while the claim waited for lanes.
with clock as materialized (select :now as now, pg_try_advisory_xact_lock(:token::bigint) as held),
{paused},
walk as materialized (
    select task as walk_task, lane as walk_lane, place
      from json_to_recordset(current_setting('duly.walk')::json) as walk (task text, lane text collate "C", place int)
     where (select held from clock) and task not in (select name from gate where kind = 'task')
       and not exists (select 1 from gate where kind = 'queue' and name = :queue)
),
looked as materialized (
    select walk_task, walk_lane, place, coalesce(set_cap, cap) as most, coalesce(set_rate_count, rate_count) as rate,
           (select count(*) from duly.duly_job where lane = walk_lane and token is not null) as running,
           (select coalesce(sum((permit ->> 1)::int), 0)
              from json_array_elements(permits::json) as permit
             where (permit ->> 0)::bigint > now - coalesce(set_rate_ms, rate_ms) - 250) as permitted,
           (select id from duly.duly_job where lane = walk_lane and seq is not null order by seq limit 1) as head
      from walk
     cross join clock
      join duly.duly_lane on duly_lane.name = walk_lane and held_by = :token::bigint
      left join duly.duly_queue on kind = 'task' and duly_queue.name = walk_task
     where duly_lane.name = any (array(select walk_lane from walk))
),
free as materialized (
    select walk_task, walk_lane, place, head,
           least(:limit::bigint, case when most > 0 then greatest(most - running, 0) end,
                 case when rate > 0 then greatest(rate - permitted, 0) end) as room
      from looked
     where head is null or running = 0
),
picked as materialized (
    select job.id, job.rank, place, walk_task
      from free
     cross join lateral (
           select id, row_number() over (order by priority desc, due_at, id) as rank
             from (select id, priority, due_at
                     from duly.duly_job
                    where state = 'ready' and lane is not null and lane = walk_lane and queue = :queue
                      and suspect = :alone::boolean and task = walk_task
                      and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
                    order by priority desc, due_at, id
                    limit room) as best) as job
     where head is null and room > 0
     union all
    select duly_job.id, 1, place, walk_task
      from free
      join duly.duly_job on duly_job.id = head
     where room > 0 and state = 'ready' and queue = :queue and suspect = :alone::boolean
       and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
       and (select id from duly.duly_done
             where duly_done.lane = walk_lane and duly_done.state = 'dead' and duly_done.ordering_dead = 'block'
               and replayed_as is null and resolved_at is null and duly_done.seq < duly_job.seq
             limit 1) is null
),
chosen as materialized (
    select id from picked order by rank, place, walk_task collate "C" <= :turn, walk_task collate "C" limit :limit::int
),
locked as materialized (
    select id
      from duly.duly_job
     where id = any (array(select id from chosen)) and state = 'ready'
     order by id
       for update skip locked
),
taken as (
    update duly.duly_job
       {lease}
     where id = any (array(select id from locked))
    returning id, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
              lease_ms, lease_until, due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane
),
paid as (
    update duly.duly_lane
       set used_at = case when used_at < now - 600000 then now else used_at end,
           permits = (
               select json_agg(json_build_array(at, n))::text
                 from (select (permit ->> 0)::bigint as at, (permit ->> 1)::int as n
                         from json_array_elements(duly_lane.permits::json) as permit
                        where (permit ->> 0)::bigint > now - window_ms - 250
                        union all
                       select now, spent.n) as permit)
      from (select lane, count(*) as n, max(coalesce(set_rate_ms, rate_ms)) as window_ms
              from taken
              join duly.duly_queue on kind = 'task' and name = task
             where coalesce(set_rate_count, rate_count) > 0
             group by lane) as spent, clock
     where duly_lane.name = spent.lane
)
select {claimed},
       lane
  from taken
 order by priority desc, due_at, id;

-- name: laned_tasks
-- The tasks of a queue that have ready or due jobs in lanes, each found by one step along the index. Of due jobs only
-- the first are read: `promote_lanes` makes the rest ready.
with recursive found (is_suspect, found_task) as (
    select is_suspect, ''::text
      from (values (false), (true)) as which (is_suspect)
     union all
    select is_suspect,
           (select task from duly.duly_job
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
  from (select task from duly.duly_job
         where state = 'scheduled' and lane is not null and queue = :queue
         order by due_at, id
         limit 1000) as due;

-- name: next_permit
-- In how many milliseconds the first lane that only its rate holds up may continue.
with recursive clock as materialized (select :now as now),
rated as materialized (
    select name as asked_task, coalesce(set_rate_count, rate_count) as rate, coalesce(set_rate_ms, rate_ms) as window_ms
      from duly.duly_queue
     where kind = 'task' and name = any (array(select json_array_elements_text(:tasks::json)))
       and coalesce(set_rate_count, rate_count) > 0
),
walk (walk_task, walk_lane, rate, window_ms, place) as (
    select asked_task,
           (select lane from duly.duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = false and task = asked_task
             order by lane limit 1), rate, window_ms, 1
      from rated
     union all
    select walk_task,
           (select lane from duly.duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = false and task = walk_task
               and lane > walk_lane
             order by lane limit 1), rate, window_ms, place + 1
      from walk
     where walk_lane is not null and place < 1000
)
select min(ends_at) - max(now) as permit_in_ms
  from (select min((permit ->> 0)::bigint) + max(window_ms) + 250 as ends_at, sum((permit ->> 1)::int) as permitted,
               max(rate) as rate, max(now) as now
          from walk
         cross join clock
          join duly.duly_lane on name = walk_lane
         cross join lateral json_array_elements(permits::json) as permit
         where name = any (array(select walk_lane from walk)) and walk_lane is not null
           and (permit ->> 0)::bigint > now - window_ms - 250
         group by walk_lane) as held
 where permitted >= rate;

-- name: hand_out
-- Assigns the places of an order in the order of commits: the holder of the lane's row assigns next. Lanes are locked
-- in their order, as everywhere.
insert into duly.duly_lane (name, task, last_seq, used_at)
select lane, min(task), count(*), :now
  from duly.duly_job
 where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
   and seq is null and ordering_dead is not null
 group by lane
 order by lane
    on conflict (name) do update
   set last_seq = duly_lane.last_seq + excluded.last_seq,
       -- Rarely, because it is indexed: other changes rewrite the row in place.
       used_at = case when duly_lane.used_at < excluded.used_at - 600000 then excluded.used_at else duly_lane.used_at end;
update duly.duly_job
   set seq = handed
  from (select duly_job.id as placed,
               last_seq - count(*) over (partition by lane) + row_number() over (partition by lane order by place) as handed
          from json_array_elements_text(:ids::json) with ordinality as asked (id, place)
          join duly.duly_job on duly_job.id = asked.id::uuid
          join duly.duly_lane on duly_lane.name = lane
         where duly_job.id = any (array(select other::uuid from json_array_elements_text(:ids::json) as other))
           and seq is null and ordering_dead is not null) as places
 where id = any (array(select other::uuid from json_array_elements_text(:ids::json) as other)) and id = placed;

-- name: declare_limits
-- Stores the limits in the code. Limits that were removed from the code are deleted.
insert into duly.duly_queue (kind, name, cap, rate_count, rate_ms)
select 'task', task, cap, rate_count, rate_ms
  from json_to_recordset(:limits::json) as said (task text, cap int, rate_count int, rate_ms bigint)
 where cap is not null or rate_count is not null
    or exists (select 1 from duly.duly_queue where kind = 'task' and name = task)
 order by task
    on conflict (kind, name) do update
   set cap = excluded.cap, rate_count = excluded.rate_count, rate_ms = excluded.rate_ms
 where duly_queue.cap is distinct from excluded.cap or duly_queue.rate_count is distinct from excluded.rate_count
    or duly_queue.rate_ms is distinct from excluded.rate_ms;

-- name: limit_task
-- A limit set at run time overrides the code until it is reset. A repetition writes one event.
insert into duly.duly_event (at, name, subject, by, why, data)
select now, 'task.limited', :name, :by::text, :why::text,
       json_build_object('cap', :cap::int, 'rate_count', :rate_count::int, 'rate_ms', :rate_ms::bigint,
                         'reset', :reset::boolean::int)::text
  from (select :now as now offset 0) as clock
 where not exists (
       select 1 from duly.duly_queue
        where kind = 'task' and name = :name and set_by = :by::text and set_why = :why::text and set_at > now - 60000
          and case when :reset::boolean then set_cap is null and set_rate_count is null
                   else set_cap is not distinct from coalesce(:cap::int, set_cap)
                        and set_rate_count is not distinct from coalesce(:rate_count::int, set_rate_count)
                        and set_rate_ms is not distinct from coalesce(:rate_ms::bigint, set_rate_ms) end);
insert into duly.duly_queue (kind, name, set_cap, set_rate_count, set_rate_ms, set_at, set_by, set_why)
values ('task', :name, :cap::int, :rate_count::int, :rate_ms::bigint, :now, :by::text, :why::text)
    on conflict (kind, name) do update
   set set_cap = case when :reset::boolean then null else coalesce(:cap::int, duly_queue.set_cap) end,
       set_rate_count = case when :reset::boolean then null else coalesce(:rate_count::int, duly_queue.set_rate_count) end,
       set_rate_ms = case when :reset::boolean then null else coalesce(:rate_ms::bigint, duly_queue.set_rate_ms) end,
       set_at = excluded.set_at, set_by = excluded.set_by, set_why = excluded.set_why;

-- name: task_limits
select name, cap, rate_count, rate_ms, set_cap, set_rate_count, set_rate_ms, set_at, set_by, set_why
  from duly.duly_queue
 where kind = 'task' and (cap is not null or rate_count is not null or set_at is not null)
 order by name;
