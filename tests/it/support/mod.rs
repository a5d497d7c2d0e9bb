//! A scripted upstream, the real gate as a process, and a client that sees every byte.

pub mod brokers;
pub mod client;
pub mod faults;
pub mod frames;
pub mod gate;
pub mod h2;
pub mod http2;
pub mod https;
pub mod listening;
pub mod process;
pub mod prometheus;
pub mod recorded;
pub mod service;
pub mod store;
pub mod tls;
pub mod upstream;
pub mod wait;
pub mod wire;

pub use client::{Client, Request, Response};
pub use gate::{Gate, Plan};
pub use h2::H2;
pub use process::Process;
pub use prometheus::Prometheus;
pub use service::Service;
pub use tls::{Terms, Tls};
pub use upstream::{Reply, Upstream};
pub use wait::{Awake, Signal, eventually};
