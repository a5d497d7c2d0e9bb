-- What tells this store from all others, and what gates that share it have in common and nobody else knows: what a gate keeps
-- of its records elsewhere is named by the one and authenticated with the other. A copy of the database has the same, for it
-- has the same records.

CREATE TABLE oncegate.store (
    id bytea NOT NULL CHECK (length(id) = 16),
    secret bytea NOT NULL CHECK (length(secret) = 32),
    -- There is one row.
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one)
);

INSERT INTO oncegate.store (id, secret) VALUES (
    uuid_send(gen_random_uuid()),
    sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()))
);

-- Both, and the time.
CREATE FUNCTION oncegate.store_v1(OUT id bytea, OUT secret bytea, OUT at bigint)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.id, s.secret, oncegate.now_v1() FROM oncegate.store s
$$;
