//! Listeners, upstream connections, bodies, headers and problems.
//!
//! No module in here knows records or policies: they transfer messages, and report exactly how a transfer ended.

pub mod accept;
pub mod body;
pub mod budget;
pub mod buffer;
pub mod byte_set;
pub mod capture;
pub mod connection_memory;
mod counted_buffer;
mod detect;
mod exchange;
pub mod fault;
pub mod forwarding;
mod frame;
mod guarded_io;
pub mod headers;
pub mod host;
pub mod http1;
mod http2;
pub mod limits;
pub mod listen;
pub mod memory;
pub mod prefer;
pub mod problem;
mod proxy_protocol;
mod refusal;
pub mod replay;
pub mod request_body;
mod rewind;
pub mod server;
pub mod shards;
mod socket;
pub mod tee;
pub mod trace;
pub mod upgrade;
pub mod upstream;
pub mod usage;
pub mod via;
