//! Calls of scripts.

use redis::{Cmd, ErrorKind as RedisKind, RedisResult, ServerErrorKind, Value};

use super::link::{Answers, Link};
use super::scripts::Scripts;

/// A link with the scripts that are called by it.
pub(super) struct Caller {
    pub(super) link: Link,
    pub(super) scripts: Scripts,
    /// Whether what one call carries must be of one partition.
    pub(super) is_partitioned: bool,
}

impl Caller {
    /// Sends commands at once, and those in full whose script a server does not know.
    pub(super) async fn send(&self, batch: &[Cmd]) -> RedisResult<Answers> {
        let mut answers = self.link.send(batch).await?;
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
        match self.link.send(&again).await {
            Ok(said) => unknown.into_iter().zip(said).for_each(|(place, said)| answers[place] = said),
            Err(error) => unknown.into_iter().for_each(|place| answers[place] = Err(error.clone())),
        }
        Ok(answers)
    }

    /// Sends one.
    pub(super) async fn call(&self, call: Cmd) -> RedisResult<Value> {
        let said = self.send(std::slice::from_ref(&call)).await?.pop();
        said.unwrap_or_else(|| Err((RedisKind::UnexpectedReturnType, "nothing was answered").into()))
    }
}
