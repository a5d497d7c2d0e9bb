-- Takes what is due so that each lane has its turn also where one delivery, or few bytes, are taken at a time.
--
-- Gates that run on the older schema go on with the older functions.

-- As before, but deliveries are taken by age and by lane in turn, one of each, up to so many and so many bytes. The caller says
-- which of the two goes first, as the last row said the last time: so both have their half also where each take gives one.
-- A lane whose delivery does not fit keeps its turn. Where lanes are in order, a lane waits while another of its first deliveries
-- is held or pauses: one that was dead may come back before it.
CREATE FUNCTION oncegate.take_due_v3(
    of_origin bigint, most bigint, most_bytes bigint, hold bigint, is_ordered boolean, before_lane bigint, is_lane_first boolean,
    from_due bigint, from_sequence bigint
)
RETURNS TABLE (
    id bytea, token bytea, sequence bigint, lane bigint, accepted_at bigint, queued_at bigint, due bigint, attempts int,
    head bytea, note bytea, request bytea, body bytea, now bigint, is_more boolean, last_lane bigint, next_due bigint,
    is_lane_next boolean
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
    highest constant bigint := 9223372036854775807;
    candidates bigint := CASE WHEN is_ordered THEN 4 * most ELSE most END;
    least_due bigint := coalesce(from_due, lowest);
    least_sequence bigint := CASE WHEN is_ordered THEN lowest ELSE coalesce(from_sequence, lowest) END;
    seen bigint;
    seen_due bigint;
    seen_sequence bigint;
    seen_bytes bigint;
    by_age bytea[];
    oldest_half bytea[];
    by_lane bytea[] := '{}';
    lanes bigint[] := '{}';
    chosen bytea[];
    found bytea[];
    found_lanes bigint[];
    places tid[];
    last_taken int;
    first_left int;
    at_lane bigint := coalesce(before_lane, highest);
    next_lane bigint;
    has_wrapped boolean := at_lane = highest;
    lanes_left bigint := 64;
    room bigint;
    has_rest boolean;
    is_crowded boolean;
BEGIN
    IF EXISTS (SELECT FROM oncegate.paused p WHERE p.origin = of_origin) THEN
        RETURN;
    END IF;
    IF is_ordered THEN
        WITH oldest AS MATERIALIZED (
            SELECT d.id, d.due, d.lane, d.sequence, octet_length(d.body) + octet_length(d.request) AS size
            FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due >= least_due AND d.due <= at
                AND d.held_until <= at
            ORDER BY d.due LIMIT candidates
        ), first AS MATERIALIZED (
            SELECT l.lane, (
                SELECT CASE WHEN max(greatest(f.due, f.held_until)) <= at THEN min(f.sequence) END
                FROM (
                    SELECT e.sequence, e.due, e.held_until FROM oncegate.delivery e
                    WHERE e.origin = of_origin AND e.lane >= l.lane AND e.lane <= l.lane AND e.dead_until IS NULL
                    ORDER BY e.lane, e.sequence LIMIT 16
                ) f
            ) AS sequence
            FROM (SELECT DISTINCT o.lane FROM oldest o) l
        ), judged AS MATERIALIZED (
            SELECT o.id, o.due, o.sequence, o.size, o.sequence IN (SELECT f.sequence FROM first f) AS is_first FROM oldest o
        )
        SELECT count(*), min(j.due), min(j.sequence), coalesce(sum(j.size) FILTER (WHERE j.is_first), 0),
            coalesce(array_agg(j.id ORDER BY j.due, j.sequence) FILTER (WHERE j.is_first), '{}')
        INTO seen, seen_due, seen_sequence, seen_bytes, by_age
        FROM judged j;
    ELSE
        SELECT count(*), min(d.due), min(d.sequence), coalesce(sum(d.size), 0),
            coalesce(array_agg(d.id ORDER BY d.due, d.sequence), '{}')
        INTO seen, seen_due, seen_sequence, seen_bytes, by_age
        FROM (
            SELECT d.id, d.due, d.sequence, octet_length(d.body) + octet_length(d.request) AS size FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due >= least_due AND d.due <= at
                AND d.held_until <= at
            ORDER BY d.due LIMIT candidates
        ) d;
    END IF;
    has_rest := seen >= candidates OR cardinality(by_age) > most;
    is_crowded := has_rest OR seen_bytes > most_bytes;
    IF NOT is_crowded THEN
        chosen := by_age;
    ELSE
        oldest_half := by_age[1:(least(most, cardinality(by_age)) + 1 - is_lane_first::int) / 2];
        WHILE lanes_left > 0 AND cardinality(oldest_half) + cardinality(by_lane) < most LOOP
            room := least(lanes_left, most - cardinality(oldest_half) - cardinality(by_lane));
            WITH RECURSIVE visited (lane) AS (
                SELECT at_lane
                UNION ALL
                SELECT (
                    SELECT d.lane FROM oncegate.delivery d
                    WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.lane < v.lane
                    ORDER BY d.lane DESC, d.sequence DESC LIMIT 1
                )
                FROM visited v WHERE v.lane IS NOT NULL
            )
            SELECT count(*), min(f.lane),
                coalesce(array_agg(f.id ORDER BY f.lane DESC) FILTER (WHERE f.id IS NOT NULL), '{}'),
                coalesce(array_agg(f.lane ORDER BY f.lane DESC) FILTER (WHERE f.id IS NOT NULL), '{}')
            INTO seen, next_lane, found, found_lanes
            FROM (
                SELECT v.lane, (
                    SELECT CASE
                        WHEN NOT is_ordered THEN (array_agg(e.id ORDER BY e.sequence) FILTER (WHERE e.is_free))[1]
                        WHEN bool_and(e.is_due) AND bool_and(e.is_free) THEN (array_agg(e.id ORDER BY e.sequence))[1]
                    END
                    FROM (
                        SELECT d.id, d.sequence, d.due <= at AND d.held_until <= at AS is_due,
                            d.due <= at AND d.held_until <= at AND d.id <> ALL (oldest_half) AND d.id <> ALL (by_lane) AS is_free
                        FROM oncegate.delivery d
                        WHERE d.origin = of_origin AND (d.lane, d.sequence) >= (v.lane, v.first) AND d.lane <= v.lane
                            AND d.dead_until IS NULL
                        ORDER BY d.lane, d.sequence LIMIT 16
                    ) e
                ) AS id
                FROM (
                    SELECT l.lane, coalesce((
                        SELECT least_sequence FROM oncegate.delivery d
                        WHERE d.origin = of_origin AND (d.lane, d.sequence) >= (l.lane, least_sequence) AND d.lane <= l.lane
                            AND d.dead_until IS NULL
                        ORDER BY d.lane, d.sequence LIMIT 1
                    ), lowest) AS first
                    FROM (SELECT lane FROM visited OFFSET 1 LIMIT room) l
                    WHERE l.lane IS NOT NULL OFFSET 0
                ) v
            ) f;
            by_lane := by_lane || found;
            lanes := lanes || found_lanes;
            lanes_left := lanes_left - seen;
            at_lane := coalesce(next_lane, at_lane);
            IF seen < room THEN
                EXIT WHEN has_wrapped;
                has_wrapped := true;
                at_lane := highest;
            END IF;
        END LOOP;
        chosen := ARRAY(
            SELECT c.id FROM (
                SELECT a.id, 2 * a.place + is_lane_first::int AS turn
                FROM unnest(oldest_half) WITH ORDINALITY AS a (id, place)
                UNION ALL
                SELECT l.id, 2 * l.place + 1 - is_lane_first::int FROM unnest(by_lane) WITH ORDINALITY AS l (id, place)
            ) c ORDER BY c.turn
        );
        -- Where there are few lanes.
        chosen := chosen || ARRAY(
            SELECT a.id FROM unnest(by_age) WITH ORDINALITY AS a (id, place)
            WHERE a.id <> ALL (chosen) ORDER BY a.place LIMIT most - cardinality(chosen)
        );
    END IF;
    WITH free AS MATERIALIZED (
        SELECT d.ctid AS place, array_position(chosen, d.id) AS turn, octet_length(d.body) + octet_length(d.request) AS size
        FROM oncegate.delivery d
        WHERE d.id = ANY (chosen) AND d.dead_until + 0 IS NULL AND d.due + 0 <= at AND d.held_until <= at
        FOR UPDATE SKIP LOCKED
    )
    SELECT coalesce(array_agg(s.place) FILTER (WHERE s.before < most_bytes), '{}'),
        max(s.turn) FILTER (WHERE s.before < most_bytes), min(s.turn) FILTER (WHERE s.before >= most_bytes)
    INTO places, last_taken, first_left
    FROM (SELECT f.place, f.turn, sum(f.size) OVER (ORDER BY f.turn) - f.size AS before FROM free f) s;
    IF first_left IS NOT NULL THEN
        at_lane := coalesce(
            lanes[(SELECT count(*)::int FROM unnest(by_lane) AS l (id) WHERE l.id = ANY (chosen[1:first_left - 1]))],
            before_lane, highest
        );
    END IF;
    RETURN QUERY
    UPDATE oncegate.delivery d SET held_until = oncegate.after_v1(at, hold)
    WHERE d.ctid = ANY (places)
    RETURNING d.id, d.token, d.sequence, d.lane, d.accepted_at, d.queued_at, d.held_until, d.attempts, d.head, d.note,
        d.request, d.body, at, false, at_lane, NULL::bigint, false;
    GET DIAGNOSTICS seen = ROW_COUNT;
    RETURN QUERY
    SELECT NULL::bytea, NULL::bytea, seen_sequence, NULL::bigint, NULL::bigint, NULL::bigint, seen_due, NULL::int,
        NULL::bytea, NULL::bytea, NULL::bytea, NULL::bytea, at, has_rest OR seen < cardinality(chosen), at_lane, (
            SELECT d.due FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due > at ORDER BY d.due LIMIT 1
        ), CASE WHEN is_crowded AND last_taken IS NOT NULL THEN chosen[last_taken] <> ALL (by_lane) ELSE is_lane_first END;
END $$;

-- As before, by what is above.
CREATE OR REPLACE FUNCTION oncegate.take_due_v2(
    of_origin bigint, most bigint, most_bytes bigint, hold bigint, is_ordered boolean, before_lane bigint, from_due bigint,
    from_sequence bigint
)
RETURNS TABLE (
    id bytea, token bytea, sequence bigint, lane bigint, accepted_at bigint, queued_at bigint, due bigint, attempts int,
    head bytea, note bytea, request bytea, body bytea, now bigint, is_more boolean, last_lane bigint, next_due bigint
)
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.id, t.token, t.sequence, t.lane, t.accepted_at, t.queued_at, t.due, t.attempts, t.head, t.note, t.request, t.body,
        t.now, t.is_more, t.last_lane, t.next_due
    FROM oncegate.take_due_v3(of_origin, most, most_bytes, hold, is_ordered, before_lane, false, from_due, from_sequence) t
$$;

REVOKE ALL ON FUNCTION oncegate.take_due_v3 FROM PUBLIC;

-- Who runs the older function runs this one now.
DO $$
DECLARE
    grantee name;
BEGIN
    FOR grantee IN
        SELECT r.rolname FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) a JOIN pg_roles r ON r.oid = a.grantee
        WHERE p.oid = 'oncegate.take_due_v2'::regproc AND a.privilege_type = 'EXECUTE'
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION oncegate.take_due_v3 TO %I', grantee);
    END LOOP;
END $$;
