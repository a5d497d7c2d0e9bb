//! The `Via` header (RFC 9110, 7.6.3), and loop detection.

use http::header::VIA;
use http::{HeaderMap, HeaderValue, Version};

use super::headers::tokens;

/// The prefix of every gate's pseudonym.
const GATE: &[u8] = b"oncegate";

/// The maximum number of gates on the path of a request.
const MOST_GATES: usize = 10;

/// The unique pseudonym of this process in `Via`, by which it recognises its own requests.
#[derive(Clone, Debug)]
pub struct Via {
    /// For HTTP/1.1, HTTP/1.0 and HTTP/2.
    lines: [HeaderValue; 3],
}

impl Via {
    /// A new one.
    #[must_use]
    pub fn new() -> Self {
        let name = format!("oncegate-{:016x}", fastrand::u64(..));
        let line = |version: &str| {
            let line = HeaderValue::from_str(&format!("{version} {name}"));
            // It is nothing but visible ASCII.
            line.unwrap_or_else(|_| HeaderValue::from_static("1.1 oncegate"))
        };
        Self { lines: ["1.1", "1.0", "2.0"].map(line) }
    }

    /// The entry for a request of this version.
    #[must_use]
    pub fn line(&self, version: Version) -> &HeaderValue {
        match version {
            Version::HTTP_2 => &self.lines[2],
            Version::HTTP_10 => &self.lines[1],
            _ => &self.lines[0],
        }
    }

    /// Whether a request passed this gate before, or too many gates.
    #[must_use]
    pub fn is_loop(&self, headers: &HeaderMap) -> bool {
        let own = received_by(self.lines[0].as_bytes());
        let mut gates = 0;
        for by in headers.get_all(VIA).iter().flat_map(tokens).map(received_by) {
            gates += usize::from(by.starts_with(GATE));
            if gates > MOST_GATES || by == own {
                return true;
            }
        }
        false
    }
}

impl Default for Via {
    fn default() -> Self {
        Self::new()
    }
}

/// The `received-by` part of a list member.
fn received_by(member: &[u8]) -> &[u8] {
    let mut words = member.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    words.nth(1).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[&str]) -> HeaderMap {
        lines.iter().map(|line| (VIA, HeaderValue::from_str(line).unwrap())).collect::<Vec<_>>().into_iter().fold(
            HeaderMap::new(),
            |mut headers, (name, line)| {
                headers.append(name, line);
                headers
            },
        )
    }

    #[test]
    fn a_gate_knows_itself_and_no_other() {
        let (via, other) = (Via::new(), Via::new());
        for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
            let own = via.line(version).to_str().unwrap();
            assert!(via.is_loop(&headers(&[own])));
            assert!(via.is_loop(&headers(&["1.1 a", &format!("1.0 b (x), {own}  (comment) ,1.1 c")])), "{own}");
            assert!(!other.is_loop(&headers(&[own])));
            assert!(!via.is_loop(&headers(&[&format!("{own}0"), "1.1 oncegate", "", ","])));
        }
    }

    #[test]
    fn too_many_gates_are_a_loop() {
        let line = |gates: usize| (0..gates).map(|gate| format!("1.1 oncegate-{gate}")).collect::<Vec<_>>().join(", ");
        assert!(!Via::new().is_loop(&headers(&[&line(MOST_GATES)])));
        assert!(Via::new().is_loop(&headers(&[&line(4), &line(MOST_GATES - 3)])));
    }
}
