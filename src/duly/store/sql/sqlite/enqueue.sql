-- Enqueue on SQLite and D1: adds jobs to `duly_job`, plain, under a key, or from a handler.
--
-- In all files a section is one statement, or a list of statements that commits as one. Batches travel as one JSON
-- text. `:now` is the database's own clock unless the caller binds a time. SQLite has one writer, so no other write
-- comes between the statements of a list. If PostgreSQL needs a lock or a guard for this, its file gives the reason.

-- name: enqueue
-- again: on conflict (id) do nothing
-- Jobs are sent as {[lane, envelope]: {id: payload}}, so that few values are read from JSON row by row. A repetition
-- changes nothing while the job is live; if it may have ended, `undo_finished` follows. A handler that lost its lease
-- (`hold_parent`) adds nothing. Neither does an insert into a batch that is sealed, or that has more jobs than
-- `:filling`.
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
 where {parent_held}
   and (:filling is null
        or exists (
           select 1 from duly_batch
            where id = :batch_id and sealed_at is null and (:filling < 0 or filled = :filling)));

-- name: enqueue_one
-- The same for one job that neither a handler nor a batch adds: without a list and without checks.
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, expires_at,
    lease_ms, keep_ms, result_ttl_ms, schedule, on_dead, lane)
values (
    :id, :task, :queue, :priority, case when coalesce(:due_at, :now + :delay_ms) <= :now then 'ready' else 'scheduled' end,
    :payload, :envelope, :max_attempts, :now, coalesce(:due_at, :now + :delay_ms),
    coalesce(:expires_at, :now + :expires_ms), :lease_ms, :keep_ms, :result_ttl_ms, :schedule, :on_dead, :lane);

-- name: hold_parent
-- A handler can enqueue only while it holds its job. Returns a row if it does.
select 1 as held
  from duly_job
 where id = :parent_id and token = :parent_token and state = 'running';

-- name: reserve_keys
-- No check before the insert: the insert that gets the row of (task, key) has the key, all others read its holder.
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
-- After a lost answer the job may have run: a job that is in duly_done is deleted from duly_job.
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
