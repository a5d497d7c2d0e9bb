//! A scripted upstream, the real gate as a process, and a client that sees every byte.

pub mod client;
pub mod faults;
pub mod gate;
pub mod process;
pub mod store;
pub mod upstream;
pub mod wait;
pub mod wire;

pub use client::{Client, Request, Response};
pub use gate::{Gate, Plan};
pub use process::Process;
pub use upstream::{Reply, Upstream};
pub use wait::{Signal, eventually};
