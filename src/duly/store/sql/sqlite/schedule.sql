-- Schedules on SQLite and D1: due times, firings and misses.
--
-- A scheduler reads due schedules, decides, and writes the jobs, the firings and the next due time as one. Each write
-- names the revision that was read, and every write of a schedule makes a new revision: of any number of schedulers one
-- succeeds, and a decision on old values changes nothing.

-- name: next_fire
select (select min(next_at) from duly_schedule where next_at is not null and paused_at is null) as next_at, :now as now;

-- name: due_schedules
-- Reads due schedules, or one by name. Each has its last run of misses, if that is its newest record, so that further
-- misses extend it, and the times that a user triggered.
select name, mode, spec, tz, interval_ms, anchor_at, catchup, grace_ms, overlap, jitter_ms, envelope, revision, next_at,
       overlap <> 'allow' and exists (
           select 1 from duly_job
            where schedule = s.name and finished_at is null
              and (s.overlap <> 'cancel_running' or cancel_requested_at is null)) as live,
       (select json_array(due_at, until_at, count, reason)
          from duly_fire
         where schedule = s.name and outcome = 'skipped'
           and due_at = (select max(due_at) from duly_fire where schedule = s.name)) as missed,
       (select json_group_array(due_at)
          from duly_fire
         where schedule = s.name and outcome = 'fired' and due_at >= s.next_at) as fired,
       paused_at is not null as paused, created_at, :now as now
  from duly_schedule as s
 where name in (
       select name
         from (select name
                 from duly_schedule
                where next_at is not null and paused_at is null and next_at <= :now and :name is null
                  and name not in (select value from json_each(:beside))
                order by next_at, name
                limit :limit)
        union all
       select :name)
 order by next_at, name;

-- name: live_runs
select id
  from duly_job
 where schedule in (select value from json_each(:names)) and finished_at is null and cancel_requested_at is null
 order by id;

-- name: fire_jobs
-- A due time that was fired is not fired again. A run is due when it is fired, by the present clock.
insert into duly_job (
    id, task, queue, priority, state, reason, payload, envelope, max_attempts, created_at, due_at, expires_at, lease_ms,
    keep_ms, result_ttl_ms, schedule, on_dead, lane, ordering_dead)
select run.value ->> 'id', task, terms ->> 'queue', terms ->> 'priority',
       case when run.value ->> 'reason' is not null then 'waiting'
            when run.value ->> 'after_ms' = 0 then 'ready' else 'scheduled' end,
       run.value ->> 'reason', payload, run.value ->> 'envelope', terms ->> 'max_attempts', :now,
       case when run.value ->> 'reason' is null then :now + (run.value ->> 'after_ms') end,
       :now + (run.value ->> 'after_ms') + (terms ->> 'expires_ms'), terms ->> 'lease_ms', terms ->> 'keep_ms', terms ->> 'result_ttl_ms', name,
       terms ->> 'on_dead', terms ->> 'lane', terms ->> 'ordering_dead'
  from json_each(:jobs) as run
 cross join duly_schedule on name = run.value ->> 'name' and revision = run.value ->> 'revision'
 where not exists (
       select 1 from duly_fire
        where schedule = name and due_at = run.value ->> 'due_at' and outcome = 'fired')
    on conflict (id) do nothing;

-- name: fire_forget
delete from duly_fire
 where (schedule, due_at) in (
       select name, row.value ->> 'due_at'
         from json_each(:forget) as row
        cross join duly_schedule on name = row.value ->> 'name' and revision = row.value ->> 'revision')
   and outcome = 'skipped';

-- name: fire_rows
insert into duly_fire (schedule, due_at, until_at, count, outcome, job_id, reason, at)
select name, row.value ->> 'due_at', row.value ->> 'until_at', row.value ->> 'count', row.value ->> 'outcome',
       row.value ->> 'job_id', row.value ->> 'reason', :now
  from json_each(:rows) as row
 cross join duly_schedule on name = row.value ->> 'name' and revision = row.value ->> 'revision'
 where true
    on conflict (schedule, due_at) do update
   set until_at = excluded.until_at, count = excluded.count, outcome = excluded.outcome, job_id = excluded.job_id,
       reason = excluded.reason, at = excluded.at
 where duly_fire.outcome = 'skipped';

-- name: fire_events
insert into duly_event (at, name, subject, by, why, data)
select :now, told.value ->> 'event', duly_schedule.name, told.value ->> 'by', told.value ->> 'why', told.value ->> 'data'
  from json_each(:events) as told
 cross join duly_schedule on duly_schedule.name = told.value ->> 'name' and revision = told.value ->> 'revision';

-- name: fire_advance
update duly_schedule
   set next_at = fire.value ->> 'next_at', last_at = coalesce(fire.value ->> 'last_at', last_at), revision = revision + 1,
       paused_at = case when fire.value ->> 'resume' then null else paused_at end,
       paused_by = case when fire.value ->> 'resume' then null else paused_by end,
       paused_why = case when fire.value ->> 'resume' then null else paused_why end,
       dead_runs = case when fire.value ->> 'resume' then 0 else dead_runs end
  from json_each(:fires) as fire
 where name = fire.value ->> 'name' and revision = fire.value ->> 'revision'
returning name;

-- name: fired
-- After a lost answer: schedules whose runs are recorded as ours; without runs, those that are as this write leaves
-- them.
select run.value ->> 'name' as name
  from json_each(:jobs) as run
 cross join duly_fire on schedule = run.value ->> 'name' and due_at = run.value ->> 'due_at'
 where job_id = run.value ->> 'id'
 union
select fire.value ->> 'name'
  from json_each(:fires) as fire
 cross join duly_schedule on name = fire.value ->> 'name' and revision = 1 + (fire.value ->> 'revision')
 where name not in (select run.value ->> 'name' from json_each(:jobs) as run)
   and next_at is fire.value ->> 'next_at' and (not fire.value ->> 'resume' or paused_at is null);

-- name: define_schedules
-- An existing schedule is changed only if it is as it was read. Its next due time changes only with its timing. A due
-- schedule stays due, and one that waits for the end of a run still waits. A rate continues from its due time, so that
-- two versions of the code in turns do not delay it for ever. Queued runs start if they need not wait any more.
insert into duly_schedule (
    name, task, mode, spec, tz, interval_ms, anchor_at, catchup, grace_ms, overlap, jitter_ms, pause_after, terms,
    payload, envelope, in_code, revision, created_at, changed_at, next_at)
select one.value ->> 'name', one.value ->> 'task', one.value ->> 'mode', one.value ->> 'spec', one.value ->> 'tz',
       one.value ->> 'interval_ms', one.value ->> 'anchor_at', one.value ->> 'catchup', one.value ->> 'grace_ms',
       one.value ->> 'overlap', one.value ->> 'jitter_ms', one.value ->> 'pause_after', one.value ->> 'terms',
       one.value ->> 'payload', one.value ->> 'envelope', one.value ->> 'in_code', one.value ->> 'revision', :now, :now,
       one.value ->> 'next_at'
  from json_each(:schedules) as one
 where true
    on conflict (name) do update
   set task = excluded.task, mode = excluded.mode, spec = excluded.spec, tz = excluded.tz,
       interval_ms = excluded.interval_ms, catchup = excluded.catchup, grace_ms = excluded.grace_ms,
       overlap = excluded.overlap, jitter_ms = excluded.jitter_ms, pause_after = excluded.pause_after,
       terms = excluded.terms, payload = excluded.payload, envelope = excluded.envelope, in_code = excluded.in_code,
       revision = excluded.revision, changed_at = excluded.changed_at,
       anchor_at = case
           when duly_schedule.mode = excluded.mode and duly_schedule.spec = excluded.spec and duly_schedule.tz = excluded.tz
           then duly_schedule.anchor_at else excluded.anchor_at end,
       next_at = case
           when duly_schedule.mode = excluded.mode and duly_schedule.spec = excluded.spec and duly_schedule.tz = excluded.tz
             or duly_schedule.mode = 'delay' and excluded.mode = 'delay' and duly_schedule.next_at is null
             or duly_schedule.next_at <= :now
           then duly_schedule.next_at
           when duly_schedule.mode = 'rate' and excluded.mode = 'rate' and duly_schedule.next_at is not null
           then min(duly_schedule.next_at, excluded.next_at)
           else excluded.next_at end
 where duly_schedule.revision = excluded.revision - 1
returning name;
update duly_job
   set state = 'ready', due_at = :now, reason = null
 where schedule in (select one.value ->> 'name' from json_each(:schedules) as one where one.value ->> 'overlap' = 'allow')
   and state = 'waiting' and reason = 'queued: an earlier run of its schedule has not ended';

-- name: defined
-- After a lost answer: the schedules that are as this write leaves them.
select duly_schedule.name
  from json_each(:schedules) as one
 cross join duly_schedule on name = one.value ->> 'name'
 where revision >= one.value ->> 'revision' and task = one.value ->> 'task' and mode = one.value ->> 'mode'
   and spec = one.value ->> 'spec' and tz = one.value ->> 'tz' and catchup = one.value ->> 'catchup'
   and grace_ms is one.value ->> 'grace_ms' and overlap = one.value ->> 'overlap'
   and jitter_ms = one.value ->> 'jitter_ms' and pause_after is one.value ->> 'pause_after'
   and terms = one.value ->> 'terms' and payload = one.value ->> 'payload' and envelope is one.value ->> 'envelope'
   and in_code = one.value ->> 'in_code';

-- name: readopt_schedules
-- A schedule that was paused because no code had it continues where it stopped, and catches up on misses.
update duly_schedule
   set paused_at = null, paused_by = null, paused_why = null, revision = revision + 1
 where name in (select value from json_each(:names)) and paused_why = :gone and paused_at is not null
returning name;

-- name: abandon_schedules
insert into duly_event (at, name, subject, by, why)
select :now, 'schedule.paused', name, :by, :gone
  from duly_schedule
 where in_code = 1 and paused_at is null and name not in (select value from json_each(:own))
   and name not in (
       select had.value
         from duly_worker
        cross join json_each(duly_worker.schedules) as had
        where seen_at > :now - 3 * beat_ms);
update duly_schedule
   set paused_at = :now, paused_by = :by, paused_why = :gone, revision = revision + 1
 where in_code = 1 and paused_at is null and name not in (select value from json_each(:own))
   and name not in (
       select had.value
         from duly_worker
        cross join json_each(duly_worker.schedules) as had
        where seen_at > :now - 3 * beat_ms)
returning name;

-- name: abandoned
-- After a lost answer.
select name
  from duly_schedule
 where in_code and paused_why = :gone and paused_at >= :now - 60000;

-- name: pause_schedule
insert into duly_event (at, name, subject, by, why)
select :now, 'schedule.paused', name, :by, :why
  from duly_schedule
 where name = :name and (paused_at is null or paused_by <> :by or paused_why <> :why);
update duly_schedule
   set paused_at = coalesce(paused_at, :now), paused_by = :by, paused_why = :why, revision = revision + 1
 where name = :name and (paused_at is null or paused_by <> :by or paused_why <> :why);
select name
  from duly_schedule
 where name = :name;

-- name: delete_schedule
insert into duly_event (at, name, subject, by, why)
select :now, 'schedule.deleted', name, :by, :why
  from duly_schedule
 where name = :name;
update duly_job
   set state = 'ready', due_at = :now, reason = null
 where schedule = :name and state = 'waiting' and reason = 'queued: an earlier run of its schedule has not ended';
delete from duly_schedule
 where name = :name
returning name;

-- name: deleted_schedule
-- After a lost answer.
select subject
  from duly_event
 where name = 'schedule.deleted' and subject = :name and at >= :now - 60000
   and not exists (select 1 from duly_schedule where duly_schedule.name = :name)
 limit 1;

-- name: schedules
select name, task, mode, spec, tz, interval_ms, anchor_at, catchup, grace_ms, overlap, jitter_ms, pause_after, terms,
       payload, envelope, in_code, revision, created_at, changed_at, next_at, last_at, dead_runs, paused_at, paused_by,
       paused_why, :now as now
  from duly_schedule
 where name in (
       select name
         from (select name from duly_schedule where name > :after and :names is null order by name limit :limit)
        union all
       select value from json_each(:names))
 order by name;

-- name: fires
select schedule, due_at, until_at, count, outcome, job_id, reason, at
  from duly_fire
 where schedule = :name and due_at < :before
 order by due_at desc
 limit :limit;

-- name: skipped_between
select due_at, until_at, count, reason
  from duly_fire
 where schedule = :name and outcome = 'skipped' and due_at <= :until and coalesce(until_at, due_at) >= :since
 order by due_at;

-- name: fired_between
select due_at
  from duly_fire
 where schedule = :name and outcome = 'fired' and due_at between :since and :until
 order by due_at;

-- name: unqueue
-- Starts runs that wait for a run that has ended: its ending was interrupted, or its row was deleted by hand. The same
-- for schedules that wait for the end of a run.
update duly_schedule
   set next_at = :now + interval_ms, revision = revision + 1
 where mode = 'delay' and next_at is null
   and not exists (select 1 from duly_job where schedule = name and finished_at is null);
update duly_job
   set state = 'ready', due_at = :now, reason = null
 where id in (
       select (select follower.id
                 from duly_job as follower
                where follower.schedule = name and follower.state = 'waiting' and follower.reason = 'queued: an earlier run of its schedule has not ended'
                order by follower.created_at, follower.id
                limit 1)
         from duly_schedule
        where overlap <> 'allow'
          and (select 1
                 from duly_job as other
                where other.schedule = name and other.finished_at is null
                  and (other.state <> 'waiting' or other.reason is not 'queued: an earlier run of its schedule has not ended')
                limit 1) is null)
returning id;
