//! What attempts do to their records: many in one call, each for itself.

use redis::{Cmd, RedisResult, Value};

use super::caller::Caller;
use super::keys::{self, Partition};
use super::record::{self, Unreadable, millis, span};
use super::scripts::Scripts;
use super::{confused, error};
use crate::idempotency::record::{Attempt, RecordId, Timestamp, Version};
use crate::store::rules::{self, Change, Standing};
use crate::store::{Claim, End, Error, Expiry, Fresh, Held, Settled};

/// What the lane carries.
pub(super) enum Operation {
    Claim {
        id: RecordId,
        fresh: Fresh,
    },
    Supersede {
        id: RecordId,
        seen: Version,
        fresh: Fresh,
    },
    Settle {
        id: RecordId,
        attempt: Attempt,
        end: End,
    },
    /// Of one partition, where calls are.
    Renew(Vec<Held>),
    Await(RecordId),
}

/// What it says.
pub(super) enum Said {
    Claim(Claim),
    Superseded(bool),
    Settled(Settled),
    /// The leases of these were extended.
    Renewed(Vec<RecordId>),
    /// Whether its end will be told.
    Awaited(bool),
}

/// Which calls carry more than one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Claim,
    Settle,
}

/// A call, and which of the operations it carries.
struct Call {
    kind: Option<Kind>,
    partition: Option<Partition>,
    places: Vec<usize>,
}

impl Operation {
    /// The record that it is about, if it is about one.
    pub(super) fn id(&self) -> Option<RecordId> {
        match self {
            Self::Claim { id, .. } | Self::Supersede { id, .. } | Self::Settle { id, .. } | Self::Await(id) => {
                Some(*id)
            }
            Self::Renew(_) => None,
        }
    }

    /// The first of the records that it is about.
    pub(super) fn first(&self) -> Option<RecordId> {
        match self {
            Self::Renew(held) => held.first().map(|held| held.id),
            other => other.id(),
        }
    }

    /// How many bytes it writes, where they may be many.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Claim { fresh, .. } | Self::Supersede { fresh, .. } => fresh.head.len(),
            Self::Settle { end: End::Complete { answer, .. }, .. } => answer.len(),
            Self::Settle { .. } | Self::Renew(_) | Self::Await(_) => 0,
        }
    }

    /// Whether it is left undone where its caller has gone before it was sent: of a claim nobody would know, and it would
    /// only block its key until its lease is past.
    pub(super) fn is_abandoned_with_caller(&self) -> bool {
        !matches!(self, Self::Settle { .. })
    }

    fn kind(&self) -> Option<Kind> {
        match self {
            Self::Claim { .. } => Some(Kind::Claim),
            Self::Settle { .. } => Some(Kind::Settle),
            Self::Supersede { .. } | Self::Renew(_) | Self::Await(_) => None,
        }
    }
}

/// Carries out operations in one round trip, and says of each what came of it.
pub(super) async fn carry_out(caller: &Caller, batch: &[&Operation]) -> Vec<Result<Said, Error>> {
    let calls = calls(batch, caller.is_partitioned);
    let commands: Vec<Cmd> = calls.iter().map(|call| call.command(&caller.scripts, batch)).collect();
    let mut said: Vec<Result<Said, Error>> = Vec::with_capacity(batch.len());
    said.resize_with(batch.len(), || Err(confused(Unreadable)));
    match caller.send(&commands).await {
        Ok(answers) => {
            for (call, answer) in calls.iter().zip(answers) {
                call.read(batch, answer, &mut said);
            }
        }
        Err(error) => said.iter_mut().for_each(|said| *said = Err(error::of_write(&error))),
    }
    said
}

/// As few calls as carry all of them.
fn calls(batch: &[&Operation], is_partitioned: bool) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for (place, operation) in batch.iter().enumerate() {
        let kind = operation.kind();
        let partition = operation.id().filter(|_| is_partitioned).map(Partition::of);
        let fits = |call: &&mut Call| kind.is_some() && call.kind == kind && call.partition == partition;
        match calls.iter_mut().find(fits) {
            Some(call) => call.places.push(place),
            None => calls.push(Call { kind, partition, places: vec![place] }),
        }
    }
    calls
}

impl Call {
    fn command(&self, scripts: &Scripts, batch: &[&Operation]) -> Cmd {
        let operations = self.places.iter().map(|place| batch[*place]);
        let script = match batch[self.places[0]] {
            Operation::Claim { .. } => &scripts.claim,
            Operation::Supersede { .. } => &scripts.supersede,
            Operation::Settle { .. } => &scripts.settle,
            Operation::Renew(held) => {
                let mut command = scripts.renew.call(2 * held.len());
                held.iter().for_each(|held| add_keys(&mut command, held.id));
                for held in held {
                    command.arg(&held.attempt.0[..]).arg(span(held.lease));
                }
                return command;
            }
            Operation::Await(id) => {
                let mut command = scripts.await_end.call(1);
                command.arg(&keys::record(*id)[..]);
                return command;
            }
        };
        let mut command = script.call(2 * self.places.len());
        operations.clone().filter_map(Operation::id).for_each(|id| add_keys(&mut command, id));
        for operation in operations {
            match operation {
                Operation::Claim { fresh, .. } => add_fresh(&mut command, fresh),
                Operation::Supersede { seen, fresh, .. } => {
                    command.arg(&seen.attempt.0[..]).arg(rules::place(seen.state)).arg(millis(seen.until));
                    add_fresh(&mut command, fresh);
                }
                Operation::Settle { attempt, end, .. } => {
                    let (how, lasts, answer) = told(end);
                    command.arg(&attempt.0[..]).arg(how).arg(lasts).arg(answer);
                }
                // They go alone.
                Operation::Renew(_) | Operation::Await(_) => {}
            }
        }
        command
    }

    /// Puts what was answered in the places of the operations.
    fn read(&self, batch: &[&Operation], answer: RedisResult<Value>, said: &mut [Result<Said, Error>]) {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                self.places.iter().for_each(|place| said[*place] = Err(error::of_write(&error)));
                return;
            }
        };
        if self.kind.is_none() {
            let place = self.places[0];
            said[place] = read_alone(batch[place], answer);
            return;
        }
        let Value::Array(answers) = answer else { return };
        let mut answers = answers.into_iter();
        let Some(now) = answers.next().and_then(|now| number(&now).ok()).map(record::time) else { return };
        for (place, answer) in self.places.iter().zip(answers) {
            said[*place] = match (batch[*place], answer) {
                (_, Value::ServerError(error)) => Err(error::of_write(&error.into())),
                (Operation::Claim { .. }, answer) => read_claim(answer, now).map(Said::Claim),
                (Operation::Settle { attempt, end, .. }, answer) => {
                    read_settled(answer, *attempt, end, now).map(Said::Settled)
                }
                _ => Err(confused(Unreadable)),
            };
        }
    }
}

fn read_alone(operation: &Operation, answer: Value) -> Result<Said, Error> {
    match operation {
        Operation::Supersede { .. } => Ok(Said::Superseded(number(&answer)? == 1)),
        Operation::Await(_) => Ok(Said::Awaited(number(&answer)? == 1)),
        Operation::Renew(held) => {
            let Value::Array(answers) = answer else { return Err(confused(Unreadable)) };
            let renewed = held.iter().zip(answers).filter(|(_, answer)| *answer == Value::Int(1));
            Ok(Said::Renewed(renewed.map(|(held, _)| held.id).collect()))
        }
        Operation::Claim { .. } | Operation::Settle { .. } => Err(confused(Unreadable)),
    }
}

fn read_claim(answer: Value, now: Timestamp) -> Result<Claim, Error> {
    match answer {
        Value::Int(_) => Ok(Claim::Inserted(record::time(number(&answer)?))),
        answer => match read_standing(answer)? {
            Some(kept) => Ok(Claim::Exists { record: kept.record, now }),
            None => Err(confused(Unreadable)),
        },
    }
}

/// What stands, if anything does. What stands alone in a list lacks its answer, which is large.
fn read_standing(said: Value) -> Result<Option<record::Kept>, Error> {
    match said {
        Value::BulkString(standing) => record::read(standing, true).map(Some).map_err(confused),
        Value::Array(standing) => match <[Value; 1]>::try_from(standing) {
            Ok([Value::BulkString(standing)]) => record::read(standing, false).map(Some).map_err(confused),
            _ => Err(confused(Unreadable)),
        },
        Value::Nil => Ok(None),
        _ => Err(confused(Unreadable)),
    }
}

fn read_settled(answer: Value, attempt: Attempt, end: &End, now: Timestamp) -> Result<Settled, Error> {
    match answer {
        Value::Int(_) => Ok(Settled::Done { until: record::time(number(&answer)?) }),
        answer => judge(read_standing(answer)?, attempt, end, now),
    }
}

/// What an ending that the script left alone comes to.
fn judge(standing: Option<record::Kept>, attempt: Attempt, end: &End, now: Timestamp) -> Result<Settled, Error> {
    let seen = standing.as_ref().map(|kept| Standing {
        attempt: kept.record.attempt,
        state: kept.record.state,
        claimed_at: kept.record.claimed_at,
        until: kept.record.until,
        unknown_ttl: kept.unknown_ttl,
    });
    let record = standing.map(|kept| kept.record);
    Ok(match rules::settle(seen, attempt, end, now) {
        // The script would have done it.
        Change::Complete { .. } | Change::TurnUnknown { .. } | Change::Remove => return Err(confused(Unreadable)),
        Change::Repeated { until } => Settled::Done { until },
        Change::RepeatedIfSame { until } => match (record, end) {
            (Some(record), End::Complete { answer, .. }) if record.answer.as_ref() == Some(answer) => {
                Settled::Done { until }
            }
            (record, _) => Settled::Superseded { record },
        },
        Change::Superseded => Settled::Superseded { record },
    })
}

fn add_keys(command: &mut Cmd, id: RecordId) {
    command.arg(&keys::record(id)[..]).arg(&Partition::of(id).times()[..]);
}

fn add_fresh(command: &mut Cmd, fresh: &Fresh) {
    command.arg(&record::before_times(fresh.attempt)[..]).arg(span(fresh.lease)).arg(record::after_times(fresh));
}

/// How an attempt ends, in the words of the script, the span that belongs to it, and the answer.
fn told(end: &End) -> (u8, u64, &[u8]) {
    match end {
        End::Complete { expiry: Expiry::FromClaim(ttl), answer } => (1, span(*ttl), answer),
        End::Complete { expiry: Expiry::FromNow(ttl), answer } => (2, span(*ttl), answer),
        End::Release => (3, 0, &[]),
        End::Hold => (4, 0, &[]),
    }
}

pub(super) fn number(said: &Value) -> Result<u64, Error> {
    match said {
        Value::Int(number) => u64::try_from(*number).map_err(|_| confused(Unreadable)),
        _ => Err(confused(Unreadable)),
    }
}
