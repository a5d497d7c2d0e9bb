-- Rows are appended in the order of their claims, so that claims and settles write the same few pages at the end of the
-- table; only the index of ids, which are hashes, is written at random places.
CREATE TABLE record (
    seq INTEGER PRIMARY KEY,
    id BLOB NOT NULL,                -- 32 bytes
    attempt BLOB NOT NULL,           -- 16 bytes
    state INTEGER NOT NULL,          -- 0 in flight, 1 completed, 2 unknown
    claimed_at INTEGER NOT NULL,     -- milliseconds since the Unix epoch
    until INTEGER NOT NULL,          -- end of the lease, or expiry
    unknown_ttl INTEGER NOT NULL,    -- milliseconds
    origin INTEGER NOT NULL,         -- origin.id
    head BLOB NOT NULL,
    answer BLOB                      -- last: reading the others does not follow its overflow pages
);
CREATE UNIQUE INDEX record_id ON record (id);

-- What the workers look for, in the order in which it falls due.
CREATE INDEX record_lease ON record (until) WHERE state = 0;
CREATE INDEX record_expiry ON record (until) WHERE state <> 0;

-- What operators look for: few among many.
CREATE INDEX record_unknown ON record (id) WHERE state = 2;

CREATE TABLE origin (
    id INTEGER PRIMARY KEY,
    service TEXT NOT NULL,
    namespace TEXT NOT NULL,
    route TEXT NOT NULL
);

CREATE TABLE identity (
    service TEXT NOT NULL,
    namespace TEXT NOT NULL,
    digest BLOB NOT NULL,            -- 32 bytes
    PRIMARY KEY (service, namespace)
) WITHOUT ROWID;

-- The latest time that this file has seen, to the second: time does not run back over a restart.
CREATE TABLE clock (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    at INTEGER NOT NULL
);
