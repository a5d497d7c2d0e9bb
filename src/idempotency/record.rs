//! What the store keeps for one (service, namespace, scope, key).

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;

use super::encoding::Hex;

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
