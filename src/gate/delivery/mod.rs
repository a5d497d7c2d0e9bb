//! Requests that no client waits for: those that are accepted and delivered later, and messages of brokers.

pub(super) mod accept;
pub(super) mod circuit;
pub(super) mod deliver;
pub(super) mod disposition;
pub(super) mod message;
pub(super) mod request_status;
