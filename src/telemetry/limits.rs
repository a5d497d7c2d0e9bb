//! One word for each limit that can be reached, how often it was, and how much of it is taken.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus::IntCounter;

use super::log_throttle::LogThrottle;

/// What was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// `[limits] max_connections`
    MaxConnections,
    /// `[limits] max_connections_per_address`
    MaxConnectionsPerAddress,
    /// `[limits] max_requests`
    MaxRequests,
    /// `[limits] max_waiting`
    MaxWaiting,
    /// `[limits] max_observing`
    MaxObserving,
    /// `[limits] max_buffered_memory`
    MaxBufferedMemory,
    /// `[limits] max_buffered_disk`
    MaxBufferedDisk,
    /// `[upstreams] NAME.max_connections`
    UpstreamMaxConnections,
    /// `[limits] fair_share`
    FairShare,
    /// `[limits] header_timeout`
    HeaderTimeout,
    /// `[limits] idle_timeout`
    IdleTimeout,
    /// `[limits] body_timeout`
    BodyTimeout,
    /// `[limits] min_body_rate`
    MinBodyRate,
    /// `[limits] max_header_size`
    MaxHeaderSize,
    /// `[limits] max_headers`
    MaxHeaders,
    /// The bounds of a connection over HTTP/2, which have no key
    Http2Flood,
}

impl Limit {
    /// Every limit, in the order of its declaration.
    pub const ALL: [Self; 16] = [
        Self::MaxConnections,
        Self::MaxConnectionsPerAddress,
        Self::MaxRequests,
        Self::MaxWaiting,
        Self::MaxObserving,
        Self::MaxBufferedMemory,
        Self::MaxBufferedDisk,
        Self::UpstreamMaxConnections,
        Self::FairShare,
        Self::HeaderTimeout,
        Self::IdleTimeout,
        Self::BodyTimeout,
        Self::MinBodyRate,
        Self::MaxHeaderSize,
        Self::MaxHeaders,
        Self::Http2Flood,
    ];

    /// The word for it: its key in the configuration, if it has one.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MaxConnections => "max_connections",
            Self::MaxConnectionsPerAddress => "max_connections_per_address",
            Self::MaxRequests => "max_requests",
            Self::MaxWaiting => "max_waiting",
            Self::MaxObserving => "max_observing",
            Self::MaxBufferedMemory => "max_buffered_memory",
            Self::MaxBufferedDisk => "max_buffered_disk",
            Self::UpstreamMaxConnections => "upstream_max_connections",
            Self::FairShare => "fair_share",
            Self::HeaderTimeout => "header_timeout",
            Self::IdleTimeout => "idle_timeout",
            Self::BodyTimeout => "body_timeout",
            Self::MinBodyRate => "min_body_rate",
            Self::MaxHeaderSize => "max_header_size",
            Self::MaxHeaders => "max_headers",
            Self::Http2Flood => "http2_flood",
        }
    }

    /// Whether it is all of the gate that is short of something, and not one client that takes too much.
    fn is_shared(self) -> bool {
        match self {
            Self::MaxConnections
            | Self::MaxRequests
            | Self::MaxWaiting
            | Self::MaxObserving
            | Self::MaxBufferedMemory
            | Self::MaxBufferedDisk
            | Self::UpstreamMaxConnections => true,
            Self::MaxConnectionsPerAddress
            | Self::FairShare
            | Self::HeaderTimeout
            | Self::IdleTimeout
            | Self::BodyTimeout
            | Self::MinBodyRate
            | Self::MaxHeaderSize
            | Self::MaxHeaders
            | Self::Http2Flood => false,
        }
    }
}

/// How often each limit was reached, and how much is taken of those that are shared.
pub struct LimitMetrics {
    pub(super) exceeded: [IntCounter; Limit::ALL.len()],
    pub(super) warned: [LogThrottle; Limit::ALL.len()],
    pub(super) levels: [Level; Limit::ALL.len()],
}

/// How much of a limit is taken: metrics show what it is when they are asked for.
pub type Level = Arc<AtomicU64>;

impl LimitMetrics {
    /// A limit was reached.
    pub fn exceeded(&self, limit: Limit) {
        self.exceeded[limit as usize].inc();
        if limit.is_shared()
            && let Some(others) = self.warned[limit as usize].due()
        {
            tracing::warn!(limit = limit.as_str(), others, "a limit of the gate is reached");
        }
    }

    /// A client was refused more of a limit of which it holds its share. This counts for both.
    pub fn share_exceeded(&self, of: Limit) {
        self.exceeded[of as usize].inc();
        self.exceeded[Limit::FairShare as usize].inc();
        if let Some(others) = self.warned[Limit::FairShare as usize].due() {
            tracing::warn!(limit = of.as_str(), others, "one client holds its share of a limit of the gate");
        }
    }

    /// How much of a limit is taken.
    #[must_use]
    pub fn level(&self, limit: Limit) -> Level {
        Arc::clone(&self.levels[limit as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_stands_at_its_index() {
        for (index, limit) in Limit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, index, "{}", limit.as_str());
        }
    }
}
