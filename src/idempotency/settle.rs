//! What an attempt's ending does to its record.

use std::collections::BTreeMap;
use std::time::Duration;

use http::HeaderMap;

use super::policy::Policy;

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The upstream gave a complete answer with this status.
    Answered(u16),
    /// Provably nothing was sent.
    Unreachable,
    /// The upstream did not answer in time.
    Timeout,
    /// The connection or the answer broke off.
    Broken,
}

/// What `outcomes` can say of an ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Keep the answer and replay it.
    Store,
    /// Forget the key: a retry runs again.
    Release,
    /// The outcome is unknown.
    Hold,
}

/// `outcomes`: overrides of the defaults. The most specific entry wins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// By exact status.
    pub status: BTreeMap<u16, Action>,
    /// By class: 2 for `2xx` up to 5 for `5xx`.
    pub class: BTreeMap<u16, Action>,
    /// `unreachable`; never `Store`.
    pub unreachable: Option<Action>,
    /// `timeout`; never `Store`.
    pub timeout: Option<Action>,
    /// `broken`; never `Store`.
    pub broken: Option<Action>,
}

/// What the upstream said in `Idempotency-Control`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// `release`
    pub release: bool,
    /// `no-store`
    pub no_store: bool,
    /// `ttl=SECONDS`
    pub ttl: Option<Duration>,
    /// How many directives were invalid and ignored.
    pub invalid: usize,
}

/// What becomes of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It completes with the answer.
    Complete {
        /// How long it answers retries, from its claim.
        ttl: Duration,
        /// Whether the body is kept; else a tombstone is.
        keep_body: bool,
    },
    /// It is forgotten.
    Release,
    /// It turns unknown.
    Hold,
}

/// Decides what an attempt's ending does to its record.
#[must_use]
pub fn settle(policy: &Policy, ending: Ending, control: &Control) -> Verdict {
    let _ = (policy, ending, control);
    todo!()
}

impl Control {
    /// Reads every `Idempotency-Control` line of an answer.
    #[must_use]
    pub fn read(headers: &HeaderMap) -> Self {
        let _ = headers;
        todo!()
    }
}
