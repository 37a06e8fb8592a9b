-- The tail of every ending: finish, rescue, cancel and expire mark rows as ended, then run all of these sections in
-- this order. `:ids` names the jobs; only marked rows are changed. No section may be left out.

-- name: ended_key
-- A success keeps the key for its time, so that the work is not repeated. A dead or cancelled job frees it. If another
-- call is to run next, `ended_next` passes the key on. Materialized, so that each job looks up its key; otherwise each
-- key is compared with all jobs.
with ended as materialized (
    select duly_job.id, task as ended_task, duly_job.key as ended_key,
           coalesce(key_until, finished_at + key_ttl_ms) as until, result as ended_result
      {jobs_by_id}
     where state in ('succeeded', 'partial') and duly_job.key is not null and next is null
)
update duly_key
   set state = 'succeeded', expires_at = until,
       result = case when length(cast(ended_result as blob)) <= 65536 then ended_result end,
       result_dropped = coalesce(length(cast(ended_result as blob)) > 65536, 0)
  from ended
 where task = ended_task and key = ended_key and job_id = ended.id;
delete from duly_key
 where (task, key) in (
       select task, duly_job.key
         {jobs_by_id}
        where state in ('dead', 'cancelled') and duly_job.key is not null and next is null)
   and job_id in (select value from json_each(:ids));

-- name: ended_next
-- A call that was debounced while the job ran is added under its key, whatever the ending.
with following as materialized (
    select duly_job.id as ended_id, task as ended_task, duly_job.key as ended_key, next
      {jobs_by_id}
     where finished_at is not null and next is not null
)
update duly_key
   set job_id = next ->> 'id', state = 'live', fingerprint = next ->> 'fingerprint', result = null, result_dropped = 0,
       expires_at = null
  from following
 where task = ended_task and key = ended_key and job_id = ended_id;
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, max_attempts, created_at, due_at,
    expires_at, lease_ms, keep_ms, result_ttl_ms, on_dead, lane)
select next ->> 'id', duly_job.task, next ->> 'queue', next ->> 'priority',
       case when next ->> 'due_at' <= :now then 'ready' else 'scheduled' end, next ->> 'payload', next ->> 'envelope',
       duly_job.key, next ->> 'fingerprint', next ->> 'key_ttl_ms', next ->> 'max_attempts', next ->> 'created_at',
       max(next ->> 'due_at', :now), next ->> 'expires_at', next ->> 'lease_ms', next ->> 'keep_ms',
       next ->> 'result_ttl_ms', next ->> 'on_dead', next ->> 'lane'
  {jobs_by_id}
  join duly_key on duly_key.task = duly_job.task and duly_key.key = duly_job.key
   and duly_key.job_id = next ->> 'id'
 where finished_at is not null and next is not null;

-- name: ended_batch
update duly_batch
   set open = open - n, succeeded = succeeded + n_succeeded, partial = partial + n_partial, dead = dead + n_dead,
       cancelled = cancelled + n_cancelled
  from (select batch_id, count(*) as n, sum(state = 'succeeded') as n_succeeded, sum(state = 'partial') as n_partial,
               sum(state = 'dead') as n_dead, sum(state = 'cancelled') as n_cancelled
          {jobs_by_id}
         where finished_at is not null and batch_id is not null
         group by batch_id) as ended
 where duly_batch.id = ended.batch_id;

-- name: ended_callbacks
-- The operation that makes a callback due inserts its job, so a crash cannot lose it. `:batches` are batches whose jobs
-- took a short way out, and one that is being sealed. As a binary number, 0.28 of 25 is a little more than 7, and 7 are
-- enough.
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, lease_ms, keep_ms,
    result_ttl_ms, lane)
select spec ->> 'id', spec ->> 'task', spec ->> 'queue', spec ->> 'priority', 'ready', payload, envelope,
       spec ->> 'max_attempts', :now, :now, spec ->> 'lease_ms', spec ->> 'keep_ms', spec ->> 'result_ttl_ms',
       spec ->> 'lane'
  from (select spec, spec ->> 'payload' as payload, spec ->> 'envelope' as envelope
          from (select case which when 1 then on_complete when 2 then on_success else on_first_dead end as spec
                  from duly_batch
                 cross join (select 1 as which union all select 2 union all select 3)
                 where duly_batch.id in (
                       select batch_id {jobs_by_id}
                        where finished_at is not null and batch_id is not null
                        union all
                       select value from json_each(:batches))
                   and case which
                       when 1 then open = 0 and sealed_at is not null and completed_at is null
                       when 2 then open = 0 and sealed_at is not null and completed_at is null and cancelled_at is null
                                   and succeeded + 0.000001 >= ok_at * (succeeded + partial + dead + cancelled)
                       else dead > 0 and first_dead_at is null end)
         union all
        select json_set(on_dead, '$.id', ended_dead_id), json_object('job_id', ended_id),
               json_object('causation_id', ended_id, 'correlation_id', coalesce(envelope ->> 'correlation_id', ended_id))
          from (select on_dead, envelope, duly_job.id as ended_id,
                       -- The database makes this UUIDv7: it is inserted once, with the dead job it reports.
                       lower(printf('%s-%s-7%s-%s%s-%s', substr(moment, 1, 8), substr(moment, 9),
                             substr(hex(randomblob(2)), 2), substr('89ab', 1 + abs(random() % 4), 1),
                             substr(hex(randomblob(2)), 2), hex(randomblob(6))))
                       as ended_dead_id
                  {jobs_by_id}
                 cross join (select printf('%012x', cast(:now as integer)) as moment)
                 where state = 'dead' and on_dead is not null))
 where spec is not null;
update duly_batch
   set completed_at = case when open = 0 and sealed_at is not null then coalesce(completed_at, :now) else completed_at end,
       first_dead_at = case when dead > 0 then coalesce(first_dead_at, :now) else first_dead_at end
 where id in (
       select batch_id {jobs_by_id}
        where finished_at is not null and batch_id is not null
        union all
       select value from json_each(:batches))
   and (open = 0 and sealed_at is not null and completed_at is null or dead > 0 and first_dead_at is null);

-- name: ended_schedule
-- Counts consecutive dead runs, pauses the schedule after too many, sets the next due time if it depends on this end,
-- and starts the run queued behind this one. Schedules that need none of this are not locked.
update duly_schedule
   set dead_runs = case when n_good > 0 then 0 else dead_runs + n_dead end,
       next_at = case when mode = 'delay' and not exists (
                           select 1 from duly_job where schedule = name and duly_job.finished_at is null)
                      then coalesce(next_at, ended_at + interval_ms) else next_at end,
       revision = revision + (mode = 'delay' or overlap <> 'allow')
  from (select schedule, sum(state in ('succeeded', 'partial')) as n_good, sum(state = 'dead') as n_dead,
               max(finished_at) as ended_at
          {jobs_by_id}
         where finished_at is not null and schedule is not null
         group by schedule) as ended
 where name = ended.schedule;
insert into duly_event (at, name, subject, by, why)
select :now, 'schedule.paused', name, 'duly', dead_runs || ' dead runs in a row'
  from duly_schedule
 where paused_at is null and dead_runs >= pause_after
   and name in (
       select schedule {jobs_by_id}
        where finished_at is not null and schedule is not null);
update duly_schedule
   set paused_at = :now, paused_by = 'duly', paused_why = dead_runs || ' dead runs in a row', revision = revision + 1
 where paused_at is null and dead_runs >= pause_after
   and name in (
       select schedule {jobs_by_id}
        where finished_at is not null and schedule is not null);
update duly_job
   set state = 'ready', due_at = :now, reason = null
 where id in (
       select (select follower.id
                 from duly_job as follower
                where follower.schedule = ended.schedule and follower.state = 'waiting'
                  and follower.reason = 'queued: an earlier run of its schedule has not ended'
                order by follower.created_at, follower.id
                limit 1)
         from (select distinct schedule
                 {jobs_by_id}
                where finished_at is not null and schedule is not null) as ended
        where not exists (
              select 1
                from duly_job as other
               where other.schedule = ended.schedule and other.finished_at is null
                 and (other.state <> 'waiting'
                      or other.reason is not 'queued: an earlier run of its schedule has not ended')));

-- name: ended_event
insert into duly_event (at, name, job_id, subject, by, why)
select finished_at, 'job.' || state, duly_job.id, task, :by, coalesce(:why, reason)
  {jobs_by_id}
 where finished_at is not null and state <> 'succeeded';

-- name: ended_done
insert into duly_done (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, attempt, max_attempts,
    crashes, created_at, due_at, expires_at, lease_ms, token, worker, progress, progress_message, cancel_requested_at,
    reason, error, result, result_until, finished_at, keep_ms, result_ttl_ms, prune_at, batch_id, schedule, on_dead,
    origin, replay_of, replay_count, lane, seq, ordering_dead)
select duly_job.id, task, queue, priority, state, payload, envelope, duly_job.key, fingerprint, key_ttl_ms, key_until,
       attempt, max_attempts, crashes, created_at, due_at, expires_at, lease_ms, last_token, worker, progress, progress_message,
       cancel_requested_at, reason, error, result,
       case when result is not null
            then max(finished_at + result_ttl_ms, coalesce(key_until, finished_at + key_ttl_ms, 0)) end,
       finished_at, keep_ms, result_ttl_ms,
       case when state = 'dead' then null
            when result is null then finished_at + keep_ms
            else min(max(finished_at + result_ttl_ms, coalesce(key_until, finished_at + key_ttl_ms, 0)),
                     finished_at + keep_ms) end,
       batch_id, schedule, on_dead, origin, replay_of, replay_count, lane, seq, ordering_dead
  {jobs_by_id}
 where finished_at is not null and (keep_ms > 0 or state <> 'succeeded');

-- name: ended_delete
-- A success with `keep=0` leaves no rows.
delete from duly_attempt
 where job_id in (
       select duly_job.id {jobs_by_id}
        where state = 'succeeded' and keep_ms = 0);
delete from duly_step
 where job_id in (
       select duly_job.id {jobs_by_id}
        where state = 'succeeded' and keep_ms = 0);
delete from duly_job
 where id in (select value from json_each(:ids)) and finished_at is not null;
