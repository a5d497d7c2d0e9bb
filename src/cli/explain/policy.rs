//! A policy as text: dotted keys and their values, as a configuration file has them.

use std::fmt::Write as _;

use toml_edit::Table;

use crate::config::{self, Flags, Resolved, Sources, show_duration};
use crate::idempotency::grpc::Status;
use crate::idempotency::quota::{Quota, QuotaBy};
use crate::idempotency::settle::{Ending, Outcomes};

/// How long a line of defaults may be.
const WIDTH: usize = 85;

/// Keys of a route that are no policy.
const OF_ROUTE: [&str; 7] = ["name", "namespace", "methods", "host", "path", "upstream", "preset"];

/// Keys that are tables and whose parts count one by one: each part is shown as a key of its own.
const IN_PARTS: [&str; 6] = ["key", "fingerprint", "outcomes", "response_headers", "cors", "deliver"];

/// A policy as dotted keys and their values.
pub(super) type Spelled = Vec<(String, String)>;

/// The policy of a route, every value spelled out.
pub(super) fn policy_of(config: &Resolved, name: &str) -> Spelled {
    let routes = config.effective["routes"].as_array_of_tables().into_iter().flatten();
    let mut own = routes.filter(|route| route.get("name").and_then(|name| name.as_str()) == Some(name));
    own.next().map(spell).unwrap_or_default()
}

/// The preset of a route, and the keys that it fills in, every value spelled out.
pub(super) fn preset_of(config: &Resolved, name: &str) -> Option<(String, Spelled)> {
    let routes = config.effective["routes"].as_array_of_tables().into_iter().flatten();
    let mut own = routes.filter(|route| route.get("name").and_then(|name| name.as_str()) == Some(name));
    let preset = own.next()?.get("preset")?.as_str()?.to_owned();
    let text = format!("[upstreams]\na = \"http://127.0.0.1\"\n[defaults]\npreset = {preset:?}\n");
    let built_in = built_in();
    let mut filled = policy_of(&config::load_text("preset".into(), &text).ok()?, "default");
    filled.retain(|key| !built_in.contains(key));
    Some((preset, filled))
}

/// A quota in words.
pub(super) fn show_quota(quota: &Quota) -> String {
    let whose = match quota.by {
        QuotaBy::Scope => "each caller, by the scope above",
        QuotaBy::ClientIp => "each address of a client",
        QuotaBy::Route => "all callers of the route together",
    };
    format!("{} new keys in {} for {whose}; retries do not count", quota.new_keys, show_duration(quota.per))
}

/// The policy of a route that says nothing.
pub(super) fn built_in() -> Spelled {
    let flags = Flags { upstream: Some("http://127.0.0.1".to_owned()), ..Flags::default() };
    let config = config::load(Sources { flags, ..Sources::default() });
    config.map(|config| policy_of(&config, "default")).unwrap_or_default()
}

fn spell(route: &Table) -> Spelled {
    let mut spelled = Vec::new();
    for (key, value) in route.iter().filter(|(key, _)| !OF_ROUTE.contains(key)) {
        match value.as_inline_table().filter(|_| IN_PARTS.contains(&key)) {
            Some(parts) => spelled.extend(
                parts.iter().map(|(part, value)| (format!("{key}.{part}"), value.to_string().trim().to_owned())),
            ),
            None => spelled.push((key.to_owned(), value.to_string().trim().to_owned())),
        }
    }
    spelled
}

/// The default of a key that the built-in policy does not spell out.
pub(super) fn other_default(key: &str) -> String {
    let ending = key.strip_prefix("outcomes.").and_then(|entry| match entry {
        "unreachable" => Some(Ending::Unreachable),
        "timeout" => Some(Ending::Timeout),
        "broken" => Some(Ending::Broken),
        entry => match entry.trim_matches('"').strip_prefix("grpc:") {
            Some(status) => Status::parse(status).map(Ending::Called),
            None => entry.replace("xx", "00").parse().ok().map(Ending::Answered),
        },
    });
    match ending {
        Some(ending) => format!("# default: {:?}", Outcomes::default().action(ending).as_str()),
        None => "# without a default".to_owned(),
    }
}

/// The items with commas between them, in lines that a terminal holds.
pub(super) fn wrapped(items: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for (place, item) in items.iter().enumerate() {
        let comma = if place + 1 < items.len() { "," } else { "" };
        match lines.last_mut() {
            Some(line) if line.len() + item.len() < WIDTH => {
                let _ = write!(line, " {item}{comma}");
            }
            _ => lines.push(format!("{item}{comma}")),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_tables_are_shown_one_by_one() {
        let text = "[upstreams]\na = \"http://127.0.0.1\"\n[defaults]\n\
                    deliver = { attempts = 3 }\ncors = { origins = [\"*\"] }\n";
        let Ok(config) = config::load_text("gate.toml".into(), text) else { panic!("{text}") };
        let (mut own, built_in) = (policy_of(&config, "default"), built_in());
        own.retain(|key| !built_in.contains(key));
        let own: Vec<_> = own.iter().map(|(key, value)| (&**key, &**value)).collect();
        assert_eq!(own, [("deliver.attempts", "3"), ("cors.origins", "[\"*\"]")]);
        assert!(built_in.iter().any(|(key, _)| key == "deliver.backoff"), "{built_in:?}");
    }
}
