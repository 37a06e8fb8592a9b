-- Batches on SQLite and D1: a label with counters. `open` counts the jobs that were added and have not ended: adding
-- jobs raises it, every ending lowers it (`ended_batch`), and the last ending adds the callbacks (`ended_callbacks`).

-- name: open_batch
-- A repetition, or a key that exists, returns the existing batch.
insert into duly_batch (id, name, key, created_at, ok_at, on_complete, on_success, on_first_dead)
values (:id, :name, :key, :now, :ok_at, :on_complete, :on_success, :on_first_dead)
    on conflict do nothing;
select id, name, key, filled
  from duly_batch
 where id = :id or key = :key
 limit 1;

-- name: lock_batch
-- Returns how many jobs a batch has, and whether it is sealed. Jobs that a first try added before the seal count. Only
-- PostgreSQL needs a lock.
select id from duly_batch where false;
select filled, sealed_at is not null
       and not exists (select 1 from duly_job where id in (select value from json_each(:ids)))
       and not exists (select 1 from duly_done where id in (select value from json_each(:ids))) as sealed
  from duly_batch
 where id = :batch_id;

-- fragment: parent_held
(:parent_token is null
 or exists (select 1 from duly_job where id = :parent_id and token = :parent_token and state = 'running'))

-- name: count_added
-- Runs before the insert, so that jobs of a first try are not counted again. Counts only jobs that got their keys, and
-- none of a handler that lost its lease.
update duly_batch
   set open = open + (
       select count(*)
         from json_each(:jobs)
        where not exists (select 1 from duly_job where duly_job.id = value ->> 'id')
          and not exists (select 1 from duly_done where duly_done.id = value ->> 'id')
          and (value ->> 'key' is null or exists (
               select 1 from duly_key
                where task = :task and duly_key.key = value ->> 'key' and job_id = value ->> 'id' and state = 'live')))
 where id = :batch_id and sealed_at is null
   and {parent_held};

-- fragment: jobs_by_id
from json_each(:ids) cross join duly_job on duly_job.id = value

-- name: count_filled
-- Runs after the insert: `filled` tells a repetition from the first try, even if success leaves no row.
update duly_batch
   set open = open + (select count(*) {jobs_by_id}),
       filled = filled + json_array_length(:ids)
 where id = :batch_id and sealed_at is null and filled = :filling
   and {parent_held};

-- name: added_before
-- The answers for jobs whose places were filled before. Jobs whose keys were taken were not added.
select value ->> 'id' as asked, coalesce(duly_key.job_id, value ->> 'id') as holder,
       duly_key.fingerprint is not null and duly_key.fingerprint <> value ->> 'fingerprint' as other_payload,
       coalesce(duly_key.state, 'live') as state, duly_key.result, coalesce(duly_key.result_dropped, 0) as result_dropped
  from json_each(:jobs)
  left join duly_key on duly_key.task = :task and duly_key.key = value ->> 'key'
   and not exists (select 1 from duly_job where duly_job.id = value ->> 'id')
   and not exists (select 1 from duly_done where duly_done.id = value ->> 'id')
 order by json_each.key;

-- name: drop_keys
-- If the batch is sealed, the keys that were reserved for its jobs are deleted.
delete from duly_key
 where task = :task and state = 'live'
   and (key, job_id) in (select value ->> 'key', value ->> 'id' from json_each(:jobs))
   and not exists (select 1 from duly_job where duly_job.id = duly_key.job_id);

-- name: seal_batch
update duly_batch
   set sealed_at = :now
 where id = :batch_id and sealed_at is null;

-- name: cancel_batch
-- Seals the batch and marks it cancelled. A complete batch is not changed.
insert into duly_event (at, name, subject, by, why, data)
select :now, 'batch.cancelled', name, :by, :why, json_object('batch_id', id)
  from duly_batch
 where id = :batch_id and completed_at is null and cancelled_at is null;
update duly_batch
   set sealed_at = coalesce(sealed_at, :now), cancelled_at = :now, cancelled_by = :by, cancelled_why = :why
 where id = :batch_id and completed_at is null and cancelled_at is null;

-- name: sealed
select sealed_at is not null as sealed
  from duly_batch
 where id = :batch_id;

-- name: batches
-- Running jobs are found by the index of leases, which is small; a batch may have a million jobs.
with found as materialized (
    select id
      from duly_batch
     where id between :first and :last and (:name is null or name = :name) and (:key is null or key = :key)
       and (:active is null or :active = (completed_at is null or open > 0))
     order by id desc
     limit :limit
),
running as materialized (
    select batch_id, count(*) as n
      from duly_job indexed by duly_job_running
     where token is not null and batch_id in (select id from found)
     group by batch_id
)
select duly_batch.id, name, key, created_at, sealed_at, completed_at, cancelled_at, cancelled_by, cancelled_why,
       first_dead_at, ok_at, open,
       coalesce(running.n, 0) as running, succeeded, partial, dead, cancelled
  from found
 cross join duly_batch on duly_batch.id = found.id
  left join running on running.batch_id = duly_batch.id
 order by duly_batch.id desc;

-- name: batch_rest
select id
  from duly_job
 where batch_id = :batch_id and cancel_requested_at is null
 limit :limit;
