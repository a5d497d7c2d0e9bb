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

/// The text of a file; or the line with a byte that no configuration may have, and the error.
pub(super) fn text(bytes: Vec<u8>) -> Result<String, (usize, Wrong)> {
    let line_of = |offset: usize| bytes[..offset].iter().filter(|&&byte| byte == b'\n').count() + 1;
    if is_utf16(&bytes) {
        return Err((1, Wrong::new("not UTF-8, but UTF-16").hint("save the file as UTF-8")));
    }
    if let Some(offset) = bytes.iter().position(|&byte| byte == 0) {
        let hint = "remove it; a disk that was full, or a crash, may have cut the file off: compare it with a copy";
        return Err((line_of(offset), Wrong::new("a NUL byte stands in this line").hint(hint)));
    }
    match std::str::from_utf8(&bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => Err((line_of(error.valid_up_to()), Wrong::new("not UTF-8").hint("save the file as UTF-8"))),
    }
}

/// Whether it is UTF-16 by its mark, or by the zeros beside its first two characters.
fn is_utf16(bytes: &[u8]) -> bool {
    match bytes {
        [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] => true,
        [first, second, third, fourth, ..] => {
            let zeros = [first, second, third, fourth].map(|byte| *byte == 0);
            zeros == [true, false, true, false] || zeros == [false, true, false, true]
        }
        _ => false,
    }
}

/// Reads TOML, or says what is wrong with its syntax, and in which line.
pub(super) fn parse(text: &str) -> Result<Parsed, (usize, Wrong)> {
    let document = Document::parse(text).map_err(|error| {
        let offset = error.span().map_or(text.len(), |span| span.start);
        let (line, column) = position(text, offset);
        let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        let hint = table_twice(text, line).unwrap_or_else(|| {
            format!(
                "look at column {column}; texts, durations and sizes stand in double quotes, and each key stands once"
            )
        });
        (line, Wrong::new(format!("not TOML: {message}")).hint(hint))
    })?;
    let mut reader = Reader { text, lines: Lines::new() };
    let values = reader.table(document.as_table(), &Path::default());
    Ok(Parsed { values, lines: reader.lines })
}

/// What to do where the header of a table in this line is wrong because the table is there already.
fn table_twice(text: &str, line: usize) -> Option<String> {
    let header = |text: &str| {
        let text = text.trim_start().strip_prefix('[')?;
        let (is_list, text) = text.strip_prefix('[').map_or((false, text), |text| (true, text));
        Some((is_list, text.split_once(']')?.0.trim().to_owned()))
    };
    let (is_list, name) = header(text.lines().nth(line - 1)?)?;
    let mut before = (1..line).zip(text.lines()).filter_map(|(line, text)| Some((line, header(text)?)));
    let (first, (was_list, _)) = before.find(|(_, (_, other))| *other == name)?;
    Some(match (was_list, is_list) {
        (true, false) => format!("write [[{name}]], as in line {first}"),
        (false, true) => format!("[{name}] stands in line {first}: write [[{name}]] there, too"),
        _ => format!("[{name}] stands in line {first} already: move its keys there"),
    })
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
    fn bytes_that_are_no_text_have_a_line() {
        let utf16: Vec<u8> = "[a]\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let with_mark = [&[0xFF, 0xFE], &utf16[..]].concat();
        let big_endian: Vec<u8> = "[a]\n".encode_utf16().flat_map(u16::to_be_bytes).collect();
        for (bytes, line, said) in [
            (&utf16[..], 1, "UTF-16"),
            (&with_mark, 1, "UTF-16"),
            (&big_endian, 1, "UTF-16"),
            (b"a = 1\nb\0", 2, "NUL"),
            (b"a = 1\n\0\0\0\0", 2, "NUL"),
            (b"a = 1\n# \xE4", 2, "not UTF-8"),
        ] {
            let (found, wrong) = text(bytes.to_vec()).unwrap_err();
            assert_eq!(found, line, "{said}");
            assert!(wrong.message.contains(said), "{wrong}");
        }
        assert_eq!(text(b"".to_vec()).unwrap(), "");
        assert_eq!(text(b"a = 1".to_vec()).unwrap(), "a = 1");
    }

    #[test]
    fn a_table_that_is_there_already_has_both_lines() {
        for (text, hint) in [
            ("[a]\nb = 1\n[ a ] # again\n", "[a] stands in line 1 already: move its keys there"),
            ("\n[[a]]\nb = 1\n[a]\n", "write [[a]], as in line 2"),
            ("[a]\nb = 1\n[[a]]\n", "[a] stands in line 1: write [[a]] there, too"),
        ] {
            let (line, wrong) = parse(text).unwrap_err();
            assert_eq!((line, wrong.hint.as_deref()), (text.lines().count(), Some(hint)), "{text}");
        }
    }

    #[test]
    fn wrong_syntax_has_a_line() {
        for (text, line) in [("a = 1\nb =\n", 2), ("[x\n", 1), ("a = 1\na = 2\n", 2), ("a = 1\n\nttl = 30s\n", 3)] {
            assert_eq!(parse(text).unwrap_err().0, line, "{text}");
        }
    }
}
