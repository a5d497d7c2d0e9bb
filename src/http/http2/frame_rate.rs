//! Limits useless frames: pings, settings, priorities, window updates, unknown and empty frames.
//!
//! Each of them costs the gate work, and some cost a reply. A client may send as many as its requests and their
//! responses account for, and some more, so that keepalive pings and streaming never exhaust the credit.

use tokio::time::Instant;

use super::frame_parser::FrameHeader;
use crate::http::frame::{CONTINUATION, DATA, END_STREAM, HEADERS, PADDED, RST_STREAM, WINDOW_UPDATE};

/// The most padding in a frame, with its length field.
const MAX_PADDING: i64 = 256;

/// The maximum credit of a client: some 16,000 frames at once. Each byte of a request or of output earns 1.
const CREDIT: i64 = 1 << 20;

/// The least credit of a request: repeated heads compress to a few bytes.
const MIN_REQUEST_CREDIT: i64 = 256;

/// The cost of a useless frame: more than its reply earns.
const COST: i64 = 64;

/// The cost of a window update: two of them may acknowledge one small chunk of a response.
const WINDOW_COST: i64 = 16;

/// The credit per second: a thousand frames. Some clients send a ping and a window update for each small message of a
/// streaming response.
const CREDIT_PER_SECOND: f64 = 64_000.0;

/// Keeps the credit of a client.
pub(super) struct FrameRateLimiter {
    credit: i64,
    /// The instant up to which time was credited.
    since: Instant,
}

impl FrameRateLimiter {
    pub(super) fn new() -> Self {
        Self { credit: CREDIT, since: Instant::now() }
    }

    /// Credits bytes written to the client.
    pub(super) fn on_write(&mut self, bytes: usize) {
        self.add_credit(i64::try_from(bytes).unwrap_or(CREDIT));
    }

    /// Accounts for a frame.
    pub(super) fn on_frame(&mut self, FrameHeader { kind, flags, length, .. }: FrameHeader) {
        self.add_credit(credit_of(kind, flags, length.into()));
    }

    /// Whether the credit is exhausted. Then it is refilled.
    pub(super) fn is_exceeded(&mut self) -> bool {
        if self.credit >= 0 {
            return false;
        }
        // The clock is read only here: few clients get this far.
        let now = Instant::now();
        let earned = now.duration_since(std::mem::replace(&mut self.since, now)).as_secs_f64() * CREDIT_PER_SECOND;
        self.add_credit(earned as i64);
        let is_exceeded = self.credit < 0;
        if is_exceeded {
            self.credit = CREDIT;
        }
        is_exceeded
    }

    fn add_credit(&mut self, credit_of: i64) {
        self.credit = (self.credit + credit_of).min(CREDIT);
    }
}

/// The credit of a frame; negative if it costs.
fn credit_of(kind: u8, flags: u8, length: i64) -> i64 {
    let earned = match kind {
        // Cancelled streams are counted by the stream tracker.
        RST_STREAM => return 0,
        WINDOW_UPDATE => return -WINDOW_COST,
        DATA if flags & PADDED != 0 => length - MAX_PADDING,
        HEADERS if length > 0 => length.max(MIN_REQUEST_CREDIT),
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
    use super::super::frame_parser::{FrameParser, FramePart, PREFACE};
    use super::*;

    const PING: u8 = 6;

    /// The frames of a client, and what they are worth.
    struct LimitedFrames(FrameParser, FrameRateLimiter);

    impl LimitedFrames {
        fn new() -> Self {
            let mut followed = Self(FrameParser::new(), FrameRateLimiter::new());
            assert!(!followed.read(&[0; PREFACE]));
            followed
        }

        fn read(&mut self, bytes: &[u8]) -> bool {
            let Self(frames, limiter) = self;
            frames.read(&mut bytes.to_vec(), |part| {
                if let FramePart::Header(header, _) = part {
                    limiter.on_frame(header);
                }
            });
            limiter.is_exceeded()
        }

        fn on_write(&mut self, bytes: usize) {
            self.1.on_write(bytes);
        }
    }

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        [&[0, 0, length, kind, flags, 0, 0, 0, 1][..], &vec![0; length.into()]].concat()
    }

    /// How many of these frames are followed until they are too many; at most so many.
    fn accepted(frames: &[u8], most: usize, mut between: impl FnMut(&mut LimitedFrames)) -> usize {
        let mut limiter = LimitedFrames::new();
        for nth in 0..most {
            between(&mut limiter);
            if limiter.read(frames) {
                return nth;
            }
        }
        most
    }

    #[tokio::test(start_paused = true)]
    async fn useless_frames_exhaust_the_credit_and_others_do_not() {
        let at_once = usize::try_from(CREDIT / COST).unwrap();
        for (kind, flags, length) in
            [(PING, 0, 8), (PING, 1, 8), (4, 0, 0), (2, 0, 5), (0xEE, 0, 100), (DATA, 0, 0), (9, 4, 0)]
        {
            assert_eq!(accepted(&frame(kind, flags, length), 1 << 20, |_| ()), at_once, "{kind}");
        }
        assert!(accepted(&frame(DATA, PADDED, 255), 1 << 20, |_| ()) == at_once);
        assert!(accepted(&frame(WINDOW_UPDATE, 0, 4), 1 << 20, |_| ()) < 1 << 17);
        for (kind, flags, length) in [(HEADERS, 5, 30), (DATA, 0, 1), (DATA, 1, 0), (RST_STREAM, 0, 4)] {
            assert_eq!(accepted(&frame(kind, flags, length), 1 << 18, |_| ()), 1 << 18, "{kind}");
        }
        // An answer to each earns less than it costs.
        assert!(accepted(&frame(PING, 0, 8), 1 << 20, |limiter| limiter.on_write(17)) < 2 * at_once);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_and_time_earn_credit() {
        let beside = [frame(HEADERS, 5, 5), frame(PING, 0, 8), frame(0x10, 0, 6), frame(WINDOW_UPDATE, 0, 4)].concat();
        assert_eq!(accepted(&beside, 1 << 18, |limiter| limiter.on_write(40)), 1 << 18);
        let mut limiter = LimitedFrames::new();
        // As gRPC for Go does at each message of a few bytes that it gets.
        let message = [frame(WINDOW_UPDATE, 0, 4), frame(PING, 0, 8)].concat();
        for _ in 0..100_000 {
            tokio::time::advance(std::time::Duration::from_millis(1)).await;
            limiter.on_write(26);
            assert!(!limiter.read(&message));
            limiter.on_write(17);
        }
        for _ in 0..100_000 {
            tokio::time::advance(std::time::Duration::from_millis(20)).await;
            assert!(!limiter.read(&frame(PING, 0, 8)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_make_no_difference() {
        let stream: Vec<u8> = [frame(PING, 0, 8), frame(DATA, 0, 3), frame(4, 0, 0), frame(HEADERS, 4, 200)].concat();
        let credit_after = |size: usize| {
            let mut limiter = LimitedFrames::new();
            limiter.1.credit = 1000;
            stream.chunks(size).for_each(|piece| assert!(!limiter.read(piece)));
            limiter.1.credit
        };
        assert_eq!(credit_after(usize::MAX), 1000 - 2 * COST + 3 + MIN_REQUEST_CREDIT);
        for size in 1..stream.len() {
            assert_eq!(credit_after(size), credit_after(usize::MAX), "{size}");
        }
    }
}
