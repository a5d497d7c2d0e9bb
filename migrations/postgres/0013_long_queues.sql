-- Takes what is due in the same time whatever the queue's length, also where the server's statistics say that it is empty.
--
-- Gates that run on the older schema take by the same function.

-- As before, but each of its statements has one index that gives its order, and all others would have to sort: a plan that was
-- made for an empty queue is the plan for a long one. `lane >= x AND lane <= x` is `lane = x` in words that keep `lane` in the
-- order: without it, the planner may read the queue in order of acceptance to find a lane. The lanes of a round are found by
-- one statement.
CREATE OR REPLACE FUNCTION oncegate.take_due_v1(
    of_origin bigint, most bigint, most_bytes bigint, hold bigint, is_ordered boolean, after_lane bigint
)
RETURNS TABLE (
    id bytea, token bytea, sequence bigint, lane bigint, accepted_at bigint, queued_at bigint, due bigint, attempts int,
    head bytea, note bytea, request bytea, body bytea, now bigint, is_more boolean, last_lane bigint, next_due bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_incremental_sort = off
SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
    lowest constant bigint := -9223372036854775808;
    candidates bigint := CASE WHEN is_ordered THEN 4 * most ELSE most END;
    depth constant bigint := CASE WHEN is_ordered THEN 1 ELSE 16 END;
    seen bigint;
    by_age bytea[];
    chosen bytea[];
    fitting bytea[];
    of_lanes bytea[];
    at_lane bigint := coalesce(after_lane, lowest);
    next_lane bigint;
    has_wrapped boolean := at_lane = lowest;
    lanes_left bigint := 64;
    room bigint;
    is_crowded boolean;
BEGIN
    IF EXISTS (SELECT FROM oncegate.paused p WHERE p.origin = of_origin) THEN
        RETURN;
    END IF;
    SELECT count(*), coalesce(array_agg(d.id ORDER BY d.due, d.sequence) FILTER (WHERE NOT is_ordered OR d.sequence = (
        SELECT e.sequence FROM oncegate.delivery e
        WHERE e.origin = of_origin AND e.lane >= d.lane AND e.lane <= d.lane AND e.dead_until IS NULL
        ORDER BY e.lane, e.sequence LIMIT 1
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
        WHILE lanes_left > 0 AND cardinality(chosen) < most LOOP
            room := least(lanes_left, most - cardinality(chosen));
            WITH RECURSIVE visited (lane) AS (
                SELECT at_lane
                UNION ALL
                SELECT (
                    SELECT d.lane FROM oncegate.delivery d
                    WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.lane > v.lane
                    ORDER BY d.lane, d.sequence LIMIT 1
                )
                FROM visited v WHERE v.lane IS NOT NULL
            )
            SELECT count(*), max(f.lane), coalesce(array_agg(f.id) FILTER (WHERE f.id IS NOT NULL), '{}')
            INTO seen, next_lane, of_lanes
            FROM (
                SELECT v.lane, (
                    SELECT e.id FROM (
                        SELECT d.id, d.due, d.lane, d.sequence FROM oncegate.delivery d
                        WHERE d.origin = of_origin AND d.lane >= v.lane AND d.lane <= v.lane AND d.dead_until IS NULL
                        ORDER BY d.lane, d.sequence LIMIT depth
                    ) e
                    WHERE e.due <= at AND e.id <> ALL (chosen) ORDER BY e.lane, e.sequence LIMIT 1
                ) AS id
                FROM (SELECT lane FROM visited OFFSET 1 LIMIT room) v
                WHERE v.lane IS NOT NULL
            ) f;
            chosen := chosen || of_lanes;
            lanes_left := lanes_left - seen;
            at_lane := coalesce(next_lane, at_lane);
            IF seen < room THEN
                EXIT WHEN has_wrapped;
                has_wrapped := true;
                at_lane := lowest;
            END IF;
        END LOOP;
        chosen := chosen || ARRAY(
            SELECT a.id FROM unnest(by_age) WITH ORDINALITY AS a (id, place)
            WHERE a.id <> ALL (chosen) ORDER BY a.place LIMIT most - cardinality(chosen)
        );
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

-- As before, but `+ 0` keeps the planner from the indexes of the whole queue: one delivery is found by its id.
CREATE OR REPLACE FUNCTION oncegate.change_delivery_v1(
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
        WHERE d.id = of_id AND d.token = of_token AND d.due + 0 = held_until AND d.dead_until + 0 IS NULL;
    ELSE
        UPDATE oncegate.delivery d SET dead_until = oncegate.after_v1(at, span), attempts = d.attempts + is_attempt::int,
            note = new_note
        WHERE d.id = of_id AND d.token = of_token AND d.due + 0 = held_until AND d.dead_until + 0 IS NULL;
    END IF;
    RETURN FOUND;
END $$;

-- As before, in the same way.
CREATE OR REPLACE FUNCTION oncegate.requeue_delivery_v1(of_id bytea)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    PERFORM oncegate.durably_v1();
    UPDATE oncegate.delivery d SET queued_at = at, due = at, dead_until = NULL, attempts = 0, note = NULL
    WHERE d.id = of_id AND d.dead_until + 0 IS NOT NULL;
    RETURN FOUND;
END $$;
