//! A TOML file as values that remember their lines.

use std::collections::BTreeMap;
use std::ops::Range;

use figment::value::{Dict, Value};
use toml_edit::{Document, Item, Key, TableLike};

use super::context::Path;
use super::node::Wrong;

/// The line of each key and list item of a file, counted from 1.
pub(super) type Lines = BTreeMap<Path, usize>;

/// The first line that has a key; the first of all where none has.
pub(super) fn first(lines: &Lines) -> usize {
    lines.values().copied().min().unwrap_or(1)
}

/// What a file says.
#[derive(Debug, Default)]
pub(super) struct Parsed {
    /// Its values.
    pub values: Dict,
    /// Where they stand.
    pub lines: Lines,
}

/// Reads TOML, or says what is wrong with its syntax, and in which line.
pub(super) fn parse(text: &str) -> Result<Parsed, (usize, Wrong)> {
    let document = Document::parse(text).map_err(|error| {
        let offset = error.span().map_or(text.len(), |span| span.start);
        let (line, column) = position(text, offset);
        let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        let hint = format!(
            "look at column {column}; texts, durations and sizes stand in double quotes, and each key stands once"
        );
        (line, Wrong::new(format!("not TOML: {message}")).hint(hint))
    })?;
    let mut reader = Reader { text, lines: Lines::new() };
    let values = reader.table(document.as_table(), &Path::default());
    Ok(Parsed { values, lines: reader.lines })
}

/// Reads one value; nothing where it is not TOML.
pub(super) fn value(text: &str) -> Option<Value> {
    let value = text.parse::<toml_edit::Value>().ok()?;
    Some(Reader { text, lines: Lines::new() }.value(&value, &Path::default()))
}

/// The line and column of an offset, counted from 1.
fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = &text.as_bytes()[..offset.min(text.len())];
    let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
    let column = before.iter().rev().take_while(|&&byte| byte != b'\n').count() + 1;
    (line, column)
}

struct Reader<'a> {
    text: &'a str,
    lines: Lines,
}

impl Reader<'_> {
    fn table(&mut self, table: &dyn TableLike, path: &Path) -> Dict {
        let mut values = Dict::new();
        for (name, item) in table.iter() {
            let path = path.key(name);
            let span = table.key(name).and_then(Key::span).or_else(|| item.span());
            self.note(&path, span);
            values.insert(name.to_owned(), self.item(item, &path));
        }
        values
    }

    fn item(&mut self, item: &Item, path: &Path) -> Value {
        match item {
            Item::None => Value::from(Dict::new()),
            Item::Value(value) => self.value(value, path),
            Item::Table(table) => Value::from(self.table(table, path)),
            Item::ArrayOfTables(tables) => {
                let tables = tables.iter().enumerate().map(|(index, table)| {
                    let path = path.index(index);
                    self.note(&path, table.span());
                    Value::from(self.table(table, &path))
                });
                Value::from(tables.collect::<Vec<_>>())
            }
        }
    }

    fn value(&mut self, value: &toml_edit::Value, path: &Path) -> Value {
        match value {
            toml_edit::Value::String(text) => Value::from(text.value().clone()),
            toml_edit::Value::Integer(number) => Value::from(*number.value()),
            toml_edit::Value::Float(number) => Value::from(*number.value()),
            toml_edit::Value::Boolean(flag) => Value::from(*flag.value()),
            // No key takes a date: as text it gets the message that any other text gets.
            toml_edit::Value::Datetime(date) => Value::from(date.value().to_string()),
            toml_edit::Value::InlineTable(table) => Value::from(self.table(table, path)),
            toml_edit::Value::Array(array) => {
                let items = array.iter().enumerate().map(|(index, item)| {
                    let path = path.index(index);
                    self.note(&path, item.span());
                    self.value(item, &path)
                });
                Value::from(items.collect::<Vec<_>>())
            }
        }
    }

    fn note(&mut self, path: &Path, span: Option<Range<usize>>) {
        if let Some(span) = span {
            self.lines.insert(path.clone(), position(self.text, span.start).0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"top = 1

[server]
listen = [
  "a",
  "b",
]

[upstreams]
app = { url = "x",
        timeout = "1s" }
dotted.url = "y"

[[routes]]
name = "one"
[[routes]]
name = "two"
key.from = ["header:A"]
[routes.fingerprint]
body = "json"
"#;

    #[test]
    fn every_value_knows_its_line() {
        let parsed = parse(TEXT).unwrap();
        let lines: Vec<String> = parsed.lines.iter().map(|(path, line)| format!("{path}:{line}")).collect();
        let expected = "routes:14 routes[0]:14 routes[0].name:15 routes[1]:16 routes[1].fingerprint:19 \
             routes[1].fingerprint.body:20 routes[1].key:18 routes[1].key.from:18 routes[1].key.from[0]:18 \
             routes[1].name:17 server:3 server.listen:4 server.listen[0]:5 server.listen[1]:6 top:1 upstreams:9 \
             upstreams.app:10 upstreams.app.timeout:11 upstreams.app.url:10 upstreams.dotted:12 \
             upstreams.dotted.url:12";
        assert_eq!(lines.join(" "), expected);
        assert_eq!(parsed.values.len(), 4);
    }

    /// Comments in every place that may have one move lines, and nothing is said to stand in the line of a comment.
    #[test]
    fn no_value_stands_in_the_line_of_a_comment() {
        let plain = parse(TEXT).unwrap();
        let commented: String =
            TEXT.lines().map(|line| format!("# server.listen = 1\n\n  #[routes]\n{line} # name = 1\n")).collect();
        let lines: Vec<&str> = commented.lines().collect();
        let parsed = parse(&commented).unwrap();
        let moved: Lines = plain.lines.into_iter().map(|(path, line)| (path, 4 * line)).collect();
        assert_eq!(parsed.lines, moved);
        assert!(parsed.lines.values().all(|line| !lines[line - 1].trim().starts_with('#')));
        assert_eq!(first(&parsed.lines), 4);
        assert_eq!(first(&parse("# nothing\n").unwrap().lines), 1);
    }

    #[test]
    fn wrong_syntax_has_a_line() {
        for (text, line) in [("a = 1\nb =\n", 2), ("[x\n", 1), ("a = 1\na = 2\n", 2), ("a = 1\n\nttl = 30s\n", 3)] {
            assert_eq!(parse(text).unwrap_err().0, line, "{text}");
        }
    }
}
