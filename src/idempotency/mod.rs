//! The pure rules of idempotency.
//!
//! Nothing in here reads a clock, waits, or touches the network or the disk: every function maps values to values,
//! so each rule can be read, tested and simulated on its own.

pub mod codec;
pub mod decide;
pub mod fingerprint;
pub mod identity;
pub mod key;
pub mod policy;
pub mod record;
pub mod scope;
pub mod settle;
