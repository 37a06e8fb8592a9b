-- Dead letters on SQLite and D1: replay with lineage, resolve, purge, figures.

-- name: replay
-- Every statement has the guard `replayed_as is null`, which the last one sets: a repetition changes nothing.
insert into duly_key (task, key, job_id, state, fingerprint)
select task, coalesce(value ->> 'key', duly_done.key), value ->> 'new_id', 'live',
       coalesce(value ->> 'fingerprint', fingerprint)
  from json_each(:replays)
 cross join duly_done on duly_done.id = value ->> 'id'
 where replayed_as is null and coalesce(value ->> 'key', duly_done.key) is not null
   and (state in ('dead', 'partial', 'cancelled') and resolved_at is null or value ->> 'force')
    on conflict (task, key) do update
   set job_id = excluded.job_id, state = 'live', fingerprint = excluded.fingerprint, result = null,
       result_dropped = 0, expires_at = null
 where duly_key.expires_at <= :now
    or exists (select 1 from json_each(:replays)
                where value ->> 'new_id' = excluded.job_id and value ->> 'id' = duly_key.job_id);
insert into duly_job (
    id, task, queue, priority, state, payload, envelope, key, fingerprint, key_ttl_ms, key_until, max_attempts, created_at,
    due_at, lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead, origin, replay_of, replay_count, lane,
    seq, ordering_dead)
select value ->> 'new_id', task, queue, priority, 'ready', coalesce(value ->> 'payload', payload), envelope,
       coalesce(value ->> 'key', duly_done.key),
       case when coalesce(value ->> 'key', duly_done.key) is not null
            then coalesce(value ->> 'fingerprint', fingerprint) end,
       case when coalesce(value ->> 'key', duly_done.key) is not null then coalesce(key_ttl_ms, :key_ttl_ms) end,
       key_until,
       max_attempts, :now, :now, lease_ms, keep_ms, result_ttl_ms, batch_id, schedule, on_dead,
       coalesce(origin, duly_done.id), duly_done.id, replay_count + 1, lane,
       -- A job that blocks its ordering key gets its own place again.
       case when state = 'dead' and ordering_dead = 'block' then seq end, ordering_dead
  from json_each(:replays)
 cross join duly_done on duly_done.id = value ->> 'id'
 where replayed_as is null and (state in ('dead', 'partial', 'cancelled') and resolved_at is null or value ->> 'force')
   and (coalesce(value ->> 'key', duly_done.key) is null or exists (
        select 1 from duly_key
         where duly_key.task = duly_done.task and duly_key.key = coalesce(value ->> 'key', duly_done.key)
           and job_id = value ->> 'new_id'));
insert into duly_step (job_id, name, kind, state, attempt, key, result, error, created_at, changed_at)
select value ->> 'new_id', name, kind, case when duly_step.state = 'started' then 'unknown' else duly_step.state end,
       duly_step.attempt, duly_step.key, duly_step.result, duly_step.error, duly_step.created_at, :now
  from json_each(:replays)
 cross join duly_done on duly_done.id = value ->> 'id'
 cross join duly_job on duly_job.id = value ->> 'new_id'
  join duly_step on duly_step.job_id = duly_done.id
 where replayed_as is null;
update duly_batch
   set open = open + n, succeeded = succeeded - n_succeeded, partial = partial - n_partial, dead = dead - n_dead,
       cancelled = cancelled - n_cancelled
  from (select duly_done.batch_id, count(*) as n, sum(duly_done.state = 'succeeded') as n_succeeded,
               sum(duly_done.state = 'partial') as n_partial, sum(duly_done.state = 'dead') as n_dead,
               sum(duly_done.state = 'cancelled') as n_cancelled
          from json_each(:replays)
         cross join duly_done on duly_done.id = value ->> 'id'
         cross join duly_job on duly_job.id = value ->> 'new_id'
         where replayed_as is null and duly_done.batch_id is not null
         group by duly_done.batch_id) as reopened
 where duly_batch.id = reopened.batch_id;
insert into duly_event (at, name, job_id, subject, by, why, data)
select :now, 'job.replayed', duly_done.id, duly_done.task, :by, :why,
       json_object('as', duly_job.id, 'from', duly_done.state,
                   'old', case when duly_job.payload <> duly_done.payload then json(duly_done.payload) end,
                   'new', case when duly_job.payload <> duly_done.payload then json(duly_job.payload) end,
                   'old_key', case when duly_job.key is not duly_done.key then duly_done.key end,
                   'new_key', case when duly_job.key is not duly_done.key then duly_job.key end)
  from json_each(:replays)
 cross join duly_done on duly_done.id = value ->> 'id'
 cross join duly_job on duly_job.id = value ->> 'new_id'
 where replayed_as is null;
update duly_done
   set replayed_as = new_id
  from (select value ->> 'id' as old_id, value ->> 'new_id' as new_id
          from json_each(:replays)
         cross join duly_job on duly_job.id = value ->> 'new_id') as replay
 where duly_done.id = old_id and replayed_as is null;
select value ->> 'id' as id, value ->> 'new_id' as new_id, duly_done.state, duly_done.replayed_as,
       duly_key.job_id as key_holder
  from json_each(:replays)
  left join duly_done on duly_done.id = value ->> 'id'
  left join duly_key on duly_key.task = duly_done.task and duly_key.key = coalesce(value ->> 'key', duly_done.key)
 order by json_each.key;

-- name: resolve
insert into duly_event (at, name, job_id, subject, by, why)
select :now, 'job.resolved', id, task, :by, :why
  from duly_done
 where id in (select value from json_each(:ids)) and state in ('dead', 'partial') and replayed_as is null
   and resolved_at is null;
update duly_done
   set resolved_at = :now, resolved_by = :by, resolved_why = :why
 where id in (select value from json_each(:ids)) and state in ('dead', 'partial') and replayed_as is null
   and resolved_at is null
returning id;

-- name: resolved
-- After a lost answer.
select id
  from duly_done
 where id in (select value from json_each(:ids)) and resolved_by = :by and resolved_why = :why;

-- name: purge
insert into duly_event (at, name, job_id, subject, by, why)
select :now, 'job.purged', id, task, :by, :why
  from duly_done
 where id in (select value from json_each(:ids)) and state = 'dead';
delete from duly_attempt
 where job_id in (select id from duly_done where id in (select value from json_each(:ids)) and state = 'dead');
delete from duly_step
 where job_id in (select id from duly_done where id in (select value from json_each(:ids)) and state = 'dead');
delete from duly_done
 where id in (select value from json_each(:ids)) and state = 'dead'
returning id;

-- name: purged
-- After a lost answer: the audit log has the purged jobs, with the user and the reason.
select distinct job_id as id
  from duly_event
 where name = 'job.purged' and job_id in (select value from json_each(:ids)) and by is :by and why is :why;

-- name: dead_metrics
select task, reason, count(*) as count, min(finished_at) as oldest, :now as now
  from duly_done
 where state = 'dead' and (:all or (replayed_as is null and resolved_at is null))
 group by task, reason
 order by count(*) desc, task, reason;

-- name: dead_list
-- Oldest first, as `replay_all` takes them. Each of the two states has its index; an `or` in one condition would walk
-- over all successes.
with page as materialized (
    select id from (
        select id from duly_done
         where state = 'dead'
           and (:all or (replayed_as is null and resolved_at is null)) and id > :after
           and (:task is null or task = :task) and (:queue is null or queue = :queue)
           and (:batch_id is null or batch_id = :batch_id)
           and (:error is null or instr(error, :error) > 0 or instr(reason, :error) > 0)
           and (:since is null or finished_at >= :since) and (:until is null or finished_at < :until)
         order by id limit :limit)
     union all
    select id from (
        select id from duly_done
         where :partial and state = 'partial'
           and (:all or (replayed_as is null and resolved_at is null)) and id > :after
           and (:task is null or task = :task) and (:queue is null or queue = :queue)
           and (:batch_id is null or batch_id = :batch_id)
           and (:error is null or instr(error, :error) > 0 or instr(reason, :error) > 0)
           and (:since is null or finished_at >= :since) and (:until is null or finished_at < :until)
         order by id limit :limit)
     order by id
     limit :limit
)
select page.id as id, task, queue, priority, state, payload, envelope, key, attempt, max_attempts, crashes, created_at, due_at,
       expires_at, worker, null as lease_until, null as heartbeat_at, progress, progress_message, cancel_requested_at, finished_at, result,
       result_until, reason, error, batch_id, schedule, lane, origin, replay_of, replay_count, replayed_as, resolved_at,
       resolved_by, resolved_why, :now as now
  from page
  join duly_done on duly_done.id = page.id
 order by 1;
