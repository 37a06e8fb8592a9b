-- Schedules on PostgreSQL: due times, firings and misses.
--
-- A scheduler reads due schedules, decides, and writes the jobs, the firings and the next due time as one. Each write
-- names the revision that was read, and every write of a schedule makes a new revision: of any number of schedulers one
-- succeeds, and a decision on old values changes nothing. Differs from SQLite: the rows are locked first, in the order
-- of their names, so that the next statements read the same values.

-- name: next_fire
select (select min(next_at) from duly.duly_schedule where next_at is not null and paused_at is null) as next_at,
       :now as now;

-- name: due_schedules
-- Reads due schedules, or one by name. Each has its last run of misses, if that is its newest record, so that further
-- misses extend it, and the times that a user triggered.
with clock as materialized (select :now as now)
select name, mode, spec, tz, interval_ms, anchor_at, catchup, grace_ms, overlap, jitter_ms, envelope, revision, next_at,
       overlap <> 'allow' and exists (
           select 1 from duly.duly_job
            where schedule = s.name and finished_at is null
              and (s.overlap <> 'cancel_running' or cancel_requested_at is null)) as live,
       (select json_build_array(due_at, until_at, count, reason)::text
          from duly.duly_fire
         where schedule = s.name and outcome = 'skipped'
           and due_at = (select max(due_at) from duly.duly_fire where schedule = s.name)) as missed,
       (select json_agg(due_at)::text
          from duly.duly_fire
         where schedule = s.name and outcome = 'fired' and due_at >= s.next_at) as fired,
       paused_at is not null as paused, created_at, now
  from duly.duly_schedule as s, clock
 where name = any (array(
       (select name
          from duly.duly_schedule
         where next_at is not null and paused_at is null and next_at <= (select now from clock) and :name::text is null
           and name <> all (array(select passed from json_array_elements_text(:beside::json) as passed))
         order by next_at, name
         limit :limit::int)
        union all
       select :name::text))
 order by next_at, name;

-- name: live_runs
select id::text
  from duly.duly_job
 where schedule = any (array(select name from json_array_elements_text(:names::json) as name))
   and finished_at is null and cancel_requested_at is null
 order by id;

-- name: fire_lock
-- Returns nothing.
with held as materialized (
    select name
      from duly.duly_schedule
     where name = any (array(select name from json_to_recordset(:fires::json) as fire (name text)))
     order by name
       for update
)
select name from held where name is null;

-- name: fire_jobs
-- A due time that was fired is not fired again. A run is due when it is fired, by the present clock.
with clock as materialized (select :now as now),
wanted as materialized (
    select run.id, run.after_ms, run.reason, run.envelope, duly_schedule.name, task, payload, terms::json as terms
      from json_to_recordset(:jobs::json)
           as run (name text, revision bigint, id uuid, due_at bigint, after_ms bigint, reason text, envelope text)
      join duly.duly_schedule on duly_schedule.name = run.name and duly_schedule.revision = run.revision
     where not exists (
           select 1 from duly.duly_fire
            where schedule = run.name and duly_fire.due_at = run.due_at and outcome = 'fired')
)
insert into duly.duly_job (
    id, task, queue, priority, state, reason, payload, envelope, max_attempts, created_at, due_at, expires_at, lease_ms,
    keep_ms, result_ttl_ms, schedule, on_dead, lane, ordering_dead)
select id, task, terms ->> 'queue', (terms ->> 'priority')::int,
       case when reason is not null then 'waiting' when after_ms = 0 then 'ready' else 'scheduled' end,
       reason, payload, envelope, (terms ->> 'max_attempts')::int, now, case when reason is null then now + after_ms end,
       now + after_ms + (terms ->> 'expires_ms')::bigint, (terms ->> 'lease_ms')::int, (terms ->> 'keep_ms')::bigint,
       (terms ->> 'result_ttl_ms')::bigint, name, terms ->> 'on_dead', terms ->> 'lane',
       terms ->> 'ordering_dead'
  from wanted, clock
    on conflict (id) do nothing;

-- name: fire_forget
with gone as materialized (
    select duly_schedule.name, gone.due_at
      from json_to_recordset(:forget::json) as gone (name text, revision bigint, due_at bigint)
      join duly.duly_schedule on duly_schedule.name = gone.name and duly_schedule.revision = gone.revision
)
delete from duly.duly_fire
 using gone
 where schedule = gone.name and duly_fire.due_at = gone.due_at and outcome = 'skipped';

-- name: fire_rows
insert into duly.duly_fire (schedule, due_at, until_at, count, outcome, job_id, reason, at)
select duly_schedule.name, due_at, until_at, count, outcome, job_id, reason, :now
  from json_to_recordset(:rows::json)
       as row (name text, revision bigint, due_at bigint, until_at bigint, count int, outcome text, job_id uuid, reason text)
  join duly.duly_schedule on duly_schedule.name = row.name and duly_schedule.revision = row.revision
    on conflict (schedule, due_at) do update
   set until_at = excluded.until_at, count = excluded.count, outcome = excluded.outcome, job_id = excluded.job_id,
       reason = excluded.reason, at = excluded.at
 where duly_fire.outcome = 'skipped';

-- name: fire_events
insert into duly.duly_event (at, name, subject, by, why, data)
select :now, told.event, duly_schedule.name, told.by, told.why, told.data
  from json_to_recordset(:events::json) as told (name text, revision bigint, event text, by text, why text, data text)
  join duly.duly_schedule on duly_schedule.name = told.name and duly_schedule.revision = told.revision;

-- name: fire_advance
update duly.duly_schedule
   set next_at = fire.next_at, last_at = coalesce(fire.last_at, duly_schedule.last_at),
       revision = duly_schedule.revision + 1,
       paused_at = case when fire.resume then null else paused_at end,
       paused_by = case when fire.resume then null else paused_by end,
       paused_why = case when fire.resume then null else paused_why end,
       dead_runs = case when fire.resume then 0 else dead_runs end
  from json_to_recordset(:fires::json) as fire (name text, revision bigint, next_at bigint, last_at bigint, resume boolean)
 where duly_schedule.name = fire.name and duly_schedule.revision = fire.revision
returning duly_schedule.name;

-- name: fired
-- After a lost answer: schedules whose runs are recorded as ours; without runs, those that are as this write leaves
-- them.
with run as materialized (
    select name, id, due_at from json_to_recordset(:jobs::json) as run (name text, id uuid, due_at bigint)
)
select duly_schedule.name
  from json_to_recordset(:fires::json) as fire (name text, revision bigint, next_at bigint, resume boolean)
  join duly.duly_schedule on duly_schedule.name = fire.name
 where case
       when exists (select 1 from run where run.name = fire.name)
       then exists (
            select 1
              from run
              join duly.duly_fire on schedule = run.name and duly_fire.due_at = run.due_at
             where run.name = fire.name and job_id = run.id)
       else duly_schedule.revision = fire.revision + 1 and duly_schedule.next_at is not distinct from fire.next_at
            and (not fire.resume or paused_at is null) end;

-- name: define_schedules
-- An existing schedule is changed only if it is as it was read. Its next due time changes only with its timing. A due
-- schedule stays due, and one that waits for the end of a run still waits. A rate continues from its due time, so that
-- two versions of the code in turns do not delay it for ever. Queued runs start if they need not wait any more.
insert into duly.duly_schedule (
    name, task, mode, spec, tz, interval_ms, anchor_at, catchup, grace_ms, overlap, jitter_ms, pause_after, terms,
    payload, envelope, in_code, revision, created_at, changed_at, next_at)
select name, task, mode, spec, tz, interval_ms, anchor_at, catchup, grace_ms, overlap, jitter_ms, pause_after, terms,
       payload, envelope, in_code, revision, :now, :now, next_at
  from json_to_recordset(:schedules::json)
       as one (name text, task text, mode text, spec text, tz text, interval_ms bigint, anchor_at bigint, catchup text,
               grace_ms bigint, overlap text, jitter_ms bigint, pause_after int, terms text, payload text,
               envelope text, in_code boolean, revision bigint, next_at bigint)
 order by name
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
           then least(duly_schedule.next_at, excluded.next_at)
           else excluded.next_at end
 where duly_schedule.revision = excluded.revision - 1
returning name;
update duly.duly_job
   set state = 'ready', due_at = :now, reason = null
 where id = any (array(
       select id
         from duly.duly_job
        where schedule = any (array(
              select name from json_to_recordset(:schedules::json) as one (name text, overlap text) where overlap = 'allow'))
          and state = 'waiting' and reason = 'queued: an earlier run of its schedule has not ended'
          for update skip locked));

-- name: defined
-- After a lost answer: the schedules that are as this write leaves them.
select duly_schedule.name
  from json_to_recordset(:schedules::json)
       as one (name text, task text, mode text, spec text, tz text, catchup text, grace_ms bigint, overlap text,
               jitter_ms bigint, pause_after int, terms text, payload text, envelope text, in_code boolean,
               revision bigint)
  join duly.duly_schedule on duly_schedule.name = one.name
 where duly_schedule.revision >= one.revision
   and (duly_schedule.task, duly_schedule.mode, duly_schedule.spec, duly_schedule.tz, duly_schedule.catchup,
        duly_schedule.grace_ms, duly_schedule.overlap, duly_schedule.jitter_ms, duly_schedule.pause_after,
        duly_schedule.terms, duly_schedule.payload, duly_schedule.envelope, duly_schedule.in_code)
       is not distinct from
       (one.task, one.mode, one.spec, one.tz, one.catchup, one.grace_ms, one.overlap, one.jitter_ms, one.pause_after,
        one.terms, one.payload, one.envelope, one.in_code);

-- name: readopt_schedules
-- A schedule that was paused because no code had it continues where it stopped, and catches up on misses.
with held as materialized (
    select name
      from duly.duly_schedule
     where name = any (array(select had from json_array_elements_text(:names::json) as had))
       and paused_why = :gone and paused_at is not null
     order by name
       for update
)
update duly.duly_schedule
   set paused_at = null, paused_by = null, paused_why = null, revision = revision + 1
 where name = any (array(select name from held))
returning name;

-- name: abandon_schedules
-- Differs from SQLite: one statement, so that the event matches the pause.
with clock as materialized (select :now as now),
held as materialized (
    select name
      from duly.duly_schedule
     where in_code and paused_at is null
       and name <> all (array(select had from json_array_elements_text(:own::json) as had))
       and name <> all (array(
           select had
             from duly.duly_worker
            cross join json_array_elements_text(duly_worker.schedules::json) as had
            where seen_at > (select now from clock) - 3 * beat_ms))
     order by name
       for update
),
abandoned as (
    update duly.duly_schedule
       set paused_at = (select now from clock), paused_by = :by::text, paused_why = :gone::text, revision = revision + 1
     where name = any (array(select name from held))
    returning name
)
insert into duly.duly_event (at, name, subject, by, why)
select now, 'schedule.paused', abandoned.name, :by::text, :gone::text
  from abandoned, clock
returning subject as name;

-- name: abandoned
-- After a lost answer.
select name
  from duly.duly_schedule
 where in_code and paused_why = :gone and paused_at >= :now - 60000;

-- name: pause_schedule
insert into duly.duly_event (at, name, subject, by, why)
select :now, 'schedule.paused', name, :by::text, :why::text
  from duly.duly_schedule
 where name = :name and (paused_at is null or paused_by <> :by or paused_why <> :why);
update duly.duly_schedule
   set paused_at = coalesce(paused_at, :now), paused_by = :by::text, paused_why = :why::text, revision = revision + 1
 where name = :name and (paused_at is null or paused_by <> :by or paused_why <> :why);
select name
  from duly.duly_schedule
 where name = :name;

-- name: delete_schedule
insert into duly.duly_event (at, name, subject, by, why)
select :now, 'schedule.deleted', name, :by::text, :why::text
  from duly.duly_schedule
 where name = :name;
update duly.duly_job
   set state = 'ready', due_at = :now, reason = null
 where id = any (array(
       select id
         from duly.duly_job
        where schedule = :name and state = 'waiting' and reason = 'queued: an earlier run of its schedule has not ended'
          for update skip locked));
delete from duly.duly_schedule
 where name = :name
returning name;

-- name: deleted_schedule
-- After a lost answer.
select subject
  from duly.duly_event
 where name = 'schedule.deleted' and subject = :name and at >= :now - 60000
   and not exists (select 1 from duly.duly_schedule where duly_schedule.name = :name)
 limit 1;

-- name: schedules
select name, task, mode, spec, tz, interval_ms, anchor_at, catchup, grace_ms, overlap, jitter_ms, pause_after, terms,
       payload, envelope, in_code, revision, created_at, changed_at, next_at, last_at, dead_runs, paused_at, paused_by,
       paused_why, :now as now
  from duly.duly_schedule
 where name = any (array(
       (select name
          from duly.duly_schedule
         where name > :after and :names::text is null
         order by name
         limit :limit::int)
        union all
       select had from json_array_elements_text(:names::json) as had))
 order by name;

-- name: fires
select schedule, due_at, until_at, count, outcome, job_id::text, reason, at
  from duly.duly_fire
 where schedule = :name and due_at < :before::bigint
 order by due_at desc
 limit :limit::int;

-- name: skipped_between
select due_at, until_at, count, reason
  from duly.duly_fire
 where schedule = :name and outcome = 'skipped' and due_at <= :until::bigint
   and coalesce(until_at, due_at) >= :since::bigint
 order by due_at;

-- name: fired_between
select due_at
  from duly.duly_fire
 where schedule = :name and outcome = 'fired' and due_at between :since::bigint and :until::bigint
 order by due_at;

-- name: unqueue_lock
-- Returns nothing. The next statement sees runs that other sessions have queued or ended meanwhile.
with held as materialized (
    select name
      from duly.duly_schedule
     where mode = 'delay' and next_at is null
        or overlap <> 'allow'
       and (select 1
              from duly.duly_job
             where schedule = name and state = 'waiting' and reason = 'queued: an earlier run of its schedule has not ended'
             limit 1) is not null
     order by name
       for update
)
select name from held where name is null;

-- name: unqueue
-- Starts runs that wait for a run that has ended: its ending was interrupted, or its row was deleted by hand. The same
-- for schedules that wait for the end of a run.
update duly.duly_schedule
   set next_at = :now + interval_ms, revision = revision + 1
 where mode = 'delay' and next_at is null
   and (select 1 from duly.duly_job where schedule = name and finished_at is null limit 1) is null;
with followers as materialized (
    select (select follower.id
              from duly.duly_job as follower
             where follower.schedule = name and follower.state = 'waiting' and follower.reason = 'queued: an earlier run of its schedule has not ended'
             order by follower.created_at, follower.id
             limit 1
               for update skip locked) as id
      from duly.duly_schedule
     where overlap <> 'allow'
       and (select 1
              from duly.duly_job as other
             where other.schedule = name and other.finished_at is null
               and (other.state <> 'waiting' or other.reason is distinct from 'queued: an earlier run of its schedule has not ended')
             limit 1) is null
)
update duly.duly_job
   set state = 'ready', due_at = :now, reason = null
 where id = any (array(select id from followers)) and state = 'waiting'
returning id::text;
