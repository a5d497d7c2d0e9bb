//! `${NAME}` in the values of a file, which are taken as they stand.

use figment::value::Value;

use super::context::Layer;
use super::keys;
use super::node::Node;

/// What to do about a value of the file that names a variable, where it does.
pub(super) fn hint(node: &Node<'_>) -> Option<String> {
    let Value::String(_, text) = node.value else { return None };
    let is_in_file = node.context.layer(node.value) == Some(Layer::File);
    if !is_in_file || !names_variable(text) {
        return None;
    }
    let instead = match keys::variable_at(&node.path.to_string()) {
        Some(variable) => format!(", or remove the key and set the variable {variable}"),
        None => String::new(),
    };
    Some(format!("variables are not replaced in the file: write the value itself{instead}"))
}

/// Advises on the values that a reader took with the name of a variable in them.
pub(super) fn advise(node: &Node<'_>) {
    let context = node.context;
    match node.value {
        Value::Dict(_, entries) => {
            for (key, value) in entries {
                advise(&Node { context, value, path: node.path.key(key) });
            }
        }
        Value::Array(..) => node.items().into_iter().flatten().for_each(|item| advise(&item)),
        _ => {
            if let Some(hint) = hint(node) {
                context.advise(node.place(), &node.path, hint);
            }
        }
    }
}

/// `${NAME}`, `${NAME:-default}`, or `$NAME` alone.
fn names_variable(text: &str) -> bool {
    let is_first = |char: char| char.is_ascii_alphabetic() || char == '_';
    let is_name =
        |name: &str| name.starts_with(is_first) && name.chars().all(|char| is_first(char) || char.is_ascii_digit());
    text.split("${").skip(1).any(|rest| rest.starts_with(is_first) && rest.contains('}'))
        || text.strip_prefix('$').is_some_and(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_told_from_text() {
        for text in ["${LISTEN}", "sqlite:${DATA}/x.db", "${DRAIN:-30s}", "$LISTEN", "${_x}"] {
            assert!(names_variable(text), "{text}");
        }
        for text in ["$", "${", "${}", "${1}", "$1", "a$B", "/v1/{id}", "$LISTEN/x", "^/v1$"] {
            assert!(!names_variable(text), "{text}");
        }
    }
}
