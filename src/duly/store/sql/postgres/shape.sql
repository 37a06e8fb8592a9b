-- What a queue can be told, on PostgreSQL: how many jobs it takes, how its priorities age, what share retries have.

-- name: limit_queue
-- What is null stays as it is, what is below 0 is taken away. A depth that was counted up to another limit says nothing.
with old as (
    select max_depth, ageing_ms, retry_share
      from (select 1) as one
      left join duly.duly_queue on kind = 'queue' and name = :name
),
changed as (
    select max_depth, ageing_ms, retry_share,
           case when :max_depth::bigint is null then max_depth when :max_depth::bigint >= 0 then :max_depth::bigint end
               as new_depth,
           case when :ageing_ms::bigint is null then ageing_ms when :ageing_ms::bigint >= 0 then :ageing_ms::bigint end
               as new_ageing,
           case when :retry_share::float8 is null then retry_share
                when :retry_share::float8 >= 0 then :retry_share::float8 end as new_share
      from old
)
insert into duly.duly_event (at, name, subject, by, why, data)
select :now, 'queue.limited', :name::text, :by::text, :why::text,
       json_build_object(
           'before', json_build_object('depth', max_depth, 'ageing_ms', ageing_ms, 'retry_share', retry_share),
           'after', json_build_object('depth', new_depth, 'ageing_ms', new_ageing, 'retry_share', new_share))::text
  from changed
 where max_depth is distinct from new_depth or ageing_ms is distinct from new_ageing
    or retry_share is distinct from new_share;
insert into duly.duly_queue (kind, name, max_depth, ageing_ms, retry_share, set_at, set_by, set_why)
values ('queue', :name::text, case when :max_depth::bigint >= 0 then :max_depth::bigint end,
        case when :ageing_ms::bigint >= 0 then :ageing_ms::bigint end,
        case when :retry_share::float8 >= 0 then :retry_share::float8 end, :now, :by::text, :why::text)
    on conflict (kind, name) do update
   set max_depth = case when :max_depth::bigint is null then duly_queue.max_depth else excluded.max_depth end,
       ageing_ms = case when :ageing_ms::bigint is null then duly_queue.ageing_ms else excluded.ageing_ms end,
       retry_share = case when :retry_share::float8 is null then duly_queue.retry_share else excluded.retry_share end,
       depth = case when :max_depth::bigint is null or duly_queue.max_depth is not distinct from excluded.max_depth
                    then duly_queue.depth end,
       depth_at = case when :max_depth::bigint is null or duly_queue.max_depth is not distinct from excluded.max_depth
                       then duly_queue.depth_at end,
       set_at = excluded.set_at, set_by = excluded.set_by, set_why = excluded.set_why
 where (:max_depth::bigint is not null and duly_queue.max_depth is distinct from excluded.max_depth)
    or (:ageing_ms::bigint is not null and duly_queue.ageing_ms is distinct from excluded.ageing_ms)
    or (:retry_share::float8 is not null and duly_queue.retry_share is distinct from excluded.retry_share);

-- name: limits
select kind, name, max_depth, depth, depth_at, ageing_ms, retry_share, set_at, set_by, set_why,
       :now - depth_at as depth_age_ms
  from duly.duly_queue
 where kind = 'queue' and (max_depth is not null or ageing_ms is not null or retry_share is not null)
 order by name;

-- name: depth
-- What waits in a queue, counted no further than asked, and ordered as its index is: see `queues`.
select count(*) as depth
  from ((select 1 from duly.duly_job
          where state = 'ready' and lane is null and queue = :queue
          order by suspect, priority desc, due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'scheduled' and lane is null and queue = :queue
          order by due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'ready' and lane is not null and queue = :queue
          order by suspect, task, lane, priority desc, due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'scheduled' and lane is not null and queue = :queue
          order by due_at, id limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where state = 'waiting' and parked_version is null and queue = :queue
          order by due_at limit :enough::bigint)
         union all
        (select 1 from duly.duly_job
          where parked_version is not null and queue = :queue
          order by task, parked_version limit :enough::bigint)
         limit :enough::bigint) as waiting;

-- name: note_depth
-- One count a second is enough for a whole fleet, and one that stopped at another limit says nothing.
update duly.duly_queue
   set depth = :depth::bigint, depth_at = now
  from (select :now as now) as clock
 where kind = 'queue' and name = :queue and max_depth = :max_depth::bigint
   and (depth_at is null or depth_at <= now - 1000 or depth_at > now)
returning name;

-- name: claim_shaped
-- `claim` for a queue whose priorities age (`:ageing_ms`) or whose retries have a budget (`:retries`). Of due retries,
-- the budget goes before the rest of the queue and all others after it. With many retries due, others that are due are
-- looked for among the first only: promoting finds them. Differs from SQLite: `best` says how many of each priority are
-- among the first, without a lock, and `ready` takes as many of each, past what others have locked. What that leaves
-- free, because others were there first, `rest` fills.
with recursive clock as materialized (select :now as now),
gate as materialized (
    select name, kind
      from duly.duly_queue, clock
     where paused_at is not null and (paused_until is null or paused_until > now)
),
asked as materialized (
    select case when not pg_try_advisory_xact_lock(:token::bigint)
                  or exists (select 1 from duly.duly_job where token = :token::bigint)
                  or exists (select 1 from gate where kind = 'queue' and name = :queue) then 0
                else :limit::int end as room
),
budgeted as materialized (
    select id
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and attempt > 0 and due_at <= (select now from clock)
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate where kind = 'task')
     order by due_at, id
     limit least(coalesce(:retries::int, 0), (select room from asked))
       for update skip locked
),
level (level_priority, place) as (
    select (select priority from duly.duly_job
             where state = 'ready' and lane is null and queue = :queue and suspect = false
             order by priority desc limit 1), 1
     union all
    select (select priority from duly.duly_job
             where state = 'ready' and lane is null and queue = :queue and suspect = false and priority < level_priority
             order by priority desc limit 1), place + 1
      from level
     where level_priority is not null and place < 1000
),
best as materialized (
    select level_priority, count(*) as share
      from (select level_priority
              from level
             cross join lateral (
                   select due_at, id
                     from duly.duly_job
                    where state = 'ready' and lane is null and queue = :queue and suspect = false
                      and priority = level_priority
                      and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
                      and task not in (select name from gate where kind = 'task')
                      and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
                    order by due_at, id
                    limit (select room from asked) - (select count(*) from budgeted)) as first_ones
             where level_priority is not null
             order by case when :ageing_ms::bigint is null then - level_priority
                           else due_at - level_priority * :ageing_ms::float8 end,
                      case when :ageing_ms::bigint is null then due_at end, id
             limit (select room from asked) - (select count(*) from budgeted)) as first_of_all
     group by level_priority
),
ready as materialized (
    select chosen.id
      from best
     cross join lateral (
           select id
             from duly.duly_job
            where state = 'ready' and lane is null and queue = :queue and suspect = false and priority = level_priority
              and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
              and task not in (select name from gate where kind = 'task')
              and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
            order by due_at, id
            limit best.share
              for update skip locked) as chosen
     limit (select room from asked) - (select count(*) from budgeted)
),
rest as materialized (
    select id
      from duly.duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = false
       and id <> all (array(select id from ready))
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate where kind = 'task')
       and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
     order by priority desc, due_at, id
     limit (select room from asked) - (select count(*) from budgeted) - (select count(*) from ready)
       for update skip locked
),
fresh as materialized (
    select id
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= (select now from clock)
       and (:retries::int is null
            or (attempt = 0 and due_at <= coalesce(
                (select due_at from duly.duly_job
                  where state = 'scheduled' and lane is null and queue = :queue and due_at <= (select now from clock)
                  order by due_at, id limit 1 offset 100), (select now from clock))))
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate where kind = 'task')
       and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
     order by due_at, id
     limit (select room from asked) - (select count(*) from budgeted) - (select count(*) from ready)
           - (select count(*) from rest)
       for update skip locked
),
further as materialized (
    select id
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and attempt > 0 and due_at <= (select now from clock)
       and :retries::int is not null and id <> all (array(select id from budgeted))
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate where kind = 'task')
     order by due_at, id
     limit (select room from asked) - (select count(*) from budgeted) - (select count(*) from ready)
           - (select count(*) from rest) - (select count(*) from fresh)
       for update skip locked
),
taken as (
    update duly.duly_job
       set state = 'running', attempt = attempt + 1, token = :token::bigint, worker = :worker,
           lease_until = (select now from clock) + lease_ms, heartbeat_at = null, progress = null,
           progress_message = null, reason = null
     where id = any (array(
           select id from budgeted union all select id from ready union all select id from rest
            union all select id from fresh union all select id from further))
    returning id, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
              lease_ms, lease_until, due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane
)
select id::text, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
       lease_ms, lease_until, due_at, created_at, keep_ms, batch_id::text, schedule, replay_count, cancel_requested_at, origin::text,
       lane
  from (select id, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
               lease_ms, lease_until, due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane
          from taken
         union all
        select id, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
               lease_ms, lease_until, due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane
          from duly.duly_job
         where token = :token::bigint) as held
 order by case when :ageing_ms::bigint is null then - priority else due_at - priority * :ageing_ms::float8 end,
          case when :ageing_ms::bigint is null then due_at end, id;
