//! An upstream that honours keys itself: the same key again does not run again, and gets the first answer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use http::{HeaderName, HeaderValue, StatusCode};
use oncegate::idempotency::codec;
use oncegate::idempotency::record::AttemptToken;
use oncegate::store::{Expiry, Settlement};
use tokio::sync::Notify;

use super::{Arrived, Site};
use crate::books::Recorded;
use crate::history::{Answer, Event, Label};
use crate::life::Life;
use crate::setup::id_of;

/// What it knows of each key and request.
#[derive(Default)]
pub(super) struct Honoured {
    /// Nothing of what is being run.
    given: Mutex<BTreeMap<(Label, usize), Option<Given>>>,
    has_run: Notify,
}

/// The serial of a run, its answer and that in bytes.
type Given = (u32, Answer, Vec<u8>);

impl Honoured {
    /// The answer of a run before, also of one that is under way; nothing where there is none, and this one is to run.
    pub(super) async fn known(&self, label: Label, variant: usize) -> Option<Given> {
        loop {
            let has_run = {
                let mut given = self.given.lock().unwrap();
                match given.get(&(label, variant)) {
                    None => {
                        given.insert((label, variant), None);
                        return None;
                    }
                    Some(Some(given)) => return Some(given.clone()),
                    Some(None) => self.has_run.notified(),
                }
            };
            has_run.await;
        }
    }

    pub(super) fn keep(&self, key: (Label, usize), given: Given) {
        self.given.lock().unwrap().insert(key, Some(given));
        self.has_run.notify_waiters();
    }
}

impl Site {
    /// Completes the record of the attempt itself, where the gate would as well.
    pub(super) async fn complete(&self, life: &Arc<Life>, arrived: &Arrived, serial: u32, answer: &Answer) {
        let (policy, Some(token), Some(attempt)) = (self.setup.policy(arrived.label), arrived.token, &arrived.attempt)
        else {
            return;
        };
        let is_plain = matches!(answer.status, 200 | 201) && answer.header("idempotency-control").is_none();
        if !is_plain || answer.body.len() as u64 > policy.max_response_body {
            return;
        }
        let passes = |name: &str| !name.starts_with("idempoten");
        let lines = answer.headers.iter().filter(|(name, _)| passes(name)).map(|(name, value)| {
            (HeaderName::try_from(name.as_str()).unwrap(), HeaderValue::try_from(value.as_str()).unwrap())
        });
        let content = codec::Content { body: answer.body.clone().into(), trailers: Vec::new() };
        let kept = codec::Answer {
            status: StatusCode::from_u16(answer.status).unwrap(),
            reason: (answer.reason != "OK" && answer.reason != "Created").then(|| answer.reason.clone().into()),
            headers: lines.collect(),
            content: Some(content),
        };
        let end = Settlement::Complete { answer: kept.encode(), expiry: Expiry::FromClaim(policy.ttl) };
        let upstream = Recorded { shelf: Arc::clone(&self.shelf), life: Arc::clone(life), keeps_deliveries: false };
        let kept = Event::Kept { serial, token, answer: answer.clone() };
        upstream.complete_beside(id_of(arrived.label), attempt_of(attempt), end, kept).await;
    }
}

/// Of the header's 32 hexadecimal digits.
fn attempt_of(text: &str) -> AttemptToken {
    AttemptToken(u128::from_str_radix(text, 16).unwrap().to_be_bytes())
}
