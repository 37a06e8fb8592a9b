-- Deletes expired rows in bounded chunks, on SQLite and D1. Each section returns one row for each deleted one, so that
-- the caller knows whether to repeat it. Dead jobs are never pruned.

-- name: prune_results
update duly_done
   set result = null, prune_at = finished_at + keep_ms
 where id in (
       select id from duly_done
        where prune_at <= :now and finished_at + keep_ms > :now
        order by prune_at
        limit :limit)
returning id;

-- name: prune_done
-- Marked first: the clock advances between statements, and a job that expires meanwhile would leave its attempts.
update duly_done
   set prune_at = -1
 where id in (
       select id from duly_done
        where prune_at <= :now and finished_at + keep_ms <= :now
        order by prune_at, id
        limit :limit);
delete from duly_attempt
 where job_id in (select id from duly_done where prune_at = -1);
delete from duly_step
 where job_id in (select id from duly_done where prune_at = -1);
delete from duly_done
 where prune_at = -1
returning id;

-- name: prune_keys
delete from duly_key
 where (task, key) in (
       select task, key from duly_key
        where expires_at <= :now
        order by expires_at
        limit :limit)
returning key;

-- name: prune_events
delete from duly_event
 where id in (
       select id from duly_event
        where at <= :now - :keep_ms
        order by at
        limit :limit)
returning id;

-- name: prune_fires
delete from duly_fire
 where (schedule, due_at) in (
       select schedule, due_at from duly_fire
        where at <= :now - :keep_ms
        order by at
        limit :limit)
returning schedule;

-- name: prune_batches
delete from duly_batch
 where id in (
       select id from duly_batch
        where open = 0 and completed_at <= :now - :keep_ms
          and not exists (select 1 from duly_done where batch_id = duly_batch.id)
        limit :limit)
returning id;

-- name: prune_workers
delete from duly_worker
 where id in (
       select id from duly_worker
        where seen_at <= :now - max(:keep_ms, 3 * beat_ms)
        limit :limit)
returning id;

-- name: prune_lanes
-- An idle lane is deleted; the next job creates it again. Its order starts over too, so it is kept while a dead job may
-- return to its place.
delete from duly_lane
 where name in (
       select name from duly_lane
        where used_at <= :now - 3600000 and used_at <= :now - 3600000 - coalesce(
              (select max(coalesce(set_rate_ms, 0), coalesce(rate_ms, 0)) from duly_queue
                where kind = 'task' and duly_queue.name = duly_lane.task), 0)
          and not exists (select 1 from duly_job where duly_job.lane = duly_lane.name and seq is not null)
          and not exists (
              select 1 from duly_done
               where duly_done.lane = duly_lane.name and state = 'dead' and ordering_dead = 'block'
                 and replayed_as is null and resolved_at is null)
        order by used_at
        limit :limit)
returning name;

-- name: prunable
-- Counts the rows that each section above would delete. Counting and reading stop early.
with due as materialized (
    select finished_at + keep_ms <= :now as is_whole
      from duly_done
     where prune_at <= :now
     order by prune_at
     limit 2 * :enough
),
ended as materialized (
    select id
      from duly_batch
     where open = 0 and completed_at <= :now - :keep_ms
     order by completed_at
     limit :enough
)
select min((select count(*) from due where not is_whole), :enough) as results,
       min((select count(*) from due where is_whole), :enough) as done,
       (select count(*) from (
        select 1 from duly_key where expires_at <= :now
         order by expires_at
         limit :enough)) as keys,
       (select count(*) from (
        select 1 from duly_event where at <= :now - :keep_ms
         order by at
         limit :enough)) as events,
       (select count(*) from (
        select 1 from duly_fire where at <= :now - :keep_ms
         order by at
         limit :enough)) as fires,
       (select count(*) from ended
         where (select id from duly_done where batch_id = ended.id limit 1) is null) as batches,
       (select count(*) from (
        select 1 from duly_worker where seen_at <= :now - max(:keep_ms, 3 * beat_ms)
         limit :enough)) as workers,
       (select count(*) from (
        select 1 from duly_lane
         where used_at <= :now - 3600000 and used_at <= :now - 3600000 - coalesce(
               (select max(coalesce(set_rate_ms, 0), coalesce(rate_ms, 0)) from duly_queue
                 where kind = 'task' and duly_queue.name = duly_lane.task), 0)
           and not exists (select 1 from duly_job where duly_job.lane = duly_lane.name and seq is not null)
           and not exists (
               select 1 from duly_done
                where duly_done.lane = duly_lane.name and state = 'dead' and ordering_dead = 'block'
                  and replayed_as is null and resolved_at is null)
         order by used_at
         limit :enough)) as lanes;
