-- Requests that were accepted, and are delivered later. Whether an attempt is under way, the record of the same id says.
--
-- Gates that run on the older schema know nothing of it.

CREATE TABLE oncegate.delivery (
    id bytea PRIMARY KEY,
    -- Names this delivery: a request that is accepted again later has another.
    token bytea NOT NULL,
    -- The order of acceptance.
    sequence bigint GENERATED ALWAYS AS IDENTITY,
    origin bigint NOT NULL,
    -- Of its caller's scope.
    lane bigint NOT NULL,
    -- Milliseconds since 1970 by this server's clock.
    accepted_at bigint NOT NULL,
    -- When it was accepted, or queued again.
    queued_at bigint NOT NULL,
    due bigint NOT NULL,
    -- When it expires, where it was given up.
    dead_until bigint,
    -- How many attempts ended in a release.
    attempts int NOT NULL DEFAULT 0,
    -- Encrypted where the gate has keys, these four.
    head bytea NOT NULL,
    request bytea NOT NULL,
    body bytea NOT NULL,
    note bytea
) WITH (
    -- Rows come and go.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.1
);

CREATE INDEX delivery_due ON oncegate.delivery (origin, due) WHERE dead_until IS NULL;
CREATE INDEX delivery_lane ON oncegate.delivery (origin, lane, sequence) WHERE dead_until IS NULL;
CREATE INDEX delivery_dead ON oncegate.delivery (dead_until) WHERE dead_until IS NOT NULL;
CREATE UNIQUE INDEX delivery_sequence ON oncegate.delivery (sequence);

-- The routes whose deliveries an operator holds back.
CREATE TABLE oncegate.paused (
    origin bigint PRIMARY KEY
);

-- Keeps requests, each id once, in order. For each: 0 where it is kept under its token, 1 where another is, 2 where there is a
-- record of its id.
CREATE FUNCTION oncegate.accept_v1(
    ids bytea[], tokens bytea[], origins bigint[], lanes bigint[], heads bytea[], requests bytea[], bodies bytea[]
)
RETURNS TABLE (id bytea, found smallint)
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
    kept bytea[];
BEGIN
    PERFORM oncegate.durably_v1();
    WITH inserted AS (
        INSERT INTO oncegate.delivery AS d (id, token, origin, lane, accepted_at, queued_at, due, head, request, body)
        SELECT a.id, a.token, a.origin, a.lane, at, at, at, a.head, a.request, a.body
        FROM unnest(ids, tokens, origins, lanes, heads, requests, bodies)
            AS a (id, token, origin, lane, head, request, body)
        ON CONFLICT (id) DO NOTHING
        RETURNING d.id
    )
    SELECT coalesce(array_agg(i.id), '{}') INTO kept FROM inserted i;
    IF cardinality(kept) = 0 THEN
        -- What stands may be on this server's disk only.
        PERFORM oncegate.flush_v1();
    END IF;
    -- In a statement of its own, which sees what was committed meanwhile: a delivery is removed after its record has its
    -- end, so that the record of one that was there when this began is there now.
    DELETE FROM oncegate.delivery d
    WHERE d.id = ANY (kept) AND EXISTS (
        SELECT FROM oncegate.record r
        WHERE r.id = ANY (ARRAY[d.id]) AND (r.state + 0 = 0 OR r.expires_at > at) OFFSET 0
    );
    RETURN QUERY
    SELECT a.id, CASE
        WHEN EXISTS (
            SELECT FROM oncegate.record r
            WHERE r.id = ANY (ARRAY[a.id]) AND (r.state + 0 = 0 OR r.expires_at > at) OFFSET 0
        ) THEN 2::smallint
        WHEN (SELECT d.token FROM oncegate.delivery d WHERE d.id = ANY (ARRAY[a.id]) OFFSET 0) = a.token THEN 0::smallint
        ELSE 1::smallint
    END
    FROM unnest(ids, tokens) AS a (id, token);
END $$;

-- Changes a delivery that was taken: 0 removes it, 1 puts it off, 2 gives it up. Whether it was still to be changed.
CREATE FUNCTION oncegate.change_delivery_v1(
    of_id bytea, of_token bytea, held_until bigint, kind smallint, span bigint, is_attempt boolean, new_note bytea
)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    PERFORM oncegate.durably_v1();
    IF kind = 0 THEN
        DELETE FROM oncegate.delivery d WHERE d.id = of_id AND d.token = of_token;
    ELSIF kind = 1 THEN
        UPDATE oncegate.delivery d SET due = oncegate.after_v1(at, span), attempts = d.attempts + is_attempt::int,
            note = coalesce(new_note, d.note)
        WHERE d.id = of_id AND d.token = of_token AND d.due = held_until AND d.dead_until IS NULL;
    ELSE
        UPDATE oncegate.delivery d SET dead_until = oncegate.after_v1(at, span), attempts = d.attempts + is_attempt::int,
            note = new_note
        WHERE d.id = of_id AND d.token = of_token AND d.due = held_until AND d.dead_until IS NULL;
    END IF;
    RETURN FOUND;
END $$;

-- Makes a dead delivery due now. Whether there is one.
CREATE FUNCTION oncegate.requeue_delivery_v1(of_id bytea)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    PERFORM oncegate.durably_v1();
    UPDATE oncegate.delivery d SET queued_at = at, due = at, dead_until = NULL, attempts = 0, note = NULL
    WHERE d.id = of_id AND d.dead_until IS NOT NULL;
    RETURN FOUND;
END $$;

-- Removes a delivery, whatever its state. Whether there was one.
CREATE FUNCTION oncegate.discard_delivery_v1(of_id bytea)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    DELETE FROM oncegate.delivery d WHERE d.id = of_id;
    RETURN FOUND;
END $$;

-- Holds back the deliveries of a route, or lets them go. Whether that is a change.
CREATE FUNCTION oncegate.pause_v1(of_origin bigint, is_paused boolean)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    IF is_paused THEN
        INSERT INTO oncegate.paused AS p (origin) VALUES (of_origin) ON CONFLICT (origin) DO NOTHING;
    ELSE
        DELETE FROM oncegate.paused p WHERE p.origin = of_origin;
    END IF;
    RETURN FOUND;
END $$;

-- Removes up to so many dead deliveries that have expired, except those that others hold. How many.
CREATE FUNCTION oncegate.sweep_deliveries_v1(most bigint)
RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at bigint := oncegate.now_v1();
    swept bigint;
BEGIN
    DELETE FROM oncegate.delivery d
    WHERE d.id = ANY (ARRAY(
        SELECT e.id FROM oncegate.delivery e WHERE e.dead_until <= at
        ORDER BY e.dead_until LIMIT most FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS swept = ROW_COUNT;
    RETURN swept;
END $$;

REVOKE ALL ON oncegate.delivery, oncegate.paused FROM PUBLIC;
REVOKE ALL ON FUNCTION oncegate.accept_v1, oncegate.change_delivery_v1, oncegate.requeue_delivery_v1,
    oncegate.discard_delivery_v1, oncegate.pause_v1, oncegate.sweep_deliveries_v1 FROM PUBLIC;
