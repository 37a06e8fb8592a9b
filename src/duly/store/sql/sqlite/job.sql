-- The life of a job on SQLite and D1, from enqueue to the moment it ends; `ended.sql` has what follows.
--
-- A section is one statement or a list that runs and commits as one. Batches travel as one JSON text.
-- `:now` is the database's own clock unless a caller binds a moment. SQLite has one writer, so nothing
-- changes between the statements of a list; where PostgreSQL needs a lock or a guard for that, its file says so.

-- name: enqueue
-- again: on conflict (id) do nothing
-- They come as {[lane, envelope]: {id: payload}}, so that little has to be taken out of JSON row by row.
-- Asked again while the job is live, it changes nothing; `undo_finished` follows where it may have ended since. A handler
-- that lost its lease (`hold_parent`) adds nothing either, and nothing is added to a batch that takes no more, or whose
-- key says that it was filled further (`:filling`) by now.
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, expires_at,
    lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, lane, ordering_dead)
select one.key, :task, :queue, :priority,
       case when coalesce(:due_at, :now + :delay_ms) <= :now then 'ready' else 'scheduled' end,
       one.value, kind.key ->> 1, :max_attempts, :now, coalesce(:due_at, :now + :delay_ms),
       coalesce(:expires_at, :now + :expires_ms), :lease_ms, :keep_ms, :result_ttl_ms, :batch_id, :schedule, :on_dead,
       kind.key ->> 0, :ordering_dead
  from json_each(:payloads) as kind
 cross join json_each(kind.value) as one
 where (:parent_token is null
        or exists (select 1 from duly_job where id = :parent_id and token = :parent_token and state = 'running'))
   and (:filling is null
        or exists (
           select 1 from duly_batch
            where id = :batch_id and sealed_at is null and (:filling < 0 or filled = :filling)));

-- name: enqueue_one
-- The same for one job which neither a handler nor a batch adds: there is no list to read and nothing to look at first.
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, expires_at,
    lease_ms, keep_ms, result_ttl_ms, schedule, on_dead, lane)
values (
    :id, :task, :queue, :priority, case when coalesce(:due_at, :now + :delay_ms) <= :now then 'ready' else 'scheduled' end,
    :payload, :envelope, :max_attempts, :now, coalesce(:due_at, :now + :delay_ms),
    coalesce(:expires_at, :now + :expires_ms), :lease_ms, :keep_ms, :result_ttl_ms, :schedule, :on_dead, :lane);

-- name: hold_parent
-- A handler enqueues while it holds its own job, or not at all. Answers a row if it does.
select 1 as held
  from duly_job
 where id = :parent_id and token = :parent_token and state = 'running';

-- name: lock_jobs
-- Only PostgreSQL has something to lock.
select value as id
  from json_each(:ids)
 where false;

-- name: reserve_keys
-- Never check-then-run: whoever gets the row of (task, key) has the key, everybody else reads who has it.
insert into duly_key (task, key, job_id, state, fingerprint)
select :task, value ->> 'key', value ->> 'id', 'live', value ->> 'fingerprint'
  from json_each(:jobs)
 where :parent_token is null
    or exists (select 1 from duly_job where id = :parent_id and token = :parent_token and state = 'running')
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint,
       result = null, result_dropped = 0, expires_at = null
 where duly_key.expires_at <= :now;

-- name: enqueue_keyed
-- again: on conflict (id) do nothing
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, max_attempts,
    created_at, due_at, expires_at, lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, lane, ordering_dead)
select value ->> 'id', :task, :queue, :priority,
       case when coalesce(:due_at, :now + :delay_ms) <= :now then 'ready' else 'scheduled' end,
       value ->> 'payload', value ->> 'envelope', value ->> 'key', value ->> 'fingerprint', :key_ttl_ms,
       :now + :key_window_ms, :max_attempts, :now, coalesce(:due_at, :now + :delay_ms), coalesce(:expires_at, :now + :expires_ms),
       :lease_ms, :keep_ms, :result_ttl_ms, :batch_id, :schedule, :on_dead, value ->> 'lane', :ordering_dead
  from json_each(:jobs)
 where exists (
       select 1 from duly_key
        where task = :task and key = value ->> 'key' and job_id = value ->> 'id' and state = 'live')
   and (:filling is null
        or exists (
           select 1 from duly_batch
            where id = :batch_id and sealed_at is null and (:filling < 0 or filled = :filling)));

-- name: undo_finished
-- After a lost answer the job may have run already: what duly_done has is taken back out.
delete from duly_key
 where (task, key, job_id) in (
       select task, duly_done.key, duly_done.id
         from json_each(:ids)
        cross join duly_done on duly_done.id = value
        where duly_done.key is not null)
   and state = 'live';
delete from duly_job
 where id in (select duly_done.id from json_each(:ids) join duly_done on duly_done.id = value);

-- name: key_holders
select value ->> 'id' as asked, coalesce(duly_key.job_id, value ->> 'id') as holder,
       duly_key.fingerprint is not null and duly_key.fingerprint <> value ->> 'fingerprint' as other_payload,
       coalesce(duly_key.state, 'live') as state, duly_key.result, coalesce(duly_key.result_dropped, 0) as result_dropped
  from json_each(:jobs)
  left join duly_key on duly_key.task = :task and duly_key.key = value ->> 'key'
 order by json_each.key;

-- name: lock_debounced
-- Only PostgreSQL has something to lock.
select job_id as id
  from duly_key
 where task = :task and key = :key and job_id = :parent_id and false;

-- name: take_key
-- A key that nobody holds, or that a success keeps, is taken over: what is debounced is never answered with an old
-- result.
insert into duly_key (task, key, job_id, state, fingerprint, debounced_by)
select :task, :key, :id, 'live', :job ->> 'fingerprint', :id
 where not exists (select 1 from duly_done where id = :id)
   and (:parent_token is null
        or exists (select 1 from duly_job where id = :parent_id and token = :parent_token and state = 'running'))
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint,
       debounced_by = excluded.debounced_by, result = null, result_dropped = 0, expires_at = null
 where duly_key.state = 'succeeded' and duly_key.job_id <> excluded.job_id
   and duly_key.debounced_by is not excluded.debounced_by;

-- name: debounce
-- The first call adds the job. While it has not begun, a call puts its own payload and terms into it and puts it off
-- again. One that has begun is left as it is: what is to run next is written beside it, and `ended_next` adds it. What
-- was in a worker's hands has begun, even if it was given back: its steps are those of its payload. A call that did one
-- of these is named by the key, and asked again it does nothing.
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, max_attempts, created_at, due_at,
    expires_at, lease_ms, keep_ms, result_ttl_ms, on_dead, lane)
select :id, :task, :job ->> 'queue', :job ->> 'priority', 'scheduled', :job ->> 'payload', :job ->> 'envelope', :key,
       :job ->> 'fingerprint', :job ->> 'key_ttl_ms', :job ->> 'max_attempts', :now, :now + :debounce_ms,
       coalesce(:expires_at, :now + :expires_ms), :job ->> 'lease_ms', :job ->> 'keep_ms', :job ->> 'result_ttl_ms',
       :job ->> 'on_dead', :job ->> 'lane'
 where exists (select 1 from duly_key where task = :task and key = :key and job_id = :id and state = 'live')
    on conflict (id) do nothing;
update duly_job
   set state = 'scheduled', queue = :job ->> 'queue', priority = :job ->> 'priority', payload = :job ->> 'payload',
       envelope = :job ->> 'envelope', fingerprint = :job ->> 'fingerprint', key_ttl_ms = :job ->> 'key_ttl_ms',
       max_attempts = :job ->> 'max_attempts', due_at = :now + :debounce_ms,
       expires_at = coalesce(:expires_at, :now + :expires_ms), lease_ms = :job ->> 'lease_ms',
       keep_ms = :job ->> 'keep_ms', result_ttl_ms = :job ->> 'result_ttl_ms', on_dead = :job ->> 'on_dead',
       lane = :job ->> 'lane', reason = null, parked_version = null
 where id = (
       select job_id from duly_key
        where task = :task and key = :key and state = 'live' and job_id <> :id and debounced_by is not :id)
   and state <> 'running' and attempt = 0 and last_token is null and replay_of is null
   and not exists (select 1 from duly_done where id = :id)
   and (:parent_token is null
        or exists (select 1 from duly_job where id = :parent_id and token = :parent_token and state = 'running'));
update duly_job
   set next = json_set(:job, '$.id', coalesce(next ->> 'id', :id), '$.by', :id, '$.created_at', :now,
                       '$.due_at', cast(:now + :debounce_ms as integer),
                       '$.expires_at', cast(coalesce(:expires_at, :now + :expires_ms) as integer))
 where id = (
       select job_id from duly_key
        where task = :task and key = :key and state = 'live' and job_id <> :id and debounced_by is not :id)
   and (state = 'running' or attempt > 0 or last_token is not null or replay_of is not null)
   and (next is null or next ->> 'id' <> :id)
   and not exists (select 1 from duly_done where id = :id)
   and (:parent_token is null
        or exists (select 1 from duly_job where id = :parent_id and token = :parent_token and state = 'running'));
update duly_key
   set debounced_by = :id,
       fingerprint = (select fingerprint from duly_job where duly_job.id = job_id)
 where task = :task and key = :key and state = 'live' and job_id <> :id and debounced_by is not :id
   and exists (
       select 1 from duly_job
        where duly_job.id = duly_key.job_id
          and (next ->> 'by' = :id
               or state <> 'running' and attempt = 0 and last_token is null and replay_of is null))
   and not exists (select 1 from duly_done where id = :id)
   and (:parent_token is null
        or exists (select 1 from duly_job where id = :parent_id and token = :parent_token and state = 'running'));

-- name: debounced
-- Which job has what this call gave, if it came to give it.
select holder, coalesce(holder = next_id, 0) as is_behind
  from (select next ->> 'id' as next_id,
               case when duly_key.job_id is null or duly_key.job_id = :id or next ->> 'id' = :id
                      or exists (select 1 from duly_done where id = :id) then :id
                    when debounced_by = :id then coalesce(next ->> 'id', duly_key.job_id) end as holder
          from (select 1) as asked
          left join duly_key on duly_key.key = :key and duly_key.task = :task
          left join duly_job on duly_job.id = duly_key.job_id);

-- name: await_claim
-- Only PostgreSQL has something to wait for.
select :token as waited
 where false;

-- name: claim
-- Ready rows in their order, then due scheduled ones, so that nothing has to be promoted first (no scheduled one is
-- a suspect). A token that holds jobs already is being asked about again: it takes no more. Differs from PostgreSQL: each
-- comes as one value, as the driver takes longer to fetch a value than SQLite to find it.
with asked as materialized (
    select case when exists (select 1 from duly_job where token = :token) then 0 else :limit end as room
     where not exists (
           select 1 from duly_queue
            where kind = 'queue' and name = :queue and paused_at is not null
              and (paused_until is null or paused_until > :now))
),
ready as materialized (
    select id
      from duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = :alone
       and (:tasks is null or task in (select value from json_each(:tasks)))
       and task not in (
           select name from duly_queue
            where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by priority desc, due_at, id
     limit coalesce((select room from asked), 0)
),
due as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and not :alone and due_at <= :now
       and (:tasks is null or task in (select value from json_each(:tasks)))
       and task not in (
           select name from duly_queue
            where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by due_at, id
     limit coalesce((select room from asked), 0) - (select count(*) from ready)
)
update duly_job
   set state = 'running', attempt = attempt + 1, token = :token, worker = :worker,
       lease_until = :now + lease_ms, heartbeat_at = null, progress = null, progress_message = null, reason = null
 where id in (select id from ready union all select id from due);
select json_array(
       id, token, task, queue, priority, payload, key, attempt, max_attempts, crashes, suspect, lease_ms, lease_until,
       due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane,
       envelope) as job
  from duly_job
 where token = :token;

-- name: claim_marked
-- Differs from PostgreSQL: nothing that is gone is walked over, so whatever the parts are, the whole order is.
with free as materialized (
    select :limit as room
     where :parts is not null and not exists (select 1 from duly_job where token = :token) and not exists (
           select 1 from duly_queue
            where kind = 'queue' and name = :queue and paused_at is not null
              and (paused_until > :now or paused_until is null))
),
ready as materialized (
    select id
      from duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = 0
       and (:tasks is null or task in (select value from json_each(:tasks)))
       and task not in (
           select name from duly_queue
            where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by priority desc, due_at, id
     limit coalesce((select room from free), 0)
),
due as materialized (
    select id
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= :now
       and (:tasks is null or task in (select value from json_each(:tasks)))
       and task not in (
           select name from duly_queue
            where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
       and (expires_at is null or expires_at > :now or attempt > 0)
     order by due_at, id
     limit coalesce((select room from free), 0) - (select count(*) from ready)
)
update duly_job
   set state = 'running', attempt = attempt + 1, token = :token, worker = :worker,
       lease_until = :now + lease_ms, reason = null, heartbeat_at = null, progress = null, progress_message = null
 where id in (select id from ready union all select id from due);
select json_array(
       id, token, task, queue, priority, payload, key, attempt, max_attempts, crashes, suspect, lease_ms, lease_until,
       due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane,
       envelope) as job
  from duly_job
 where token = :token;

-- name: recall
select json_array(
       id, token, task, queue, priority, payload, key, attempt, max_attempts, crashes, suspect, lease_ms, lease_until,
       due_at, created_at, keep_ms, batch_id, schedule, replay_count, cancel_requested_at, origin, lane,
       envelope) as job
  from duly_job
 where token = :token
 order by priority desc, due_at, id;

-- name: head
-- Differs from PostgreSQL: nothing that is gone is walked over, so no way is long.
select priority, due_at, id, null as took_ms
  from duly_job
 where state = 'ready' and lane is null and queue = :queue and suspect = 0
   and (:tasks is null or task in (select value from json_each(:tasks)))
   and task not in (
       select name from duly_queue
        where kind = 'task' and paused_at is not null and (paused_until is null or paused_until > :now))
   and (expires_at is null or expires_at > :now or attempt > 0)
 order by priority desc, due_at, id
 limit 1;

-- name: extend
-- The token alone decides: a worker that comes back late still holds what nobody has taken.
update duly_job
   set lease_until = :now + lease_ms
  from (select value ->> 'id' as id, value ->> 'token' as token from json_each(:held)) as held
 where duly_job.id = held.id and duly_job.token = held.token and duly_job.state = 'running'
returning id, cancel_requested_at;

-- name: progress
update duly_job
   set progress = :progress, progress_message = :message
 where id = :id and token = :token and state = 'running'
returning id;

-- name: heartbeat
update duly_job
   set heartbeat_at = :now
 where id = :id and token = :token and state = 'running'
returning id;

-- name: plain_held
-- How many plain ends there are to write. For a caller's own connection, which may tell of something else when it is
-- asked what was written last. A transaction that begins with a read cannot write any more once somebody else has, so
-- it begins with a write, of nothing.
delete from duly_job where false;
select count(*) as recorded
  from json_each(:plain) as held
 cross join json_each(held.value) as one
 cross join duly_job on duly_job.id = one.key
 where token = cast(held.key as integer) and state = 'running'
   and duly_job.key is null and batch_id is null and schedule is null;

-- name: keyed_held
-- The same for those that have a key.
delete from duly_job where false;
select count(*) as recorded
  from json_each(:keyed) as held
 cross join json_each(held.value) as one
 cross join duly_job on duly_job.id = one.key
 where token = cast(held.key as integer) and state = 'running' and keep_ms > 0
   and duly_job.key is not null and batch_id is null and schedule is null and next is null;

-- name: finish_plain
-- The short way out for a success without key, batch or schedule, which is most of them. They come as
-- {token: {id: result}}, so that nothing has to be taken out of JSON row by row. All that takes a short way is only
-- counted, by the section before or after it: to name each would take as long as to write it.
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
  from json_each(:plain) as held
 cross join json_each(held.value) as one
 cross join duly_job on duly_job.id = one.key
 where token = cast(held.key as integer) and state = 'running' and keep_ms > 0
   and duly_job.key is null and batch_id is null and schedule is null;
delete from duly_job
 where id in (
       select duly_job.id
         from json_each(:plain) as held
        cross join json_each(held.value) as one
        cross join duly_job on duly_job.id = one.key
        where token = cast(held.key as integer) and state = 'running'
          and duly_job.key is null and batch_id is null and schedule is null);

-- name: finish_gone
-- The same for a turn of jobs that all leave nothing behind.
delete from duly_job
 where id in (
       select duly_job.id
         from json_each(:plain) as held
        cross join json_each(held.value) as one
        cross join duly_job on duly_job.id = one.key
        where token = cast(held.key as integer) and state = 'running' and keep_ms = 0
          and duly_job.key is null and batch_id is null and schedule is null);

-- name: ends_written
-- How many ends the statement before this one has taken out.
select changes() as recorded;

-- name: finish_keyed
-- The short way out for a success with a key, which it keeps for its time. What is to run next under the key takes the
-- long way.
with mine as materialized (
    select duly_job.id as job_id, task as job_task, duly_job.key as job_key,
           coalesce(key_until, :now + key_ttl_ms) as until, one.value as job_result
      from json_each(:keyed) as held
     cross join json_each(held.value) as one
     cross join duly_job on duly_job.id = one.key
     where token = cast(held.key as integer) and state = 'running' and keep_ms > 0
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
  from json_each(:keyed) as held
 cross join json_each(held.value) as one
 cross join duly_job on duly_job.id = one.key
 where token = cast(held.key as integer) and state = 'running' and keep_ms > 0
   and duly_job.key is not null and batch_id is null and schedule is null and next is null;
delete from duly_job
 where id in (
       select duly_job.id
         from json_each(:keyed) as held
        cross join json_each(held.value) as one
        cross join duly_job on duly_job.id = one.key
        where token = cast(held.key as integer) and state = 'running' and keep_ms > 0
          and duly_job.key is not null and batch_id is null and schedule is null and next is null);

-- name: finish_batched
-- The short way out for a success of a batch: it is counted, then gone. `ended_callbacks` follows.
update duly_batch
   set open = open - n, succeeded = succeeded + n
  from (select batch_id, count(*) as n
          from json_each(:batched) as held
         cross join json_each(held.value) as one
         cross join duly_job on duly_job.id = one.key
         where token = cast(held.key as integer) and state = 'running'
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
  from json_each(:batched) as held
 cross join json_each(held.value) as one
 cross join duly_job on duly_job.id = one.key
 where token = cast(held.key as integer) and state = 'running' and keep_ms > 0
   and duly_job.key is null and batch_id is not null and schedule is null;
delete from duly_job
 where id in (
       select duly_job.id
         from json_each(:batched) as held
        cross join json_each(held.value) as one
        cross join duly_job on duly_job.id = one.key
        where token = cast(held.key as integer) and state = 'running'
          and duly_job.key is null and batch_id is not null and schedule is null);

-- name: finish
-- A worker that lost its lease matches no row here, and so changes nothing. A job that somebody asked to
-- cancel does not come back for another attempt.
update duly_job
   set state = case when cancel_requested_at is not null and ending = 0 then 'cancelled' else new_state end,
       finished_at = case when cancel_requested_at is not null or ending = 1 then :now end,
       due_at = case when new_state = 'ready' or ending = 1 or new_parked is not null then due_at
                     else :now + after_ms end,
       -- It has started, and a snooze gives its attempt back: from here on nothing is left to expire. What is
       -- parked has not started.
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
-- The attempt is named: a token that has given its attempt back before has none that could fail.
insert into duly_attempt (job_id, attempt, at, worker, outcome, error, traceback)
select duly_job.id, attempt, :now, worker, case when value ->> 'crashed' then 'crashed' else 'failed' end,
       value ->> 'error', value ->> 'traceback'
  from json_each(:changes)
 cross join duly_job on duly_job.id = value ->> 'id'
 where last_token = value ->> 'token' and attempt = value ->> 'attempt' and duly_job.state <> 'running'
   and value ->> 'error' is not null
    on conflict (job_id, attempt) do nothing;

-- name: settle
-- What became of writes that changed nothing: done before, done and gone, or lost to another worker.
select value ->> 'id' as id,
       case when exists (select 1 from duly_job where id = value ->> 'id' and last_token = value ->> 'token')
              or exists (select 1 from duly_done where id = value ->> 'id' and token = value ->> 'token') then 'already'
            when not exists (select 1 from duly_job where id = value ->> 'id')
             and not exists (select 1 from duly_done where id = value ->> 'id') then 'gone'
            else 'lost' end as verdict
  from json_each(:held);

-- name: expired_leases
-- A lease that ends further ahead than two beats past a whole one was written before the clock stepped back.
select id, token, lease_until, lease_ms, worker
  from duly_job
 where token is not null
   and (lease_until <= :now or lease_until > :now + lease_ms + 2 * (lease_ms / 3))
 order by lease_until
 limit :limit;

-- name: rescue
-- Only rows still running, still that token, still the lease end that was seen, still expired. A crash counts only
-- while the job ran alone, so that no neighbour dies of it, and in the worker itself: the death of a child is seen by its
-- worker. The token is kept negated: asked again, the rescue knows its own, and the worker that comes back is told that
-- it lost.
update duly_job
   set state = case when cancel_requested_at is not null then 'cancelled'
                    when crashes + crashed >= 3 or attempt >= max_attempts then 'dead'
                    else 'ready' end,
       finished_at = case when cancel_requested_at is not null or crashes + crashed >= 3 or attempt >= max_attempts
                          then :now end,
       reason = case when cancel_requested_at is not null then 'cancelled on request'
                     when crashes + crashed >= 3 then 'killed its worker'
                     when attempt >= max_attempts then 'worker lost on the last attempt' end,
       error = 'worker ' || worker || ' stopped beating',
       crashes = crashes + crashed, suspect = 1, token = null, lease_until = null, last_token = -token
  from (select value ->> 'id' as seen_id, value ->> 'token' as seen_token, value ->> 'lease_until' as seen_until,
               suspect and worker not like '%/child' as crashed
          from json_each(:seen)
         cross join duly_job on duly_job.id = value ->> 'id') as seen
 where duly_job.id = seen_id and state = 'running' and token = seen_token and lease_until = seen_until
   and (lease_until <= :now or lease_until > :now + lease_ms + 2 * (lease_ms / 3))
returning id, state;

-- name: crashed_attempts
insert into duly_attempt (job_id, attempt, at, worker, outcome, error)
select duly_job.id, attempt, :now, worker, 'crashed', error
  from json_each(:seen)
 cross join duly_job on duly_job.id = value ->> 'id'
 where last_token = -(value ->> 'token') and state <> 'running'
    on conflict (job_id, attempt) do nothing;

-- name: rescued
-- Asked after a lost answer: which of these leases are taken, and what their jobs came to.
select duly_job.id, state
  from json_each(:seen)
 cross join duly_job on duly_job.id = value ->> 'id'
 where last_token = -(value ->> 'token')
 union all
select duly_done.id, state
  from json_each(:seen)
 cross join duly_done on duly_done.id = value ->> 'id'
 where token = -(value ->> 'token');

-- name: promote
-- Without `:retries`, those stay scheduled: in a queue where they have a budget, a claim takes them from there.
update duly_job
   set state = 'ready'
 where id in (
       select id from duly_job
        where state = 'scheduled' and lane is null and queue = :queue and due_at <= :now
          and (:retries or attempt = 0)
        order by due_at, id
        limit :limit)
returning id;
update duly_job
   set state = 'ready'
 where id in (
       select id from duly_job
        where state = 'scheduled' and lane is not null and queue = :queue and due_at <= :now
        order by due_at, id
        limit :limit)
returning id;
update duly_job
   set state = 'ready', reason = 'timed out'
 where id in (
       select id from duly_job
        where state = 'waiting' and parked_version is null and queue = :queue and due_at <= :now
        order by due_at
        limit :limit)
returning id;

-- name: park
-- Of the head of the queue, what no worker that serves it knows. The rest is not looked at, so that this costs the same
-- however long the queue is. Where nobody serves the queue, there is nobody to spare. Of lanes, the tasks are looked at
-- one after the other.
with recursive known as materialized (
    select tasks
      from duly_worker
     where seen_at > :now - 3 * beat_ms and exists (select 1 from json_each(queues) where value = :queue)
),
ready as materialized (
    select id, task
      from duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = 0
     order by priority desc, due_at, id
     limit :limit
),
suspects as materialized (
    select id, task
      from duly_job
     where state = 'ready' and lane is null and queue = :queue and suspect = 1
     order by priority desc, due_at, id
     limit :limit
),
due as materialized (
    select id, task
      from duly_job
     where state = 'scheduled' and lane is null and queue = :queue and due_at <= :now
     order by due_at, id
     limit :limit
),
laned (is_suspect, lane_task) as (
    select is_suspect, ''
      from (select 0 as is_suspect union all select 1)
     union all
    select is_suspect,
           (select task from duly_job
             where state = 'ready' and lane is not null and queue = :queue and suspect = is_suspect and task > lane_task
             order by task limit 1)
      from laned
     where lane_task is not null
),
in_lanes as materialized (
    select id, task
      from laned
     cross join duly_job
        on state = 'ready' and lane is not null and queue = :queue and suspect = is_suspect and task = lane_task
     where lane_task not in (select value from known cross join json_each(tasks))
     limit :limit
)
update duly_job
   set state = 'waiting', reason = :reason, parked_version = coalesce(envelope ->> 'schema_version', 1)
 where exists (select 1 from known)
   and id in (
       select id
         from (select id, task from ready
                union all
               select id, task from suspects
                union all
               select id, task from due
                union all
               select id, task from in_lanes)
        where task not in (select value from known cross join json_each(tasks)))
returning id;

-- name: wake
-- It keeps the due time it was parked with, and so its place.
update duly_job
   set state = 'ready', reason = null, parked_version = null
 where id in (
       select duly_job.id
         from json_each(:versions) as knows
        cross join json_each(:queues) as serves
        cross join duly_job
           on duly_job.queue = serves.value and duly_job.task = knows.key and parked_version <= knows.value
        where state = 'waiting'
        limit :limit)
returning id;

-- name: next_due
-- What is overdue is not waited for: who could have claimed it would have. It may have become due a moment ago, though.
select min(due_at) - :now as due_in_ms
  from (select min(due_at) as due_at
          from duly_job
         where state = 'scheduled' and lane is null and queue = :queue and due_at > :now - 50
         union all
        select min(due_at)
          from duly_job
         where state = 'scheduled' and lane is not null and queue = :queue and due_at > :now - 50);

-- name: cancel
-- A job that runs is only asked, so that no effect is forgotten.
insert into duly_event (at, name, job_id, subject, by, why)
select :now, 'job.cancel_requested', duly_job.id, task, :by, :why
  from json_each(:ids)
 cross join duly_job on duly_job.id = value
 where state = 'running' and cancel_requested_at is null;
update duly_job
   set cancel_requested_at = coalesce(cancel_requested_at, :now),
       finished_at = case when state <> 'running' then :now end,
       reason = case when state <> 'running' then coalesce(:why, 'cancelled') else reason end,
       state = case when state <> 'running' then 'cancelled' else state end
 where id in (select value from json_each(:ids)) and finished_at is null
returning id, state;

-- name: cancelled
-- Asked after a lost answer.
select id, state
  from duly_done
 where id in (select value from json_each(:ids)) and state = 'cancelled';

-- name: retry
insert into duly_event (at, name, job_id, subject, by, why, data)
select :now, 'job.retried', duly_job.id, task, :by, :why, json_object('from', state)
  from json_each(:ids)
 cross join duly_job on duly_job.id = value
 where state in ('scheduled', 'waiting');
update duly_job
   set state = 'ready', due_at = :now, reason = null, parked_version = null
 where id in (select value from json_each(:ids)) and state in ('scheduled', 'waiting')
returning id, state;

-- name: retried
-- Asked after a lost answer: the log says what was made due, which may have run since.
select distinct job_id as id, 'ready' as state
  from duly_event
 where name = 'job.retried' and job_id in (select value from json_each(:ids)) and by is :by and why is :why;

-- name: expirable
select id
  from duly_job
 where expires_at <= :now and attempt = 0 and state in ('scheduled', 'ready', 'waiting')
 order by expires_at
 limit :limit;

-- name: expire
update duly_job
   set state = 'cancelled', finished_at = :now, reason = 'expired'
 where id in (select value from json_each(:ids))
   and expires_at <= :now and attempt = 0 and state in ('scheduled', 'ready', 'waiting')
returning id;
