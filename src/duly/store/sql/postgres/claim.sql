-- Claim on PostgreSQL: a worker leases due jobs with a token that it made. While a job runs, the worker extends the
-- lease, and the handler writes progress. Every such write names the token, so a worker that lost its lease changes
-- nothing. `lane.sql` claims jobs with a cap, a rate or an order.

-- name: await_claim
-- The first try may be in flight in another session, where its writes are not visible yet. It holds the lock of its
-- token until its commit. Returns nothing.
with waited as materialized (select pg_advisory_xact_lock(:token::bigint)::text as waited)
select waited from waited where waited is null;

-- fragment: claimed
id::text, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
lease_ms, lease_until, due_at, created_at, keep_ms, batch_id::text, schedule, replay_count, cancel_requested_at,
origin::text

-- fragment: known_tasks
    (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
and task not in (select name from gate where kind = 'task')
and (expires_at is null or expires_at > (select now from clock) or attempt > 0)

-- fragment: lease
set state = 'running', attempt = attempt + 1, token = :token::bigint, worker = :worker,
    lease_until = (select now from clock) + lease_ms, heartbeat_at = null, progress = null,
    progress_message = null, reason = null

-- fragment: paused
gate as materialized (
    select name, kind
      from duly.duly_queue, clock
     where paused_at is not null and (paused_until is null or paused_until > now)
)

-- name: claim
-- Differs from SQLite: each claim skips rows that another has locked. The row is chosen and locked in a materialized
-- step: inside an `in (...)` the planner may choose it twice and take more than the limit. A locked row keeps its
-- position until it is updated. If another session changed it just before, the next claim finds it. Jobs that the token
-- holds are returned by `recall`, which follows if a claim is repeated: merging both in order took a fifth of the
-- claim.
with clock as materialized (select :now as now),
{paused},
asked as materialized (
    select case when not pg_try_advisory_xact_lock(:token::bigint)
                  or exists (select 1 from duly.duly_job where token = :token::bigint)
                  or exists (select 1 from gate where kind = 'queue' and name = :queue) then 0
                else :limit::int end as room
),
ready as materialized (
    select ctid as place
      from duly.duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = :alone::boolean
       and {known_tasks}
     order by priority desc, due_at, id
     limit (select room from asked)
       for update skip locked
),
due as materialized (
    select ctid as place
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and not :alone::boolean and due_at <= (select now from clock)
       and {known_tasks}
     order by due_at, id
     limit (select room from asked) - (select count(*) from ready)
       for update skip locked
)
update duly.duly_job
   {lease}
 where ctid = any (array(select place from ready union all select place from due))
returning {claimed}, lane;

-- name: claim_marked
-- The same, but the order is walked in parts, best first. A part with a mark starts a moment before the present,
-- because enqueues do not commit in the order of their due times. The equality on `queue` makes the planner expect one
-- part, not a hundred, for which it would compile the plan. Separate from `claim`, because it costs a tenth more.
with clock as materialized (select :now as now),
{paused},
free as materialized (
    select case when pg_try_advisory_xact_lock(:token::bigint)
                 and not exists (select 1 from duly.duly_job where token = :token::bigint)
                 and not exists (select 1 from gate where kind = 'queue' and name = :queue) then :limit::int
                else 0 end as room
),
part as materialized (
    select top, bottom, least(due_at, now - 100) as due_at,
           case when due_at <= now - 100 then id else '00000000-0000-0000-0000-000000000000' end as id
      from json_to_recordset(:parts::json) as part (queue text, top int, bottom int, due_at bigint, id uuid)
     cross join clock
     where queue = :queue
),
ready as materialized (
    select chosen.place
      from part
     cross join lateral (
           select ctid as place
             from duly.duly_job
            where state = 'ready' and lane is null and queue = :queue and suspect = false
              and priority <= part.top and priority >= part.bottom and (due_at, id) >= (part.due_at, part.id)
              and {known_tasks}
            order by priority desc, due_at, id
            limit (select room from free)
              for update skip locked) as chosen
     limit (select room from free)
),
due as materialized (
    select ctid as place
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= (select now from clock)
       and {known_tasks}
     order by due_at, id
     limit (select room from free) - (select count(*) from ready)
       for update skip locked
)
update duly.duly_job
   {lease}
 where ctid = any (array(select place from ready union all select place from due))
returning {claimed}, lane;

-- name: claim_shaped
-- `claim` for a queue whose priorities age (`:ageing_ms`) or whose retries have a budget (`:retries`). Due retries
-- within the budget come before the rest of the queue, further ones after it. If many retries are due, other due jobs
-- are sought among the first only: promoting finds the rest. Differs from SQLite: `best` counts, without locks, how
-- many of each priority are among the first, and `ready` takes as many of each, skipping locked rows. If it finds
-- fewer, because other claims were first, `rest` fills the room.
with recursive clock as materialized (select :now as now),
{paused},
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
                      and {known_tasks}
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
              and {known_tasks}
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
       and {known_tasks}
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
       and {known_tasks}
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
       {lease}
     where id = any (array(
           select id from budgeted union all select id from ready union all select id from rest
            union all select id from fresh union all select id from further))
    returning id, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
              lease_ms, lease_until, due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane
)
select {claimed},
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

-- name: recall
select {claimed}, lane
  from duly.duly_job
 where token = :token::bigint
 order by priority desc, due_at, id;

-- name: head
-- Returns the first row that a claim would take, and how long finding it took: deleted rows stay in the index until
-- vacuum removes them, and every claim walks over them.
with clock as materialized (select :now as now, clock_timestamp() as began),
gate as materialized (
    select name
      from duly.duly_queue, clock
     where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > now)
),
head as materialized (
    select priority, due_at, id
      from duly.duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = false
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate)
       and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
     order by priority desc, due_at, id
     limit 1
)
select priority, due_at, id::text, (extract(epoch from clock_timestamp() - began) * 1000)::float8 as took_ms
  from clock
  left join head on true;

-- name: extend
-- Differs from SQLite: a locked row (by a caller's open transaction with its finish, or a cancel) must not delay the
-- others. It is extended at the next heartbeat; rescue skips locked rows.
with clock as materialized (select :now as now),
held as materialized (select id, token from json_to_recordset(:held::json) as held (id uuid, token bigint)),
mine as materialized (
    select duly_job.id
      from held
      join duly.duly_job on duly_job.id = held.id and duly_job.token is not distinct from held.token
     where duly_job.id = any (array(select id from held)) and duly_job.state = 'running'
     order by duly_job.id
       for update of duly_job skip locked
),
extended as (
    update duly.duly_job
       set lease_until = (select now from clock) + lease_ms
     where id = any (array(select id from mine))
    returning id, cancel_requested_at
)
select id::text, cancel_requested_at
  from extended
 union all
select duly_job.id::text, cancel_requested_at
  from held
  join duly.duly_job on duly_job.id = held.id and duly_job.token is not distinct from held.token
 where duly_job.id = any (array(select id from held)) and duly_job.state = 'running'
   and duly_job.id <> all (array(select id from mine));

-- name: progress
-- Differs from SQLite like `extend`: the handler's own open transaction may hold the row, and would wait for itself.
with mine as materialized (
    select id
      from duly.duly_job
     where id = :id::uuid and token is not distinct from :token::bigint and state = 'running'
       for update skip locked
),
written as (
    update duly.duly_job
       set progress = :progress::real, progress_message = :message::text
     where id = any (array(select id from mine))
)
select id::text
  from duly.duly_job
 where id = :id::uuid and token is not distinct from :token::bigint and state = 'running';

-- name: heartbeat
-- Differs from SQLite like `progress`.
with mine as materialized (
    select id
      from duly.duly_job
     where id = :id::uuid and token is not distinct from :token::bigint and state = 'running'
       for update skip locked
),
written as (
    update duly.duly_job
       set heartbeat_at = :now
     where id = any (array(select id from mine))
)
select id::text
  from duly.duly_job
 where id = :id::uuid and token is not distinct from :token::bigint and state = 'running';
