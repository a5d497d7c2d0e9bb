//! Why the outcome of an attempt is unknown, as its gate writes it into the record.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 1 |
//! | 1 | envelope: 0 |
//! | 1 | unreachable 0, timeout 1, broken 2, answered 3, called 4, shutdown 5 |
//! | 2 | answered: the status; called: the gRPC status; else 0 |

use std::fmt;

use bytes::Bytes;

use super::codec::{PLAIN, Reader, Unreadable, VERSION};
use super::grpc;
use super::settle::Ending;

/// Why the outcome of an attempt is unknown. A record that turned unknown because its lease ran out has none of these: no gate
/// was there to write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownCause {
    /// The attempt ended like this, and the policy of its route holds that.
    Ended(Ending),
    /// The gate shut down before the upstream answered.
    Shutdown,
}

impl UnknownCause {
    /// The stored form.
    #[must_use]
    pub fn encode(self) -> Bytes {
        let (kind, detail) = match self {
            Self::Ended(Ending::Unreachable) => (0, 0),
            Self::Ended(Ending::Timeout) => (1, 0),
            Self::Ended(Ending::Broken) => (2, 0),
            Self::Ended(Ending::Answered(status)) => (3, status),
            Self::Ended(Ending::Called(status)) => (4, u16::from(status.number())),
            Self::Shutdown => (5, 0),
        };
        let [high, low] = detail.to_be_bytes();
        Bytes::copy_from_slice(&[VERSION, PLAIN, kind, high, low])
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// Another version of oncegate wrote it. It is for operators alone: no decision depends on it.
    pub fn decode(bytes: &Bytes) -> Result<Self, Unreadable> {
        let mut reader = Reader::new(bytes);
        let [version, envelope, kind] = reader.array()?;
        let detail = u16::from_be_bytes(reader.array()?);
        reader.finish()?;
        if [version, envelope] != [VERSION, PLAIN] {
            return Err(Unreadable);
        }
        Ok(match kind {
            0 => Self::Ended(Ending::Unreachable),
            1 => Self::Ended(Ending::Timeout),
            2 => Self::Ended(Ending::Broken),
            3 => Self::Ended(Ending::Answered(detail)),
            4 => {
                let status = grpc::Status::ALL.into_iter().find(|status| u16::from(status.number()) == detail);
                Self::Ended(Ending::Called(status.ok_or(Unreadable)?))
            }
            5 => Self::Shutdown,
            _ => return Err(Unreadable),
        })
    }
}

/// In the words of the configuration's `outcomes`: `timeout`, `502`, `grpc:UNAVAILABLE`; or `shutdown`.
impl fmt::Display for UnknownCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(Ending::Unreachable) => f.write_str("unreachable"),
            Self::Ended(Ending::Timeout) => f.write_str("timeout"),
            Self::Ended(Ending::Broken) => f.write_str("broken"),
            Self::Ended(Ending::Answered(status)) => write!(f, "{status}"),
            Self::Ended(Ending::Called(status)) => write!(f, "grpc:{}", status.name()),
            Self::Shutdown => f.write_str("shutdown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<UnknownCause> {
        let plain = [Ending::Unreachable, Ending::Timeout, Ending::Broken, Ending::Answered(502)];
        let called = grpc::Status::ALL.into_iter().map(Ending::Called);
        plain.into_iter().chain(called).map(UnknownCause::Ended).chain([UnknownCause::Shutdown]).collect()
    }

    #[test]
    fn causes_survive_and_differ_in_words() {
        let mut words: Vec<String> = all().iter().map(ToString::to_string).collect();
        for cause in all() {
            assert_eq!(UnknownCause::decode(&cause.encode()), Ok(cause));
        }
        words.sort();
        words.dedup();
        assert_eq!(words.len(), all().len());
        assert!(words.contains(&"grpc:UNAVAILABLE".to_owned()) && words.contains(&"502".to_owned()));
    }

    #[test]
    fn another_versions_cause_is_unreadable() {
        for bytes in [&b""[..], b"\x01\x00\x01\0", b"\x02\x00\x01\0\0", b"\x01\x01\x01\0\0", b"\x01\x00\x09\0\0"] {
            assert_eq!(UnknownCause::decode(&Bytes::copy_from_slice(bytes)), Err(Unreadable));
        }
        assert_eq!(UnknownCause::decode(&Bytes::from_static(b"\x01\x00\x01\0\0!")), Err(Unreadable));
    }
}
