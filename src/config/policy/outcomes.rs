//! `outcomes` of a policy, whose keys are endings.

use serde_json::{Map, json};

use super::hinted;
use crate::config::declare::{Inner, Section};
use crate::config::kinds::{Kind, Shape, Toml};
use crate::config::node::{Node, Table, Wrong};
use crate::idempotency::grpc;
use crate::idempotency::settle::{Ending, OutcomeAction, Outcomes};

const SECTION: &Section = &Section { name: "outcomes", about: &[], groups: &[] };

/// The table.
pub(super) fn outcomes() -> Kind<Outcomes> {
    let inner = || {
        let entries = defaults().into_iter().map(|(entry, action)| (entry, action.as_str().into()));
        Inner::Entries(entries.collect())
    };
    Kind::new(shape, |node| Ok(read(node, Outcomes::default())), print).with_inner(inner).merged(read)
}

fn shape() -> Shape {
    let actions = |actions: &[OutcomeAction]| -> Shape {
        json!({ "type": "string", "enum": actions.iter().map(|action| action.as_str()).collect::<Vec<_>>() })
    };
    let all = actions(&[OutcomeAction::Store, OutcomeAction::Release, OutcomeAction::Hold]);
    let without_answer = actions(&[OutcomeAction::Release, OutcomeAction::Hold]);
    let properties = defaults().into_iter().map(|(entry, action)| {
        // What did not answer has nothing to store.
        let has_answer = entry.as_bytes()[0].is_ascii_digit() || entry.starts_with("grpc:");
        let mut shape = if has_answer { all.clone() } else { without_answer.clone() };
        shape["default"] = action.as_str().into();
        (entry, shape)
    });
    let grpc = format!("^grpc:([0-9]|1[0-6]|{})$", grpc::Status::ALL.map(grpc::Status::name).join("|"));
    json!({
        "title": SECTION.name,
        "type": "object",
        "properties": properties.collect::<Map<_, _>>(),
        "patternProperties": { "^[2-5]([0-9]{2}|xx)$": all, (grpc): all },
        "additionalProperties": false,
    })
}

fn print(outcomes: &Outcomes) -> Toml {
    let classes = outcomes.class.iter().map(|(class, action)| (format!("{class}xx"), *action));
    let statuses = outcomes.status.iter().map(|(status, action)| (status.to_string(), *action));
    let transport = [("unreachable", outcomes.unreachable), ("timeout", outcomes.timeout), ("broken", outcomes.broken)];
    let transport = transport.into_iter().filter_map(|(entry, action)| Some((entry.to_owned(), action?)));
    let calls = outcomes.grpc.iter().map(|(status, action)| (format!("grpc:{}", status.name()), *action));
    let entries = statuses.chain(classes).chain(calls).chain(transport);
    Toml::InlineTable(entries.map(|(entry, action)| (entry, action.as_str())).collect())
}

/// Every entry that an ending is settled by where nothing is configured: classes, the statuses that differ from their
/// class, the gRPC statuses that are not stored, and endings without an answer.
fn defaults() -> Vec<(String, OutcomeAction)> {
    let action = |ending| Outcomes::default().action(ending);
    let class = |status: u16| action(Ending::Answered(status / 100 * 100 + 99));
    let classes = (2..=5).map(|first| (format!("{first}xx"), class(first * 100)));
    let statuses = (200..600).map(|status| (status, action(Ending::Answered(status))));
    let statuses = statuses.filter(|(status, action)| *action != class(*status));
    let calls = grpc::Status::ALL.into_iter().map(|status| (status, action(Ending::Called(status))));
    let calls = calls.filter(|(_, action)| *action != OutcomeAction::Store);
    let transport = [("unreachable", Ending::Unreachable), ("timeout", Ending::Timeout), ("broken", Ending::Broken)];
    classes
        .chain(statuses.map(|(status, action)| (status.to_string(), action)))
        .chain(calls.map(|(status, action)| (format!("grpc:{}", status.name()), action)))
        .chain(transport.map(|(entry, ending)| (entry.to_owned(), action(ending))))
        .collect()
}

fn read(node: &Node<'_>, base: Outcomes) -> Outcomes {
    let mut outcomes = base;
    let mut calls = Vec::new();
    for (entry, node) in Table::open(node.clone(), SECTION).entries() {
        let read = match entry.strip_prefix("grpc:").and_then(grpc::Status::parse) {
            Some(status) if calls.contains(&status) => {
                let wrong =
                    Wrong::new(format!("`{entry}` stands twice: as {} and as {}", status.number(), status.name()));
                Err(wrong.hint("remove one of them"))
            }
            status => {
                calls.extend(status);
                outcome(&mut outcomes, entry, &node)
            }
        };
        if let Err(wrong) = read {
            node.report(wrong);
        }
    }
    outcomes
}

fn outcome(outcomes: &mut Outcomes, entry: &str, node: &Node<'_>) -> Result<(), Wrong> {
    let action = node.text()?;
    let hint = "such as \"429\" = \"store\", \"4xx\" = \"release\" or \"timeout\" = \"hold\"";
    outcomes.insert(entry, action).map_err(|message| hinted(&message, hint))
}
