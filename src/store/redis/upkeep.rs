//! Periodic upkeep of all partitions.

use std::collections::VecDeque;

use redis::{Cmd, Value};

use super::error;
use super::keys::Partition;
use super::operation::number;
use super::script_client::ScriptClient;
use crate::idempotency::record::RecordId;
use crate::store::Error;

/// The kind of upkeep.
#[derive(Clone, Copy)]
enum Due {
    /// Leases that are past.
    Leases,
    /// Completed and unknown records that have expired.
    Expired,
}

/// Turns up to `limit` records whose lease is past into unknown ones, and returns their ids.
pub(super) async fn expire_leases(client: &ScriptClient, limit: usize) -> Result<Vec<RecordId>, Error> {
    let turned = each(client, Due::Leases, limit, looked_at_and_turned, |(looked_at, _)| *looked_at).await?;
    Ok(turned.into_iter().flat_map(|(_, ids)| ids).collect())
}

/// Removes up to `limit` records that have expired, and returns how many.
pub(super) async fn sweep(client: &ScriptClient, limit: usize) -> Result<usize, Error> {
    let swept = each(client, Due::Expired, limit, number, |swept| *swept).await?;
    Ok(swept.into_iter().map(to_usize).sum::<usize>().min(limit))
}

/// Processes up to `limit` due records, and returns the replies; `count` is how many a reply stands for. A partition that
/// fails does not stop the others: its error is returned after all of them have run.
async fn each<T>(
    client: &ScriptClient,
    what: Due,
    limit: usize,
    read: fn(&Value) -> Result<T, Error>,
    count: fn(&T) -> u64,
) -> Result<Vec<T>, Error> {
    let partitions: Vec<Partition> = Partition::all().collect();
    let questions = partitions.iter().map(|partition| {
        let mut call = client.scripts.due.call(1);
        call.arg(&partition.times()[..]);
        call
    });
    let (due, mut failure) =
        send(client, questions.collect(), error::of_read, |response| due_count(response, what)).await?;
    let script = match what {
        Due::Leases => &client.scripts.expire_leases,
        Due::Expired => &client.scripts.sweep,
    };
    let due = partitions.into_iter().zip(due).map(|(partition, due)| (partition, due.unwrap_or_default()));
    let mut due: VecDeque<(Partition, usize)> = due.filter(|(_, due)| *due > 0).collect();
    let (mut left, mut replies) = (limit, Vec::new());
    // The share of partitions that fail goes to others.
    while left > 0 && !due.is_empty() {
        let (mut calls, mut free) = (Vec::new(), left);
        while free > 0
            && let Some((partition, due)) = due.pop_front()
        {
            let share = due.min(free);
            let mut call = script.call(2);
            // The second key never exists, so the call fails while the slot moves, when records may be on another
            // node.
            call.arg(&partition.times()[..]).arg(&partition.absent_key()[..]).arg(&partition.records()[..]).arg(share);
            calls.push(call);
            free -= share;
        }
        let (done, failed) = send(client, calls, error::of_write, read).await?;
        left -= done.iter().flatten().map(count).map(to_usize).sum::<usize>().min(left);
        replies.extend(done.into_iter().flatten());
        failure = failure.or(failed);
    }
    failure.map_or(Ok(replies), Err)
}

/// The reply to each call that succeeded, and the first error.
async fn send<T>(
    client: &ScriptClient,
    calls: Vec<Cmd>,
    of: fn(&redis::RedisError) -> Error,
    read: impl Fn(&Value) -> Result<T, Error>,
) -> Result<(Vec<Option<T>>, Option<Error>), Error> {
    let mut failure = None;
    let response = client.send(&calls).await.map_err(|error| of(&error))?;
    let read = response.into_iter().map(|response| {
        match response.map_err(|error| of(&error)).and_then(|response| read(&response)) {
            Ok(read) => Some(read),
            Err(error) => {
                failure.get_or_insert(error);
                None
            }
        }
    });
    Ok((read.collect(), failure))
}

fn due_count(response: &Value, what: Due) -> Result<usize, Error> {
    let place = match what {
        Due::Leases => 0,
        Due::Expired => 1,
    };
    let Value::Array(counts) = response else { return Err(super::unexpected_reply(super::record::Unreadable)) };
    counts.get(place).map_or(Ok(0), number).map(to_usize)
}

/// The reply of the script that turns records unknown.
fn looked_at_and_turned(response: &Value) -> Result<(u64, Vec<RecordId>), Error> {
    let unexpected = || super::unexpected_reply(super::record::Unreadable);
    let Value::Array(parts) = response else { return Err(unexpected()) };
    let (looked_at, ids) = parts.split_first().ok_or_else(unexpected)?;
    let ids = ids.iter().map(|id| match id {
        Value::BulkString(id) => id[..].try_into().map(RecordId).map_err(|_| unexpected()),
        _ => Err(unexpected()),
    });
    Ok((number(looked_at)?, ids.collect::<Result<_, _>>()?))
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
