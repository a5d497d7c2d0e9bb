//! The acknowledged end of the log, noted in the lock file: a start that finds less must not continue.
//!
//! The note is written after each commit and before its requests are answered. It is not synced. If the process is killed, the
//! kernel still has the note. After a power failure an older note may stand there: it demands less of the log, never more than
//! the log has.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::wal::{self, Checksum, Salts};

/// How long a note is without its own checksum: a multiple of 8.
const BODY: usize = 88;

const LENGTH: usize = BODY + 17;

/// No database has a page of this number.
pub(super) const CLOSED_AT: u32 = u32::MAX;

/// The state of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkState {
    /// It is in use: the log belongs to it.
    Open,
    /// Everything is in the database. Where `page` is [`CLOSED_AT`], `content` is the time at which it was closed, by the
    /// database's own clock.
    Closed,
    /// The database was taken away while it was in use; `content` is its inode.
    Taken,
    /// Everything is in the database, and a log beside it is not this store's: the log was taken away.
    Saved,
}

/// The end of the log as of the last acknowledged commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) state: MarkState,
    pub(super) salts: Salts,
    /// How many frames it has.
    pub(super) frames: u32,
    /// The page that the last one is a version of.
    pub(super) page: u32,
    /// The checksum of this version.
    pub(super) content: Checksum,
}

/// The notes of a lock file. There are two, written by turns: one that was cut off in the middle leaves the other.
#[derive(Debug)]
pub(super) struct Marks {
    next: u64,
    last: Option<Mark>,
}

impl Marks {
    /// Reads the notes.
    pub(super) fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; 2 * LENGTH];
        let mut length = 0;
        while length < bytes.len() {
            match file.read_at(&mut bytes[length..], length as u64)? {
                0 => break,
                more => length += more,
            }
        }
        let newest = bytes.chunks_exact(LENGTH).filter_map(parse).max_by_key(|(number, _)| *number);
        Ok(Self { next: newest.map_or(0, |(number, _)| number + 1), last: newest.map(|(_, mark)| mark) })
    }

    /// The last one.
    pub(super) fn last(&self) -> Option<&Mark> {
        self.last.as_ref()
    }

    /// Notes this.
    pub(super) fn write(&mut self, file: &File, mark: Mark) -> io::Result<()> {
        let at = self.next % 2 * LENGTH as u64;
        file.write_all_at(encode(self.next, &mark).as_bytes(), at)?;
        self.next += 1;
        self.last = Some(mark);
        Ok(())
    }
}

fn encode(number: u64, mark: &Mark) -> String {
    let state = match mark.state {
        MarkState::Open => "open",
        MarkState::Closed => "closed",
        MarkState::Taken => "taken",
        MarkState::Saved => "saved",
    };
    let [first, second] = mark.content;
    let salts = u64::from_be_bytes(mark.salts);
    let body =
        format!("{state:<6} {number:020} {salts:016x} {:010} {:010} {first:08x} {second:08x}", mark.frames, mark.page);
    let body = format!("{body:<BODY$}");
    let [first, second] = seal(body.as_bytes());
    format!("{body}{first:08x}{second:08x}\n")
}

fn parse(bytes: &[u8]) -> Option<(u64, Mark)> {
    let (body, rest) = std::str::from_utf8(bytes).ok()?.split_at_checked(BODY)?;
    let [first, second] = seal(body.as_bytes());
    if rest != format!("{first:08x}{second:08x}\n") {
        return None;
    }
    let mut words = body.split_ascii_whitespace();
    let state = match words.next()? {
        "open" => MarkState::Open,
        "closed" => MarkState::Closed,
        "taken" => MarkState::Taken,
        "saved" => MarkState::Saved,
        _ => return None,
    };
    let number = words.next()?.parse().ok()?;
    let salts = u64::from_str_radix(words.next()?, 16).ok()?.to_be_bytes();
    let (frames, page) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let mut content = || u32::from_str_radix(words.next()?, 16).ok();
    let content = [content()?, content()?];
    Some((number, Mark { state, salts, frames, page, content }))
}

/// Not zero for an empty note.
fn seal(body: &[u8]) -> Checksum {
    wal::checksum(body, [0x6f6e_6365, 1], true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(frames: u32) -> Mark {
        Mark { state: MarkState::Open, salts: [0xff; 8], frames, page: u32::MAX, content: [u32::MAX, 7] }
    }

    #[test]
    fn the_last_note_is_read_back() {
        let file = tempfile::tempfile().unwrap();
        let mut marks = Marks::read(&file).unwrap();
        assert_eq!(marks.last(), None);
        for frames in [1, 2, u32::MAX] {
            marks.write(&file, mark(frames)).unwrap();
            assert_eq!(Marks::read(&file).unwrap().last(), Some(&mark(frames)));
        }
        for state in [MarkState::Closed, MarkState::Taken, MarkState::Saved] {
            marks.write(&file, Mark { state, ..mark(3) }).unwrap();
            assert_eq!(Marks::read(&file).unwrap().last().map(|mark| mark.state), Some(state));
        }
        assert_eq!(file.metadata().unwrap().len(), 2 * LENGTH as u64);
    }

    #[test]
    fn a_note_that_was_cut_off_leaves_the_one_before() {
        for length in 0..LENGTH {
            let file = tempfile::tempfile().unwrap();
            let mut marks = Marks::read(&file).unwrap();
            marks.write(&file, mark(1)).unwrap();
            marks.write(&file, mark(2)).unwrap();
            let (before, torn) = (encode(0, &mark(1)), encode(2, &mark(3)));
            file.write_all_at(&torn.as_bytes()[..length], 0).unwrap();
            let mut again = Marks::read(&file).unwrap();
            // The rest may be the same.
            let is_whole = torn[length..] == before[length..];
            assert_eq!(again.last(), Some(&mark(if is_whole { 3 } else { 2 })), "{length}");
            again.write(&file, mark(4)).unwrap();
            assert_eq!(Marks::read(&file).unwrap().last(), Some(&mark(4)), "{length}");
        }
    }
}
