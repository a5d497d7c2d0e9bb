//! One word for each limit that can be reached: metric label, and what logs call it.

use prometheus::IntCounter;

/// What was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
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
}

impl Limit {
    /// Every limit, in the order of its declaration.
    pub const ALL: [Self; 6] = [
        Self::HeaderTimeout,
        Self::IdleTimeout,
        Self::BodyTimeout,
        Self::MinBodyRate,
        Self::MaxHeaderSize,
        Self::MaxHeaders,
    ];

    /// The word for it: its key in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HeaderTimeout => "header_timeout",
            Self::IdleTimeout => "idle_timeout",
            Self::BodyTimeout => "body_timeout",
            Self::MinBodyRate => "min_body_rate",
            Self::MaxHeaderSize => "max_header_size",
            Self::MaxHeaders => "max_headers",
        }
    }
}

/// How often each limit was reached.
#[derive(Clone)]
pub struct LimitMetrics {
    pub(super) exceeded: [IntCounter; Limit::ALL.len()],
}

impl LimitMetrics {
    /// A limit was reached.
    pub fn exceeded(&self, limit: Limit) {
        self.exceeded[limit as usize].inc();
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
