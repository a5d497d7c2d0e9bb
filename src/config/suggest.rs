//! Did you mean?

/// The candidate that `word` is most likely a slip of, if one is near enough; or the only one that begins with it.
pub(super) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let length = word.chars().count();
    // For a word of one letter, every other letter would be near.
    let limit = (length / 3).clamp(usize::from(length > 1), 3);
    let candidates: Vec<&str> = candidates.into_iter().collect();
    let near = candidates
        .iter()
        .filter(|candidate| candidate.chars().count().abs_diff(length) <= limit)
        .map(|candidate| (distance(&word, &candidate.to_lowercase()), *candidate))
        .filter(|&(distance, _)| distance <= limit)
        .min_by_key(|&(distance, _)| distance);
    let mut longer =
        candidates.iter().filter(|candidate| word.len() >= SHORTEST_BEGINNING && candidate.starts_with(&word));
    match (near, longer.next(), longer.next()) {
        (Some((_, near)), ..) => Some(near),
        (None, Some(only), None) => Some(only),
        (None, ..) => None,
    }
}

/// How long a word is at least that is taken for the beginning of another.
const SHORTEST_BEGINNING: usize = 4;

/// How many letters must be inserted, removed, replaced or swapped with their neighbour to get from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(before_last[j - 2] + 1);
            }
            row.push(least);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_recognised() {
        let keys = ["listen", "drain_timeout", "methods", "host", "path", "ttl", "secret_file", "secret_url"];
        for (slip, meant) in [
            ("lsten", Some("listen")),
            ("Listen", Some("listen")),
            ("drain-timeout", Some("drain_timeout")),
            ("method", Some("methods")),
            ("hots", Some("host")),
            ("tll", Some("ttl")),
            ("colour", None),
            ("drain", Some("drain_timeout")),
            ("metho", Some("methods")),
            ("secret", None),
            ("x", None),
        ] {
            assert_eq!(nearest(slip, keys), meant, "{slip}");
        }
    }

    #[test]
    fn distances_count_single_slips() {
        for (a, b, expected) in
            [("", "abc", 3), ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "ab", 1), ("ab", "xy", 2)]
        {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }
}
