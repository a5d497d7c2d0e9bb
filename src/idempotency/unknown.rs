//! Why the outcome of an attempt is unknown, as its gate writes it into the record.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 1 |
//! | 1 | envelope: 0 |
//! | 1 | unreachable 0, timeout 1, broken 2, answered 3, called 4, shutdown 5; 6 more than each of the first five where the gate was about to send the request again |
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
    /// The same, and the gate was about to send the request again: another attempt takes the place of this one at once.
    SentAgain(Ending),
    /// The gate shut down before the upstream answered.
    Shutdown,
}

impl UnknownCause {
    /// The stored form.
    #[must_use]
    pub fn encode(self) -> Bytes {
        let (kind, detail) = match self {
            Self::Ended(ending) => number(ending),
            Self::SentAgain(ending) => {
                let (kind, detail) = number(ending);
                (kind + SENT_AGAIN, detail)
            }
            Self::Shutdown => (SHUTDOWN, 0),
        };
        let [high, low] = detail.to_be_bytes();
        Bytes::copy_from_slice(&[VERSION, PLAIN, kind, high, low])
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// Another version of oncegate wrote it. Operators read it, and requests only that another attempt is about to follow.
    pub fn decode(bytes: &Bytes) -> Result<Self, Unreadable> {
        let mut reader = Reader::new(bytes);
        let [version, envelope, kind] = reader.array()?;
        let detail = u16::from_be_bytes(reader.array()?);
        reader.finish()?;
        if [version, envelope] != [VERSION, PLAIN] {
            return Err(Unreadable);
        }
        Ok(match kind {
            SHUTDOWN => Self::Shutdown,
            kind if kind >= SENT_AGAIN => Self::SentAgain(ending(kind - SENT_AGAIN, detail)?),
            kind => Self::Ended(ending(kind, detail)?),
        })
    }

    /// The cause, where another attempt follows.
    #[must_use]
    pub fn sent_again(self) -> Self {
        match self {
            Self::Ended(ending) => Self::SentAgain(ending),
            Self::SentAgain(_) | Self::Shutdown => self,
        }
    }
}

const SHUTDOWN: u8 = 5;
/// What the kind of an ending is more by where the request is sent again.
const SENT_AGAIN: u8 = 6;

fn number(ending: Ending) -> (u8, u16) {
    match ending {
        Ending::Unreachable => (0, 0),
        Ending::Timeout => (1, 0),
        Ending::Broken => (2, 0),
        Ending::Answered(status) => (3, status),
        Ending::Called(status) => (4, u16::from(status.number())),
    }
}

fn ending(kind: u8, detail: u16) -> Result<Ending, Unreadable> {
    Ok(match kind {
        0 => Ending::Unreachable,
        1 => Ending::Timeout,
        2 => Ending::Broken,
        3 => Ending::Answered(detail),
        4 => {
            let status = grpc::Status::ALL.into_iter().find(|status| u16::from(status.number()) == detail);
            Ending::Called(status.ok_or(Unreadable)?)
        }
        _ => return Err(Unreadable),
    })
}

/// In the words of the configuration's `outcomes`: `timeout`, `502`, `grpc:UNAVAILABLE`; or `shutdown`.
impl fmt::Display for UnknownCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Ended(ending) | Self::SentAgain(ending)) = self else { return f.write_str("shutdown") };
        match ending {
            Ending::Unreachable => f.write_str("unreachable"),
            Ending::Timeout => f.write_str("timeout"),
            Ending::Broken => f.write_str("broken"),
            Ending::Answered(status) => write!(f, "{status}"),
            Ending::Called(status) => write!(f, "grpc:{}", status.name()),
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
            let again = cause.sent_again();
            assert_eq!(UnknownCause::decode(&again.encode()), Ok(again));
            assert_eq!((again.to_string(), again == cause), (cause.to_string(), cause == UnknownCause::Shutdown));
        }
        words.sort();
        words.dedup();
        assert_eq!(words.len(), all().len());
        assert!(words.contains(&"grpc:UNAVAILABLE".to_owned()) && words.contains(&"502".to_owned()));
    }

    #[test]
    fn another_versions_cause_is_unreadable() {
        for bytes in [&b""[..], b"\x01\x00\x01\0", b"\x02\x00\x01\0\0", b"\x01\x01\x01\0\0", b"\x01\x00\x0b\0\0"] {
            assert_eq!(UnknownCause::decode(&Bytes::copy_from_slice(bytes)), Err(Unreadable));
        }
        assert_eq!(UnknownCause::decode(&Bytes::from_static(b"\x01\x00\x01\0\0!")), Err(Unreadable));
    }
}
