//! What happens to accepted requests.

use std::collections::{BTreeMap, BTreeSet};

use oncegate::idempotency::record::State;
use oncegate::store::unreliable::Operation;

use super::{EXPECTED, Tally};
use crate::history::{Entry, Event, Label, LifeNumber, Request, Standing, Token, Waiting};
use crate::setup::ACCEPT;

/// What is known of accepted requests at one moment of a history.
#[derive(Default)]
pub(super) struct Moment {
    waiting: BTreeMap<Label, Waiting>,
    /// Those that were accepted.
    accepted: BTreeSet<Request>,
    /// Which gate took each delivery last.
    takers: BTreeMap<Token, LifeNumber>,
    /// How often each request left a gate.
    sent: BTreeMap<Request, u32>,
    records: BTreeMap<Label, Standing>,
}

impl Moment {
    pub(super) fn is_accepted(&self, request: Request) -> bool {
        self.accepted.contains(&request)
    }
}

impl Tally {
    pub(super) fn count_delivery(&mut self, moment: &mut Moment, entry: &Entry) {
        match &entry.event {
            Event::Queued { life, op, label, before, after } => {
                self.queued(moment, entry.at, (*life, *op, *label), before.as_ref(), after.as_ref());
                match after {
                    Some(after) => drop(moment.waiting.insert(*label, after.clone())),
                    None => drop(moment.waiting.remove(label)),
                }
            }
            Event::Lost { request } | Event::Left { request } if moment.is_accepted(*request) => {
                self.hit("accepted, and its client never heard");
            }
            Event::Died { life } => {
                let held = |waiting: &&Waiting| waiting.until > entry.at && !waiting.is_dead;
                let taken = |waiting: &&Waiting| moment.takers.get(&waiting.token) == Some(life);
                let lost = moment.waiting.values().filter(held).filter(taken).count();
                (0..lost).for_each(|_| self.hit("delivery of a gate that died"));
            }
            Event::Paused { is_paused: true, .. } if !moment.waiting.is_empty() => {
                self.hit("route paused with deliveries");
            }
            Event::Polled { word, .. } => {
                let told = EXPECTED.iter().find(|(known, _)| known.strip_prefix("status: ") == Some(word));
                told.into_iter().for_each(|(known, _)| self.hit(known));
            }
            Event::Wrote { request, .. } if moment.is_accepted(*request) => {
                let sent = moment.sent.entry(*request).or_default();
                *sent += 1;
                if *sent > 1 {
                    self.hit("delivery run again");
                }
            }
            Event::Changed { label, after, .. } if label.route == ACCEPT => match after {
                Some(after) => drop(moment.records.insert(*label, after.clone())),
                None => drop(moment.records.remove(label)),
            },
            _ => {}
        }
    }

    fn queued(
        &mut self,
        moment: &mut Moment,
        at: u64,
        (life, op, label): (LifeNumber, Operation, Label),
        before: Option<&Waiting>,
        after: Option<&Waiting>,
    ) {
        match (op, before, after) {
            (Operation::Accept, None, Some(after)) => {
                moment.accepted.insert(after.request);
                if moment.waiting.keys().any(|other| other.tenant == label.tenant) {
                    self.hit("accepted while a delivery of its tenant waits");
                }
            }
            (Operation::TakeDue, Some(_), Some(after)) => match moment.takers.insert(after.token, life) {
                None if after.token.life() != life => self.hit("delivery begun by another gate"),
                Some(taker) if taker != life && after.attempts == 0 => self.hit("delivery taken again past its hold"),
                _ => {}
            },
            (Operation::ChangeDelivery, Some(before), None) => {
                self.hit("delivery done");
                let Some(record) = moment.records.get(&label).filter(|record| record.state == State::Completed) else {
                    return;
                };
                if moment.takers.get(&before.token) != Some(&record.token.life()) {
                    self.hit("delivery done by its record alone");
                }
                if record.is_past(at) {
                    self.hit("delivery done past the expiry of its record");
                }
            }
            (Operation::ChangeDelivery, Some(before), Some(after)) => self.hit(match after.is_dead {
                true if after.attempts == before.attempts => "delivery given up as unknown",
                true => "delivery given up after a release",
                false if after.attempts == before.attempts => "delivery put off",
                false => "delivery to be tried again",
            }),
            (Operation::SweepDeliveries, ..) => self.hit("dead delivery expired"),
            (Operation::Requeue, ..) => self.hit("dead delivery queued again"),
            (Operation::Discard, ..) => self.hit("delivery discarded"),
            _ => {}
        }
    }
}
