//! `outcomes_body` of a policy: rules about the JSON of answers.

use figment::value::Value;
use serde_json::json;

use super::{STEPS, hinted};
use crate::config::declare::Shown::Required;
use crate::config::declare::{Inner, Keys as _, keys};
use crate::config::kinds::{Kind, Toml, list, text, whole, words};
use crate::config::node::{Node, Wrong};
use crate::idempotency::fingerprint::Pointer;
use crate::idempotency::settle::{BodyOutcomes, BodyRule, Number, OutcomeAction, Scalar};

keys! {
    /// A rule of `outcomes_body`
    pub(super) struct Rule "outcomes_body" {
        /// Where the value stands in the answer: a JSON pointer (RFC 6901). A rule does not match where a name on the way
        /// stands twice.
        pointer: Option<Pointer> = None
            => text(format!("^({STEPS})?$"), pointer).optional(), Required("\"/error/retryable\"");
        /// What the value has to be: a string, a number, true or false. Numbers are compared by value, so that 1 is 1.0. A
        /// value that is null or missing never matches.
        equals: Option<Scalar> = None => scalar().optional(), Required("true");
        /// What the end of the attempt does then: "store", "release" or "hold", as in `outcomes`.
        then: Option<OutcomeAction> = None => words(&[
            ("store", OutcomeAction::Store), ("release", OutcomeAction::Release), ("hold", OutcomeAction::Hold),
        ]).optional(), Required("\"release\"");
    }
}

/// The list.
pub(super) fn rules() -> Kind<BodyOutcomes> {
    let rule = whole::<Rule>().complete(Rule::into_rule, Rule::of_rule);
    list(rule).map(decisive, |rules| rules.0.clone()).with_inner(|| Inner::List(Rule::SECTION))
}

impl Rule {
    fn into_rule(self) -> Option<BodyRule> {
        Some(BodyRule { pointer: self.pointer?, equals: self.equals?, then: self.then? })
    }

    fn of_rule(rule: &BodyRule) -> Self {
        let BodyRule { pointer, equals, then } = rule.clone();
        Self { pointer: Some(pointer), equals: Some(equals), then: Some(then) }
    }
}

/// A rule that stands behind one that matches the same never decides.
fn decisive(rules: Vec<BodyRule>) -> Result<BodyOutcomes, Wrong> {
    let is_same = |one: &BodyRule, other: &BodyRule| one.pointer == other.pointer && one.equals == other.equals;
    let twice = rules.iter().enumerate().find(|(place, rule)| rules[..*place].iter().any(|other| is_same(other, rule)));
    match twice {
        Some((place, rule)) => {
            let wrong =
                format!("rule {} is never used: one before it has `{}` with the same value", place + 1, rule.pointer);
            Err(Wrong::new(wrong).hint("remove one of them"))
        }
        None => Ok(BodyOutcomes(rules)),
    }
}

fn scalar() -> Kind<Scalar> {
    Kind::new(|| json!({ "type": ["string", "number", "boolean"] }), read_scalar, print_scalar)
}

fn read_scalar(node: &Node<'_>) -> Result<Scalar, Wrong> {
    let expected = || node.expected("a string, a number, true or false");
    match node.value {
        Value::Bool(_, flag) => Ok(Scalar::Flag(*flag)),
        Value::Num(_, number) => {
            let whole = number.to_i128().map(|whole| whole.to_string());
            let whole = whole.or_else(|| number.to_u128().map(|whole| whole.to_string()));
            // The shortest decimal that is read as this number: what was written, up to 15 digits.
            let text = whole.or_else(|| number.to_f64().map(|float| float.to_string()));
            text.as_deref()
                .and_then(Number::parse)
                .map(Scalar::Number)
                .ok_or_else(|| Wrong::new("JSON has no such number").hint("write a number with digits"))
        }
        _ => match node.text() {
            Ok(text) => Ok(Scalar::Text(text.to_owned())),
            Err(_) => Err(expected().hint("let the pointer lead to a value that holds no others")),
        },
    }
}

fn print_scalar(scalar: &Scalar) -> Toml {
    match scalar {
        Scalar::Text(text) => text.as_str().into(),
        Scalar::Flag(flag) => (*flag).into(),
        Scalar::Number(number) => match number.to_i64() {
            Some(whole) => whole.into(),
            None => number.to_string().parse::<f64>().unwrap_or_default().into(),
        },
    }
}

fn pointer(node: &Node<'_>) -> Result<Pointer, Wrong> {
    let hint = "write a JSON pointer (RFC 6901) such as \"/error/retryable\"";
    Pointer::parse(node.text()?).map_err(|message| hinted(&message, hint))
}
