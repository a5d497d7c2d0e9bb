//! The operations of attempts on their records. One script call carries many.

use std::future::pending;
use std::sync::Arc;

use redis::{Cmd, RedisResult, Value};
use tokio::time::Instant;

use super::keys::{self, Partition};
use super::record::{self, Unreadable, millis, span};
use super::script_client::ScriptClient;
use super::{error, unexpected_reply};
use crate::idempotency::record::{AttemptToken, RecordId, Timestamp, Version};
use crate::store::batcher::{self, Backend, Failure, Replies};
use crate::store::lifecycle::{self, CurrentRecord, Transition};
use crate::store::server_clock::ServerClock;
use crate::store::{CLAIM_EXPIRY, Claim, Error, Expiry, LeaseRenewal, NewRecord, Settled, Settlement};

/// An operation of the batcher.
pub(super) enum Operation {
    Claim {
        id: RecordId,
        fresh: NewRecord,
    },
    Supersede {
        id: RecordId,
        seen: Version,
        fresh: NewRecord,
    },
    Settle {
        id: RecordId,
        attempt: AttemptToken,
        end: Settlement,
    },
    /// Of one partition, where calls are.
    Renew(Vec<LeaseRenewal>),
    Await(RecordId),
}

/// The reply to an [`Operation`].
pub(super) enum Reply {
    Claim(Claim),
    Superseded(bool),
    Settled(Settled),
    /// The leases of these were extended.
    Renewed(Vec<RecordId>),
    /// Whether the end of the attempt will be published.
    Awaited(bool),
}

/// Which calls carry more than one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Claim,
    Settle,
}

/// A call, and which of the operations it carries.
struct ScriptCall {
    kind: Option<Kind>,
    partition: Option<Partition>,
    places: Vec<usize>,
}

impl Operation {
    /// The record that it is about, if it is about one.
    fn record(&self) -> Option<RecordId> {
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
            other => other.record(),
        }
    }

    fn kind(&self) -> Option<Kind> {
        match self {
            Self::Claim { .. } => Some(Kind::Claim),
            Self::Settle { .. } => Some(Kind::Settle),
            Self::Supersede { .. } | Self::Renew(_) | Self::Await(_) => None,
        }
    }
}

impl batcher::Operation for Operation {
    type Reply = Reply;

    fn id(&self) -> Option<RecordId> {
        match self {
            // Any number of callers may await the end of one attempt.
            Self::Await(_) => None,
            other => other.record(),
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Claim { fresh, .. } | Self::Supersede { fresh, .. } => fresh.head.len(),
            Self::Settle { end: Settlement::Complete { answer, .. }, .. } => answer.len(),
            Self::Settle { .. } | Self::Renew(_) | Self::Await(_) => 0,
        }
    }

    // An orphaned claim would only block its key until its lease expires.
    fn is_abandoned_with_caller(&self) -> bool {
        !matches!(self, Self::Settle { .. })
    }
}

/// One round trip carries a batch. The client looks after its connections itself, and refuses commands while none works.
impl Backend for Arc<ScriptClient> {
    type Operation = Operation;
    type Connection = ();
    const WHAT: &'static str = "operations";
    // The server does nothing else meanwhile.
    const MAX_BATCH_BYTES: usize = 4 << 20;

    async fn connect(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn ended((): &()) {
        pending().await
    }

    fn give_up((): ()) {}

    async fn execute(&self, (): &(), batch: &[&Operation]) -> Result<Replies<Operation>, Failure> {
        let calls = calls(batch, self.is_partitioned);
        let commands: Vec<Cmd> = calls.iter().map(|call| call.command(self, batch)).collect();
        let asked = Instant::now();
        let answers = self.send(&commands).await.map_err(|error| Failure::OfAll(error::of_write(&error)))?;
        let mut replies: Replies<Operation> = Vec::with_capacity(batch.len());
        replies.resize_with(batch.len(), || Some(Err(unexpected_reply(Unreadable))));
        for (call, answer) in calls.iter().zip(answers) {
            call.read(batch, answer, self.clock(call.partition), asked, &mut replies);
        }
        Ok(replies)
    }
}

/// As few calls as carry all of them.
fn calls(batch: &[&Operation], is_partitioned: bool) -> Vec<ScriptCall> {
    let mut calls: Vec<ScriptCall> = Vec::new();
    for (place, operation) in batch.iter().enumerate() {
        let kind = operation.kind();
        let partition = operation.record().filter(|_| is_partitioned).map(Partition::of);
        let fits = |call: &&mut ScriptCall| kind.is_some() && call.kind == kind && call.partition == partition;
        match calls.iter_mut().find(fits) {
            Some(call) => call.places.push(place),
            None => calls.push(ScriptCall { kind, partition, places: vec![place] }),
        }
    }
    calls
}

impl ScriptCall {
    fn command(&self, client: &ScriptClient, batch: &[&Operation]) -> Cmd {
        let scripts = &client.scripts;
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
        operations.clone().filter_map(Operation::record).for_each(|id| add_keys(&mut command, id));
        if self.kind == Some(Kind::Claim) {
            command.arg(client.clock(self.partition).after(CLAIM_EXPIRY));
        }
        for operation in operations {
            match operation {
                Operation::Claim { fresh, .. } => add_fresh(&mut command, fresh),
                Operation::Supersede { seen, fresh, .. } => {
                    command.arg(&seen.attempt.0[..]).arg(lifecycle::state_index(seen.state)).arg(millis(seen.until));
                    add_fresh(&mut command, fresh);
                    command.arg(client.clock(self.partition).after(CLAIM_EXPIRY));
                }
                Operation::Settle { attempt, end, .. } => {
                    let (kind, lasts, answer) = encoded_end(end);
                    command.arg(&attempt.0[..]).arg(kind).arg(lasts).arg(answer);
                }
                // Each has a call of its own.
                Operation::Renew(_) | Operation::Await(_) => {}
            }
        }
        command
    }

    /// Puts what was answered in the places of the operations.
    fn read(
        &self,
        batch: &[&Operation],
        answer: RedisResult<Value>,
        clock: &ServerClock,
        asked: Instant,
        replies: &mut [Option<Result<Reply, Error>>],
    ) {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                self.places.iter().for_each(|place| replies[*place] = Some(Err(error::of_write(&error))));
                return;
            }
        };
        if self.kind.is_none() {
            let place = self.places[0];
            replies[place] = match (batch[place], late(&answer)) {
                // As a claim may come.
                (Operation::Supersede { .. }, Some(now)) => {
                    clock.read(asked, now);
                    None
                }
                (operation, _) => Some(read_alone(operation, answer)),
            };
            return;
        }
        let Value::Array(answers) = answer else { return };
        let mut answers = answers.into_iter();
        let Some(now) = answers.next().and_then(|now| number(&now).ok()).map(record::time) else { return };
        clock.read(asked, i64::try_from(now.0).unwrap_or(i64::MAX));
        if self.kind == Some(Kind::Claim) && answers.len() == 0 {
            // They came too late, by a clock that was set perhaps. They are claimed again, by the time that this tells.
            self.places.iter().for_each(|place| replies[*place] = None);
            return;
        }
        for (place, answer) in self.places.iter().zip(answers) {
            replies[*place] = Some(match (batch[*place], answer) {
                (_, Value::ServerError(error)) => Err(error::of_write(&error.into())),
                (Operation::Claim { .. }, answer) => read_claim(answer, now).map(Reply::Claim),
                (Operation::Settle { attempt, end, .. }, answer) => {
                    read_settled(answer, *attempt, end, now).map(Reply::Settled)
                }
                _ => Err(unexpected_reply(Unreadable)),
            });
        }
    }
}

/// The time, where that is all that was answered: the call came too late.
fn late(answer: &Value) -> Option<i64> {
    let Value::Array(told) = answer else { return None };
    let [Value::Int(now)] = told[..] else { return None };
    Some(now)
}

fn read_alone(operation: &Operation, answer: Value) -> Result<Reply, Error> {
    match operation {
        Operation::Supersede { .. } => Ok(Reply::Superseded(number(&answer)? == 1)),
        Operation::Await(_) => Ok(Reply::Awaited(number(&answer)? == 1)),
        Operation::Renew(held) => {
            let Value::Array(answers) = answer else { return Err(unexpected_reply(Unreadable)) };
            let (mut renewed, mut refused) = (Vec::new(), None);
            for (held, answer) in held.iter().zip(answers) {
                match answer {
                    Value::Int(1) => renewed.push(held.id),
                    Value::ServerError(error) => refused = Some(error::of_write(&error.into())),
                    _ => {}
                }
            }
            // Where some were renewed, the others are missing in the reply, and their gate asks for them again.
            refused.filter(|_| renewed.is_empty()).map_or(Ok(Reply::Renewed(renewed)), Err)
        }
        Operation::Claim { .. } | Operation::Settle { .. } => Err(unexpected_reply(Unreadable)),
    }
}

fn read_claim(answer: Value, now: Timestamp) -> Result<Claim, Error> {
    match answer {
        Value::Int(_) => Ok(Claim::Inserted(record::time(number(&answer)?))),
        answer => match read_current(answer)? {
            Some(stored) => Ok(Claim::Exists { record: stored.record, now }),
            None => Err(unexpected_reply(Unreadable)),
        },
    }
}

/// The current record, if there is one. A record alone in a list lacks its answer, which is large.
fn read_current(response: Value) -> Result<Option<record::StoredRecord>, Error> {
    match response {
        Value::BulkString(current) => record::read(current, true).map(Some).map_err(unexpected_reply),
        Value::Array(current) => match <[Value; 1]>::try_from(current) {
            Ok([Value::BulkString(current)]) => record::read(current, false).map(Some).map_err(unexpected_reply),
            _ => Err(unexpected_reply(Unreadable)),
        },
        Value::Nil => Ok(None),
        _ => Err(unexpected_reply(Unreadable)),
    }
}

fn read_settled(answer: Value, attempt: AttemptToken, end: &Settlement, now: Timestamp) -> Result<Settled, Error> {
    match answer {
        Value::Int(_) => Ok(Settled::Done { until: record::time(number(&answer)?) }),
        answer => outcome(read_current(answer)?, attempt, end, now),
    }
}

/// The outcome of a settlement that the script did not apply.
fn outcome(
    current: Option<record::StoredRecord>,
    attempt: AttemptToken,
    end: &Settlement,
    now: Timestamp,
) -> Result<Settled, Error> {
    let seen = current.as_ref().map(|stored| CurrentRecord {
        attempt: stored.record.attempt,
        state: stored.record.state,
        claimed_at: stored.record.claimed_at,
        until: stored.record.until,
        unknown_ttl: stored.unknown_ttl,
    });
    let record = current.map(|stored| stored.record);
    Ok(match lifecycle::settle(seen, attempt, end, now) {
        // The script would have done it.
        Transition::Complete { .. } | Transition::TurnUnknown { .. } | Transition::Remove => {
            return Err(unexpected_reply(Unreadable));
        }
        Transition::Repeated { until } => Settled::Done { until },
        Transition::RepeatedIfSame { until } => match (record, end) {
            (Some(record), Settlement::Complete { answer, .. }) if record.answer.as_ref() == Some(answer) => {
                Settled::Done { until }
            }
            (record, _) => Settled::NotCurrent { record },
        },
        Transition::NotCurrent => Settled::NotCurrent { record },
    })
}

fn add_keys(command: &mut Cmd, id: RecordId) {
    command.arg(&keys::record(id)[..]).arg(&Partition::of(id).times()[..]);
}

fn add_fresh(command: &mut Cmd, fresh: &NewRecord) {
    command.arg(&record::before_times(fresh.attempt)[..]).arg(span(fresh.lease)).arg(record::after_times(fresh));
}

/// The end, as the script encodes it, its duration, and the answer.
fn encoded_end(end: &Settlement) -> (u8, u64, &[u8]) {
    match end {
        Settlement::Complete { expiry: Expiry::FromClaim(ttl), answer } => (1, span(*ttl), answer),
        Settlement::Complete { expiry: Expiry::FromNow(ttl), answer } => (2, span(*ttl), answer),
        Settlement::Release => (3, 0, &[]),
        Settlement::Hold { cause } => (4, 0, cause),
    }
}

pub(super) fn number(response: &Value) -> Result<u64, Error> {
    match response {
        Value::Int(number) => u64::try_from(*number).map_err(|_| unexpected_reply(Unreadable)),
        _ => Err(unexpected_reply(Unreadable)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ErrorKind;
    use crate::store::batcher::Operation as _;

    #[test]
    fn only_the_end_of_an_attempt_is_carried_out_without_its_caller() {
        let id = RecordId([1; 32]);
        let release = Operation::Settle { id, attempt: AttemptToken([0; 16]), end: Settlement::Release };
        assert!(!release.is_abandoned_with_caller());
        assert!(Operation::Await(id).is_abandoned_with_caller());
        assert!(Operation::Renew(Vec::new()).is_abandoned_with_caller());
    }

    #[test]
    fn a_renewal_fails_where_none_is_renewed_and_one_is_refused() {
        let lease = std::time::Duration::from_secs(60);
        let held = [1, 2].map(|n| LeaseRenewal { id: RecordId([n; 32]), attempt: AttemptToken([n; 16]), lease });
        let renewed = |answers: &str| {
            let answer = redis::parse_redis_value(format!("*2\r\n{answers}").as_bytes()).unwrap();
            match read_alone(&Operation::Renew(held.to_vec()), answer)? {
                Reply::Renewed(renewed) => Ok(renewed),
                _ => panic!("it is a renewal"),
            }
        };
        let refused: Result<_, Error> = renewed(":0\r\n-OOM command not allowed\r\n");
        assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Full), "{refused:?}");
        assert_eq!(renewed("-OOM command not allowed\r\n:1\r\n").unwrap(), [RecordId([2; 32])]);
        assert_eq!(renewed(":0\r\n:0\r\n").unwrap(), []);
    }

    #[test]
    fn claims_that_came_late_are_asked_again() {
        let fresh = NewRecord {
            attempt: AttemptToken([1; 16]),
            origin: crate::store::OriginId(1),
            lease: std::time::Duration::from_secs(60),
            ttl: std::time::Duration::from_secs(60),
            unknown_ttl: std::time::Duration::from_secs(60),
            head: bytes::Bytes::new(),
        };
        let claim = Operation::Claim { id: RecordId([1; 32]), fresh };
        let call = ScriptCall { kind: Some(Kind::Claim), partition: None, places: vec![0] };
        let clock = ServerClock::default();
        let mut replies: Replies<Operation> = vec![Some(Err(unexpected_reply(Unreadable)))];
        call.read(&[&claim], Ok(Value::Array(vec![Value::Int(70_000)])), &clock, Instant::now(), &mut replies);
        assert!(replies[0].is_none());
        assert!((75_000..80_000).contains(&clock.after(CLAIM_EXPIRY)), "by the time that this told");
    }

    #[test]
    fn any_number_of_callers_await_one_attempt_in_one_batch() {
        assert_eq!(Operation::Await(RecordId([1; 32])).id(), None);
    }
}
