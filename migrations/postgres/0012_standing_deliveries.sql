-- What became of an accepted request stays for as long as its delivery stands. Where a gate died before it removed the delivery,
-- whoever takes the delivery next finds that the request has run.
--
-- Gates that run on the older schema sweep by the same function.

-- Removes records that expired after `begin`, the first to expire first, and gives how many, and when the last one did.
CREATE OR REPLACE FUNCTION oncegate.sweep_v1(begin bigint, most bigint, OUT swept bigint, OUT reached bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    WITH gone AS (
        DELETE FROM oncegate.record r
        WHERE r.id = ANY (ARRAY(
            SELECT e.id FROM oncegate.record e
            WHERE e.state <> 0 AND e.expires_at >= begin AND e.expires_at <= at
                AND NOT EXISTS (SELECT FROM oncegate.delivery d WHERE d.id = e.id OFFSET 0)
            ORDER BY e.expires_at LIMIT most FOR UPDATE OF e SKIP LOCKED
        ))
        RETURNING r.expires_at
    )
    SELECT count(*), max(expires_at) INTO swept, reached FROM gone;
END $$;
