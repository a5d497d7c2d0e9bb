//! What a start refuses because accepted requests would wait in the queue for ever: their keys are found, and nothing delivers them.

use std::fmt::Write as _;

use super::advice::how_to_take;
use super::{ACCEPT, Occasion, Present, what_is_lost};
use crate::gate::identity::coverage::LostKeys;

/// What to do about them, best first. Several lines, without a line break at the end.
pub(super) fn report(present: &Present<'_>, undelivered: &[&LostKeys], occasion: Occasion) -> String {
    let total = undelivered.iter().map(|lost| lost.keys).sum();
    let mut text = format!(
        "this configuration would leave {} in the queue: no route has the name and the namespace of the one that accepted them\n",
        requests(total)
    );
    for lost in undelivered {
        let _ = write!(text, "\nnamespace `{}`: {}", lost.namespace, what_is_lost(present, lost));
    }
    text.push_str("\n\nWhat you can do, best first:\n  1. Let them be delivered first.\n");
    undelivered.iter().for_each(|lost| text.push_str(&how_to_take(present, lost)));
    let accept = match occasion {
        Occasion::Start => format!("start once with {ACCEPT}"),
        Occasion::Reload => format!("restart the process, once with {ACCEPT}"),
    };
    let _ = write!(
        text,
        "  2. Leave them in the queue: {accept}. They are not forgotten: a later route of that name delivers them.\n     \
         `oncegate records purge` removes those that must not run any more."
    );
    text
}

pub(super) fn requests(count: u64) -> String {
    if count == 1 { "1 accepted request".to_owned() } else { format!("{count} accepted requests") }
}
