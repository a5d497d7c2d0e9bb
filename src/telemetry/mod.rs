//! Outcomes, metrics and logs.

pub mod access_log;
pub mod admin_refusal;
pub mod consumers;
mod decryption_failures;
pub mod deliveries;
pub mod limits;
pub mod log_throttle;
#[cfg(test)]
pub(crate) mod logged;
pub mod logs;
pub mod losses;
pub mod metrics;
pub mod notes;
pub mod observed;
pub mod outcome;
mod process;
pub mod records_by_key;
mod register;
pub mod report;
mod runtimes;
pub mod spans;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::idempotency::record::Timestamp;

/// The last millisecond of the year 9999, the last that RFC 3339 and HTTP dates can write.
const LAST: Timestamp = Timestamp(253_402_300_799_999);

/// The time of this process's clock.
#[must_use]
pub fn wall_clock() -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// A time for people and for programs, in RFC 3339.
#[must_use]
pub fn rfc3339(time: Timestamp) -> String {
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(time.min(LAST).0)).to_string()
}

/// A time as an HTTP date (RFC 9110, 5.6.7), which has four digits for the year.
#[must_use]
pub fn http_date(time: Timestamp) -> String {
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_millis(time.min(LAST).0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_whatever_they_are() {
        assert_eq!(rfc3339(Timestamp(0)), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(Timestamp(1_767_225_600_123)), "2026-01-01T00:00:00.123Z");
        assert_eq!(rfc3339(Timestamp(i64::MAX as u64)), "9999-12-31T23:59:59.999Z");
    }

    #[test]
    fn times_are_http_dates_whatever_they_are() {
        assert_eq!(http_date(Timestamp(1_767_225_600_999)), "Thu, 01 Jan 2026 00:00:00 GMT");
        assert_eq!(http_date(Timestamp(0)), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(http_date(Timestamp(u64::MAX)), "Fri, 31 Dec 9999 23:59:59 GMT");
    }
}
