-- What a queue can be told, on SQLite and D1: how many jobs it takes, how its priorities age, what share retries have.

-- name: limit_queue
-- What is null stays as it is, what is below 0 is taken away. A depth that was counted up to another limit says nothing.
with old as (
    select max_depth, ageing_ms, retry_share
      from (select 1)
      left join duly_queue on kind = 'queue' and name = :name
),
changed as (
    select max_depth, ageing_ms, retry_share,
           case when :max_depth is null then max_depth when :max_depth >= 0 then cast(:max_depth as integer) end
               as new_depth,
           case when :ageing_ms is null then ageing_ms when :ageing_ms >= 0 then cast(:ageing_ms as integer) end
               as new_ageing,
           case when :retry_share is null then retry_share when :retry_share >= 0 then cast(:retry_share as real) end
               as new_share
      from old
)
insert into duly_event (at, name, subject, by, why, data)
select :now, 'queue.limited', :name, :by, :why,
       json_object('before', json_object('depth', max_depth, 'ageing_ms', ageing_ms, 'retry_share', retry_share),
                   'after', json_object('depth', new_depth, 'ageing_ms', new_ageing, 'retry_share', new_share))
  from changed
 where max_depth is not new_depth or ageing_ms is not new_ageing or retry_share is not new_share;
insert into duly_queue (kind, name, max_depth, ageing_ms, retry_share, set_at, set_by, set_why)
values ('queue', :name, case when :max_depth >= 0 then :max_depth end, case when :ageing_ms >= 0 then :ageing_ms end,
        case when :retry_share >= 0 then :retry_share end, :now, :by, :why)
    on conflict (kind, name) do update
   set max_depth = case when :max_depth is null then duly_queue.max_depth else excluded.max_depth end,
       ageing_ms = case when :ageing_ms is null then duly_queue.ageing_ms else excluded.ageing_ms end,
       retry_share = case when :retry_share is null then duly_queue.retry_share else excluded.retry_share end,
       depth = case when :max_depth is null or duly_queue.max_depth is excluded.max_depth then duly_queue.depth end,
       depth_at = case when :max_depth is null or duly_queue.max_depth is excluded.max_depth then duly_queue.depth_at end,
       set_at = excluded.set_at, set_by = excluded.set_by, set_why = excluded.set_why
 where (:max_depth is not null and duly_queue.max_depth is not excluded.max_depth)
    or (:ageing_ms is not null and duly_queue.ageing_ms is not excluded.ageing_ms)
    or (:retry_share is not null and duly_queue.retry_share is not excluded.retry_share);

-- name: limits
select kind, name, max_depth, depth, depth_at, ageing_ms, retry_share, set_at, set_by, set_why,
       :now - depth_at as depth_age_ms
  from duly_queue
 where kind = 'queue' and (max_depth is not null or ageing_ms is not null or retry_share is not null)
 order by name;

-- name: depth
-- What waits in a queue, counted no further than asked, and ordered as its index is: see `queues`.
select count(*) as depth
  from (select 1 from (
        select 1 from duly_job
         where state = 'ready' and lane is null and queue = :queue
         order by suspect, priority desc, due_at, id limit :enough)
         union all
        select 1 from (
        select 1 from duly_job
         where state = 'scheduled' and lane is null and queue = :queue
         order by due_at, id limit :enough)
         union all
        select 1 from (
        select 1 from (
        select 1 from duly_job
         where state = 'ready' and lane is not null and queue = :queue
         order by suspect, task, lane, priority desc, due_at, id limit :enough)
         union all
        select 1 from (
        select 1 from duly_job
         where state = 'scheduled' and lane is not null and queue = :queue
         order by due_at, id limit :enough))
         union all
        select 1 from (
        select 1 from duly_job
         where state = 'waiting' and parked_version is null and queue = :queue
         order by due_at limit :enough)
         union all
        select 1 from (
        select 1 from duly_job
         where parked_version is not null and queue = :queue
         order by task, parked_version limit :enough)
         limit :enough);

-- name: note_depth
-- One count a second is enough for a whole fleet, and one that stopped at another limit says nothing.
update duly_queue
   set depth = :depth, depth_at = :now
 where kind = 'queue' and name = :queue and max_depth = :max_depth
   and (depth_at is null or depth_at <= :now - 1000 or depth_at > :now)
returning name;

-- name: claim_shaped
-- `claim` for a queue whose priorities age (`:ageing_ms`) or whose retries have a budget (`:retries`). `walk` merges the
-- priorities, best first: what it gives is followed by the next of the same priority. Of due retries, the budget goes
-- before the rest of the queue and all others after it. With many retries due, others that are due are looked for among
-- the first only: promoting finds them.
with recursive asked as materialized (
    select case when exists (select 1 from duly_job where token = :token) then 0 else :limit end as room
     where not exists (
           select 1 from duly_queue
            where kind = 'queue' and name = :queue and paused_at is not null
              and (paused_until is null or paused_until > :now))
),
budgeted as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and attempt > 0 and due_at <= :now
       and (:tasks is null or task in (select value from json_each(:tasks)))
       and task not in (
           select name from duly_queue
            where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
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
              and one.task not in (
                  select name from duly_queue
                   where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
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
              and one.task not in (
                  select name from duly_queue
                   where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
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
       and (:tasks is null or task in (select value from json_each(:tasks)))
       and task not in (
           select name from duly_queue
            where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by due_at, id
     limit coalesce((select room from asked), 0) - (select count(*) from budgeted) - (select count(*) from ready)
),
further as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and attempt > 0 and due_at <= :now
       and :retries is not null and id not in (select id from budgeted)
       and (:tasks is null or task in (select value from json_each(:tasks)))
       and task not in (
           select name from duly_queue
            where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
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
