//! The configuration file as a JSON Schema, for editors.
//!
//! It is of draft 7, and repeats what stands at two places instead of referring to it: taplo, which most editors check
//! TOML with, reads nothing newer, and loses the text beside a reference. It refuses what is wrong with one value; what
//! only several values or the machine show (names that stand twice, routes that overlap, files that are missing) is
//! left to `oncegate check`.

use serde_json::Value;

use super::keys::ROOT;

/// The schema of the configuration file (JSON Schema, draft 7).
#[must_use]
pub fn schema() -> Value {
    let mut root = ROOT.shape();
    root["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    root["title"] = "oncegate".into();
    root["description"] =
        "The configuration of oncegate, an idempotency reverse proxy. `oncegate check` finds more than an editor can."
            .into();
    root
}

#[cfg(test)]
mod tests;
