//! Outcomes, metrics and logs.

pub mod limits;
pub mod log_throttle;
pub mod logs;
pub mod metrics;
pub mod outcome;
