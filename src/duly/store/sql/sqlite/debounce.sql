-- Debounce on SQLite and D1: the last of several calls under a key runs, once no further call comes.

-- name: take_key
-- A key that is free, or kept by a success, is taken: a debounced call never returns an old result.
insert into duly_key (task, key, job_id, state, fingerprint, debounced_by)
select :task, :key, :id, 'live', :job ->> 'fingerprint', :id
 where not exists (select 1 from duly_done where id = :id)
   and {parent_held}
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint,
       debounced_by = excluded.debounced_by, result = null, result_dropped = 0, expires_at = null
 where duly_key.state = 'succeeded' and duly_key.job_id <> excluded.job_id
   and duly_key.debounced_by is not excluded.debounced_by;

-- name: debounce
-- The first call adds the job. Until it starts, each call replaces its payload and terms and delays it again. A job
-- that has started is not changed: the call is stored in `next`, and `ended_next` adds it. A job that was given back
-- counts as started, because its steps belong to its payload. The key names the last call, so a repetition changes
-- nothing.
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
   and {parent_held};
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
   and {parent_held};
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
   and {parent_held};

-- name: debounced
-- The job that has the arguments of this call, if one has.
select holder, coalesce(holder = next_id, 0) as is_behind
  from (select next ->> 'id' as next_id,
               case when duly_key.job_id is null or duly_key.job_id = :id or next ->> 'id' = :id
                      or exists (select 1 from duly_done where id = :id) then :id
                    when debounced_by = :id then coalesce(next ->> 'id', duly_key.job_id) end as holder
          from (select 1) as asked
          left join duly_key on duly_key.key = :key and duly_key.task = :task
          left join duly_job on duly_job.id = duly_key.job_id);
