-- What tells this store from all others: what a gate keeps of its records elsewhere is bound to it. A copy of the database
-- has the same, for it has the same records.

CREATE TABLE oncegate.store (
    id bytea NOT NULL CHECK (length(id) = 16),
    -- There is one row.
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one)
);

INSERT INTO oncegate.store (id) VALUES (uuid_send(gen_random_uuid()));

-- The id, and the time.
CREATE FUNCTION oncegate.store_v1(OUT id bytea, OUT at bigint)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.id, oncegate.now_v1() FROM oncegate.store s
$$;
