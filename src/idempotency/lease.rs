//! When the lease of an attempt is renewed, and what follows from that.

use std::time::Duration;

/// How long after it was granted or renewed a lease is renewed. Two renewals may fail before it runs out.
#[must_use]
pub fn renewal_interval(lease: Duration) -> Duration {
    lease / 3
}

/// How often to look for leases that are due. The renewal is late by this much at most.
#[must_use]
pub fn check_interval(lease: Duration) -> Duration {
    renewal_interval(lease) / 2
}

/// How old a lease may be when the store acknowledges it. Less than a [`renewal_interval`] would be left after that, and the first
/// renewal may come a [`check_interval`] later: the lease could run out under a request that has just been sent.
#[must_use]
pub fn max_age_at_start(lease: Duration) -> Duration {
    lease - renewal_interval(lease)
}
