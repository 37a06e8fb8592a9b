-- Debounce on PostgreSQL: the last of several calls under a key runs, once no further call comes.

-- name: lock_debounced
-- For a debounce, which changes a job and its key. An ending locks the job, then its key, so this statement first locks
-- the job that holds the key, and the job of the calling handler. Returns nothing.
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
-- A key that is free, or kept by a success, is taken: a debounced call never returns an old result. Differs from
-- SQLite: this also locks a key that is held, so that its job stays the same.
insert into duly.duly_key (task, key, job_id, state, fingerprint, debounced_by)
select :task::text, :key::text, :id::uuid, 'live', :job::json ->> 'fingerprint', :id::uuid
 where not exists (select 1 from duly.duly_done where id = :id::uuid)
   and {parent_held}
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint,
       debounced_by = excluded.debounced_by, result = null, result_dropped = false, expires_at = null
 where duly_key.state = 'succeeded' and duly_key.job_id <> excluded.job_id
   and duly_key.debounced_by is distinct from excluded.debounced_by;

-- name: debounce
-- The first call adds the job. Until it starts, each call replaces its payload and terms and delays it again. A job
-- that has started is not changed: the call is stored in `next`, and `ended_next` adds it. A job that was given back
-- counts as started, because its steps belong to its payload. The key names the last call, so a repetition changes
-- nothing. Differs from SQLite: another job than the locked one may hold the key now. Waiting for it could deadlock, so
-- nothing is changed and the operation is repeated. An insert of an existing key would wait too.
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
       and {parent_held}
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
       and {parent_held}
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
-- The job that has the arguments of this call, if one has.
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
