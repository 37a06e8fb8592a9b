-- The life of a job on PostgreSQL, from enqueue to the moment it ends; `ended.sql` has what follows.
--
-- The sections and parameters are those of SQLite; comments say where and why the statements differ. All over:
-- several workers write at once, so rows that a statement will change are locked first, in the order of their ids
-- (two that lock in different orders wait for each other for ever), or skipped where somebody else may have them.
-- `clock` reads the time once, because a volatile function in a condition keeps an index from being used.
-- `= any (array(...))` and not a join, because a plan made for many rows would read the whole table; tokens are
-- compared by `is not distinct from`, because by its index each would find all the jobs of its claim.

-- name: enqueue
-- again: on conflict (id) do nothing
-- They come as {[lane, envelope]: {id: payload}}, so that little has to be taken out of JSON row by row.
-- Asked again while the job is live, it changes nothing; `undo_finished` follows where it may have ended since. A handler
-- that lost its lease (`hold_parent`) adds nothing either, and nothing is added to a batch that takes no more, or whose
-- key says that it was filled further (`:filling`) by now.
with clock as materialized (select :now as now)
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, expires_at,
    lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, lane, ordering_dead)
select one.key::uuid, :task, :queue, :priority::int,
       case when coalesce(:due_at::bigint, now + :delay_ms::bigint) <= now then 'ready' else 'scheduled' end,
       one.value, envelope, :max_attempts::int, now, coalesce(:due_at::bigint, now + :delay_ms::bigint),
       coalesce(:expires_at::bigint, now + :expires_ms::bigint), :lease_ms::int, :keep_ms::bigint,
       :result_ttl_ms::bigint, :batch_id::uuid, :schedule::text, :on_dead::text, lane, :ordering_dead::text
  from clock
 cross join (
       select key::json ->> 0 as lane, key::json ->> 1 as envelope, value as payloads
         from json_each(:payloads::json)
       offset 0) as kind  -- read once, not for each of its jobs
 cross join json_each_text(kind.payloads) as one
 where (:parent_token::bigint is null
        or exists (
           select 1 from duly.duly_job
            where id = :parent_id::uuid and token is not distinct from :parent_token::bigint and state = 'running'))
   and (:filling::bigint is null
        or exists (
           select 1 from duly.duly_batch
            where id = :batch_id::uuid and sealed_at is null
              and (:filling::bigint < 0 or filled = :filling::bigint)));

-- name: enqueue_one
-- The same for one job which neither a handler nor a batch adds: there is no list to read and nothing to look at first.
-- Most of what the other one costs for one job is to set up what it might have to do.
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, expires_at,
    lease_ms, keep_ms, result_ttl_ms, schedule, on_dead, lane)
select :id::uuid, :task, :queue, :priority::int,
       case when coalesce(:due_at::bigint, now + :delay_ms::bigint) <= now then 'ready' else 'scheduled' end,
       :payload, :envelope, :max_attempts::int, now, coalesce(:due_at::bigint, now + :delay_ms::bigint),
       coalesce(:expires_at::bigint, now + :expires_ms::bigint), :lease_ms::int, :keep_ms::bigint,
       :result_ttl_ms::bigint, :schedule, :on_dead, :lane
  from (select :now as now) as clock;

-- name: hold_parent
-- A handler enqueues while it holds its own job, or not at all. Answers a row if it does. Differs from SQLite: the row is
-- held to the end, so that nobody takes the job in between.
select 1 as held
  from duly.duly_job
 where id = :parent_id::uuid and token is not distinct from :parent_token::bigint and state = 'running'
   for share;

-- name: lock_jobs
-- For lists that would otherwise lock jobs in two goes, or keys before jobs: whoever ends a job has locked it and
-- then wants its key. Answers nothing.
with held as materialized (
    select id
      from duly.duly_job
     where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
     order by id
       for update
)
select id::text from held where id is null;

-- name: reserve_keys
-- Differs from SQLite: one statement may not touch a row twice, so a key that comes twice is taken by its first,
-- and keys are taken in order.
insert into duly.duly_key (task, key, job_id, state, fingerprint)
select distinct on (key) :task::text, key, id, 'live', fingerprint
  from rows from (json_to_recordset(:jobs::json) as (id uuid, key text, fingerprint text)) with ordinality
       as input (id, key, fingerprint, place)
 where :parent_token::bigint is null
    or exists (
       select 1 from duly.duly_job
        where duly_job.id = :parent_id::uuid and token is not distinct from :parent_token::bigint and state = 'running')
 order by key, place
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint,
       result = null, result_dropped = false, expires_at = null
 where duly_key.expires_at <= :now;

-- name: enqueue_keyed
-- again: on conflict (id) do nothing
with clock as materialized (select :now as now)
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, max_attempts,
    created_at, due_at, expires_at, lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, lane, ordering_dead)
select id, :task, :queue, :priority::int,
       case when coalesce(:due_at::bigint, now + :delay_ms::bigint) <= now then 'ready' else 'scheduled' end,
       payload, envelope, key, fingerprint, :key_ttl_ms::bigint, now + :key_window_ms::bigint, :max_attempts::int, now,
       coalesce(:due_at::bigint, now + :delay_ms::bigint), coalesce(:expires_at::bigint, now + :expires_ms::bigint),
       :lease_ms::int, :keep_ms::bigint, :result_ttl_ms::bigint, :batch_id::uuid, :schedule::text, :on_dead::text,
       lane, :ordering_dead::text
  from clock
 cross join json_to_recordset(:jobs::json) as input (
       id uuid, payload text, envelope text, key text, fingerprint text, lane text)
 where exists (
       select 1 from duly.duly_key
        where duly_key.task = :task and duly_key.key = input.key and duly_key.job_id = input.id
          and duly_key.state = 'live')
   and (:filling::bigint is null
        or exists (
           select 1 from duly.duly_batch
            where duly_batch.id = :batch_id::uuid and sealed_at is null
              and (:filling::bigint < 0 or filled = :filling::bigint)));

-- name: undo_finished
-- Differs from SQLite: `not exists` in the insert would not do. The insert may wait for the finish of this very
-- job, whose row in duly_done only the next statement can see.
delete from duly.duly_key
 using json_array_elements_text(:ids::json) as asked
  join duly.duly_done on duly_done.id = asked::uuid
 where duly_key.task = duly_done.task and duly_key.key = duly_done.key
   and duly_key.job_id = duly_done.id and duly_key.state = 'live';
delete from duly.duly_job
 where id = any (array(
       select duly_done.id
         from json_array_elements_text(:ids::json) as asked
         join duly.duly_done on duly_done.id = asked::uuid));

-- name: key_holders
select input.id::text as asked, coalesce(duly_key.job_id, input.id)::text as holder,
       duly_key.fingerprint is not null and duly_key.fingerprint <> input.fingerprint as other_payload,
       coalesce(duly_key.state, 'live') as state, duly_key.result, coalesce(duly_key.result_dropped, false) as result_dropped
  from rows from (json_to_recordset(:jobs::json) as (id uuid, key text, fingerprint text)) with ordinality
       as input (id, key, fingerprint, place)
  left join duly.duly_key on duly_key.task = :task and duly_key.key = input.key
 order by place;

-- name: lock_debounced
-- For a debounce, which is between a job and its key. Whoever ends a job has locked it and then wants its key, so the
-- job that holds the key is locked first, with the one whose handler asks, in a statement of its own. Answers nothing.
with held as materialized (
    select id
      from duly.duly_job
     where id = any (array(
           select job_id from duly.duly_key where task = :task and key = :key
            union all
           select :parent_id::uuid))
     order by id
       for update
)
select id::text from held where id is null;

-- name: take_key
-- A key that nobody holds, or that a success keeps, is taken over: what is debounced is never answered with an old
-- result. Differs from SQLite: a key that is held is locked by this too, so that from here on the same job holds it.
insert into duly.duly_key (task, key, job_id, state, fingerprint, debounced_by)
select :task::text, :key::text, :id::uuid, 'live', :job::json ->> 'fingerprint', :id::uuid
 where not exists (select 1 from duly.duly_done where id = :id::uuid)
   and (:parent_token::bigint is null
        or exists (
           select 1 from duly.duly_job
            where id = :parent_id::uuid and token is not distinct from :parent_token::bigint and state = 'running'))
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint,
       debounced_by = excluded.debounced_by, result = null, result_dropped = false, expires_at = null
 where duly_key.state = 'succeeded' and duly_key.job_id <> excluded.job_id
   and duly_key.debounced_by is distinct from excluded.debounced_by;

-- name: debounce
-- The first call adds the job. While it has not begun, a call puts its own payload and terms into it and puts it off
-- again. One that has begun is left as it is: what is to run next is written beside it, and `ended_next` adds it. What
-- was in a worker's hands has begun, even if it was given back: its steps are those of its payload. A call that did one
-- of these is named by the key, and asked again it does nothing. Differs from SQLite: another job than the one that was
-- locked before may hold the key by now. It is not waited for, because who has it wants the key: where that is so,
-- nothing is done, and it is asked again. Nor is it inserted where it is there, for that too would wait for who has it.
with clock as materialized (select :now as now)
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, max_attempts, created_at, due_at,
    expires_at, lease_ms, keep_ms, result_ttl_ms, on_dead, lane)
select :id::uuid, :task, queue, priority, 'scheduled', payload, envelope, :key, fingerprint, key_ttl_ms, max_attempts,
       now, now + :debounce_ms::bigint, coalesce(:expires_at::bigint, now + :expires_ms::bigint), lease_ms, keep_ms,
       result_ttl_ms, on_dead, lane
  from clock
 cross join json_to_record(:job::json) as input (
       queue text, priority int, payload text, envelope text, fingerprint text, key_ttl_ms bigint, max_attempts int,
       lease_ms int, keep_ms bigint, result_ttl_ms bigint, on_dead text, lane text)
 where exists (
       select 1 from duly.duly_key
        where task = :task and key = :key and job_id = :id::uuid and state = 'live')
   and not exists (select 1 from duly.duly_job where id = :id::uuid)
    on conflict (id) do nothing;
with clock as materialized (select :now as now),
waiting as materialized (
    select duly_job.id
      from duly.duly_key
      join duly.duly_job on duly_job.id = duly_key.job_id
     where duly_key.task = :task and duly_key.key = :key and duly_key.state = 'live' and duly_key.job_id <> :id::uuid
       and duly_key.debounced_by is distinct from :id::uuid
       and duly_job.state <> 'running' and attempt = 0 and last_token is null and replay_of is null
       and not exists (select 1 from duly.duly_done where id = :id::uuid)
       and (:parent_token::bigint is null
            or exists (
               select 1 from duly.duly_job
                where id = :parent_id::uuid and token is not distinct from :parent_token::bigint
                  and state = 'running'))
       for update of duly_job skip locked
),
replaced as (
    update duly.duly_job
       set state = 'scheduled', queue = input.queue, priority = input.priority, payload = input.payload,
           envelope = input.envelope, fingerprint = input.fingerprint, key_ttl_ms = input.key_ttl_ms,
           max_attempts = input.max_attempts, due_at = now + :debounce_ms::bigint,
           expires_at = coalesce(:expires_at::bigint, now + :expires_ms::bigint), lease_ms = input.lease_ms,
           keep_ms = input.keep_ms, result_ttl_ms = input.result_ttl_ms, on_dead = input.on_dead, lane = input.lane,
           reason = null, parked_version = null
      from clock
     cross join json_to_record(:job::json) as input (
           queue text, priority int, payload text, envelope text, fingerprint text, key_ttl_ms bigint, max_attempts int,
           lease_ms int, keep_ms bigint, result_ttl_ms bigint, on_dead text, lane text)
     where duly_job.id = any (array(select id from waiting))
    returning duly_job.id, duly_job.fingerprint
)
update duly.duly_key
   set fingerprint = replaced.fingerprint, debounced_by = :id::uuid
  from replaced
 where task = :task and key = :key and job_id = replaced.id;
with clock as materialized (select :now as now),
begun as materialized (
    select duly_job.id
      from duly.duly_key
      join duly.duly_job on duly_job.id = duly_key.job_id
     where duly_key.task = :task and duly_key.key = :key and duly_key.state = 'live' and duly_key.job_id <> :id::uuid
       and duly_key.debounced_by is distinct from :id::uuid
       and (duly_job.state = 'running' or attempt > 0 or last_token is not null or replay_of is not null)
       and (next is null or next::json ->> 'id' <> :id::text)
       and not exists (select 1 from duly.duly_done where id = :id::uuid)
       and (:parent_token::bigint is null
            or exists (
               select 1 from duly.duly_job
                where id = :parent_id::uuid and token is not distinct from :parent_token::bigint
                  and state = 'running'))
       for update of duly_job skip locked
),
written as (
    update duly.duly_job
       set next = (:job::jsonb || jsonb_build_object(
                   'id', coalesce(next::json ->> 'id', :id::text), 'by', :id::text, 'created_at', now,
                   'due_at', now + :debounce_ms::bigint,
                   'expires_at', coalesce(:expires_at::bigint, now + :expires_ms::bigint)))::text
      from clock
     where duly_job.id = any (array(select id from begun))
    returning duly_job.id
)
update duly.duly_key
   set debounced_by = :id::uuid
  from written
 where task = :task and key = :key and job_id = written.id;

-- name: debounced
-- Which job has what this call gave, if it came to give it.
select holder::text, coalesce(holder = next_id, false) as is_behind
  from (select next_id,
               case when duly_key.job_id is null or duly_key.job_id = :id::uuid or next_id = :id::uuid
                      or exists (select 1 from duly.duly_done where id = :id::uuid) then :id::uuid
                    when debounced_by = :id::uuid then coalesce(next_id, duly_key.job_id) end as holder
          from (values (1)) as asked
          left join duly.duly_key on duly_key.key = :key and duly_key.task = :task
          left join lateral (
               select (next::json ->> 'id')::uuid as next_id from duly.duly_job where id = duly_key.job_id) as behind
            on true) as answer;

-- name: await_claim
-- The first try may still be on its way in another session, not committed and so not seen. It holds the lock of its
-- token until then. Answers nothing.
with waited as materialized (select pg_advisory_xact_lock(:token::bigint)::text as waited)
select waited from waited where waited is null;

-- name: claim
-- Differs from SQLite: each claimer skips the rows that another has locked. The row is chosen and locked in a
-- materialized step: inside an `in (...)` the planner may choose it twice and take more than the limit. Locked, it stays
-- in its place until it is updated; if somebody changed it just before, that place is not seen here, and it is left to the
-- next claim. What the token holds already is not answered here but by `recall`, which follows where a claim is sent once
-- more: to put both together and in order took a fifth of the claim.
with clock as materialized (select :now as now),
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
ready as materialized (
    select ctid as place
      from duly.duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = :alone::boolean
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate where kind = 'task')
       and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
     order by priority desc, due_at, id
     limit (select room from asked)
       for update skip locked
),
due as materialized (
    select ctid as place
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and not :alone::boolean and due_at <= (select now from clock)
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate where kind = 'task')
       and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
     order by due_at, id
     limit (select room from asked) - (select count(*) from ready)
       for update skip locked
)
update duly.duly_job
   set state = 'running', attempt = attempt + 1, token = :token::bigint, worker = :worker,
       lease_until = (select now from clock) + lease_ms, heartbeat_at = null, progress = null,
       progress_message = null, reason = null
 where ctid = any (array(select place from ready union all select place from due))
returning id::text, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
          lease_ms, lease_until, due_at, created_at, keep_ms, batch_id::text, schedule, replay_count, cancel_requested_at,
          origin::text, lane;

-- name: claim_marked
-- The same, but the order is walked in parts, best first. One that begins at a mark does so a moment before the present,
-- because enqueues do not commit in the order of their due times. By the equality on `queue` one part is expected and not
-- the hundred of any JSON, for which the plan would be compiled. Apart from `claim`, because all this costs a tenth of it.
with clock as materialized (select :now as now),
gate as materialized (
    select name, kind
      from duly.duly_queue, clock
     where paused_at is not null and (paused_until is null or paused_until > now)
),
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
              and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
              and task not in (select name from gate where kind = 'task')
              and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
            order by priority desc, due_at, id
            limit (select room from free)
              for update skip locked) as chosen
     limit (select room from free)
),
due as materialized (
    select ctid as place
      from duly.duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= (select now from clock)
       and (:tasks::text is null or task in (select json_array_elements_text(:tasks::json)))
       and task not in (select name from gate where kind = 'task')
       and (expires_at is null or expires_at > (select now from clock) or attempt > 0)
     order by due_at, id
     limit (select room from free) - (select count(*) from ready)
       for update skip locked
)
update duly.duly_job
   set state = 'running', attempt = attempt + 1, token = :token::bigint, worker = :worker,
       lease_until = (select now from clock) + lease_ms, heartbeat_at = null, progress = null,
       progress_message = null, reason = null
 where ctid = any (array(select place from ready union all select place from due))
returning id::text, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
          lease_ms, lease_until, due_at, created_at, keep_ms, batch_id::text, schedule, replay_count, cancel_requested_at,
          origin::text, lane;

-- name: recall
select id::text, token, task, queue, priority, payload, envelope, key, attempt, max_attempts, crashes, suspect,
       lease_ms, lease_until, due_at, created_at, keep_ms, batch_id::text, schedule, replay_count, cancel_requested_at,
       origin::text, lane
  from duly.duly_job
 where token = :token::bigint
 order by priority desc, due_at, id;

-- name: head
-- Beside the first row that a claim would take, how long it took to come to it: rows that are gone stay in the index
-- until vacuum may remove them, and are walked over each time.
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
-- Differs from SQLite: a row that somebody has locked (a caller's open transaction that stages its finish, a cancel)
-- must not hold up the others. It is still mine and is extended at the next beat; rescue leaves locked rows alone.
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
-- Differs from SQLite, as `extend` does: the handler's own open transaction may hold the row, and would wait for itself.
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
-- Differs from SQLite, as `progress` does.
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

-- name: plain_held
-- Only SQLite counts by a statement of its own.

-- name: keyed_held
-- Only SQLite counts by a statement of its own.

-- name: finish_plain
-- Differs from SQLite: a delete can hand its rows to an insert, so both are one statement. By the order of the input and
-- the walk along the primary key, rows are locked in the order of their ids, as everywhere.
with clock as materialized (select :now as now),
input as materialized (
    select one.key::uuid as id, held.key::bigint as token, one.value as result
      from json_each(:plain::json) as held
     cross join json_each_text(held.value) as one
     order by id
),
gone as (
    delete from duly.duly_job
     using input
     where duly_job.id = any (array(select id from input)) and duly_job.id = input.id
       and duly_job.token is not distinct from input.token
       and state = 'running' and key is null and batch_id is null and schedule is null
    returning duly_job.id, task, queue, priority, payload, envelope, attempt, max_attempts, crashes, created_at, due_at,
              expires_at, lease_ms, duly_job.token, worker, progress, progress_message, cancel_requested_at, keep_ms,
              result_ttl_ms, on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead,
              input.result as result
),
kept as (
    insert into duly.duly_done (
        id, task, queue, priority, state, payload, envelope, attempt, max_attempts, crashes, created_at, due_at,
        expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at, result, result_until,
        finished_at, keep_ms, result_ttl_ms, prune_at, on_dead, origin, replay_of, replay_count,
        lane, seq, ordering_dead)
    select id, task, queue, priority, 'succeeded', payload, envelope, attempt, max_attempts, crashes, created_at,
           due_at, expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at, result,
           case when result is not null then now + result_ttl_ms end, now, keep_ms, result_ttl_ms,
           now + case when result is not null then least(result_ttl_ms, keep_ms) else keep_ms end, on_dead, origin,
           replay_of, replay_count, lane, seq, ordering_dead
      from gone
     cross join clock
     where keep_ms > 0
)
select count(*)::int as recorded from gone;

-- name: finish_gone
-- The same for a turn of jobs that all leave nothing behind.
with input as materialized (
    select one.key::uuid as id, held.key::bigint as token
      from json_each(:plain::json) as held
     cross join json_each_text(held.value) as one
     order by id
),
gone as (
    delete from duly.duly_job
     using input
     where duly_job.id = any (array(select id from input)) and duly_job.id = input.id
       and duly_job.token is not distinct from input.token
       and state = 'running' and keep_ms = 0 and key is null and batch_id is null and schedule is null
    returning 1
)
select count(*)::int as recorded from gone;

-- name: ends_written
-- Only SQLite counts by a statement of its own.

-- name: finish_keyed
-- The short way out for a success with a key, which it keeps for its time. What is to run next under the key takes the
-- long way. Keys are locked after jobs, and in order.
with clock as materialized (select :now as now),
input as materialized (
    select one.key::uuid as id, held.key::bigint as token, one.value as result
      from json_each(:keyed::json) as held
     cross join json_each_text(held.value) as one
     order by id
),
gone as (
    delete from duly.duly_job
     using input
     where duly_job.id = any (array(select id from input)) and duly_job.id = input.id
       and duly_job.token is not distinct from input.token
       and state = 'running' and keep_ms > 0 and key is not null and batch_id is null and schedule is null
       and next is null
    returning duly_job.id, task, queue, priority, payload, envelope, key, fingerprint, key_ttl_ms, key_until, attempt,
              max_attempts, crashes, created_at, due_at, expires_at, lease_ms, duly_job.token, worker, progress, progress_message,
              cancel_requested_at, keep_ms, result_ttl_ms, on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead,
              input.result as result
),
held as materialized (
    select duly_key.task, duly_key.key, key_ttl_ms, key_until, gone.result
      from gone
      join duly.duly_key on duly_key.task = gone.task and duly_key.key = gone.key and duly_key.job_id = gone.id
     order by duly_key.task, duly_key.key
       for update of duly_key
),
remembered as (
    update duly.duly_key
       set state = 'succeeded', expires_at = coalesce(key_until, now + key_ttl_ms),
           result = case when octet_length(held.result) <= 65536 then held.result end,
           result_dropped = coalesce(octet_length(held.result) > 65536, false)
      from held, clock
     where duly_key.task = held.task and duly_key.key = held.key
),
kept as (
    insert into duly.duly_done (
        id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, attempt,
        max_attempts, crashes, created_at, due_at, expires_at, lease_ms, token, worker, progress, progress_message,
        cancel_requested_at, result, result_until, finished_at, keep_ms, result_ttl_ms, prune_at, on_dead, origin,
        replay_of, replay_count, lane, seq, ordering_dead)
    select id, task, queue, priority, 'succeeded', payload, envelope, key, fingerprint, key_ttl_ms, key_until, attempt,
           max_attempts, crashes, created_at, due_at, expires_at, lease_ms, token, worker, progress, progress_message,
           cancel_requested_at, result,
           case when result is not null
                then greatest(now + result_ttl_ms, coalesce(key_until, now + key_ttl_ms)) end,
           now, keep_ms, result_ttl_ms,
           case when result is not null
                then least(greatest(now + result_ttl_ms, coalesce(key_until, now + key_ttl_ms)), now + keep_ms)
                else now + keep_ms end,
           on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead
      from gone
     cross join clock
)
select count(*)::int as recorded from gone;

-- name: finish_batched
-- The short way out for a success of a batch: it is counted, then gone. `ended_callbacks` follows. Differs from SQLite:
-- the batches are locked in order, after the jobs, as everywhere.
with clock as materialized (select :now as now),
input as materialized (
    select one.key::uuid as id, held.key::bigint as token, one.value as result
      from json_each(:batched::json) as held
     cross join json_each_text(held.value) as one
     order by id
),
gone as (
    delete from duly.duly_job
     using input
     where duly_job.id = any (array(select id from input)) and duly_job.id = input.id
       and duly_job.token is not distinct from input.token
       and state = 'running' and key is null and batch_id is not null and schedule is null
    returning duly_job.id, task, queue, priority, payload, envelope, attempt, max_attempts, crashes, created_at, due_at,
              expires_at, lease_ms, duly_job.token, worker, progress, progress_message, cancel_requested_at, keep_ms,
              result_ttl_ms, batch_id, on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead,
              input.result as result
),
kept as (
    insert into duly.duly_done (
        id, task, queue, priority, state, payload, envelope, attempt, max_attempts, crashes, created_at, due_at,
        expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at, result, result_until,
        finished_at, keep_ms, result_ttl_ms, prune_at, batch_id, on_dead, origin, replay_of, replay_count,
        lane, seq, ordering_dead)
    select id, task, queue, priority, 'succeeded', payload, envelope, attempt, max_attempts, crashes, created_at,
           due_at, expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at, result,
           case when result is not null then now + result_ttl_ms end, now, keep_ms, result_ttl_ms,
           now + case when result is not null then least(result_ttl_ms, keep_ms) else keep_ms end, batch_id, on_dead,
           origin, replay_of, replay_count, lane, seq, ordering_dead
      from gone
     cross join clock
     where keep_ms > 0
),
ended as materialized (
    select batch_id, count(*) as n from gone group by batch_id
),
locked as materialized (
    select id from duly.duly_batch where id = any (array(select batch_id from ended)) order by id for update
),
counted as (
    update duly.duly_batch
       set open = open - n, succeeded = succeeded + n
      from ended
     where duly_batch.id = any (array(select id from locked)) and duly_batch.id = ended.batch_id
)
select count(*)::int as recorded from gone;

-- name: finish
-- A worker that lost its lease matches no row here, and so changes nothing. A job that somebody asked to
-- cancel does not come back for another attempt.
with clock as materialized (select :now as now),
change as materialized (
    select id, token, state, ending, after_ms, give_back, result, reason, kind, error, crashed, parked
      from json_to_recordset(:changes::json) as change (
           id uuid, token bigint, state text, ending int, after_ms bigint, give_back int, result text, reason text,
           kind text, error text, crashed int, parked bigint)
),
mine as materialized (
    select duly_job.id
      from change
      join duly.duly_job on duly_job.id = change.id and duly_job.token is not distinct from change.token
     where duly_job.id = any (array(select id from change)) and duly_job.state = 'running'
     order by duly_job.id
       for update of duly_job
)
update duly.duly_job
   set state = case when cancel_requested_at is not null and ending = 0 then 'cancelled' else change.state end,
       finished_at = case when cancel_requested_at is not null or ending = 1 then now end,
       due_at = case when change.state = 'ready' or ending = 1 or parked is not null then due_at
                     else now + after_ms end,
       -- It has started, and a snooze gives its attempt back: from here on nothing is left to expire. What is
       -- parked has not started.
       expires_at = case when change.state in ('scheduled', 'waiting') and parked is null then null
                         else expires_at end,
       attempt = attempt - give_back,
       crashes = crashes + crashed,
       suspect = (change.state = 'ready' or parked is not null) and (suspect or crashed = 1),
       parked_version = parked,
       result = change.result,
       reason = case when cancel_requested_at is not null and ending = 0 then 'cancelled on request'
                     else coalesce(change.reason, kind) end,
       error = case when change.state in ('succeeded', 'partial') then null else coalesce(change.error, duly_job.error) end,
       token = null, lease_until = null, last_token = duly_job.token
  from change, clock
 where duly_job.id = any (array(select id from mine)) and duly_job.id = change.id
returning duly_job.id::text;

-- name: failed_attempts
-- The attempt is named: a token that has given its attempt back before has none that could fail.
insert into duly.duly_attempt (job_id, attempt, at, worker, outcome, error, traceback)
select duly_job.id, duly_job.attempt, :now, worker, case when crashed = 1 then 'crashed' else 'failed' end,
       change.error, change.traceback
  from json_to_recordset(:changes::json) as change (
       id uuid, token bigint, attempt int, error text, traceback text, crashed int)
  join duly.duly_job on duly_job.id = change.id
 where duly_job.id = any (array(select id from json_to_recordset(:changes::json) as change (id uuid)))
   and last_token = change.token and duly_job.attempt = change.attempt and duly_job.state <> 'running'
   and change.error is not null
    on conflict (job_id, attempt) do nothing;

-- name: settle
-- What became of writes that changed nothing: done before, done and gone, or lost to another worker.
select held.id::text,
       case when exists (select 1 from duly.duly_job where id = held.id and last_token = held.token)
              or exists (select 1 from duly.duly_done where id = held.id and token = held.token) then 'already'
            when not exists (select 1 from duly.duly_job where id = held.id)
             and not exists (select 1 from duly.duly_done where id = held.id) then 'gone'
            else 'lost' end as verdict
  from json_to_recordset(:held::json) as held (id uuid, token bigint);

-- name: expired_leases
-- A lease that ends further ahead than two beats past a whole one was written before the clock stepped back.
-- Differs from SQLite: `is not null` would read the whole table while it has not been analyzed yet.
select id::text, token, lease_until, lease_ms, worker
  from duly.duly_job
 cross join (select :now as now offset 0) as clock
 where token between 1 and 9223372036854775807
   and (lease_until <= now or lease_until > now + lease_ms + 2 * (lease_ms / 3))
 order by lease_until
 limit :limit::int;

-- name: rescue
-- Only rows still running, still that token, still the lease end that was seen, still expired. A crash counts only
-- while the job ran alone, so that no neighbour dies of it, and in the worker itself: the death of a child is seen by its
-- worker. The token is kept negated: asked again, the rescue knows its own, and the worker that comes back is told that
-- it lost. Differs from SQLite: a row that somebody has locked is being extended or finished at this moment, and is left
-- alone.
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
-- Asked after a lost answer: which of these leases are taken, and what their jobs came to.
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
-- Without `:retries`, those stay scheduled: in a queue where they have a budget, a claim takes them from there.
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
-- Of the head of the queue, what no worker that serves it knows. The rest is not looked at, so that this costs the same
-- however long the queue is. Where nobody serves the queue, there is nobody to spare. Differs from SQLite: only what is
-- to be parked is locked, so that claimers can have the rest meanwhile, and judged again as it then is. Of lanes, the
-- tasks are looked at one after the other.
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
-- It keeps the due time it was parked with, and so its place. By the types one task and one queue are expected and not
-- the hundred of any JSON, for which the plan would be compiled: a fifth of a second.
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
-- What is overdue is not waited for: who could have claimed it would have. It may have become due a moment ago, though.
-- Differs from SQLite: beside a `with` the least would not be read off the index, but sought among all.
select least(
           (select min(due_at)
              from duly.duly_job
             where state = 'scheduled' and lane is null and queue = :queue and due_at > now - 50),
           (select min(due_at)
              from duly.duly_job
             where state = 'scheduled' and lane is not null and queue = :queue and due_at > now - 50)) - now as due_in_ms
  from (select :now as now offset 0) as clock;

-- name: cancel
-- A job that runs is only asked, so that no effect is forgotten. Differs from SQLite: the row is locked before
-- its state is judged, so that a job that begins or ends meanwhile is judged as it then is.
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
-- Asked after a lost answer.
select id::text, state
  from duly.duly_done
 where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked)) and state = 'cancelled';

-- name: retry
-- Differs from SQLite: the row is locked before its state is judged, as in `cancel`.
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
-- Asked after a lost answer: the log says what was made due, which may have run since.
select distinct job_id::text as id, 'ready' as state
  from duly.duly_event
 where name = 'job.retried'
   and job_id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
   and by is not distinct from :by::text and why is not distinct from :why::text;

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
