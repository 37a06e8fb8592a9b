-- Flow: lanes (caps, rates, order), limits of queues and tasks, keys by a window. Jobs without a lane are found as before,
-- and never walk over those with one. No column has a check: SQLite would look through the whole table.

-- The lane of a job: its task, or its task and a key. `seq` is its place in a lane that keeps an order, and
-- `ordering_dead` says whether its death holds up those behind it: 'block' or 'skip'.
alter table duly_job add column lane text;
alter table duly_job add column seq integer;
alter table duly_job add column ordering_dead text;
-- Until when its key is kept, whatever becomes of it, instead of a time that counts from its end.
alter table duly_job add column key_until integer;
-- What was enqueued under its key while it ran and begins when it has ended: a whole job as JSON.
alter table duly_job add column next text;

drop index duly_job_ready;
drop index duly_job_scheduled;
create index duly_job_ready on duly_job (queue, suspect, priority desc, due_at, id) where state = 'ready' and lane is null;
create index duly_job_scheduled on duly_job (queue, due_at, id) where state = 'scheduled' and lane is null;
create index duly_job_lane_ready on duly_job (queue, suspect, task, lane, priority desc, due_at, id)
 where state = 'ready' and lane is not null;
create index duly_job_lane_scheduled on duly_job (queue, due_at, id) where state = 'scheduled' and lane is not null;
create index duly_job_lane_running on duly_job (lane) where lane is not null and token is not null;
create index duly_job_seq on duly_job (lane, seq) where seq is not null;

alter table duly_done add column lane text;
alter table duly_done add column seq integer;
alter table duly_done add column ordering_dead text;
alter table duly_done add column key_until integer;

create index duly_done_blocks on duly_done (lane)
 where state = 'dead' and ordering_dead = 'block' and replayed_as is null and resolved_at is null;

-- A lane that was claimed from or enqueued to in order. `permits` are [[moment, jobs], …], those that still count
-- against its rate; `last_seq` was handed out last; `held_by` is the token of the claim that locked it.
create table duly_lane (
    name text not null primary key,
    task text not null,
    last_seq integer not null default 0,
    permits text not null default '[]',
    held_by integer,
    used_at integer not null
) without rowid;

create index duly_lane_used on duly_lane (used_at);

-- Of a task: its limits as its code says, and those that were set at run time and go before (0: none).
alter table duly_queue add column cap integer;
alter table duly_queue add column rate_count integer;
alter table duly_queue add column rate_ms integer;
alter table duly_queue add column set_cap integer;
alter table duly_queue add column set_rate_count integer;
alter table duly_queue add column set_rate_ms integer;
alter table duly_queue add column set_at integer;
alter table duly_queue add column set_by text;
alter table duly_queue add column set_why text;
-- Of a queue: how many jobs it takes, and how many it had when that was counted last; how much longer a job of one
-- priority less waits; which share of a claim retries may have while others wait.
alter table duly_queue add column max_depth integer;
alter table duly_queue add column depth integer;
alter table duly_queue add column depth_at integer;
alter table duly_queue add column ageing_ms integer;
alter table duly_queue add column retry_share real;

-- For people: the gate before which each live job stands, and a word about it. `duly why` tells more, and of all gates.
-- What bears on a job is looked up by indexes; the cost of a row does not grow with the tables.
create view duly_why as
with looked as (
    select job.id, job.task, job.queue, job.state, job.worker, job.parked_version, job.reason, job.attempt, job.suspect,
           job.expires_at, job.due_at, job.lane, clock.now,
           strftime('%Y-%m-%d %H:%M:%S UTC', lease_until / 1000, 'unixepoch') as lease_ends,
           strftime('%Y-%m-%d %H:%M:%S UTC', expires_at / 1000, 'unixepoch') as expires,
           strftime('%Y-%m-%d %H:%M:%S UTC', due_at / 1000, 'unixepoch') as due,
           queue_gate.paused_by as queue_paused_by, coalesce(': ' || queue_gate.paused_why, '') as queue_paused_why,
           task_gate.paused_by as task_paused_by, coalesce(': ' || task_gate.paused_why, '') as task_paused_why,
           nullif(coalesce(limits.set_cap, limits.cap), 0) as cap,
           nullif(coalesce(limits.set_rate_count, limits.rate_count), 0) as rate_count,
           coalesce(limits.set_rate_ms, limits.rate_ms) as rate_ms,
           exists (select 1 from duly_worker where seen_at > now - 3 * beat_ms) as is_anybody_here,
           exists (select 1 from duly_worker
                    where seen_at > now - 3 * beat_ms
                      and exists (select 1 from json_each(tasks) where value = job.task)
                      and exists (select 1 from json_each(queues) where value = job.queue)) as is_known,
           (select count(*) from duly_job as mate
             where mate.lane = job.lane and mate.token is not null) as running,
           (select coalesce(sum(value ->> 1), 0)
              from duly_lane
             cross join json_each(permits)
             where duly_lane.name = job.lane
               and value ->> 0 > now - coalesce(limits.set_rate_ms, limits.rate_ms) - 250) as permitted,
           (select mate.id from duly_job as mate
             where mate.lane = job.lane and mate.seq is not null
             order by mate.seq
             limit 1) as head_id,
           (select dead.id from duly_done as dead
             where dead.lane = job.lane and dead.state = 'dead' and dead.ordering_dead = 'block'
               and dead.replayed_as is null and dead.resolved_at is null and dead.seq < job.seq
             order by dead.seq
             limit 1) as blocked_by
      from duly_job as job
     cross join (select cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) as now) as clock
      left join duly_queue as queue_gate
        on queue_gate.kind = 'queue' and queue_gate.name = job.queue and queue_gate.paused_at is not null
       and (queue_gate.paused_until is null or queue_gate.paused_until > clock.now)
      left join duly_queue as task_gate
        on task_gate.kind = 'task' and task_gate.name = job.task and task_gate.paused_at is not null
       and (task_gate.paused_until is null or task_gate.paused_until > clock.now)
      left join duly_queue as limits
        on limits.kind = 'task' and limits.name = job.task and job.lane is not null
),
judged as (
    select id, task, queue, state,
           case when state = 'running' then json_array('lease', coalesce(worker, '-') || ' has it until ' || lease_ends)
                when parked_version is not null then json_array('parked', substr(reason, 9))
                when state = 'waiting' and substr(reason, 1, 6) = 'held: ' then json_array('held', substr(reason, 7))
                when state = 'waiting' then json_array('waiting', 'for: ' || coalesce(reason, 'something outside'))
                when attempt = 0 and expires_at <= now then json_array('expired', 'it was to start by ' || expires)
                when due_at > now then json_array('not_due', 'before ' || due)
                when queue_paused_by is not null
                then json_array('paused', 'the queue, by ' || queue_paused_by || queue_paused_why)
                when task_paused_by is not null
                then json_array('paused', 'the task, by ' || task_paused_by || task_paused_why)
                when not is_anybody_here then json_array('no_worker', 'no worker is alive')
                when not is_known then json_array('unknown_task', 'no living worker knows it and serves its queue')
                when suspect then json_array('suspect', 'it waits to run alone')
                when blocked_by is not null then json_array('order', 'job ' || blocked_by || ' is dead and blocks it')
                when head_id <> id then json_array('order', 'job ' || head_id || ' comes first')
                when head_id is not null and running > 0 then json_array('order', 'another job of its lane runs')
                when running >= cap then json_array('cap', running || ' of ' || cap || ' run')
                when permitted >= rate_count
                then json_array('rate', permitted || ' of ' || rate_count || ' have begun within ' || rate_ms || ' ms')
                else json_array('turn', 'in ' || coalesce('lane ' || lane, 'queue ' || queue)) end as said
      from looked
)
select id, task, queue, state, said ->> 0 as gate, said ->> 1 as detail
  from judged;

update duly_meta set value = '4' where name = 'schema';
