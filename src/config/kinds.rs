//! The kinds of values: how each is read, printed and described.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;
use toml_edit::Array;

use super::declare::{Inner, Keys, Shown};
use super::node::{Node, Table, Wrong};
use super::units::{DURATIONS, SIZES, show_duration, show_size};

/// A part of the schema.
pub(super) type Shape = serde_json::Value;

/// A value as a file has it.
pub(super) type Toml = toml_edit::Value;

/// A kind of value.
pub(super) struct Kind<T> {
    shape: Box<dyn Fn() -> Shape>,
    inner: fn() -> Inner,
    take: Take<T>,
    merge: Option<Merge<T>>,
    print: Print<T>,
}

/// Reads a value; `None` if it is wrong, which is reported.
type Take<T> = Box<dyn Fn(&Node<'_>) -> Option<T>>;

/// Reads the parts of a value that are there over one that applies otherwise.
type Merge<T> = Box<dyn Fn(&Node<'_>, T) -> T>;

/// Writes a value; `None` leaves out the key.
type Print<T> = Box<dyn Fn(&T) -> Option<Toml>>;

impl<T: 'static> Kind<T> {
    /// What `parse` reads and `print` writes. `shape` says as JSON Schema what that looks like; its patterns keep to
    /// ECMA-262 (JSON Schema Core, 6.4). A pattern that cannot say all that is required says less: it never
    /// refuses what `parse` accepts.
    pub(super) fn new(
        shape: impl Fn() -> Shape + 'static,
        parse: impl Fn(&Node<'_>) -> Result<T, Wrong> + 'static,
        print: impl Fn(&T) -> Toml + 'static,
    ) -> Self {
        Self {
            shape: Box::new(shape),
            inner: || Inner::None,
            take: Box::new(move |node| node.accept(parse(node))),
            merge: None,
            print: Box::new(move |value| Some(print(value))),
        }
    }

    /// There are tables in it.
    pub(super) fn with_inner(self, inner: fn() -> Inner) -> Self {
        Self { inner, ..self }
    }

    /// Its parts apply one by one: `merge` reads what is there over the value that applies otherwise.
    pub(super) fn merged(self, merge: impl Fn(&Node<'_>, T) -> T + 'static) -> Self {
        Self { merge: Some(Box::new(merge)), ..self }
    }

    /// It may be absent.
    pub(super) fn optional(self) -> Kind<Option<T>> {
        Kind {
            shape: self.shape,
            inner: self.inner,
            take: Box::new(move |node| (self.take)(node).map(Some)),
            merge: None,
            print: Box::new(move |value| value.as_ref().and_then(&self.print)),
        }
    }

    /// Another form of the same.
    pub(super) fn map<U: 'static>(self, to: fn(T) -> Result<U, Wrong>, from: fn(&U) -> T) -> Kind<U> {
        Kind {
            shape: self.shape,
            inner: self.inner,
            take: Box::new(move |node| (self.take)(node).and_then(|value| node.accept(to(value)))),
            merge: None,
            print: Box::new(move |value| (self.print)(&from(value))),
        }
    }

    /// Another form of the same; nothing where `to` finds that a part was wrong, which is reported already.
    pub(super) fn complete<U: 'static>(self, to: fn(T) -> Option<U>, from: fn(&U) -> T) -> Kind<U> {
        Kind {
            shape: self.shape,
            inner: self.inner,
            take: Box::new(move |node| (self.take)(node).and_then(to)),
            merge: None,
            print: Box::new(move |value| (self.print)(&from(value))),
        }
    }

    /// What it looks like, as JSON Schema.
    pub(super) fn shape(&self) -> Shape {
        (self.shape)()
    }

    /// The tables in it.
    pub(super) fn inner(&self) -> Inner {
        (self.inner)()
    }

    /// Reads a key. If it is absent or wrong, which is reported, `base` applies.
    pub(super) fn read(&self, table: &Table<'_>, key: &str, base: T) -> T {
        match (table.get(key), &self.merge) {
            (Some(node), Some(merge)) => merge(&node, base),
            (Some(node), None) => (self.take)(&node).unwrap_or(base),
            (None, _) => base,
        }
    }

    /// A value as it is read again; `None` leaves out the key.
    pub(super) fn print(&self, value: &T) -> Option<Toml> {
        (self.print)(value)
    }
}

/// True or false.
pub(super) fn flag() -> Kind<bool> {
    Kind::new(|| json!({ "type": "boolean" }), |node| node.flag(), |flag| (*flag).into())
}

/// A whole number.
pub(super) fn number<T: TryFrom<u64> + TryInto<u64> + Copy + 'static>(allowed: RangeInclusive<u64>) -> Kind<T> {
    number_of(allowed, ", or remove it for the default")
}

/// A whole number of a key that must be there.
pub(super) fn required_number<T: TryFrom<u64> + TryInto<u64> + Copy + 'static>(
    allowed: RangeInclusive<u64>,
) -> Kind<T> {
    number_of(allowed, "")
}

fn number_of<T: TryFrom<u64> + TryInto<u64> + Copy + 'static>(
    allowed: RangeInclusive<u64>,
    or: &'static str,
) -> Kind<T> {
    let bounds = allowed.clone();
    Kind::new(
        move || json!({ "type": "integer", "minimum": bounds.start(), "maximum": bounds.end() }),
        move |node| bounded(node.number()?, &allowed, |number| number.to_string(), |nearest| nearest + or),
        |number: &T| (*number).try_into().ok().and_then(|number| i64::try_from(number).ok()).unwrap_or(i64::MAX).into(),
    )
}

/// A size: a number of bytes, or with a unit.
pub(super) fn size<T: TryFrom<u64> + TryInto<u64> + Copy + 'static>(allowed: RangeInclusive<u64>) -> Kind<T> {
    let bounds = allowed.clone();
    let pattern = || format!(r"^\s*[0-9]+\s*({})\s*$", SIZES.map(|(unit, _)| unit).join("|"));
    Kind::new(
        // A size with a unit is not compared with the bounds.
        move || {
            json!({
                "type": ["string", "integer"],
                "pattern": pattern(),
                "minimum": bounds.start(),
                "maximum": bounds.end(),
            })
        },
        move |node| {
            bounded(node.size()?, &allowed, show_size, |nearest| format!("\"{nearest}\", or remove it for the default"))
        },
        |size: &T| show_size((*size).try_into().unwrap_or(u64::MAX)).into(),
    )
}

fn bounded<T: TryFrom<u64>>(
    number: u64,
    allowed: &RangeInclusive<u64>,
    show: fn(u64) -> String,
    hint: impl FnOnce(String) -> String,
) -> Result<T, Wrong> {
    let (least, most) = (*allowed.start(), *allowed.end());
    let within = Some(number).filter(|number| allowed.contains(number)).and_then(|number| T::try_from(number).ok());
    within.ok_or_else(|| {
        let hint = format!("write {}", hint(show(number.clamp(least, most))));
        Wrong::new(format!("must be from {} to {}", show(least), show(most))).hint(hint)
    })
}

/// Any duration.
pub(super) fn time() -> Kind<Duration> {
    time_of(Duration::ZERO..=Duration::MAX)
}

/// Any duration but zero.
pub(super) fn nonzero_time() -> Kind<Duration> {
    time_of(Duration::from_millis(1)..=Duration::MAX)
}

/// A duration within bounds. A bound below that is longer than 1ms has a 1 alone: 10ms, 1s.
pub(super) fn time_of(allowed: RangeInclusive<Duration>) -> Kind<Duration> {
    let least = *allowed.start();
    let part = |number: &str| format!("{number}({})", DURATIONS.map(|(unit, _)| unit).join("|"));
    let pattern = move || match part("[0-9]+") {
        any if least.is_zero() => format!(r"^\s*({any})+\s*$"),
        any if least <= Duration::from_millis(1) => {
            format!(r"^\s*({})*{}({any})*\s*$", part("0+"), part("0*[1-9][0-9]*"))
        }
        // Several parts may come to less.
        any => {
            let digits = least.as_millis().ilog10().min(3);
            format!(r"^\s*(0*[1-9][0-9]{{{digits},}}ms|0*[1-9][0-9]*[smhd]|{any}({any})+)\s*$")
        }
    };
    let parse = move |node: &Node<'_>| {
        let (least, most) = (show_duration(*allowed.start()), show_duration(*allowed.end()));
        match node.duration()? {
            duration if allowed.contains(&duration) => Ok(duration),
            Duration::ZERO if *allowed.start() <= Duration::from_millis(1) => {
                Err(Wrong::new("must be longer than zero").hint("write more than zero, such as \"30s\" or \"24h\""))
            }
            short if short < *allowed.start() => {
                Err(Wrong::new(format!("must be at least {least}")).hint(format!("write \"{least}\" or more")))
            }
            _ => Err(Wrong::new(format!("must be at most {most}")).hint(format!("write \"{most}\" or less"))),
        }
    };
    Kind::new(
        move || json!({ "type": "string", "pattern": pattern() }),
        parse,
        |duration| show_duration(*duration).into(),
    )
}

/// One of these words.
pub(super) fn words<T: Copy + PartialEq>(words: &'static [(&'static str, T)]) -> Kind<T> {
    Kind::new(
        || json!({ "type": "string", "enum": words.iter().map(|(word, _)| *word).collect::<Vec<_>>() }),
        |node| node.word(words),
        |value| words.iter().find(|(_, meant)| meant == value).map_or("", |(word, _)| word).into(),
    )
}

/// Text of this pattern, printed as it is displayed.
pub(super) fn text<T: ToString + 'static>(
    pattern: impl Into<String>,
    parse: impl Fn(&Node<'_>) -> Result<T, Wrong> + 'static,
) -> Kind<T> {
    text_as(pattern, parse, T::to_string)
}

/// Text of this pattern.
pub(super) fn text_as<T: 'static>(
    pattern: impl Into<String>,
    parse: impl Fn(&Node<'_>) -> Result<T, Wrong> + 'static,
    print: impl Fn(&T) -> String + 'static,
) -> Kind<T> {
    let pattern = pattern.into();
    Kind::new(move || json!({ "type": "string", "pattern": pattern }), parse, move |value| print(value).into())
}

/// Text of this pattern, as it is written.
pub(super) fn raw(pattern: &str) -> Kind<String> {
    text(pattern, |node| node.filled().map(str::to_owned))
}

/// The path of a file.
pub(super) fn file() -> Kind<PathBuf> {
    raw(r"\S").map(|path| Ok(path.into()), |path| path.display().to_string())
}

/// A list, which may be empty.
pub(super) fn list<T: 'static>(item: Kind<T>) -> Kind<Vec<T>> {
    list_of(item, None, false)
}

/// A list in which nothing stands twice.
pub(super) fn unique<T: 'static>(item: Kind<T>) -> Kind<Vec<T>> {
    list_of(item, None, true)
}

/// A list that is not empty; the hint says what to write.
pub(super) fn filled<T: 'static>(hint: &'static str, item: Kind<T>) -> Kind<Vec<T>> {
    list_of(item, Some(hint), false)
}

/// A list that is not empty, in which nothing stands twice.
pub(super) fn set<T: 'static>(hint: &'static str, item: Kind<T>) -> Kind<Vec<T>> {
    list_of(item, Some(hint), true)
}

fn list_of<T: 'static>(item: Kind<T>, filled: Option<&'static str>, is_unique: bool) -> Kind<Vec<T>> {
    fn printed<T>(print: &Print<T>, values: &[T]) -> Array {
        let mut printed: Array = values.iter().filter_map(print).collect();
        // A comment behind one of them would hide the rest.
        printed.iter_mut().for_each(|value| value.decor_mut().clear());
        printed.fmt();
        printed
    }
    let of_tables = (item.shape)()["type"] == "object";
    let print = Rc::new(item.print);
    let print_item = Rc::clone(&print);
    let check = move |values: Vec<T>| {
        if let (true, Some(hint)) = (values.is_empty(), filled) {
            return Err(Wrong::new("must not be empty").hint(hint));
        }
        let printed = printed(&print_item, &values);
        let texts: Vec<&str> = printed.iter().filter_map(Toml::as_str).collect();
        match texts.iter().enumerate().find(|(place, text)| texts[..*place].contains(text)) {
            Some((_, twice)) if is_unique => {
                Err(Wrong::new(format!("`{twice}` stands twice")).hint("remove one of them"))
            }
            _ => Ok(values),
        }
    };
    Kind {
        shape: Box::new(move || {
            let mut shape = json!({ "type": "array", "items": (item.shape)() });
            filled.iter().for_each(|_| shape["minItems"] = 1.into());
            if is_unique {
                shape["uniqueItems"] = true.into();
            }
            shape
        }),
        inner: || Inner::None,
        take: Box::new(move |node| {
            let Some(items) = node.items() else {
                let hint = match node.text() {
                    _ if of_tables || node.is_table() => "write [{ ... }]".to_owned(),
                    Ok(text) => as_list(text, filled),
                    Err(_) => "write [...]".to_owned(),
                };
                return node.accept(Err(node.expected("a list").hint(hint)));
            };
            let values: Vec<T> = items.iter().filter_map(|item_node| (item.take)(item_node)).collect();
            if values.len() < items.len() { None } else { node.accept(check(values)) }
        }),
        merge: None,
        print: Box::new(move |values| Some(Toml::Array(printed(&print, values)))),
    }
}

/// The hint for text in the place of a list; `filled` is the hint for an empty list, where that is wrong.
fn as_list(text: &str, filled: Option<&'static str>) -> String {
    if text.trim_start().starts_with('[') {
        return "write it as TOML has it: texts in quotes, commas between them, and ] at the end".to_owned();
    }
    if text.contains(['*', '"', '\'', '\\']) {
        return "write [...]".to_owned();
    }
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    match (parts.map(|part| format!("\"{part}\"")).collect::<Vec<_>>(), filled) {
        (parts, Some(hint)) if parts.is_empty() => hint.to_owned(),
        (parts, _) => format!("write [{}]", parts.join(", ")),
    }
}

/// One of these, or a list of them that is not empty; the hint says what to write.
pub(super) fn one_or_several<T: 'static>(hint: &'static str, item: fn() -> Kind<T>) -> Kind<Vec<T>> {
    Kind {
        shape: Box::new(move || {
            let (mut shape, several) = (item().shape(), filled(hint, item()).shape());
            shape["type"] = json!([shape["type"], several["type"]]);
            ["items", "minItems"].into_iter().for_each(|key| shape[key] = several[key].clone());
            shape
        }),
        inner: || Inner::None,
        take: Box::new(move |node| match node.items() {
            Some(_) => (filled(hint, item()).take)(node),
            None => (item().take)(node).map(|one| vec![one]),
        }),
        merge: None,
        print: Box::new(move |values| match &values[..] {
            [] => None,
            [one] => item().print(one),
            _ => list(item()).print(values),
        }),
    }
}

/// A table with declared keys, which apply one by one.
pub(super) fn nested<T: Keys + 'static>() -> Kind<T> {
    let merge = |node: &Node<'_>, base| T::read(&Table::open(node.clone(), T::SECTION), base);
    Kind {
        shape: Box::new(|| T::SECTION.shape()),
        inner: || Inner::Table(T::SECTION),
        take: Box::new(move |node| Some(merge(node, T::default()))),
        merge: Some(Box::new(merge)),
        print: Box::new(|value| Some(value.print_inline()).filter(|table| !table.is_empty()).map(Toml::InlineTable)),
    }
}

/// A table with declared keys that stands for itself: those that are required must be there.
pub(super) fn whole<T: Keys + 'static>() -> Kind<T> {
    let take = |node: &Node<'_>| {
        let table = Table::open(node.clone(), T::SECTION);
        for key in T::KEYS.iter().filter(|_| node.is_table()) {
            if let (Shown::Required(example), None) = (&key.shown, table.get(key.name)) {
                table.report(key.name, Wrong::new("is missing").hint(format!("write {} = {example}", key.name)));
            }
        }
        T::read(&table, T::default())
    };
    Kind { take: Box::new(move |node| Some(take(node))), merge: None, ..nested() }
}

/// One of these, or false without quotes for nothing.
pub(super) fn or_false<T: 'static>(kind: Kind<T>) -> Kind<Option<T>> {
    let Kind { shape, inner, take, print, .. } = kind;
    Kind {
        shape: Box::new(move || {
            let mut shape = shape();
            shape["type"] = json!([shape["type"], "boolean"]);
            shape["not"] = json!({ "const": true });
            shape
        }),
        inner,
        take: Box::new(move |node| match node.flag() {
            Ok(false) => Some(None),
            _ => take(node).map(Some),
        }),
        merge: None,
        print: Box::new(move |value| value.as_ref().and_then(&print)),
    }
}

/// A TOML value as JSON.
pub(super) fn to_json(value: &Toml) -> Shape {
    match value {
        Toml::String(text) => text.value().as_str().into(),
        Toml::Integer(number) => (*number.value()).into(),
        Toml::Float(number) => (*number.value()).into(),
        Toml::Boolean(flag) => (*flag.value()).into(),
        Toml::Datetime(date) => date.value().to_string().into(),
        Toml::Array(items) => items.iter().map(to_json).collect(),
        Toml::InlineTable(table) => table.iter().map(|(key, value)| (key.to_owned(), to_json(value))).collect(),
    }
}
