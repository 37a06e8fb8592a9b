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

-- The call that debounced last under the key, so that it is known when it asks again.
alter table duly_key add column debounced_by text;

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

update duly_meta set value = '4' where name = 'schema';
