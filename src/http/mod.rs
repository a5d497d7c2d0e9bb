//! Listeners, upstream connections, bodies, headers and problems.
//!
//! Nothing in here knows about records or policies: it moves messages, and says exactly how moving them ended.

pub mod body;
pub mod budget;
pub mod buffer;
pub mod capture;
pub mod forwarding;
mod gathered;
pub mod headers;
mod held;
pub mod limits;
pub mod listen;
pub mod prefer;
pub mod problem;
mod refusal;
pub mod replay;
pub mod server;
pub mod shards;
mod socket;
pub mod trace;
pub mod upgrade;
pub mod upstream;
pub mod usage;
pub mod via;
pub mod wire;
