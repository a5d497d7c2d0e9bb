-- Requests that were accepted, and are delivered later. Whether an attempt is under way, the record of the same id says.
CREATE TABLE delivery (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of acceptance
    id BLOB NOT NULL UNIQUE,
    token BLOB NOT NULL,                        -- names this delivery: one that is accepted again later has another
    origin INTEGER NOT NULL,
    lane INTEGER NOT NULL,                      -- of its caller's scope
    accepted_at INTEGER NOT NULL,               -- milliseconds since the Unix epoch
    queued_at INTEGER NOT NULL,                 -- when it was accepted, or queued again
    due INTEGER NOT NULL,
    dead_until INTEGER,                         -- when it expires, where it was given up
    attempts INTEGER NOT NULL DEFAULT 0,        -- how many ended in a release
    head BLOB NOT NULL,                         -- encrypted where the gate has keys, and so are those that follow
    request BLOB NOT NULL,
    body BLOB NOT NULL,
    note BLOB
);

CREATE INDEX delivery_due ON delivery (origin, due) WHERE dead_until IS NULL;
CREATE INDEX delivery_lane ON delivery (origin, lane, sequence) WHERE dead_until IS NULL;
CREATE INDEX delivery_dead ON delivery (dead_until) WHERE dead_until IS NOT NULL;

-- The routes whose deliveries an operator holds back.
CREATE TABLE paused (
    origin INTEGER PRIMARY KEY
);
