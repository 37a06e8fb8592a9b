-- Batches on PostgreSQL: a label with counters. `open` counts what was added and has not ended; whoever adds raises
-- it, every ending lowers it (`ended_batch`), and the last one fires what is due (`ended_callbacks`).

-- name: open_batch
-- Asked again, or under a key that is there, it answers the batch that is. Differs from SQLite: one that another session
-- adds at this moment is waited for, and seen by the second statement.
insert into duly.duly_batch (id, name, key, created_at, ok_at, on_complete, on_success, on_first_dead)
values (:id::uuid, :name, :key::text, :now, :ok_at::float8, :on_complete::text, :on_success::text, :on_first_dead::text)
    on conflict do nothing;
select id::text, name, key, filled
  from duly.duly_batch
 where id = :id::uuid or key = :key::text
 limit 1;

-- name: lock_batch
-- Answers how far a batch is filled, and whether it takes no more. What a first try has added before it was sealed is
-- in. Differs from SQLite: the row is held to the end, so that meanwhile nobody seals it, nobody else adds to it, and none
-- of its jobs ends; only the next statement sees what those did who were waited for.
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
-- Before they are added, so that what a first try has added, and perhaps ended, is not counted again. Of jobs with keys,
-- those that got theirs; nothing of a handler that lost its lease.
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
-- After they are added: how far it was filled tells a repeated try from the first, also where success leaves no trace.
update duly.duly_batch
   set open = open + (
       select count(*)
         from duly.duly_job
        where duly_job.id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))),
       filled = filled + json_array_length(:ids::json)
 where id = :batch_id::uuid and sealed_at is null and filled = :filling::bigint
   and {parent_held};

-- name: added_before
-- What came of jobs whose places were filled before. Those whose keys somebody else had were not added.
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
-- A batch that takes no more leaves no key behind that nobody holds.
delete from duly.duly_key
 using json_to_recordset(:jobs::json) as input (id uuid, key text)
 where duly_key.task = :task and duly_key.key = input.key and duly_key.job_id = input.id and duly_key.state = 'live'
   and not exists (select 1 from duly.duly_job where duly_job.id = input.id);

-- name: seal_batch
update duly.duly_batch
   set sealed_at = :now
 where id = :batch_id::uuid and sealed_at is null;

-- name: cancel_batch
-- It takes no more, and is no success. What is complete stays as it is. Differs from SQLite: one statement, so that the
-- event tells what was written, also where the last job ends at this moment.
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
-- What runs is found by what all workers hold, which is little; the jobs of a batch may be a million. Differs from
-- SQLite: see `expired_leases` for the tokens.
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
