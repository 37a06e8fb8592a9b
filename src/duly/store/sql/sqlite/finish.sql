-- Finish on SQLite and D1: records the end of an attempt. A success on which nothing depends takes a short way: its row
-- moves from `duly_job` to `duly_done`. Every other end is marked by `finish`, and the sections of `ended.sql` follow.

-- fragment: each_job
cross join json_each(held.value) as one cross join duly_job on duly_job.id = one.key

-- fragment: is_held
token = cast(held.key as integer) and state = 'running'

-- name: finish_plain
-- The short way for a success without key, batch or schedule, as most are. They are sent as {token: {id: result}}, so
-- that no value is read from JSON row by row. The short ways return only a count: returning each id would take as long
-- as writing it.
insert into duly_done (
    id, task, queue, priority, state, payload, envelope, attempt, max_attempts, crashes, created_at, due_at,
    expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at, result, result_until,
    finished_at, keep_ms, result_ttl_ms, prune_at, on_dead, origin, replay_of, replay_count,
    lane, seq, ordering_dead)
select duly_job.id, task, queue, priority, 'succeeded', payload, envelope, attempt, max_attempts, crashes, created_at,
       due_at, expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at,
       one.value, case when one.value is not null then :now + result_ttl_ms end,
       :now, keep_ms, result_ttl_ms,
       :now + case when one.value is not null then min(result_ttl_ms, keep_ms) else keep_ms end,
       on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead
  from json_each(:plain) as held {each_job}
 where {is_held} and keep_ms > 0
   and duly_job.key is null and batch_id is null and schedule is null;
delete from duly_job
 where id in (
       select duly_job.id
         from json_each(:plain) as held {each_job}
        where {is_held}
          and duly_job.key is null and batch_id is null and schedule is null);

-- name: ends_written
-- The number of rows that the last statement deleted.
select changes() as recorded;

-- name: finish_keyed
-- The short way for a success with a key, which it keeps for its time. If another call is to run next, the end takes
-- the long way.
with mine as materialized (
    select duly_job.id as job_id, task as job_task, duly_job.key as job_key,
           coalesce(key_until, :now + key_ttl_ms) as until, one.value as job_result
      from json_each(:keyed) as held {each_job}
     where {is_held} and keep_ms > 0
       and duly_job.key is not null and batch_id is null and schedule is null and next is null
)
update duly_key
   set state = 'succeeded', expires_at = until,
       result = case when length(cast(job_result as blob)) <= 65536 then job_result end,
       result_dropped = coalesce(length(cast(job_result as blob)) > 65536, 0)
  from mine
 where task = job_task and key = job_key and duly_key.job_id = mine.job_id;
insert into duly_done (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, attempt, max_attempts,
    crashes, created_at, due_at, expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at,
    result, result_until, finished_at, keep_ms, result_ttl_ms, prune_at, on_dead, origin, replay_of, replay_count,
    lane, seq, ordering_dead)
select duly_job.id, task, queue, priority, 'succeeded', payload, envelope, duly_job.key, fingerprint, key_ttl_ms,
       key_until, attempt, max_attempts, crashes, created_at, due_at, expires_at, lease_ms, token, worker, progress,
       progress_message, cancel_requested_at, one.value,
       case when one.value is not null
            then max(:now + result_ttl_ms, coalesce(key_until, :now + key_ttl_ms)) end,
       :now, keep_ms, result_ttl_ms,
       case when one.value is not null
            then min(max(:now + result_ttl_ms, coalesce(key_until, :now + key_ttl_ms)), :now + keep_ms)
            else :now + keep_ms end,
       on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead
  from json_each(:keyed) as held {each_job}
 where {is_held} and keep_ms > 0
   and duly_job.key is not null and batch_id is null and schedule is null and next is null;
delete from duly_job
 where id in (
       select duly_job.id
         from json_each(:keyed) as held {each_job}
        where {is_held} and keep_ms > 0
          and duly_job.key is not null and batch_id is null and schedule is null and next is null);

-- name: finish_batched
-- The short way for a success in a batch: it is counted, then moved. `ended_callbacks` follows.
update duly_batch
   set open = open - n, succeeded = succeeded + n
  from (select batch_id, count(*) as n
          from json_each(:batched) as held {each_job}
         where {is_held}
           and duly_job.key is null and batch_id is not null and schedule is null
         group by batch_id) as ended
 where duly_batch.id = ended.batch_id;
insert into duly_done (
    id, task, queue, priority, state, payload, envelope, attempt, max_attempts, crashes, created_at, due_at,
    expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at, result, result_until,
    finished_at, keep_ms, result_ttl_ms, prune_at, batch_id, on_dead, origin, replay_of, replay_count,
    lane, seq, ordering_dead)
select duly_job.id, task, queue, priority, 'succeeded', payload, envelope, attempt, max_attempts, crashes, created_at,
       due_at, expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at,
       one.value, case when one.value is not null then :now + result_ttl_ms end,
       :now, keep_ms, result_ttl_ms,
       :now + case when one.value is not null then min(result_ttl_ms, keep_ms) else keep_ms end,
       batch_id, on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead
  from json_each(:batched) as held {each_job}
 where {is_held} and keep_ms > 0
   and duly_job.key is null and batch_id is not null and schedule is null;
delete from duly_job
 where id in (
       select duly_job.id
         from json_each(:batched) as held {each_job}
        where {is_held}
          and duly_job.key is null and batch_id is not null and schedule is null);

-- name: finish
-- A worker that lost its lease matches no row here, and so changes nothing. A job that was asked to cancel gets no
-- further attempt.
update duly_job
   set state = case when cancel_requested_at is not null and ending = 0 then 'cancelled' else new_state end,
       finished_at = case when cancel_requested_at is not null or ending = 1 then :now end,
       due_at = case when new_state = 'ready' or ending = 1 or new_parked is not null then due_at
                     else :now + after_ms end,
       -- The job has started, and a snooze gives its attempt back: it cannot expire any more. A parked job has not
       -- started.
       expires_at = case when new_state in ('scheduled', 'waiting') and new_parked is null then null
                         else expires_at end,
       attempt = attempt - give_back,
       crashes = crashes + crashed,
       suspect = case when new_state = 'ready' or new_parked is not null then max(suspect, crashed) else 0 end,
       parked_version = new_parked,
       result = new_result,
       reason = case when cancel_requested_at is not null and ending = 0 then 'cancelled on request'
                     else coalesce(new_reason, new_kind) end,
       error = case when new_state in ('succeeded', 'partial') then null else coalesce(new_error, error) end,
       token = null, lease_until = null, last_token = token
  from (select value ->> 'id' as changed_id, value ->> 'token' as held_token, value ->> 'state' as new_state,
               value ->> 'ending' as ending, value ->> 'after_ms' as after_ms, value ->> 'give_back' as give_back,
               value ->> 'result' as new_result, value ->> 'reason' as new_reason, value ->> 'kind' as new_kind,
               value ->> 'error' as new_error, value ->> 'crashed' as crashed, value ->> 'parked' as new_parked
          from json_each(:changes)) as change
 where duly_job.id = changed_id and token = held_token and duly_job.state = 'running'
returning id;

-- name: failed_attempts
-- The attempt is part of the key: a token that gave its attempt back has none that could fail.
insert into duly_attempt (job_id, attempt, at, worker, outcome, error, traceback)
select duly_job.id, attempt, :now, worker, case when value ->> 'crashed' then 'crashed' else 'failed' end,
       value ->> 'error', value ->> 'traceback'
  from json_each(:changes)
 cross join duly_job on duly_job.id = value ->> 'id'
 where last_token = value ->> 'token' and attempt = value ->> 'attempt' and duly_job.state <> 'running'
   and value ->> 'error' is not null
    on conflict (job_id, attempt) do nothing;

-- name: settle
-- The results of writes that changed nothing: recorded before, recorded and deleted, or lost to another worker.
select value ->> 'id' as id,
       case when exists (select 1 from duly_job where id = value ->> 'id' and last_token = value ->> 'token')
              or exists (select 1 from duly_done where id = value ->> 'id' and token = value ->> 'token') then 'already'
            when not exists (select 1 from duly_job where id = value ->> 'id')
             and not exists (select 1 from duly_done where id = value ->> 'id') then 'gone'
            else 'lost' end as verdict
  from json_each(:held);
