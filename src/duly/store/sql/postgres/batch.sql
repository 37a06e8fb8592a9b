-- Batches on PostgreSQL: a label with counters. `open` counts the jobs that were added and have not ended: adding jobs
-- raises it, every ending lowers it (`ended_batch`), and the last ending adds the callbacks (`ended_callbacks`).

-- name: open_batch
-- A repetition, or a key that exists, returns the existing batch. Differs from SQLite: waits for a batch that another
-- session adds at this moment; the second statement sees it.
insert into duly.duly_batch (id, name, key, created_at, ok_at, on_complete, on_success, on_first_dead)
values (:id::uuid, :name, :key::text, :now, :ok_at::float8, :on_complete::text, :on_success::text, :on_first_dead::text)
    on conflict do nothing;
select id::text, name, key, filled
  from duly.duly_batch
 where id = :id::uuid or key = :key::text
 limit 1;

-- name: lock_batch
-- Returns how many jobs a batch has, and whether it is sealed. Jobs that a first try added before the seal count.
-- Differs from SQLite: the row is locked until the commit, so that meanwhile the batch is not sealed or filled and none
-- of its jobs ends. Only the next statement sees the changes that this one waited for.
with held as materialized (
    select id from duly.duly_batch where id = :batch_id::uuid for no key update
)
select id::text from held where id is null;
select filled, sealed_at is not null
       and not exists (
           select 1 from duly.duly_job
            where duly_job.id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked)))
       and not exists (
           select 1 from duly.duly_done
            where duly_done.id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))) as sealed
  from duly.duly_batch
 where id = :batch_id::uuid;

-- fragment: parent_held
(:parent_token::bigint is null
 or exists (
    select 1 from duly.duly_job
     where id = :parent_id::uuid and token is not distinct from :parent_token::bigint and state = 'running'))

-- name: count_added
-- Runs before the insert, so that jobs of a first try are not counted again. Counts only jobs that got their keys, and
-- none of a handler that lost its lease.
update duly.duly_batch
   set open = open + (
       select count(*)
         from json_to_recordset(:jobs::json) as input (id uuid, key text)
        where not exists (select 1 from duly.duly_job where duly_job.id = input.id)
          and not exists (select 1 from duly.duly_done where duly_done.id = input.id)
          and (input.key is null or exists (
               select 1 from duly.duly_key
                where duly_key.task = :task and duly_key.key = input.key and duly_key.job_id = input.id
                  and duly_key.state = 'live')))
 where id = :batch_id::uuid and sealed_at is null
   and {parent_held};

-- name: count_filled
-- Runs after the insert: `filled` tells a repetition from the first try, even if success leaves no row.
update duly.duly_batch
   set open = open + (
       select count(*)
         from duly.duly_job
        where duly_job.id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))),
       filled = filled + json_array_length(:ids::json)
 where id = :batch_id::uuid and sealed_at is null and filled = :filling::bigint
   and {parent_held};

-- name: added_before
-- The answers for jobs whose places were filled before. Jobs whose keys were taken were not added.
select input.id::text as asked, coalesce(duly_key.job_id, input.id)::text as holder,
       duly_key.fingerprint is not null and duly_key.fingerprint <> input.fingerprint as other_payload,
       coalesce(duly_key.state, 'live') as state, duly_key.result,
       coalesce(duly_key.result_dropped, false) as result_dropped
  from rows from (json_to_recordset(:jobs::json) as (id uuid, key text, fingerprint text)) with ordinality
       as input (id, key, fingerprint, place)
  left join duly.duly_key on duly_key.task = :task and duly_key.key = input.key
   and not exists (select 1 from duly.duly_job where duly_job.id = input.id)
   and not exists (select 1 from duly.duly_done where duly_done.id = input.id)
 order by place;

-- name: drop_keys
-- If the batch is sealed, the keys that were reserved for its jobs are deleted.
delete from duly.duly_key
 using json_to_recordset(:jobs::json) as input (id uuid, key text)
 where duly_key.task = :task and duly_key.key = input.key and duly_key.job_id = input.id and duly_key.state = 'live'
   and not exists (select 1 from duly.duly_job where duly_job.id = input.id);

-- name: seal_batch
update duly.duly_batch
   set sealed_at = :now
 where id = :batch_id::uuid and sealed_at is null;

-- name: cancel_batch
-- Seals the batch and marks it cancelled. A complete batch is not changed. Differs from SQLite: one statement, so that
-- the event matches the write, even if the last job ends at this moment.
with cancelled as (
    update duly.duly_batch
       set sealed_at = coalesce(sealed_at, :now), cancelled_at = :now, cancelled_by = :by::text,
           cancelled_why = :why::text
     where id = :batch_id::uuid and completed_at is null and cancelled_at is null
    returning id, name
)
insert into duly.duly_event (at, name, subject, by, why, data)
select :now, 'batch.cancelled', name, :by::text, :why::text, json_build_object('batch_id', id)::text
  from cancelled;

-- name: sealed
select sealed_at is not null as sealed
  from duly.duly_batch
 where id = :batch_id::uuid;

-- name: batches
-- Running jobs are found by the index of leases, which is small; a batch may have a million jobs. Differs from SQLite:
-- see `expired_leases` for the tokens.
with found as materialized (
    select id, name, key, created_at, sealed_at, completed_at, cancelled_at, cancelled_by, cancelled_why,
           first_dead_at, ok_at, open, succeeded, partial, dead, cancelled
      from duly.duly_batch
     where id between :first::uuid and :last::uuid and (:name::text is null or name = :name::text)
       and (:key::text is null or key = :key::text)
       and (:active::boolean is null or :active::boolean = (completed_at is null or open > 0))
     order by id desc
     limit :limit::int
),
held as materialized (
    select batch_id from duly.duly_job where token between 1 and 9223372036854775807
),
running as materialized (
    select batch_id, count(*) as n from held where batch_id = any (array(select id from found)) group by batch_id
)
select id::text, name, key, created_at, sealed_at, completed_at, cancelled_at, cancelled_by, cancelled_why,
       first_dead_at, ok_at, open,
       coalesce(running.n, 0) as running, succeeded, partial, dead, cancelled
  from found
  left join running on running.batch_id = found.id
 order by found.id desc;

-- name: batch_rest
select id::text
  from duly.duly_job
 where batch_id = :batch_id::uuid and cancel_requested_at is null
 limit :limit::int;
