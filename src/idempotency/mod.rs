//! The pure rules of idempotency.
//!
//! Nothing in here reads a clock, waits, or touches the network or the disk: every function maps values to values,
//! so each rule can be read, tested and simulated on its own.

pub mod codec;
pub mod credential;
pub mod decide;
pub mod delivery;
pub mod description;
pub mod fingerprint;
#[cfg(test)]
mod golden;
pub mod grpc;
pub mod identity;
mod json;
pub mod key;
pub mod lease;
pub mod media;
pub mod message;
mod multipart;
mod pointer;
pub mod policy;
#[cfg(test)]
mod properties;
pub mod protocol;
pub mod quota;
pub mod record;
pub mod recovery;
pub mod request_time;
pub mod scope;
pub mod settle;
pub mod shadow;
pub mod token;
pub mod unknown;
