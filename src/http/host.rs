//! Hosts as requests name them: `uri-host [ ":" port ]` (RFC 9110, 7.2), without a user.

use http::uri::Authority;

use super::byte_set::ByteSet;

/// Whether a host is written as nearly all are: a name or an IPv4 address in lower case, with a port that is not the
/// default one or with none. It is sound, and normal.
#[must_use]
pub fn is_usual(host: &str) -> bool {
    static OF_NAMES: ByteSet = ByteSet::lower_case_and(b"-.");
    let (name, port) = host.split_at(OF_NAMES.span(host));
    let port_is_usual = |port: &str| {
        let is_short = (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit());
        is_short && port != "80" && port.parse::<u16>().is_ok()
    };
    !name.is_empty() && !name.ends_with('.') && (port.is_empty() || port.strip_prefix(':').is_some_and(port_is_usual))
}

/// Whether this is a host with an optional port. It may be empty, where the target has no authority.
#[must_use]
pub fn is_host(host: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let is_sound = |authority: Authority| {
        let name = authority.host();
        // Nothing but a port stands behind an address in brackets.
        let rest = &authority.as_str()[name.len()..];
        !name.is_empty()
            && (rest.is_empty() || rest.strip_prefix(':').is_some_and(|port| port.is_empty() || is_port(port)))
    };
    host.is_empty() || !host.contains('@') && host.parse::<Authority>().is_ok_and(is_sound)
}

/// A host in lower case, without the default port and the final dot of a name (RFC 9110, 4.2.3); nothing where it is
/// written so already.
#[must_use]
pub fn normal(host: &str, default_port: &str) -> Option<String> {
    let written = host;
    let host = host.strip_suffix(default_port).or_else(|| host.strip_suffix(':')).unwrap_or(host);
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (host, None),
    };
    let mut normal = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    if let Some(port) = port {
        normal.push(':');
        normal.push_str(port);
    }
    Some(normal).filter(|normal| normal != written)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hosts_are_recognised() {
        for host in ["", "a", "a.example:8080", "127.0.0.1:1", "[::1]", "[::1]:80", "a:"] {
            assert!(is_host(host), "{host}");
        }
        for host in [
            "a b",
            "a/c",
            "u@h",
            "h:99999",
            "[::1",
            "[::1:80",
            ":80",
            "h:x",
            "h:+80",
            "[::1].evil",
            "[::1]a:80",
            "a[::1]",
        ] {
            assert!(!is_host(host), "{host}");
        }
    }

    proptest! {
        #[test]
        fn usual_hosts_are_sound_and_normal(host in "[a-c.:\\[\\]@A%-]{0,4}(:[0-9]{0,6})?|[a-z0-9.-]{1,9}(:(80|8080|65535|65536|0?80))?") {
            if is_usual(&host) {
                prop_assert!(is_host(&host));
                prop_assert_eq!(normal(&host, ":80"), None);
            }
        }
    }

    #[test]
    fn spellings_of_one_host_are_one() {
        for host in ["api.example", "API.example", "api.example:80", "api.example.", "api.example.:80", "api.example:"]
        {
            assert_eq!(normal(host, ":80").as_deref().unwrap_or(host), "api.example", "{host}");
        }
        for (written, expected) in [
            ("api.example", None),
            ("api.example.:8080", Some("api.example:8080")),
            ("[::1]", None),
            ("[::1]:80", Some("[::1]")),
            ("[::1]:8080", None),
            ("", None),
        ] {
            assert_eq!(normal(written, ":80").as_deref(), expected, "{written}");
        }
    }
}
