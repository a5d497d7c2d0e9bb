//! What the store keeps for one (service, namespace, scope, key), and how its bytes are written.
//!
//! What is hashed or stored is made of length-prefixed parts, so that no part can run into the next. A part is its length in
//! four bytes, then its bytes. Integers are big-endian and of fixed width. Text forms are hexadecimal digits in lower case.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest, Sha256};

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// Milliseconds since the Unix epoch, by the store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// This instant plus `duration`, saturating.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        // Stores keep signed 64-bit integers.
        Self(self.0.saturating_add(millis).min(i64::MAX as u64))
    }

    /// This instant less `duration`, saturating.
    #[must_use]
    pub fn minus(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// The time from `earlier` to this instant; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// The identity of a record: eight bytes that depend on service and key alone, so that an operator can look a key
/// up by prefix, then 24 bytes of the whole identity. See [`super::identity`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId(pub [u8; 32]);

impl RecordId {
    /// Reads the 64 hexadecimal digits that `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        parse_hex(text).map(Self)
    }
}

impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(&self.0).fmt(f)
    }
}

impl fmt::Debug for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}…", Hex(&self.0[..4]))
    }
}

/// The id of a request: it names the request in problems, in the log and in its record. Unique, not secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(pub NonZeroU64);

impl RequestId {
    /// The id of the trace that the gate starts for a request that has none (W3C Trace Context, section 3.2.2.3): derived, so
    /// that a record need not keep both.
    #[must_use]
    pub fn trace(self) -> u128 {
        let id = self.0.get();
        // The finaliser of splitmix64: consecutive ids give unrelated traces.
        let mut mixed = id;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        u128::from(mixed) << 64 | u128::from(id)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(&self.0.get().to_be_bytes()).fmt(f)
    }
}

/// The secret 128-bit token that names one attempt and fences its writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttemptToken(pub [u8; 16]);

impl AttemptToken {
    /// The 32 hexadecimal digits sent to the upstream. Never log them.
    #[must_use]
    pub fn expose(&self) -> String {
        Hex(&self.0).to_string()
    }
}

impl fmt::Debug for AttemptToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AttemptToken(secret)")
    }
}

/// Where a record stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// An attempt holds the claim.
    InFlight,
    /// The attempt ended with an answer.
    Completed,
    /// The attempt ended, or was lost, without a known outcome.
    Unknown,
}

impl State {
    /// Every state, in the order in which counts list them.
    pub const ALL: [Self; 3] = [Self::InFlight, Self::Completed, Self::Unknown];

    /// The word for it: `in-flight`, `completed` or `unknown`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InFlight => "in-flight",
            Self::Completed => "completed",
            Self::Unknown => "unknown",
        }
    }

    /// Reads what [`State::as_str`] writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == text)
    }
}

/// A record as the store returns it. `head` and `answer` are opaque to the store; [`super::codec`] reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The attempt that holds or held the claim.
    pub attempt: AttemptToken,
    /// Where the record stands.
    pub state: State,
    /// When it was claimed.
    pub claimed_at: Timestamp,
    /// In flight: when the lease ends. Otherwise: when the record expires.
    pub until: Timestamp,
    /// What was claimed: an encoded [`super::codec::Head`].
    pub head: Bytes,
    /// Completed: an encoded [`super::codec::Answer`]. Unknown: an encoded [`super::unknown::UnknownCause`], unless its lease
    /// ran out.
    pub answer: Option<Bytes>,
}

impl Record {
    /// What a conditional write compares: any change of the record's course changes it.
    #[must_use]
    pub fn version(&self) -> Version {
        Version { attempt: self.attempt, state: self.state, until: self.until }
    }

    /// Whether an attempt has completed it.
    #[must_use]
    pub fn is_completed_by(&self, attempt: AttemptToken) -> bool {
        self.attempt == attempt && self.state == State::Completed
    }
}

/// What a conditional write compares. Encrypting a record anew changes none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version {
    /// See [`Record::attempt`].
    pub attempt: AttemptToken,
    /// See [`Record::state`].
    pub state: State,
    /// See [`Record::until`].
    pub until: Timestamp,
}

/// Appends a count or a length.
pub(super) fn put_count(out: &mut Vec<u8>, count: usize) {
    let count = u32::try_from(count).expect("a part of a request or an answer's head is shorter than 4 GiB");
    out.extend_from_slice(&count.to_be_bytes());
}

/// Appends a part.
pub(super) fn put(out: &mut Vec<u8>, part: &[u8]) {
    put_count(out, part.len());
    out.extend_from_slice(part);
}

/// The SHA-256 of some bytes.
pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Shows bytes as hexadecimal digits.
pub struct Hex<'a>(pub &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 64];
        self.0.chunks(digits.len() / 2).try_for_each(|chunk| {
            let digits = &mut digits[..2 * chunk.len()];
            write_hex(chunk, digits);
            f.write_str(str::from_utf8(digits).map_err(|_| fmt::Error)?)
        })
    }
}

/// Writes two hexadecimal digits for each byte, for as many as `out` has room for.
pub fn write_hex(bytes: &[u8], out: &mut [u8]) {
    for (byte, [high, low]) in bytes.iter().zip(out.as_chunks_mut().0) {
        *high = DIGITS[usize::from(byte >> 4)];
        *low = DIGITS[usize::from(byte & 15)];
    }
}

fn parse_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != N * 2 {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = u8::try_from(high * 16 + low).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_their_text_form() {
        let id = RecordId(std::array::from_fn(|i| i as u8 * 7));
        assert_eq!(RecordId::parse(&id.to_string()), Some(id));
        assert_eq!(RecordId::parse("00"), None);
        assert_eq!(RecordId::parse(&"g".repeat(64)), None);
    }

    #[test]
    fn every_byte_has_its_two_digits() {
        let bytes: Vec<u8> = (0..=255).collect();
        let expected: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(Hex(&bytes).to_string(), expected);
        assert_eq!(Hex(&[]).to_string(), "");
    }

    #[test]
    fn an_attempt_does_not_show_in_debug() {
        let attempt = AttemptToken([0xab; 16]);
        assert!(!format!("{attempt:?}").contains("ab"));
        assert_eq!(attempt.expose(), "ab".repeat(16));
    }

    #[test]
    fn time_saturates() {
        assert_eq!(Timestamp(5).since(Timestamp(9)), Duration::ZERO);
        assert_eq!(Timestamp(5).plus(Duration::MAX), Timestamp(i64::MAX as u64));
        assert_eq!(
            [Timestamp(5).minus(Duration::from_millis(2)), Timestamp(5).minus(Duration::MAX)],
            [Timestamp(3), Timestamp(0)]
        );
    }
}
