-- Answers that are large, in pieces: each is written in a transaction of its own, so that no other request waits for the whole. The
-- record's `answer` is then an integer, how many bytes they have together.
CREATE TABLE piece (
    seq INTEGER PRIMARY KEY,
    attempt BLOB NOT NULL,           -- record.attempt
    place INTEGER NOT NULL,          -- 0 is the first
    turn INTEGER NOT NULL,           -- the same in all that were written together
    answer BLOB NOT NULL             -- last: as in record
);
CREATE UNIQUE INDEX piece_attempt ON piece (attempt, place);
