//! Outcomes, metrics and logs.

pub mod limits;
pub mod log_throttle;
pub mod logs;
pub mod metered;
pub mod metrics;
mod outage;
pub mod outcome;
