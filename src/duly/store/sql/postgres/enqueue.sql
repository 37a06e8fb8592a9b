-- Enqueue on PostgreSQL: adds jobs to `duly_job`, plain, under a key, or from a handler.
--
-- All files have the sections and parameters of SQLite; comments tell where and why the statements differ. Four rules
-- hold in all of them. Workers write at the same time, so a statement first locks the rows it changes, in the order of
-- their ids: two statements that lock in different orders deadlock. `skip locked` leaves out locked rows. `clock` reads
-- the time once, because a volatile function in a condition prevents the use of an index. `= any (array(...))` replaces
-- a join, because a plan made for many rows reads the whole table. A token is compared by `is not distinct from`,
-- because its index would find all jobs of the claim for each job.

-- name: enqueue
-- again: on conflict (id) do nothing
-- Jobs are sent as {[lane, envelope]: {id: payload}}, so that few values are read from JSON row by row. A repetition
-- changes nothing while the job is live; if it may have ended, `undo_finished` follows. A handler that lost its lease
-- (`hold_parent`) adds nothing. Neither does an insert into a batch that is sealed, or that has more jobs than
-- `:filling`.
with clock as materialized (select :now as now)
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, expires_at,
    lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, lane, ordering_dead)
select one.key::uuid, :task, :queue, :priority::int,
       case when coalesce(:due_at::bigint, now + :delay_ms::bigint) <= now then 'ready' else 'scheduled' end,
       one.value, envelope, :max_attempts::int, now, coalesce(:due_at::bigint, now + :delay_ms::bigint),
       coalesce(:expires_at::bigint, now + :expires_ms::bigint), :lease_ms::int, :keep_ms::bigint,
       :result_ttl_ms::bigint, :batch_id::uuid, :schedule::text, :on_dead::text, lane, :ordering_dead::text
  from clock
 cross join (
       select key::json ->> 0 as lane, key::json ->> 1 as envelope, value as payloads
         from json_each(:payloads::json)
       offset 0) as kind  -- read once, not for each of its jobs
 cross join json_each_text(kind.payloads) as one
 where {parent_held}
   and (:filling::bigint is null
        or exists (
           select 1 from duly.duly_batch
            where id = :batch_id::uuid and sealed_at is null
              and (:filling::bigint < 0 or filled = :filling::bigint)));

-- name: enqueue_one
-- The same for one job that neither a handler nor a batch adds: without a list and without checks. For one job, most of
-- the cost of `enqueue` is unused preparation.
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, max_attempts, created_at, due_at, expires_at,
    lease_ms, keep_ms, result_ttl_ms, schedule, on_dead, lane)
select :id::uuid, :task, :queue, :priority::int,
       case when coalesce(:due_at::bigint, now + :delay_ms::bigint) <= now then 'ready' else 'scheduled' end,
       :payload, :envelope, :max_attempts::int, now, coalesce(:due_at::bigint, now + :delay_ms::bigint),
       coalesce(:expires_at::bigint, now + :expires_ms::bigint), :lease_ms::int, :keep_ms::bigint,
       :result_ttl_ms::bigint, :schedule, :on_dead, :lane
  from (select :now as now) as clock;

-- name: hold_parent
-- A handler can enqueue only while it holds its job. Returns a row if it does. Differs from SQLite: the row is locked
-- until the commit, so that the job is not taken in between.
select 1 as held
  from duly.duly_job
 where id = :parent_id::uuid and token is not distinct from :parent_token::bigint and state = 'running'
   for share;

-- name: lock_jobs
-- For lists that would otherwise lock jobs in two steps, or keys before jobs: an ending locks the job, then its key.
-- Returns nothing.
with held as materialized (
    select id
      from duly.duly_job
     where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
     order by id
       for update
)
select id::text from held where id is null;

-- name: reserve_keys
-- Differs from SQLite: one statement may not change a row twice, so the first job with a key takes it, and keys are
-- taken in order.
insert into duly.duly_key (task, key, job_id, state, fingerprint)
select distinct on (key) :task::text, key, id, 'live', fingerprint
  from rows from (json_to_recordset(:jobs::json) as (id uuid, key text, fingerprint text)) with ordinality
       as input (id, key, fingerprint, place)
 where :parent_token::bigint is null
    or exists (
       select 1 from duly.duly_job
        where duly_job.id = :parent_id::uuid and token is not distinct from :parent_token::bigint and state = 'running')
 order by key, place
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint,
       result = null, result_dropped = false, expires_at = null
 where duly_key.expires_at <= :now;

-- name: enqueue_keyed
-- again: on conflict (id) do nothing
with clock as materialized (select :now as now)
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, max_attempts,
    created_at, due_at, expires_at, lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, lane, ordering_dead)
select id, :task, :queue, :priority::int,
       case when coalesce(:due_at::bigint, now + :delay_ms::bigint) <= now then 'ready' else 'scheduled' end,
       payload, envelope, key, fingerprint, :key_ttl_ms::bigint, now + :key_window_ms::bigint, :max_attempts::int, now,
       coalesce(:due_at::bigint, now + :delay_ms::bigint), coalesce(:expires_at::bigint, now + :expires_ms::bigint),
       :lease_ms::int, :keep_ms::bigint, :result_ttl_ms::bigint, :batch_id::uuid, :schedule::text, :on_dead::text,
       lane, :ordering_dead::text
  from clock
 cross join json_to_recordset(:jobs::json) as input (
       id uuid, payload text, envelope text, key text, fingerprint text, lane text)
 where exists (
       select 1 from duly.duly_key
        where duly_key.task = :task and duly_key.key = input.key and duly_key.job_id = input.id
          and duly_key.state = 'live')
   and (:filling::bigint is null
        or exists (
           select 1 from duly.duly_batch
            where duly_batch.id = :batch_id::uuid and sealed_at is null
              and (:filling::bigint < 0 or filled = :filling::bigint)));

-- name: undo_finished
-- Differs from SQLite: `not exists` in the insert is not enough. The insert may wait for the finish of the same job,
-- whose row in duly_done only the next statement sees.
delete from duly.duly_key
 using json_array_elements_text(:ids::json) as asked
  join duly.duly_done on duly_done.id = asked::uuid
 where duly_key.task = duly_done.task and duly_key.key = duly_done.key
   and duly_key.job_id = duly_done.id and duly_key.state = 'live';
delete from duly.duly_job
 where id = any (array(
       select duly_done.id
         from json_array_elements_text(:ids::json) as asked
         join duly.duly_done on duly_done.id = asked::uuid));

-- name: key_holders
select input.id::text as asked, coalesce(duly_key.job_id, input.id)::text as holder,
       duly_key.fingerprint is not null and duly_key.fingerprint <> input.fingerprint as other_payload,
       coalesce(duly_key.state, 'live') as state, duly_key.result, coalesce(duly_key.result_dropped, false) as result_dropped
  from rows from (json_to_recordset(:jobs::json) as (id uuid, key text, fingerprint text)) with ordinality
       as input (id, key, fingerprint, place)
  left join duly.duly_key on duly_key.task = :task and duly_key.key = input.key
 order by place;
