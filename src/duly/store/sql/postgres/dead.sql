-- Dead letters on PostgreSQL: replay with lineage, resolve, purge, figures.

-- name: replay
-- Every statement has the guard `replayed_as is null`, which the last write sets: a repetition changes nothing. Differs
-- from SQLite: the first statement locks all rows, so that the others read the same values.
with locked as materialized (
    select duly_done.id, task, coalesce(replay.key, duly_done.key) as key, new_id,
           coalesce(replay.fingerprint, duly_done.fingerprint) as fingerprint, state, force, replayed_as, resolved_at
      from json_to_recordset(:replays::json) as replay (id uuid, new_id uuid, key text, fingerprint text, force int)
      join duly.duly_done on duly_done.id = replay.id
     order by duly_done.id
       for update of duly_done
)
insert into duly.duly_key (task, key, job_id, state, fingerprint)
select distinct on (task, key) task, key, new_id, 'live', fingerprint
  from locked
 where replayed_as is null and key is not null
   and (state in ('dead', 'partial', 'cancelled') and resolved_at is null or force = 1)
 order by task, key, id
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint, result = null,
       result_dropped = false, expires_at = null
 where duly_key.expires_at <= :now
    or exists (select 1 from json_to_recordset(:replays::json) as replay (id uuid, new_id uuid)
                where replay.new_id = excluded.job_id and replay.id = duly_key.job_id);
insert into duly.duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, max_attempts, created_at,
    due_at, lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, origin, replay_of, replay_count, lane,
    seq, ordering_dead)
select new_id, task, queue, priority, 'ready', coalesce(replay.payload, duly_done.payload), envelope,
       coalesce(replay.key, duly_done.key),
       case when coalesce(replay.key, duly_done.key) is not null
            then coalesce(replay.fingerprint, duly_done.fingerprint) end,
       case when coalesce(replay.key, duly_done.key) is not null then coalesce(key_ttl_ms, :key_ttl_ms::bigint) end,
       key_until,
       max_attempts, now, now, lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead,
       coalesce(origin, duly_done.id), duly_done.id, replay_count + 1, lane,
       -- A job that blocks its ordering key gets its own place again.
       case when state = 'dead' and ordering_dead = 'block' then seq end, ordering_dead
  from json_to_recordset(:replays::json) as replay (
       id uuid, new_id uuid, key text, payload text, fingerprint text, force int)
  join duly.duly_done on duly_done.id = replay.id
 cross join (select :now as now offset 0) as clock
 where replayed_as is null and (state in ('dead', 'partial', 'cancelled') and resolved_at is null or force = 1)
   and (coalesce(replay.key, duly_done.key) is null or exists (
        select 1 from duly.duly_key
         where duly_key.task = duly_done.task and duly_key.key = coalesce(replay.key, duly_done.key)
           and job_id = new_id));
insert into duly.duly_step (job_id, name, kind, state, attempt, key, result, error, created_at, changed_at)
select new_id, name, kind, case when duly_step.state = 'started' then 'unknown' else duly_step.state end,
       duly_step.attempt, duly_step.key, duly_step.result, duly_step.error, duly_step.created_at, :now
  from json_to_recordset(:replays::json) as replay (id uuid, new_id uuid)
  join duly.duly_done on duly_done.id = replay.id
  join duly.duly_job on duly_job.id = replay.new_id
  join duly.duly_step on duly_step.job_id = duly_done.id
 where replayed_as is null;
with back as materialized (
    select duly_done.batch_id, duly_done.state
      from json_to_recordset(:replays::json) as replay (id uuid, new_id uuid)
      join duly.duly_done on duly_done.id = replay.id
      join duly.duly_job on duly_job.id = replay.new_id
     where replayed_as is null
),
reopened as materialized (
    select batch_id, count(*) as n, count(*) filter (where state = 'succeeded') as n_succeeded,
           count(*) filter (where state = 'partial') as n_partial, count(*) filter (where state = 'dead') as n_dead,
           count(*) filter (where state = 'cancelled') as n_cancelled
      from back
     where batch_id is not null
     group by batch_id
),
locked as materialized (
    select id from duly.duly_batch where id = any (array(select batch_id from reopened)) order by id for update
)
update duly.duly_batch
   set open = open + n, succeeded = succeeded - n_succeeded, partial = partial - n_partial, dead = dead - n_dead,
       cancelled = cancelled - n_cancelled
  from reopened
 where duly_batch.id = any (array(select id from locked)) and duly_batch.id = reopened.batch_id;
insert into duly.duly_event (at, name, job_id, subject, by, why, data)
select :now, 'job.replayed', duly_done.id, duly_done.task, :by::text, :why::text,
       json_build_object('as', duly_job.id, 'from', duly_done.state,
                   'old', case when duly_job.payload <> duly_done.payload then duly_done.payload::json end,
                   'new', case when duly_job.payload <> duly_done.payload then duly_job.payload::json end,
                   'old_key', case when duly_job.key is distinct from duly_done.key then duly_done.key end,
                   'new_key', case when duly_job.key is distinct from duly_done.key then duly_job.key end)::text
  from json_to_recordset(:replays::json) as replay (id uuid, new_id uuid)
  join duly.duly_done on duly_done.id = replay.id
  join duly.duly_job on duly_job.id = replay.new_id
 where replayed_as is null;
update duly.duly_done
   set replayed_as = new_id
  from json_to_recordset(:replays::json) as replay (id uuid, new_id uuid)
  join duly.duly_job on duly_job.id = replay.new_id
 where duly_done.id = replay.id and replayed_as is null;
select replay.id::text, new_id::text, duly_done.state, duly_done.replayed_as::text, duly_key.job_id::text as key_holder
  from rows from (json_to_recordset(:replays::json) as (id uuid, new_id uuid, key text)) with ordinality
       as replay (id, new_id, key, place)
  left join duly.duly_done on duly_done.id = replay.id
  left join duly.duly_key on duly_key.task = duly_done.task and duly_key.key = coalesce(replay.key, duly_done.key)
 order by place;

-- name: resolve
with done as (
    update duly.duly_done
       set resolved_at = :now, resolved_by = :by::text, resolved_why = :why::text
     where id = any (array(
           select id from duly.duly_done
            where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
              and state in ('dead', 'partial') and replayed_as is null and resolved_at is null
            order by id
              for update))
    returning id, task
),
told as (
    insert into duly.duly_event (at, name, job_id, subject, by, why)
    select :now, 'job.resolved', id, task, :by::text, :why::text
      from done
)
select id::text from done;

-- name: resolved
-- After a lost answer.
select id::text
  from duly.duly_done
 where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
   and resolved_by = :by and resolved_why = :why;

-- name: purge
with gone as (
    delete from duly.duly_done
     where id = any (array(
           select id from duly.duly_done
            where id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
              and state = 'dead'
            order by id
              for update))
    returning id, task
),
told as (
    insert into duly.duly_event (at, name, job_id, subject, by, why)
    select :now, 'job.purged', id, task, :by::text, :why::text
      from gone
),
attempts_gone as (
    delete from duly.duly_attempt where job_id = any (array(select id from gone))
),
steps_gone as (
    delete from duly.duly_step where job_id = any (array(select id from gone))
)
select id::text from gone;

-- name: purged
-- After a lost answer: the audit log has the purged jobs, with the user and the reason.
select distinct job_id::text as id
  from duly.duly_event
 where name = 'job.purged'
   and job_id = any (array(select asked::uuid from json_array_elements_text(:ids::json) as asked))
   and by is not distinct from :by::text and why is not distinct from :why::text;

-- name: dead_metrics
select task, reason, count(*) as count, min(finished_at) as oldest, (select :now) as now
  from duly.duly_done
 where state = 'dead' and (:all::boolean or (replayed_as is null and resolved_at is null))
 group by task, reason
 order by count(*) desc, task, reason;

-- name: dead_list
-- Oldest first, as `replay_all` takes them.
select id::text, task, queue, priority, state, payload, envelope, key, attempt, max_attempts, crashes, created_at, due_at,
       expires_at, worker, null::bigint as lease_until, null::bigint as heartbeat_at, progress, progress_message, cancel_requested_at, finished_at,
       result, result_until, reason, error, batch_id::text, schedule, lane, origin::text, replay_of::text, replay_count,
       replayed_as::text, resolved_at, resolved_by, resolved_why, (select :now) as now
  from duly.duly_done
 where (state = 'dead' or (:partial::boolean and state = 'partial'))
   and (:all::boolean or (replayed_as is null and resolved_at is null))
   and id > :after::uuid
   and (:task::text is null or task = :task)
   and (:queue::text is null or queue = :queue)
   and (:batch_id::uuid is null or batch_id = :batch_id::uuid)
   and (:error::text is null or strpos(error, :error) > 0 or strpos(reason, :error) > 0)
   and (:since::bigint is null or finished_at >= :since::bigint)
   and (:until::bigint is null or finished_at < :until::bigint)
 order by id
 limit :limit::int;
