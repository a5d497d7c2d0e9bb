//! `preset`: what a route leaves out, for clients and senders that are well known.
//!
//! A preset is a piece of a configuration file and nothing else: it holds keys of a policy that a user could write instead.
//! `docs/reference/presets.md` says for each where its sender documents what it relies on.

use std::path::PathBuf;

use super::declare::Keys as _;
use super::declare::Shown::Example;
use super::declare::keys;
use super::kinds::words;
use super::layers;
use super::node::Table;
use super::policy::{self, PartialPolicy};

/// Every preset: its name and its keys.
pub(super) const ALL: &[(&str, &str)] = &[
    // The Idempotency-Key header as the IETF draft has it (draft-ietf-httpapi-idempotency-key-header).
    (
        "ietf",
        r#"key = { from = ["header:Idempotency-Key"], required = true }
in_flight = "reject"
"#,
    ),
    // An API that treats keys as Stripe's does: it keeps what an endpoint answered, and not what was refused before it ran.
    (
        "stripe",
        r#"ttl = "24h"
key = { from = ["header:Idempotency-Key"], required = false, max_length = 255 }
outcomes = { "400" = "release", "409" = "release", "429" = "release", "5xx" = "store" }
"#,
    ),
    // Both content modes have one key, so the body cannot count.
    (
        "cloudevents",
        r#"ttl = "7d"
key = { from = ["cloudevent"], required = true, max_length = 1024 }
scope = ["host"]
fingerprint = { of = ["method", "path"] }
outcomes = { "3xx" = "release", "4xx" = "release", "5xx" = "release" }
"#,
    ),
    // webhook-timestamp and webhook-signature are of the attempt, webhook-id is of the event.
    (
        "standard-webhooks",
        r#"ttl = "7d"
key = { from = ["header:webhook-id"], required = true }
scope = ["host"]
fingerprint = { of = ["method", "path"] }
outcomes = { "3xx" = "release", "4xx" = "release", "5xx" = "release" }
"#,
    ),
    // A redelivery has the id of the first delivery. All hooks of one event have it too. GitHub caps payloads at 25 MB.
    (
        "github-webhook",
        r#"ttl = "7d"
key = { from = ["header:X-GitHub-Delivery"], required = true }
scope = ["host", "header:X-GitHub-Hook-ID?"]
fingerprint = { of = ["method", "path"] }
outcomes = { "3xx" = "release", "4xx" = "release", "5xx" = "release" }
max_request_body = "25MiB"
"#,
    ),
    // pending_webhooks in the body and t= in the signature change from delivery to delivery. Stripe can be asked to resend
    // an event for 30 days.
    (
        "stripe-webhook",
        r#"ttl = "30d"
key = { from = ["json:/id"], required = true }
scope = ["host"]
fingerprint = { of = ["method", "path"] }
outcomes = { "3xx" = "release", "4xx" = "release", "5xx" = "release" }
"#,
    ),
    // One event can cause webhooks of several topics, all with its id: each topic is to run.
    (
        "shopify-webhook",
        r#"ttl = "7d"
key = { from = ["header:X-Shopify-Event-Id"], required = true }
scope = ["host", "header:X-Shopify-Topic"]
fingerprint = { of = ["method", "path"] }
outcomes = { "3xx" = "release", "4xx" = "release", "5xx" = "release" }
"#,
    ),
    // Ids are unique within a topic only: the subscription counts, so that the same id of another one is refused, and no replay.
    // The bearer token is renewed, and deliveryAttempt counts up.
    (
        "pubsub-push",
        r#"ttl = "7d"
key = { from = ["json:/message/messageId"], required = true }
scope = ["host"]
fingerprint = { of = ["method", "path", "body"], body = "json", include = ["/subscription"] }
outcomes = { "3xx" = "release", "4xx" = "release", "5xx" = "release" }
"#,
    ),
    // Retries end after an hour. A 4xx is final: a duplicate waits for the first, which SNS no longer waits for after 15 seconds.
    (
        "sns",
        r#"ttl = "24h"
key = { from = ["header:x-amz-sns-message-id"], required = true }
in_flight = { wait = "10s" }
scope = ["host"]
fingerprint = { of = ["method", "path"] }
outcomes = { "3xx" = "release", "4xx" = "release", "5xx" = "release" }
"#,
    ),
];

/// The preset of a table: its keys, if it names one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Preset {
    preset: Option<&'static str>,
}

keys! {
    /// `preset`
    for Preset "preset" {
        /// A ready-made set of values for the keys that are not set here: "ietf", "stripe", "cloudevents",
        /// "standard-webhooks", "github-webhook", "stripe-webhook", "shopify-webhook", "pubsub-push" or "sns". That of a
        /// route counts instead of that of [defaults], and before the other keys of [defaults]. `oncegate config print`
        /// shows what comes of it.
        preset => words(ALL).optional(), Example("\"stripe-webhook\"");
    }
}

impl Preset {
    /// The preset that a table names.
    pub(super) fn of(table: &Table<'_>) -> Self {
        Self::read(table, Self::default())
    }

    /// Whether the table names one.
    pub(super) fn is_named(self) -> bool {
        self.preset.is_some()
    }

    /// The preset, if it is one for a sender that counts an event with a 2xx as handled.
    pub(super) fn of_sender(self) -> Option<&'static str> {
        let preset = self.preset?;
        let (name, _) = ALL.iter().find(|(_, keys)| *keys == preset)?;
        (!["ietf", "stripe"].contains(name)).then_some(name)
    }

    /// The keys of the preset over `base`.
    pub(super) fn over(self, base: &PartialPolicy) -> PartialPolicy {
        let Some(keys) = self.preset else { return base.clone() };
        match layers::only(PathBuf::from("preset"), keys) {
            Ok(context) => policy::read(&Table::open(context.root(), policy::SECTION), base),
            // A test reads every preset.
            Err(_) => base.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;

    #[test]
    fn every_preset_is_what_a_user_could_write() {
        for (name, keys) in ALL {
            let config = |lines: &str| {
                let text =
                    format!("[upstreams]\na = \"http://127.0.0.1\"\n[[routes]]\nname = \"x\"\npath = \"/\"\n{lines}");
                load_text("preset.toml".into(), &text).unwrap_or_else(|problems| panic!("{name}: {problems}"))
            };
            let (named, written) = (config(&format!("preset = \"{name}\"\n")), config(keys));
            let policy = |config: &crate::config::Resolved| format!("{:?}", config.router.routes()[0].policy);
            assert_eq!(policy(&named), policy(&written), "{name}");
            let printed = named.effective.to_string();
            assert!(printed.contains(&format!("preset = \"{name}\"")), "{printed}");
            let again = load_text("printed.toml".into(), &printed).unwrap();
            assert_eq!(policy(&named), policy(&again), "{name} as it is printed");
        }
    }

    /// An API whose clients read the gate's answers is no sender.
    #[test]
    fn the_presets_of_senders_are_those_whose_scope_is_the_host() {
        for (name, keys) in ALL {
            let is_sender = Preset { preset: Some(keys) }.of_sender() == Some(name);
            assert_eq!(is_sender, keys.contains("scope = [\"host\""), "{name}");
        }
    }

    #[test]
    fn the_docs_have_every_preset_as_it_is() {
        let page = std::fs::read_to_string("docs/reference/presets.md").unwrap();
        for (name, keys) in ALL {
            assert!(page.contains(&format!("## {name}\n")), "{name} has no section");
            assert!(page.contains(&format!("```toml\n{keys}```")), "the keys of {name} are not those of the code");
        }
    }

    #[test]
    fn a_route_wins_over_its_preset_which_wins_over_the_defaults() {
        let text = "[upstreams]\na = \"http://127.0.0.1\"\n[defaults]\npreset = \"github-webhook\"\nttl = \"2d\"\n\
                    [[routes]]\nname = \"own\"\npath = \"/own\"\npreset = \"stripe-webhook\"\nkey.required = false\n\
                    [[routes]]\nname = \"inherited\"\npath = \"/inherited\"\n\
                    [[routes]]\nname = \"api\"\npath = \"/api\"\npreset = \"ietf\"\n";
        let config = load_text("presets.toml".into(), text).unwrap();
        let [own, inherited, api] = config.router.routes() else { panic!("three routes") };
        let days = |days: u64| std::time::Duration::from_secs(days * 24 * 60 * 60);
        assert_eq!((own.policy.ttl, own.policy.key.required), (days(30), false));
        assert_eq!(own.policy.key.from[0].to_string(), "json:/id");
        assert_eq!(own.policy.max_request_body, 16 << 20, "nothing is left of the preset of [defaults]");
        assert_eq!((inherited.policy.ttl, inherited.policy.key.required), (days(2), true));
        assert_eq!(inherited.policy.max_request_body, 25 << 20);
        assert_eq!((api.policy.ttl, api.policy.outcomes.class.len()), (days(2), 0));
    }
}
