//! What is done to all partitions now and then.

use std::collections::VecDeque;

use redis::{Cmd, Value};

use super::caller::Caller;
use super::error;
use super::keys::Partition;
use super::operation::number;
use crate::store::Error;

/// What is due.
#[derive(Clone, Copy)]
pub(super) enum Due {
    /// Leases that are past.
    Leases,
    /// Completed and unknown records that have expired.
    Expired,
}

/// Does up to a number of what is due, and says how much it did. A partition that fails keeps no other from its turn: its
/// error is given when all have had theirs.
pub(super) async fn of(caller: &Caller, what: Due, limit: usize) -> Result<usize, Error> {
    let partitions: Vec<Partition> = Partition::all().collect();
    let questions = partitions.iter().map(|partition| {
        let mut call = caller.scripts.due.call(1);
        call.arg(&partition.times()[..]);
        call
    });
    let (due, mut failure) = send(caller, questions.collect(), error::of_question, |said| count(said, what)).await?;
    let script = match what {
        Due::Leases => &caller.scripts.expire_leases,
        Due::Expired => &caller.scripts.sweep,
    };
    let due = partitions.into_iter().zip(due).map(|(partition, due)| (partition, due.unwrap_or_default()));
    let mut due: VecDeque<(Partition, usize)> = due.filter(|(_, due)| *due > 0).collect();
    let mut left = limit;
    // What those leave that fail, others may have.
    while left > 0 && !due.is_empty() {
        let (mut calls, mut free) = (Vec::new(), left);
        while free > 0
            && let Some((partition, due)) = due.pop_front()
        {
            let share = due.min(free);
            let mut call = script.call(2);
            // The second never stands: so nothing is done while the slot moves, when records may be elsewhere.
            call.arg(&partition.times()[..]).arg(&partition.nobody()[..]).arg(&partition.records()[..]).arg(share);
            calls.push(call);
            free -= share;
        }
        let (done, failed) = send(caller, calls, error::of_write, number).await?;
        left -= done.into_iter().flatten().map(to_usize).sum::<usize>().min(left);
        failure = failure.or(failed);
    }
    failure.map_or(Ok(limit - left), Err)
}

/// What is said to each call, if it is no error, and the first error.
async fn send<T>(
    caller: &Caller,
    calls: Vec<Cmd>,
    of: fn(&redis::RedisError) -> Error,
    read: impl Fn(&Value) -> Result<T, Error>,
) -> Result<(Vec<Option<T>>, Option<Error>), Error> {
    let mut failure = None;
    let said = caller.send(&calls).await.map_err(|error| of(&error))?;
    let read = said.into_iter().map(|said| match said.map_err(|error| of(&error)).and_then(|said| read(&said)) {
        Ok(read) => Some(read),
        Err(error) => {
            failure.get_or_insert(error);
            None
        }
    });
    Ok((read.collect(), failure))
}

fn count(said: &Value, what: Due) -> Result<usize, Error> {
    let place = match what {
        Due::Leases => 0,
        Due::Expired => 1,
    };
    let Value::Array(counts) = said else { return Err(super::confused(super::record::Unreadable)) };
    counts.get(place).map_or(Ok(0), number).map(to_usize)
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
