//! Durations and sizes.

use std::time::Duration;

use super::node::Wrong;

/// The units of durations, in milliseconds.
pub(super) const DURATIONS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// The units of sizes, in bytes.
pub(super) const SIZES: [(&str, u64); 8] = [
    ("B", 1),
    ("kB", 1_000),
    ("KB", 1_000),
    ("KiB", 1 << 10),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    ("GiB", 1 << 30),
];

/// Reads `"30s"`, `"24h"`, `"7d"`, `"500ms"`; several stand in a row: `"1h30m"`.
pub(super) fn duration(text: &str) -> Result<Duration, Wrong> {
    let wrong = || Wrong::new(format!("`{text}` is not a duration")).hint(DURATION_HINT);
    let mut rest = text.trim();
    let mut millis = 0_u64;
    if rest.is_empty() {
        return Err(wrong());
    }
    while !rest.is_empty() {
        let (number, after) = split_number(rest).ok_or_else(wrong)?;
        let end = after.find(|char: char| !char.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        if unit.is_empty() && after.is_empty() {
            return Err(no_unit(number));
        }
        let factor = factor(&DURATIONS, unit).ok_or_else(wrong)?;
        millis = number.checked_mul(factor).and_then(|part| millis.checked_add(part)).ok_or_else(wrong)?;
        rest = after;
    }
    Ok(Duration::from_millis(millis))
}

/// What to say of a duration that is a bare number.
pub(super) fn no_unit(number: impl std::fmt::Display) -> Wrong {
    let number = number.to_string();
    if number == "0" {
        return Wrong::new("a duration needs a unit").hint(DURATION_HINT);
    }
    Wrong::new("a duration needs a unit")
        .hint(format!("write \"{number}s\" for seconds, \"{number}ms\" for milliseconds, or m, h, d"))
}

/// What a duration looks like.
pub(super) const DURATION_HINT: &str = "write a whole number and a unit (ms, s, m, h, d), such as \"30s\" or \"1h30m\"";

/// Reads `"1MiB"`, `"256KiB"`, `"16MB"`, `"512B"`, in bytes.
pub(super) fn size(text: &str) -> Result<u64, Wrong> {
    let wrong = || Wrong::new(format!("`{text}` is not a size")).hint(SIZE_HINT);
    let (number, unit) = split_number(text.trim()).ok_or_else(wrong)?;
    let factor = factor(&SIZES, unit.trim_start()).ok_or_else(wrong)?;
    number.checked_mul(factor).ok_or_else(wrong)
}

/// What a size looks like.
pub(super) const SIZE_HINT: &str =
    "write a whole number and a unit (B, KiB, MiB, GiB, or kB, MB, GB for powers of ten), such as \"16MiB\"";

/// Writes a duration as the configuration has it, in one unit.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    // "60s" and "24h" read better than "1m" and "1d".
    let fits = |unit: &str, factor| millis.is_multiple_of(factor) && (millis > factor || !matches!(unit, "m" | "d"));
    match DURATIONS.iter().rev().find(|(unit, factor)| millis > 0 && fits(unit, *factor)) {
        Some((unit, factor)) => format!("{}{unit}", millis / factor),
        None => "0s".to_owned(),
    }
}

/// Writes a size as [`size`] reads it.
pub(super) fn show_size(bytes: u64) -> String {
    let binary = SIZES.iter().rev().filter(|(unit, _)| unit.ends_with("iB"));
    match binary.into_iter().find(|(_, factor)| bytes > 0 && bytes.is_multiple_of(*factor)) {
        Some((unit, factor)) => format!("{}{unit}", bytes / factor),
        None => format!("{bytes}B"),
    }
}

fn factor(units: &[(&str, u64)], word: &str) -> Option<u64> {
    units.iter().find(|(unit, _)| *unit == word).map(|(_, factor)| *factor)
}

fn split_number(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|char: char| !char.is_ascii_digit()).unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    Some((number.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written() {
        for (text, millis, shown) in [
            ("30s", 30_000, "30s"),
            ("24h", 86_400_000, "24h"),
            ("1d", 86_400_000, "24h"),
            ("7d", 604_800_000, "7d"),
            ("500ms", 500, "500ms"),
            ("1h30m", 5_400_000, "90m"),
            ("1m", 60_000, "60s"),
            ("1h", 3_600_000, "1h"),
            ("0s", 0, "0s"),
        ] {
            let read = duration(text).unwrap();
            assert_eq!(read, Duration::from_millis(millis), "{text}");
            assert_eq!(show_duration(read), shown, "{text}");
            assert_eq!(duration(shown).unwrap(), read, "{text}");
        }
        for text in ["", "30", "s", "-1s", "1.5s", "1 s", "1w", "1S", "99999999999999999999s", "18446744073709551615d"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes, shown) in [
            ("1MiB", 1 << 20, "1MiB"),
            ("256KiB", 256 << 10, "256KiB"),
            ("1024KiB", 1 << 20, "1MiB"),
            ("16MB", 16_000_000, "15625KiB"),
            ("1 GiB", 1 << 30, "1GiB"),
            ("513B", 513, "513B"),
            ("0B", 0, "0B"),
        ] {
            let read = size(text).unwrap();
            assert_eq!(read, bytes, "{text}");
            assert_eq!(show_size(read), shown, "{text}");
            assert_eq!(size(shown).unwrap(), read, "{text}");
        }
        for text in ["", "16", "MiB", "16M", "16mb", "1.5MiB", "99999999999999GiB"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
