//! Listeners, upstream connections, bodies, headers and problems.

pub mod server;
pub mod upstream;
