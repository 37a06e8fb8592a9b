-- Deletes expired rows in bounded chunks, on PostgreSQL. Each section returns one row for each deleted one, so that the
-- caller knows whether to repeat it. Dead jobs are never pruned. Several workers may prune at once: each skips rows
-- that another has locked.

-- name: prune_results
with clock as materialized (select :now as now)
update duly.duly_done
   set result = null, prune_at = finished_at + keep_ms
 where id = any (array(
       select id from duly.duly_done
        where prune_at <= (select now from clock) and finished_at + keep_ms > (select now from clock)
        order by prune_at
        limit :limit::int
          for update skip locked))
returning id::text;

-- name: prune_done
with clock as materialized (select :now as now),
gone as (
    delete from duly.duly_done
     where id = any (array(
           select id from duly.duly_done
            where prune_at <= (select now from clock) and finished_at + keep_ms <= (select now from clock)
            order by prune_at, id
            limit :limit::int
              for update skip locked))
    returning id
),
attempts_gone as (
    delete from duly.duly_attempt where job_id = any (array(select id from gone))
),
steps_gone as (
    delete from duly.duly_step where job_id = any (array(select id from gone))
)
select id::text from gone;

-- name: prune_keys
-- Found by the physical row, which the lock keeps: a join by two columns may be planned as a walk over all keys.
delete from duly.duly_key
 where ctid = any (array(
       select ctid from duly.duly_key
        where expires_at <= (select :now)
        order by expires_at
        limit :limit::int
          for update skip locked))
returning key;

-- name: prune_events
delete from duly.duly_event
 where id = any (array(
       select id from duly.duly_event
        where at <= (select :now) - :keep_ms::bigint
        order by at
        limit :limit::int
          for update skip locked))
returning id;

-- name: prune_fires
delete from duly.duly_fire
 where ctid = any (array(
       select ctid from duly.duly_fire
        where at <= (select :now) - :keep_ms::bigint
        order by at
        limit :limit::int
          for update skip locked))
returning schedule;

-- name: prune_batches
delete from duly.duly_batch
 where id = any (array(
       select id from duly.duly_batch
        where open = 0 and completed_at <= (select :now) - :keep_ms::bigint
          and not exists (select 1 from duly.duly_done where batch_id = duly_batch.id)
        limit :limit::int
          for update skip locked))
returning id::text;

-- name: prune_workers
delete from duly.duly_worker
 where id = any (array(
       select id from duly.duly_worker
        where seen_at <= (select :now) - greatest(:keep_ms::bigint, 3 * beat_ms)
        limit :limit::int
          for update skip locked))
returning id;

-- name: prune_lanes
-- An idle lane is deleted; the next job creates it again. Its order starts over too, so it is kept while a dead job may
-- return to its place.
with clock as materialized (select :now as now),
rested as materialized (
    select name
      from duly.duly_lane
     cross join clock
     where used_at <= (select now from clock) - 3600000 and used_at <= now - 3600000 - coalesce(
           (select greatest(set_rate_ms, rate_ms) from duly.duly_queue
             where kind = 'task' and duly_queue.name = duly_lane.task), 0)
       and not exists (select 1 from duly.duly_job where duly_job.lane = duly_lane.name and seq is not null)
       and not exists (
           select 1 from duly.duly_done
            where duly_done.lane = duly_lane.name and state = 'dead' and ordering_dead = 'block'
              and replayed_as is null and resolved_at is null)
     order by used_at
     limit :limit::int
       for update of duly_lane skip locked
)
delete from duly.duly_lane
 where name = any (array(select name from rested))
returning name;

-- name: prunable
-- Counts the rows that each section above would delete. Counting and reading stop early. Differs from SQLite: with a
-- constant limit, the planner would read whole tables that were not analyzed yet.
with clock as materialized (select :now as now),
due as materialized (
    select finished_at + keep_ms <= (select now from clock) as is_whole
      from duly.duly_done
     where prune_at <= (select now from clock)
     order by prune_at
     limit (select 2 * :enough::int)
),
ended as materialized (
    select id
      from duly.duly_batch
     where open = 0 and completed_at <= (select now from clock) - :keep_ms::bigint
     order by completed_at
     limit (select :enough::int)
)
select least((select count(*) from due where not is_whole), :enough::int) as results,
       least((select count(*) from due where is_whole), :enough::int) as done,
       (select count(*) from (
        select 1 from duly.duly_key where expires_at <= (select now from clock)
         order by expires_at
         limit (select :enough::int)) as counted) as keys,
       (select count(*) from (
        select 1 from duly.duly_event where at <= (select now from clock) - :keep_ms::bigint
         order by at
         limit (select :enough::int)) as counted) as events,
       (select count(*) from (
        select 1 from duly.duly_fire where at <= (select now from clock) - :keep_ms::bigint
         order by at
         limit (select :enough::int)) as counted) as fires,
       (select count(*) from ended
         where (select id from duly.duly_done where batch_id = ended.id limit 1) is null) as batches,
       (select count(*) from (
        select 1 from duly.duly_worker where seen_at <= (select now from clock) - greatest(:keep_ms::bigint, 3 * beat_ms)
         limit (select :enough::int)) as counted) as workers,
       (select count(*) from (
        select 1 from duly.duly_lane
         where used_at <= (select now from clock) - 3600000
           and used_at <= (select now from clock) - 3600000 - coalesce(
               (select greatest(set_rate_ms, rate_ms) from duly.duly_queue
                 where kind = 'task' and duly_queue.name = duly_lane.task), 0)
           and not exists (select 1 from duly.duly_job where duly_job.lane = duly_lane.name and seq is not null)
           and not exists (
               select 1 from duly.duly_done
                where duly_done.lane = duly_lane.name and state = 'dead' and ordering_dead = 'block'
                  and replayed_as is null and resolved_at is null)
         order by used_at
         limit (select :enough::int)) as counted) as lanes;
