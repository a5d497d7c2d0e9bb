//! Listeners, upstream connections, bodies, headers and problems.
//!
//! No module in here knows records or policies: they transfer messages, and report exactly how a transfer ended.

pub mod accept;
pub mod answer;
pub mod body;
pub mod collector;
pub mod connection_memory;
pub mod fair_share;
pub mod fault;
pub mod forwarding;
mod frame;
pub mod headers;
pub mod http1;
mod http2;
pub mod limits;
pub mod max_forwards;
pub mod memory;
pub mod prefer;
pub mod problem;
mod proxy_protocol;
mod refusal;
pub mod request_body;
mod rewind;
pub mod server;
pub mod shards;
pub mod socket;
pub mod spool;
pub mod upgrade;
pub mod upstream;
pub mod usage;
mod white_space;
