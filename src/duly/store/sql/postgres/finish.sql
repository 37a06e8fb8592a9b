-- Finish on PostgreSQL: records the end of an attempt. A success on which nothing depends takes a short way: its row
-- moves from `duly_job` to `duly_done`. Every other end is marked by `finish`, and the sections of `ended.sql` follow.

-- fragment: is_held
duly_job.id = any (array(select id from input)) and duly_job.id = input.id
       and duly_job.token is not distinct from input.token
       and state = 'running'

-- name: finish_plain
-- Differs from SQLite: a delete can pass its rows to an insert, so both are one statement. The order of the input and
-- the walk along the primary key lock rows in the order of their ids, as everywhere.
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
     where {is_held} and key is null and batch_id is null and schedule is null
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

-- name: finish_keyed
-- The short way for a success with a key, which it keeps for its time. If another call is to run next, the end takes
-- the long way. Keys are locked after jobs, and in order.
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
     where {is_held} and keep_ms > 0 and key is not null and batch_id is null and schedule is null
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
-- The short way for a success in a batch: it is counted, then moved. `ended_callbacks` follows. Differs from SQLite:
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
     where {is_held} and key is null and batch_id is not null and schedule is null
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
-- A worker that lost its lease matches no row here, and so changes nothing. A job that was asked to cancel gets no
-- further attempt.
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
       -- The job has started, and a snooze gives its attempt back: it cannot expire any more. A parked job has not
       -- started.
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
-- The attempt is part of the key: a token that gave its attempt back has none that could fail.
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
-- The results of writes that changed nothing: recorded before, recorded and deleted, or lost to another worker.
select held.id::text,
       case when exists (select 1 from duly.duly_job where id = held.id and last_token = held.token)
              or exists (select 1 from duly.duly_done where id = held.id and token = held.token) then 'already'
            when not exists (select 1 from duly.duly_job where id = held.id)
             and not exists (select 1 from duly.duly_done where id = held.id) then 'gone'
            else 'lost' end as verdict
  from json_to_recordset(:held::json) as held (id uuid, token bigint);
