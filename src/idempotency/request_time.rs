//! `request_time`: when a client made its request, and whether that is too long ago to run it.
//!
//! A record is forgotten after its ttl, and a retry that comes later would run again. A request that says when it was made
//! can be refused by then: with `max_age` and `skew` within the ttl, whoever is young enough to run still meets the record.

use std::time::{Duration, UNIX_EPOCH};

use http::{HeaderMap, HeaderName};

use super::record::Timestamp;

/// `request_time = { from, max_age, skew }`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTime {
    /// The header with the time.
    pub from: HeaderName,
    /// How old a request may be that runs; at this age it is too old.
    pub max_age: Duration,
    /// How far its time may be ahead.
    pub skew: Duration,
}

/// Why a request may not run. A message describes it without the header's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestTimeFault {
    /// It has no time.
    Missing,
    /// It has several, or one that cannot be read.
    Unreadable,
    /// It was made too long ago.
    Old {
        /// Its age.
        age: Duration,
    },
    /// It was made too far in the future.
    Ahead {
        /// How far.
        by: Duration,
    },
}

/// A number with so many digits or more is milliseconds: as seconds it would be after the year 5138, and as milliseconds
/// fewer digits would be before 1973.
const MILLISECONDS_FROM: u64 = 100_000_000_000;

impl RequestTime {
    /// Whether a request with these headers may run at this time.
    pub fn judge(&self, headers: &HeaderMap, now: Timestamp) -> Result<(), RequestTimeFault> {
        let mut lines = headers.get_all(&self.from).iter();
        let made = match (lines.next(), lines.next()) {
            (None, _) => return Err(RequestTimeFault::Missing),
            (Some(line), None) => {
                line.to_str().ok().and_then(|text| read(text.trim())).ok_or(RequestTimeFault::Unreadable)?
            }
            (Some(_), Some(_)) => return Err(RequestTimeFault::Unreadable),
        };
        let (age, by) = (now.since(made), made.since(now));
        // At `max_age` it is too old: a record of the same age is forgotten then.
        if age >= self.max_age {
            return Err(RequestTimeFault::Old { age });
        }
        if by > self.skew { Err(RequestTimeFault::Ahead { by }) } else { Ok(()) }
    }
}

/// Reads a time: RFC 3339, an HTTP date, or seconds or milliseconds since 1970.
fn read(text: &str) -> Option<Timestamp> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        let number: u64 = text.parse().ok()?;
        let millis = if number < MILLISECONDS_FROM { number * 1000 } else { number };
        return Some(Timestamp(millis));
    }
    rfc_3339(text).or_else(|| {
        let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(Timestamp(u64::try_from(date.as_millis()).ok()?))
    })
}

/// Reads `2026-11-23T09:00:00.5+01:00` (RFC 3339, section 5.6), to the millisecond. Nothing before 1970.
fn rfc_3339(text: &str) -> Option<Timestamp> {
    let (date, rest) = text.split_at_checked(10)?;
    let rest = rest.strip_prefix(['T', 't', ' '])?;
    let (clock, rest) = rest.split_at_checked(8)?;
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let [hour, minute, second] = numbers(clock, ':', [2, 2, 2])?;
    let (fraction, zone) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.bytes().take_while(u8::is_ascii_digit).count()),
        None => ("0", rest),
    };
    if fraction.is_empty() {
        return None;
    }
    let offset = match zone {
        "Z" | "z" => 0,
        zone => {
            let sign = if zone.starts_with('+') { 1 } else { -1 };
            let [hours, minutes] = numbers(zone.strip_prefix(['+', '-'])?, ':', [2, 2])?;
            if hours > 23 || minutes > 59 {
                return None;
            }
            sign * (hours * 60 + minutes)
        }
    };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let longest = match month {
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        1..=12 => 31,
        _ => return None,
    };
    // 60 is a leap second.
    if day < 1 || day > longest || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Days since 1970, by counting years from March (Howard Hinnant, "chrono-compatible low-level date algorithms").
    let (from_march, year) = ((month + 9) % 12, if month < 3 { year - 1 } else { year });
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * from_march + 2) / 5 + day - 1 - 719_468;
    let seconds = ((days * 24 + hour) * 60 + minute - offset) * 60 + second;
    let millis: u64 = format!("{fraction:0<3}")[..3].parse().ok()?;
    Some(Timestamp(u64::try_from(seconds).ok()? * 1000 + millis))
}

/// Numbers of so many digits, with a separator between them.
fn numbers<const N: usize>(text: &str, separator: char, digits: [usize; N]) -> Option<[i64; N]> {
    let mut parts = text.split(separator);
    let mut numbers = [0; N];
    for (number, digits) in numbers.iter_mut().zip(digits) {
        let part =
            parts.next().filter(|part| part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit()))?;
        *number = part.parse().ok()?;
    }
    parts.next().is_none().then_some(numbers)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const NOW: u64 = 1_795_424_400_000;

    fn rule(max_age: u64, skew: u64) -> RequestTime {
        let from = HeaderName::from_static("x-request-timestamp");
        RequestTime { from, max_age: Duration::from_millis(max_age), skew: Duration::from_millis(skew) }
    }

    fn judge(rule: &RequestTime, lines: &[&str], now: u64) -> Result<(), RequestTimeFault> {
        let line = |text: &&str| (rule.from.clone(), HeaderValue::from_str(text).unwrap());
        rule.judge(&lines.iter().map(line).collect(), Timestamp(now))
    }

    #[test]
    fn times_are_read_in_four_forms() {
        for (text, millis) in [
            ("2026-11-23T09:00:00Z", NOW),
            ("2026-11-23t09:00:00z", NOW),
            ("2026-11-23 09:00:00.000Z", NOW),
            ("2026-11-23T10:30:00.25+01:30", NOW + 250),
            ("2026-11-22T23:00:00.123456789-10:00", NOW + 123),
            ("2024-02-29T00:00:00Z", 1_709_164_800_000),
            ("1970-01-01T00:00:00Z", 0),
            ("9999-12-31T23:59:59Z", 253_402_300_799_000),
            ("2016-12-31T23:59:60Z", 1_483_228_800_000),
            ("Mon, 23 Nov 2026 09:00:00 GMT", NOW),
            ("Monday, 23-Nov-26 09:00:00 GMT", NOW),
            ("1795424400", NOW),
            ("1795424400000", NOW),
            ("0", 0),
            ("99999999999", 99_999_999_999_000),
            ("100000000000", 100_000_000_000),
        ] {
            assert_eq!(read(text), Some(Timestamp(millis)), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_not_read() {
        for text in [
            "",
            "now",
            "-1",
            "1795424400.5",
            "0x6b",
            "99999999999999999999999",
            "2026-11-23",
            "2026-11-23T09:00:00",
            "2026-11-23T09:00Z",
            "2026-11-23T09:00:00.Z",
            "2026-11-23T09:00:00+0100",
            "2026-11-23T09:00:00+24:00",
            "2026-13-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-11-31T00:00:00Z",
            "2026-11-00T00:00:00Z",
            "2026-11-23T24:00:00Z",
            "2026-11-23T09:60:00Z",
            "2026-11-23T09:00:61Z",
            "+026-11-23T09:00:00Z",
            "1969-12-31T23:59:59Z",
            "2026-11-23T09:00:00Zx",
            "Mon, 23 Nov 2026 09:00:00",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn a_request_runs_within_its_bounds() {
        let rule = rule(3_600_000, 300_000);
        let old = |age| Err(RequestTimeFault::Old { age: Duration::from_millis(age) });
        let ahead = |by| Err(RequestTimeFault::Ahead { by: Duration::from_millis(by) });
        for (made, judged) in [
            (NOW, Ok(())),
            (NOW - 3_599_999, Ok(())),
            (NOW - 3_600_000, old(3_600_000)),
            (NOW + 300_000, Ok(())),
            (NOW + 300_001, ahead(300_001)),
            (0, old(NOW)),
        ] {
            let text = if made == 0 { "0".to_owned() } else { made.to_string() };
            assert_eq!(judge(&rule, &[&text], NOW), judged, "{made}");
        }
        assert_eq!(judge(&rule, &[], NOW), Err(RequestTimeFault::Missing));
        assert_eq!(judge(&rule, &["soon"], NOW), Err(RequestTimeFault::Unreadable));
        let now = NOW.to_string();
        assert_eq!(judge(&rule, &[&now, &now], NOW), Err(RequestTimeFault::Unreadable), "two lines");
    }

    /// One try of a request: when it comes, how far the clock of its gate is off, and how long the store takes for its claim.
    #[derive(Clone, Copy, Debug)]
    struct Try {
        at: u64,
        clock: i64,
        claim: u64,
    }

    const TTL: u64 = 1_000;

    fn tries(most_off: i64) -> impl Strategy<Value = Vec<Try>> {
        let one = (0..3 * TTL, -most_off..=most_off, 0..200_u64);
        let tries = proptest::collection::vec(one.prop_map(|(at, clock, claim)| Try { at, clock, claim }), 1..12);
        tries.prop_map(|mut tries| {
            tries.sort_by_key(|one| one.at + one.claim);
            tries
        })
    }

    /// How often a request runs that its client says was made at `made`, by tries in the order of their claims. Each
    /// completes at once, and its record is forgotten at its ttl, by the store's clock.
    fn runs(rule: &RequestTime, made: u64, tries: &[Try]) -> usize {
        let (mut runs, mut record): (usize, Option<u64>) = (0, None);
        for Try { at, clock, claim } in tries.iter().copied() {
            let may_run = |at: u64| judge(rule, &[&made.to_string()], (NOW + at).saturating_add_signed(clock)).is_ok();
            let claimed = at + claim;
            // It is asked about before the claim, and again once it has one: see the claim protocol.
            let is_free = record.is_none_or(|until| until <= claimed);
            if may_run(at) && is_free && may_run(claimed) {
                runs += 1;
                record = Some(claimed + TTL);
            }
        }
        runs
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8 * ProptestConfig::default().cases))]

        /// With one clock at the gates, whatever time the client says, and whenever its tries come.
        #[test]
        fn no_request_runs_twice(skew in 0..TTL, less in 0..50_u64, made in 0..3 * TTL, off in -100..100_i64, mut tries in tries(0)) {
            let rule = rule((TTL - skew).saturating_sub(less).max(1), skew);
            tries.iter_mut().for_each(|one| one.clock = off);
            prop_assert!(runs(&rule, NOW + made, &tries) <= 1);
        }

        /// With clocks of its own at each gate, of which none differs from the client's by more than `skew`.
        #[test]
        fn no_request_runs_twice_on_skewed_clocks(skew in 0..TTL / 2, sent in 0..TTL, tries in tries(i64::MAX / 4)) {
            let rule = rule(TTL - skew, skew);
            let within = |one: &Try| Try { clock: one.clock % (skew as i64 + 1), ..*one };
            let tries: Vec<_> = tries.iter().map(within).filter(|one| one.at >= sent).collect();
            prop_assert!(runs(&rule, NOW + sent, &tries) <= 1);
        }

        #[test]
        fn a_text_is_read_without_a_panic(text in "[0-9TZ:.+ -]{0,35}|\\PC{0,20}") {
            let _ = read(&text);
        }
    }

    /// The model can tell.
    #[test]
    fn beyond_the_ttl_a_request_runs_twice() {
        let tries = [0, TTL].map(|at| Try { at, clock: 0, claim: 0 });
        assert_eq!(runs(&rule(TTL + 1, 0), NOW, &tries), 2);
        assert_eq!(runs(&rule(TTL, 0), NOW, &tries), 1);
    }

    #[test]
    fn a_slow_claim_does_not_outlive_the_first_record() {
        // It comes just before it is too old, and is claimed just after the record is gone.
        let tries = [Try { at: 0, clock: 0, claim: 0 }, Try { at: TTL - 1, clock: 0, claim: 1 }];
        assert_eq!(runs(&rule(TTL, 0), NOW, &tries), 1);
    }
}
