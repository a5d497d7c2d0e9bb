//! Calls of scripts.

use redis::{Cmd, ErrorKind as RedisKind, RedisResult, ServerErrorKind, Value};

use super::keys::{PARTITIONS, Partition};
use super::manager::{Answers, ConnectionManager};
use super::scripts::Scripts;
use crate::store::server_clock::ServerClock;

/// A link with the scripts that are called by it.
pub(super) struct ScriptClient {
    pub(super) manager: ConnectionManager,
    pub(super) scripts: Scripts,
    /// Whether what one call carries must be of one partition.
    pub(super) is_partitioned: bool,
    /// The clock of the server that has each partition. Without partitions, the first stands for all.
    clocks: [ServerClock; PARTITIONS as usize],
}

impl ScriptClient {
    pub(super) fn new(manager: ConnectionManager, scripts: Scripts, is_partitioned: bool) -> Self {
        Self { manager, scripts, is_partitioned, clocks: std::array::from_fn(|_| ServerClock::default()) }
    }

    /// The clock of the server that has a partition.
    pub(super) fn clock(&self, partition: Option<Partition>) -> &ServerClock {
        &self.clocks[partition.map_or(0, |Partition(partition)| usize::from(partition))]
    }

    /// Sends commands at once, and those in full whose script a server does not know.
    pub(super) async fn send(&self, batch: &[Cmd]) -> RedisResult<Answers> {
        let mut answers = self.manager.send(batch).await?;
        let is_unknown = |answer: &RedisResult<Value>| {
            let error = answer.as_ref().err();
            error.is_some_and(|error| error.kind() == RedisKind::Server(ServerErrorKind::NoScript))
        };
        let unknown: Vec<usize> =
            answers.iter().enumerate().filter(|(_, answer)| is_unknown(answer)).map(|(place, _)| place).collect();
        if unknown.is_empty() {
            return Ok(answers);
        }
        // They did nothing.
        let again: Vec<Cmd> = unknown.iter().map(|place| self.scripts.in_full(&batch[*place])).collect();
        match self.manager.send(&again).await {
            Ok(response) => unknown.into_iter().zip(response).for_each(|(place, response)| answers[place] = response),
            Err(error) => unknown.into_iter().for_each(|place| answers[place] = Err(error.clone())),
        }
        Ok(answers)
    }

    /// Sends one.
    pub(super) async fn call(&self, call: Cmd) -> RedisResult<Value> {
        let response = self.send(std::slice::from_ref(&call)).await?.pop();
        response.unwrap_or_else(|| Err((RedisKind::UnexpectedReturnType, "no answer was received").into()))
    }
}
