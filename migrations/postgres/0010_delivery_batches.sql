-- Takes and changes of many accepted requests at once, and of their keys.
--
-- Gates that run on the older schema change one at a time.

-- Without jit: the planner expects much of a long queue, and compiling takes far longer than to look at a few rows.
--
-- Takes due deliveries of a route, and holds them: nobody else takes them meanwhile. Where more is due than fits, one half
-- goes by age, and the other half goes round the lanes, from the one after `after_lane` on; what few lanes leave goes by age
-- too. The last row has no id: it says whether there may be more, after which lane to go on, and when the next is due.
--
-- What is taken is found by its id: `+ 0` keeps the planner from reading an index of the whole queue besides.
CREATE OR REPLACE FUNCTION oncegate.take_due_v1(
    of_origin bigint, most bigint, most_bytes bigint, hold bigint, is_ordered boolean, after_lane bigint
)
RETURNS TABLE (
    id bytea, token bytea, sequence bigint, lane bigint, accepted_at bigint, queued_at bigint, due bigint, attempts int,
    head bytea, note bytea, request bytea, body bytea, now bigint, is_more boolean, last_lane bigint, next_due bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
    lowest constant bigint := -9223372036854775808;
    candidates bigint := CASE WHEN is_ordered THEN 4 * most ELSE most END;
    seen bigint;
    by_age bytea[];
    chosen bytea[];
    fitting bytea[];
    found bytea;
    at_lane bigint := coalesce(after_lane, lowest);
    next_lane bigint;
    has_wrapped boolean := at_lane = lowest;
    is_crowded boolean;
BEGIN
    IF EXISTS (SELECT FROM oncegate.paused p WHERE p.origin = of_origin) THEN
        RETURN;
    END IF;
    SELECT count(*), coalesce(array_agg(d.id ORDER BY d.due, d.sequence) FILTER (WHERE NOT is_ordered OR NOT EXISTS (
        SELECT FROM oncegate.delivery e
        WHERE e.origin = of_origin AND e.lane = d.lane AND e.dead_until IS NULL AND e.sequence < d.sequence
    )), '{}')
    INTO seen, by_age
    FROM (
        SELECT d.id, d.due, d.lane, d.sequence FROM oncegate.delivery d
        WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due <= at
        ORDER BY d.due LIMIT candidates
    ) d;
    is_crowded := seen >= candidates;
    IF NOT is_crowded THEN
        chosen := by_age[1:most];
    ELSE
        chosen := by_age[1:(most + 1) / 2];
        FOR step IN 1..64 LOOP
            EXIT WHEN cardinality(chosen) >= most;
            SELECT d.lane INTO next_lane FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.lane > at_lane
            ORDER BY d.lane LIMIT 1;
            IF next_lane IS NULL THEN
                EXIT WHEN has_wrapped;
                has_wrapped := true;
                at_lane := lowest;
                CONTINUE;
            END IF;
            at_lane := next_lane;
            SELECT e.id INTO found FROM (
                SELECT d.id, d.due, d.sequence FROM oncegate.delivery d
                WHERE d.origin = of_origin AND d.lane = at_lane AND d.dead_until IS NULL
                ORDER BY d.sequence LIMIT CASE WHEN is_ordered THEN 1 ELSE 16 END
            ) e WHERE e.due <= at AND e.id <> ALL (chosen) ORDER BY e.sequence LIMIT 1;
            IF found IS NOT NULL THEN
                chosen := chosen || found;
            END IF;
        END LOOP;
        FOREACH found IN ARRAY by_age LOOP
            EXIT WHEN cardinality(chosen) >= most;
            IF found <> ALL (chosen) THEN
                chosen := chosen || found;
            END IF;
        END LOOP;
    END IF;
    SELECT coalesce(array_agg(s.id), '{}') INTO fitting FROM (
        SELECT d.id, sum(octet_length(d.body) + octet_length(d.request)) OVER (ORDER BY d.due, d.sequence)
            - octet_length(d.body) - octet_length(d.request) AS before
        FROM oncegate.delivery d WHERE d.id = ANY (chosen)
    ) s WHERE s.before < most_bytes;
    is_crowded := is_crowded OR cardinality(fitting) < cardinality(chosen);
    RETURN QUERY
    WITH free AS MATERIALIZED (
        SELECT d.id FROM oncegate.delivery d
        WHERE d.id = ANY (fitting) AND d.dead_until + 0 IS NULL AND d.due + 0 <= at
        FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE oncegate.delivery d SET due = oncegate.after_v1(at, hold)
        WHERE d.id = ANY (ARRAY(SELECT f.id FROM free f))
        RETURNING d.*
    )
    SELECT t.id, t.token, t.sequence, t.lane, t.accepted_at, t.queued_at, t.due, t.attempts, t.head, t.note, t.request,
        t.body, at, is_crowded, at_lane, NULL::bigint
    FROM taken t;
    RETURN QUERY
    SELECT NULL::bytea, NULL::bytea, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::int,
        NULL::bytea, NULL::bytea, NULL::bytea, NULL::bytea, at, is_crowded, at_lane, (
            SELECT d.due FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due > at ORDER BY d.due LIMIT 1
        );
END $$;

-- Removes deliveries whose records have their ends, in order. Those that were there.
CREATE FUNCTION oncegate.finish_deliveries_v1(ids bytea[], tokens bytea[])
RETURNS SETOF bytea
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    RETURN QUERY
    DELETE FROM oncegate.delivery d USING unnest(ids, tokens) AS f (id, token)
    WHERE d.id = f.id AND d.token = f.token
    RETURNING d.id;
END $$;

-- Puts other values in the place of those of a delivery, if its note is still what was seen: the same, encrypted with another
-- key. Whether that was so.
CREATE FUNCTION oncegate.reseal_delivery_v1(
    wanted bytea, seen_token bytea, seen_note bytea, new_head bytea, new_request bytea, new_body bytea, new_note bytea
)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    UPDATE oncegate.delivery d SET head = new_head, request = new_request, body = new_body, note = new_note
    WHERE d.id = wanted AND d.token = seen_token AND d.note IS NOT DISTINCT FROM seen_note;
    RETURN FOUND;
END $$;

REVOKE ALL ON FUNCTION oncegate.take_due_v1, oncegate.finish_deliveries_v1, oncegate.reseal_delivery_v1 FROM PUBLIC;
