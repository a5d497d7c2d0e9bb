-- Ends the delivery of a request that was given up, where its upstream completes it late. Until now it stayed in the list of dead
-- requests, and its status was `dead` again once the record had expired.

-- Completes the record of an attempt with an answer, as part of the caller's transaction: retries get this answer once
-- that has committed, and the first client too, whatever the upstream says to it. Raises where the attempt is not
-- current, so that what else the transaction did is undone. An attempt completes once: the second call raises.
CREATE OR REPLACE FUNCTION oncegate.complete(attempt text, status int, headers jsonb, body bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
SET enable_seqscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    token bytea := oncegate.token_v1('oncegate.complete', complete.attempt);
    stored bytea := oncegate.answer_v1('oncegate.complete', complete.status, complete.headers, complete.body);
    ended bytea;
    at bigint;
    began bigint;
    waits boolean;
BEGIN
    PERFORM oncegate.durably_v1();
    ended := oncegate.current_v1('oncegate.complete', token);
    at := oncegate.now_v1();
    UPDATE oncegate.record r
    SET state = 1, expires_at = CASE
            WHEN oncegate.after_v1(r.claimed_at, r.ttl) > at THEN oncegate.after_v1(r.claimed_at, r.ttl)
            ELSE oncegate.after_v1(at, r.ttl)
        END,
        answer = stored
    WHERE r.id = ended
    RETURNING r.is_awaited, r.claimed_at INTO waits, began;
    -- One that was accepted later is another request. One that is not dead is ended by the gate that delivers it.
    DELETE FROM oncegate.delivery d WHERE d.id = ended AND d.dead_until IS NOT NULL AND d.accepted_at <= began;
    -- PostgreSQL prepares no transaction that has notified somebody. Where it could prepare one, that is reason enough.
    IF waits OR current_setting('max_prepared_transactions')::int > 0 THEN
        PERFORM oncegate.tell_v1(ended);
    END IF;
END $$;
