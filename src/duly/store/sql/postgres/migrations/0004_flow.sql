-- Flow: lanes (caps, rates, order), limits of queues and tasks, keys by a window. Jobs without a lane are found as before,
-- and never walk over those with one.

alter table duly.duly_job
    -- The lane of a job: its task, or its task and a key, in the order in which workers go round. `seq` is its place in a
    -- lane that keeps an order, and `ordering_dead` says whether its death holds up those behind it.
    add column lane text collate "C",
    add column seq bigint,
    add column ordering_dead text,
    -- Until when its key is kept, whatever becomes of it, instead of a time that counts from its end.
    add column key_until bigint,
    -- What was enqueued under its key while it ran and begins when it has ended: a whole job as JSON.
    add column next text;

drop index duly.duly_job_ready;
drop index duly.duly_job_scheduled;
create index duly_job_ready on duly.duly_job (queue, suspect, priority desc, due_at, id)
 where state = 'ready' and lane is null;
create index duly_job_scheduled on duly.duly_job (queue, due_at, id) where state = 'scheduled' and lane is null;
create index duly_job_lane_ready on duly.duly_job (queue, suspect, task, lane, priority desc, due_at, id)
 where state = 'ready' and lane is not null;
create index duly_job_lane_scheduled on duly.duly_job (queue, due_at, id) where state = 'scheduled' and lane is not null;
create index duly_job_lane_running on duly.duly_job (lane) where lane is not null and token is not null;
create index duly_job_seq on duly.duly_job (lane, seq) where seq is not null;

alter table duly.duly_done
    add column lane text collate "C",
    add column seq bigint,
    add column ordering_dead text,
    add column key_until bigint;

-- The call that debounced last under the key, so that it is known when it asks again.
alter table duly.duly_key
    add column debounced_by uuid;

create index duly_done_blocks on duly.duly_done (lane)
 where state = 'dead' and ordering_dead = 'block' and replayed_as is null and resolved_at is null;

-- A lane that was claimed from or enqueued to in order. `permits` are [[moment, jobs], …], those that still count
-- against its rate; `last_seq` was handed out last; `held_by` is the token of the claim that locked it.
create table duly.duly_lane (
    name text collate "C" not null primary key,
    task text not null,
    last_seq bigint not null default 0,
    permits text not null default '[]',
    held_by bigint,
    used_at bigint not null
);

create index duly_lane_used on duly.duly_lane (used_at);
alter table duly.duly_lane set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

alter table duly.duly_queue
    -- Of a task: its limits as its code says, and those that were set at run time and go before (0: none).
    add column cap integer check (cap > 0),
    add column rate_count integer check (rate_count > 0),
    add column rate_ms bigint check (rate_ms > 0),
    add column set_cap integer check (set_cap >= 0),
    add column set_rate_count integer check (set_rate_count >= 0),
    add column set_rate_ms bigint check (set_rate_ms >= 0),
    add column set_at bigint,
    add column set_by text,
    add column set_why text,
    -- Of a queue: how many jobs it takes, and how many it had when that was counted last; how much longer a job of one
    -- priority less waits; which share of a claim retries may have while others wait.
    add column max_depth bigint check (max_depth >= 0),
    add column depth bigint,
    add column depth_at bigint,
    add column ageing_ms bigint check (ageing_ms >= 0),
    add column retry_share double precision check (retry_share between 0 and 1);

update duly.duly_meta set value = '4' where name = 'schema';
