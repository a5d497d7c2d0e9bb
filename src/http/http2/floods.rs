//! Frames that lead nowhere: pings, settings, priorities, windows, frames of no known kind, and those that are empty.
//!
//! Each of them costs the gate something, and some an answer. A client may send as many as go with its requests and their
//! answers, and some more, so that who asks for a sign of life, or streams, never comes to the end of it.

use tokio::time::Instant;

use super::frames::FrameHeader;
use crate::http::frame::{CONTINUATION, DATA, END_STREAM, HEADERS, PADDED, RST_STREAM, WINDOW_UPDATE};

/// The most padding that a frame has, and its length.
const MOST_PADDING: i64 = 256;

/// What a client may spend, at most: some 16,000 frames at once. A byte of a request or of what is written to it earns one.
const CREDIT: i64 = 1 << 20;

/// What a request earns at least: heads that are said again are a few bytes.
const REQUEST: i64 = 256;

/// What a frame costs that leads nowhere: more than its answer earns.
const COST: i64 = 64;

/// What one costs that opens a window: two of them may answer a small piece of an answer.
const COST_OF_WINDOW: i64 = 16;

/// What a second earns: a thousand frames. Some clients ask for a sign of life, and open a window, at each small message of
/// an answer that streams.
const A_SECOND: f64 = 64_000.0;

/// Counts what the frames of a client are worth.
pub(super) struct Floods {
    credit: i64,
    /// Up to when time has earned something.
    since: Instant,
}

impl Floods {
    pub(super) fn new() -> Self {
        Self { credit: CREDIT, since: Instant::now() }
    }

    /// So many bytes were written to the client.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.earn(i64::try_from(bytes).unwrap_or(CREDIT));
    }

    /// A frame has begun.
    pub(super) fn begins(&mut self, FrameHeader { kind, flags, length, .. }: FrameHeader) {
        self.earn(worth(kind, flags, length.into()));
    }

    /// Whether too much of what has come leads nowhere. Then it begins anew.
    pub(super) fn is_spent(&mut self) -> bool {
        if self.credit >= 0 {
            return false;
        }
        // The clock is read only now: seldom comes anybody so far.
        let now = Instant::now();
        let earned = now.duration_since(std::mem::replace(&mut self.since, now)).as_secs_f64() * A_SECOND;
        self.earn(earned as i64);
        let is_spent = self.credit < 0;
        if is_spent {
            self.credit = CREDIT;
        }
        is_spent
    }

    fn earn(&mut self, worth: i64) {
        self.credit = (self.credit + worth).min(CREDIT);
    }
}

/// What a frame earns, or costs.
fn worth(kind: u8, flags: u8, length: i64) -> i64 {
    let earned = match kind {
        // How many of them are given up is counted elsewhere.
        RST_STREAM => return 0,
        WINDOW_UPDATE => return -COST_OF_WINDOW,
        DATA if flags & PADDED != 0 => length - MOST_PADDING,
        HEADERS if length > 0 => length.max(REQUEST),
        HEADERS | CONTINUATION | DATA => length,
        _ => return -COST,
    };
    match earned {
        1.. => earned,
        _ if kind == DATA && flags & END_STREAM != 0 => 0,
        _ => -COST,
    }
}

#[cfg(test)]
mod tests {
    use super::super::frames::{Frames, PREFACE, Part};
    use super::*;

    const PING: u8 = 6;

    /// The frames of a client, and what they are worth.
    struct Followed(Frames, Floods);

    impl Followed {
        fn new() -> Self {
            let mut followed = Self(Frames::new(), Floods::new());
            assert!(!followed.read(&[0; PREFACE]));
            followed
        }

        fn read(&mut self, bytes: &[u8]) -> bool {
            let Self(frames, floods) = self;
            frames.read(&mut bytes.to_vec(), |part| {
                if let Part::Header(header) = part {
                    floods.begins(header);
                }
            });
            floods.is_spent()
        }

        fn wrote(&mut self, bytes: usize) {
            self.1.wrote(bytes);
        }
    }

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        [&[0, 0, length, kind, flags, 0, 0, 0, 1][..], &vec![0; length.into()]].concat()
    }

    /// How many of these frames are followed until they are too many; at most so many.
    fn endured(frames: &[u8], most: usize, mut between: impl FnMut(&mut Followed)) -> usize {
        let mut floods = Followed::new();
        for nth in 0..most {
            between(&mut floods);
            if floods.read(frames) {
                return nth;
            }
        }
        most
    }

    #[tokio::test(start_paused = true)]
    async fn what_leads_nowhere_comes_to_an_end_and_what_does_not_goes_on() {
        let at_once = usize::try_from(CREDIT / COST).unwrap();
        for (kind, flags, length) in
            [(PING, 0, 8), (PING, 1, 8), (4, 0, 0), (2, 0, 5), (0xEE, 0, 100), (DATA, 0, 0), (9, 4, 0)]
        {
            assert_eq!(endured(&frame(kind, flags, length), 1 << 20, |_| ()), at_once, "{kind}");
        }
        assert!(endured(&frame(DATA, PADDED, 255), 1 << 20, |_| ()) == at_once);
        assert!(endured(&frame(WINDOW_UPDATE, 0, 4), 1 << 20, |_| ()) < 1 << 17);
        for (kind, flags, length) in [(HEADERS, 5, 30), (DATA, 0, 1), (DATA, 1, 0), (RST_STREAM, 0, 4)] {
            assert_eq!(endured(&frame(kind, flags, length), 1 << 18, |_| ()), 1 << 18, "{kind}");
        }
        // An answer to each earns less than it costs.
        assert!(endured(&frame(PING, 0, 8), 1 << 20, |floods| floods.wrote(17)) < 2 * at_once);
    }

    #[tokio::test(start_paused = true)]
    async fn exchanges_and_time_earn_what_goes_with_them() {
        let beside = [frame(HEADERS, 5, 5), frame(PING, 0, 8), frame(0x10, 0, 6), frame(WINDOW_UPDATE, 0, 4)].concat();
        assert_eq!(endured(&beside, 1 << 18, |floods| floods.wrote(40)), 1 << 18);
        let mut floods = Followed::new();
        // As gRPC for Go does at each message of a few bytes that it gets.
        let message = [frame(WINDOW_UPDATE, 0, 4), frame(PING, 0, 8)].concat();
        for _ in 0..100_000 {
            tokio::time::advance(std::time::Duration::from_millis(1)).await;
            floods.wrote(26);
            assert!(!floods.read(&message));
            floods.wrote(17);
        }
        for _ in 0..100_000 {
            tokio::time::advance(std::time::Duration::from_millis(20)).await;
            assert!(!floods.read(&frame(PING, 0, 8)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_make_no_difference() {
        let stream: Vec<u8> = [frame(PING, 0, 8), frame(DATA, 0, 3), frame(4, 0, 0), frame(HEADERS, 4, 200)].concat();
        let credit_after = |size: usize| {
            let mut floods = Followed::new();
            floods.1.credit = 1000;
            stream.chunks(size).for_each(|piece| assert!(!floods.read(piece)));
            floods.1.credit
        };
        assert_eq!(credit_after(usize::MAX), 1000 - 2 * COST + 3 + REQUEST);
        for size in 1..stream.len() {
            assert_eq!(credit_after(size), credit_after(usize::MAX), "{size}");
        }
    }
}
