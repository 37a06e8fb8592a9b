-- The tail of every ending: finish, rescue, cancel and expire mark rows as ended, then run all of these sections in
-- this order. `:ids` names the jobs; only marked rows are changed. No section may be left out. The mark locks the rows,
-- so the sections read the same values until the commit.

-- name: ended_key
-- A success keeps the key for its time, so that the work is not repeated. A dead or cancelled job frees it. If another
-- call is to run next, `ended_next` passes the key on. Differs from SQLite: keys are locked in order.
with held as materialized (
    select duly_key.task, duly_key.key, duly_job.state, finished_at, key_ttl_ms, key_until, duly_job.result, next
      from duly.duly_job
      join duly.duly_key on duly_key.task = duly_job.task and duly_key.key = duly_job.key
       and duly_key.job_id = duly_job.id
     where duly_job.id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
       and finished_at is not null
     order by duly_key.task, duly_key.key
       for update of duly_key
),
freed as (
    delete from duly.duly_key
     using held
     where duly_key.task = held.task and duly_key.key = held.key and held.state in ('dead', 'cancelled')
       and next is null
)
update duly.duly_key
   set state = 'succeeded', expires_at = coalesce(key_until, finished_at + key_ttl_ms),
       result = case when octet_length(held.result) <= 65536 then held.result end,
       result_dropped = coalesce(octet_length(held.result) > 65536, false)
  from held
 where duly_key.task = held.task and duly_key.key = held.key and held.state in ('succeeded', 'partial')
   and next is null;

-- name: ended_next
-- A call that was debounced while the job ran is added under its key, whatever the ending.
with clock as materialized (select :now as now),
following as materialized (
    select id as ended_id, task as ended_task, key as ended_key, next
      from duly.duly_job
     where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
       and finished_at is not null and next is not null
),
handed_on as (
    update duly.duly_key
       set job_id = (next::json ->> 'id')::uuid, state = 'live', fingerprint = next::json ->> 'fingerprint',
           result = null, result_dropped = false, expires_at = null
      from following
     where task = ended_task and key = ended_key and job_id = ended_id
    returning job_id
)
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, max_attempts, created_at, due_at,
    expires_at, lease_ms, keep_ms, result_ttl_ms, on_dead, lane)
select id, ended_task, queue, priority, case when due_at <= now then 'ready' else 'scheduled' end, payload, envelope,
       ended_key, fingerprint, key_ttl_ms, max_attempts, created_at, greatest(due_at, now), expires_at, lease_ms,
       keep_ms, result_ttl_ms, on_dead, lane
  from following
 cross join clock
 cross join lateral json_to_record(next::json) as input (
       id uuid, queue text, priority int, payload text, envelope text, fingerprint text, key_ttl_ms bigint,
       max_attempts int, created_at bigint, due_at bigint, expires_at bigint, lease_ms int, keep_ms bigint,
       result_ttl_ms bigint, on_dead text, lane text)
 where id in (select job_id from handed_on);

-- name: ended_batch
-- Differs from SQLite: batches are locked in order; workers that end jobs of the same batches meet here. Jobs are found
-- by their ids first: a plan made before the first batch would walk over all jobs in batches.
with marked as materialized (
    select batch_id, state
      from duly.duly_job
     where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
       and finished_at is not null
),
ended as materialized (
    select batch_id, count(*) as n, count(*) filter (where state = 'succeeded') as n_succeeded,
           count(*) filter (where state = 'partial') as n_partial, count(*) filter (where state = 'dead') as n_dead,
           count(*) filter (where state = 'cancelled') as n_cancelled
      from marked
     where batch_id is not null
     group by batch_id
),
locked as materialized (
    select id from duly.duly_batch where id = any (array(select batch_id from ended)) order by id for update
)
update duly.duly_batch
   set open = open - n, succeeded = succeeded + n_succeeded, partial = partial + n_partial, dead = dead + n_dead,
       cancelled = cancelled + n_cancelled
  from ended
 where duly_batch.id = any (array(select id from locked)) and duly_batch.id = ended.batch_id;

-- name: ended_callbacks
-- The operation that makes a callback due inserts its job, so a crash cannot lose it. `:batches` are batches whose jobs
-- took a short way out, and one that is being sealed. As a binary number, 0.28 of 25 is a little more than 7, and 7 are
-- enough.
with clock as materialized (select :now as now),
ended as materialized (
    select id, state, batch_id, on_dead, envelope
      from duly.duly_job
     where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
       and finished_at is not null and (batch_id is not null or on_dead is not null)
),
callback as materialized (
    select spec::json as spec, (spec::json ->> 'id')::uuid as id, spec::json ->> 'payload' as payload,
           spec::json ->> 'envelope' as envelope
      from duly.duly_batch
     cross join lateral (values
           (on_complete, open = 0 and sealed_at is not null and completed_at is null),
           (on_success, open = 0 and sealed_at is not null and completed_at is null and cancelled_at is null
                        and succeeded + 0.000001 >= ok_at * (succeeded + partial + dead + cancelled)),
           (on_first_dead, dead > 0 and first_dead_at is null)) as due (spec, is_due)
     where duly_batch.id = any (array(
           select batch_id from ended
            union all
           select batch::uuid from json_array_elements_text(:batches::json) as batch))
       and is_due and spec is not null
     union all
    -- The database makes the id, a UUIDv7: it is inserted once, with the dead job it reports.
    select on_dead::json,
           (lpad(to_hex(now), 12, '0') || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid,
           json_build_object('job_id', id)::text,
           json_build_object('causation_id', id,
                             'correlation_id', coalesce(envelope::json ->> 'correlation_id', id::text))::text
      from ended, clock
     where state = 'dead' and on_dead is not null
)
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, lease_ms, keep_ms,
    result_ttl_ms, lane)
select id, spec ->> 'task', spec ->> 'queue', (spec ->> 'priority')::int, 'ready', payload, envelope,
       (spec ->> 'max_attempts')::int, now, now, (spec ->> 'lease_ms')::int, (spec ->> 'keep_ms')::bigint,
       (spec ->> 'result_ttl_ms')::bigint, spec ->> 'lane'
  from callback, clock;
update duly.duly_batch
   set completed_at = case when open = 0 and sealed_at is not null then coalesce(completed_at, :now) else completed_at end,
       first_dead_at = case when dead > 0 then coalesce(first_dead_at, :now) else first_dead_at end
 where id = any (array(
       select batch_id from duly.duly_job
        where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
          and finished_at is not null
        union all
       select batch::uuid from json_array_elements_text(:batches::json) as batch))
   and (open = 0 and sealed_at is not null and completed_at is null or dead > 0 and first_dead_at is null);

-- name: ended_schedule
-- Counts consecutive dead runs, pauses the schedule after too many, sets the next due time if it depends on this end,
-- and starts the run queued behind this one. Schedules that need none of this are not locked. Differs from SQLite: the
-- schedules are locked first, in the order of their names, so the next statement sees runs that a scheduler has queued
-- meanwhile. If a run is locked, it is about to end, and its ending starts the next one; otherwise `unqueue` does.
with marked as materialized (
    select schedule, state, finished_at
      from duly.duly_job
     where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
       and finished_at is not null
),
ended as materialized (
    select schedule, count(*) filter (where state in ('succeeded', 'partial')) as n_good,
           count(*) filter (where state = 'dead') as n_dead, max(finished_at) as ended_at
      from marked
     where schedule is not null
     group by schedule
),
locked as materialized (
    select name from duly.duly_schedule where name = any (array(select schedule from ended)) order by name for update
)
update duly.duly_schedule
   set dead_runs = case when n_good > 0 then 0 else dead_runs + n_dead end,
       next_at = case when mode = 'delay' and not exists (
                           select 1 from duly.duly_job where schedule = name and duly_job.finished_at is null)
                      then coalesce(next_at, ended_at + interval_ms) else next_at end,
       revision = revision + case when mode = 'delay' or overlap <> 'allow' then 1 else 0 end
  from ended
 where name = any (array(select name from locked)) and name = ended.schedule;
with clock as materialized (select :now as now),
marked as materialized (
    select schedule
      from duly.duly_job
     where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
       and finished_at is not null and schedule is not null
),
stopped as (
    update duly.duly_schedule
       set paused_at = (select now from clock), paused_by = 'duly', paused_why = dead_runs || ' dead runs in a row',
           revision = revision + 1
     where paused_at is null and dead_runs >= pause_after and name = any (array(select schedule from marked))
    returning name, paused_why
)
insert into duly.duly_event (at, name, subject, by, why)
select now, 'schedule.paused', stopped.name, 'duly', paused_why
  from stopped, clock;
with marked as materialized (
    select schedule
      from duly.duly_job
     where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
       and finished_at is not null and schedule is not null
),
followers as materialized (
    select (select follower.id
              from duly.duly_job as follower
             where follower.schedule = ended.schedule and follower.state = 'waiting'
               and follower.reason = 'queued: an earlier run of its schedule has not ended'
             order by follower.created_at, follower.id
             limit 1
               for update skip locked) as id
      from (select distinct schedule from marked) as ended
     where not exists (
           select 1
             from duly.duly_job as other
            where other.schedule = ended.schedule and other.finished_at is null
              and (other.state <> 'waiting'
                   or other.reason is distinct from 'queued: an earlier run of its schedule has not ended'))
)
update duly.duly_job
   set state = 'ready', due_at = :now, reason = null
 where id = any (array(select id from followers)) and state = 'waiting';

-- name: ended_event
insert into duly.duly_event (at, name, job_id, subject, by, why)
select finished_at, 'job.' || state, id, task, :by::text, coalesce(:why::text, reason)
  from duly.duly_job
 where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
   and finished_at is not null and state <> 'succeeded';

-- name: ended_done
insert into duly.duly_done (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, attempt, max_attempts,
    crashes, created_at, due_at, expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at,
    reason, error, result, result_until, finished_at, keep_ms, result_ttl_ms, prune_at, batch_id, schedule, on_dead,
    origin, replay_of, replay_count, lane, seq, ordering_dead)
select id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, attempt,
       max_attempts, crashes, created_at, due_at, expires_at, lease_ms, last_token, worker, progress, progress_message,
       cancel_requested_at, reason, error, result,
       case when result is not null
            then greatest(finished_at + result_ttl_ms, coalesce(key_until, finished_at + key_ttl_ms)) end,
       finished_at, keep_ms, result_ttl_ms,
       case when state = 'dead' then null
            when result is null then finished_at + keep_ms
            else least(greatest(finished_at + result_ttl_ms, coalesce(key_until, finished_at + key_ttl_ms)),
                       finished_at + keep_ms) end,
       batch_id, schedule, on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead
  from duly.duly_job
 where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
   and finished_at is not null and (keep_ms > 0 or state <> 'succeeded');

-- name: ended_delete
-- A success with `keep=0` leaves no rows.
delete from duly.duly_attempt
 where job_id = any (array(
       select id from duly.duly_job
        where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
          and state = 'succeeded' and keep_ms = 0));
delete from duly.duly_step
 where job_id = any (array(
       select id from duly.duly_job
        where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
          and state = 'succeeded' and keep_ms = 0));
delete from duly.duly_job
 where id = any (array(select ended::uuid from json_array_elements_text(:ids::json) as ended))
   and finished_at is not null;
