//! Listeners, upstream connections, bodies, headers and problems.
//!
//! Nothing in here knows about records or policies: it moves messages, and says exactly how moving them ended.

pub mod body;
pub mod budget;
pub mod buffer;
pub mod byte_set;
pub mod capture;
pub mod door;
pub mod flow;
pub mod forwarding;
mod frame;
mod gathered;
pub mod headers;
mod held;
pub mod host;
mod http2;
pub mod inbound;
pub mod limits;
pub mod listen;
pub mod memory;
mod opening;
pub mod prefer;
pub mod problem;
mod proxy_protocol;
mod refusal;
pub mod replay;
mod rewound;
pub mod server;
pub mod shards;
pub mod share;
mod socket;
pub mod trace;
pub mod upgrade;
pub mod upstream;
pub mod usage;
pub mod via;
pub mod wire;
