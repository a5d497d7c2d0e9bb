//! The formats of SQLite's write-ahead log (`-wal`) and of its index (`-shm`): <https://sqlite.org/walformat.html>.
//!
//! Only what [`super::guard`] reads. Frames are counted from 1.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;

/// The salts of a log: the first four bytes are a number that grows by one whenever the log starts over, the others
/// are random. They are in the log's header and in each of its frames.
pub(super) type Salts = [u8; 8];

pub(super) type Checksum = [u32; 2];

/// The checksum of a log, continued from `start` over whole pairs of words.
pub(super) fn checksum(bytes: &[u8], start: Checksum, is_big_endian: bool) -> Checksum {
    let word = |bytes: &[u8]| {
        let bytes = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if is_big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
    };
    bytes.chunks_exact(8).fold(start, |[first, second], pair| {
        let first = first.wrapping_add(word(&pair[..4])).wrapping_add(second);
        [first, second.wrapping_add(word(&pair[4..])).wrapping_add(first)]
    })
}

/// The start of a log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) salts: Salts,
    page_size: usize,
    is_big_endian: bool,
    checksum: Checksum,
}

/// A frame whose checksum is right: its header, and a version of a page.
#[derive(Debug)]
pub(super) struct Frame(Vec<u8>);

impl Frame {
    /// The page that it is a version of.
    pub(super) fn page(&self) -> u32 {
        big_endian(&self.0)
    }

    pub(super) fn checksum(&self) -> Checksum {
        pair(&self.0[16..])
    }

    pub(super) fn content(&self) -> &[u8] {
        &self.0[FRAME_HEADER..]
    }

    fn is_commit(&self) -> bool {
        big_endian(&self.0[4..]) != 0
    }

    /// Gives the memory back, for another.
    pub(super) fn into_buffer(self) -> Vec<u8> {
        self.0
    }
}

impl Header {
    /// The header of a log, if it has a valid one.
    pub(super) fn read(log: &File) -> io::Result<Option<Self>> {
        let mut bytes = [0; HEADER];
        if !read(log, &mut bytes, 0)? {
            return Ok(None);
        }
        let (magic, page_size) = (big_endian(&bytes), big_endian(&bytes[8..]) as usize);
        let is_big_endian = magic & 1 == 1;
        let checksum = checksum(&bytes[..24], [0, 0], is_big_endian);
        let is_valid = magic & !1 == 0x377f_0682
            && (512..=65_536).contains(&page_size)
            && page_size.is_power_of_two()
            && checksum == pair(&bytes[24..]);
        Ok(is_valid.then(|| Self { salts: salts(&bytes[16..]), page_size, is_big_endian, checksum }))
    }

    /// A frame that is in place, whole, and of this log, in memory that is given.
    ///
    /// Its checksum continues that of the frame before it, which is read from the file.
    pub(super) fn frame(&self, log: &File, number: u32, buffer: Vec<u8>) -> io::Result<Option<Frame>> {
        let before = match number {
            0 => return Ok(None),
            1 => self.checksum,
            _ => {
                let mut bytes = [0; 8];
                if !read(log, &mut bytes, self.offset(number - 1) + 16)? {
                    return Ok(None);
                }
                pair(&bytes)
            }
        };
        self.frame_after(before, log, number, buffer)
    }

    fn frame_after(&self, before: Checksum, log: &File, number: u32, buffer: Vec<u8>) -> io::Result<Option<Frame>> {
        let mut bytes = buffer;
        bytes.resize(FRAME_HEADER + self.page_size, 0);
        if !read(log, &mut bytes, self.offset(number))? {
            return Ok(None);
        }
        let frame = Frame(bytes);
        let checksum = checksum(&frame.0[..8], before, self.is_big_endian);
        let checksum = self::checksum(frame.content(), checksum, self.is_big_endian);
        let is_valid = frame.page() != 0 && salts(&frame.0[8..]) == self.salts && checksum == frame.checksum();
        Ok(is_valid.then_some(frame))
    }

    /// Whether a frame is still in place, byte for byte.
    pub(super) fn has(&self, log: &File, number: u32, frame: &Frame, buffer: &mut Vec<u8>) -> io::Result<bool> {
        buffer.resize(frame.0.len(), 0);
        Ok(read(log, buffer, self.offset(number))? && *buffer == frame.0)
    }

    /// How many frames up to the end of its last whole transaction: what a recovery finds.
    pub(super) fn committed(&self, log: &File) -> io::Result<u32> {
        let (mut committed, mut checksum, mut buffer) = (0, self.checksum, Vec::new());
        for number in 1.. {
            let Some(frame) = self.frame_after(checksum, log, number, buffer)? else { break };
            checksum = frame.checksum();
            if frame.is_commit() {
                committed = number;
            }
            buffer = frame.into_buffer();
        }
        Ok(committed)
    }

    fn offset(&self, number: u32) -> u64 {
        (HEADER + (number as usize - 1) * (FRAME_HEADER + self.page_size)) as u64
    }
}

/// How far one log is after another: 0 for the same, less for an earlier one.
pub(super) fn generations(from: Salts, to: Salts) -> i32 {
    big_endian(&to).wrapping_sub(big_endian(&from)) as i32
}

/// Bytes of the index before the first table.
pub(super) const INDEX_HEADER: usize = 136;

/// How many bytes a table of the index takes, the header included in the first.
const TABLE: usize = 32_768;

/// The offset of the slots of the hash table; the pages of its frames precede them.
const SLOTS: usize = 16_384;

const SLOT_COUNT: usize = (TABLE - SLOTS) / 2;

/// The start of the index: how much of the log is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IndexHeader {
    pub(super) frames: u32,
    /// That of the last frame.
    pub(super) checksum: Checksum,
    pub(super) salts: Salts,
}

impl IndexHeader {
    /// The header, if both of its copies are whole and what it says besides can be.
    pub(super) fn parse(bytes: &[u8; INDEX_HEADER]) -> Option<Self> {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let is_whole = bytes[..48] == bytes[48..96]
            && bytes[12] == 1
            && checksum(&bytes[..40], [0, 0], cfg!(target_endian = "big")) == [word(40), word(44)];
        let frames = word(16);
        // How many frames are copied into the database, how many a checkpoint tried to copy, and what readers see.
        let (copied, tried) = (word(96), word(128));
        let can_be = copied <= tried && tried <= frames && word(100) == 0;
        (is_whole && can_be).then(|| Self { frames, checksum: [word(24), word(28)], salts: salts(&bytes[32..]) })
    }
}

/// The expected content of the index for the committed frames.
#[derive(Debug, Default)]
pub(super) struct Index {
    tables: Vec<u8>,
    /// For each slot of the last table, how many slots from there on are known to be taken. Pages that are written again
    /// and again would be searched for past all their former versions.
    taken: Vec<u16>,
}

impl Index {
    /// The table that a frame is in, and its place there, from 1.
    fn place(frame: u32) -> (usize, usize) {
        let place = frame as usize - 1 + INDEX_HEADER / 4;
        let (table, place) = (place / (SLOTS / 4), place % (SLOTS / 4));
        (table, if table == 0 { place + 1 - INDEX_HEADER / 4 } else { place + 1 })
    }

    /// Where the index says which page a frame is a version of.
    pub(super) fn offset(frame: u32) -> u64 {
        let (table, place) = Self::place(frame);
        (Self::pages(table) + (place - 1) * 4) as u64
    }

    /// How many frames from this one on are contiguous in the index.
    pub(super) fn run(frame: u32) -> u32 {
        let (table, place) = Self::place(frame);
        let count = if table == 0 { SLOTS / 4 - INDEX_HEADER / 4 } else { SLOTS / 4 };
        (count + 1 - place) as u32
    }

    /// How many bytes the index has at least for so many frames.
    pub(super) fn length(frames: u32) -> usize {
        if frames == 0 { INDEX_HEADER } else { (Self::place(frames).0 + 1) * TABLE }
    }

    fn pages(table: usize) -> usize {
        if table == 0 { INDEX_HEADER } else { table * TABLE }
    }

    /// Adds what SQLite adds with a frame. False where the table has no room, which no real one comes to.
    pub(super) fn append(&mut self, frame: u32, page: u32) -> bool {
        let (table, place) = Self::place(frame);
        if place == 1 {
            self.tables.truncate(table * TABLE);
            self.tables.resize((table + 1) * TABLE, 0);
            self.taken.clear();
            self.taken.resize(SLOT_COUNT, 0);
        }
        let pages = Self::pages(table) + (place - 1) * 4;
        self.tables[pages..pages + 4].copy_from_slice(&page.to_ne_bytes());
        let slots = &mut self.tables[table * TABLE + SLOTS..(table + 1) * TABLE];
        let first = page.wrapping_mul(383) as usize % SLOT_COUNT;
        let taken = &mut self.taken[first];
        let mut free = usize::from(*taken)..SLOT_COUNT;
        let at = |distance| (first + distance) % SLOT_COUNT * 2;
        // A table has twice as many slots as frames, so that a place fits.
        let (Some(distance), Ok(place)) =
            (free.find(|distance| slots[at(*distance)..at(*distance) + 2] == [0; 2]), u16::try_from(place))
        else {
            return false;
        };
        slots[at(distance)..at(distance) + 2].copy_from_slice(&place.to_ne_bytes());
        *taken = distance as u16 + 1;
        true
    }

    /// Whether the content of an index file says this of so many frames. It may say something of later ones, which are
    /// not committed.
    pub(super) fn matches(&self, actual: &[u8], frames: u32) -> bool {
        if frames == 0 {
            return true;
        }
        let (last, count) = Self::place(frames);
        (0..=last).all(|table| {
            let (from, end) = (Self::pages(table), (table + 1) * TABLE);
            let slots = table * TABLE + SLOTS;
            let (Some(expected), Some(actual)) = (self.tables.get(from..end), actual.get(from..end)) else {
                return false;
            };
            if expected == actual {
                return true;
            }
            let is_later = |slot: &[u8]| usize::from(u16::from_ne_bytes([slot[0], slot[1]])) > count;
            let slots_match = || {
                let pairs = expected[slots - from..].chunks_exact(2).zip(actual[slots - from..].chunks_exact(2));
                pairs.into_iter().all(|(expected, actual)| expected == actual || expected == [0; 2] && is_later(actual))
            };
            table == last && expected[..count * 4] == actual[..count * 4] && slots_match()
        })
    }
}

/// Fills the bytes, or returns false where the file ends before.
fn read(file: &File, bytes: &mut [u8], at: u64) -> io::Result<bool> {
    match file.read_exact_at(bytes, at) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn pair(bytes: &[u8]) -> Checksum {
    [big_endian(bytes), big_endian(&bytes[4..])]
}

fn big_endian(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn salts(bytes: &[u8]) -> Salts {
    let mut salts = [0; 8];
    salts.copy_from_slice(&bytes[..8]);
    salts
}
