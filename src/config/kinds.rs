//! The kinds of values: how each is read, printed and described.

use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use toml_edit::Array;

use super::declare::{Inner, Keys};
use super::node::{Node, Table, Wrong};
use super::units::{DURATION_HINT, DURATIONS, SIZES, show_duration, show_size};

/// A part of the schema.
pub(super) type Shape = serde_json::Value;

/// A value as a file has it.
pub(super) type Toml = toml_edit::Value;

/// A kind of value.
pub(super) trait Kind {
    /// What is read.
    type Value;

    /// What it looks like in a file, as JSON Schema. The patterns keep to what both ECMA-262 and the `regex` crate
    /// understand. A pattern that cannot say all that is required says less: it never refuses what `take` accepts.
    fn shape(&self) -> Shape;

    /// The tables in it.
    fn inner(&self) -> Inner {
        Inner::None
    }

    /// Reads it; `None` if it is wrong, which is reported.
    fn take(&self, node: &Node<'_>) -> Option<Self::Value>;

    /// The value as it is read again; `None` leaves out the key.
    fn print(&self, value: &Self::Value) -> Option<Toml>;

    /// Reads a key. Where it is absent or wrong, `base` applies.
    fn read(&self, table: &Table<'_>, key: &str, base: Self::Value) -> Self::Value {
        table.get(key).and_then(|node| self.take(&node)).unwrap_or(base)
    }
}

/// True or false.
pub(super) struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn shape(&self) -> Shape {
        json!({ "type": "boolean" })
    }

    fn take(&self, node: &Node<'_>) -> Option<bool> {
        node.accept(node.flag())
    }

    fn print(&self, value: &bool) -> Option<Toml> {
        Some((*value).into())
    }
}

/// A number, or a size in bytes, within bounds.
pub(super) struct Bounded<T> {
    allowed: RangeInclusive<u64>,
    is_size: bool,
    value: PhantomData<T>,
}

/// A whole number.
pub(super) const fn number<T>(allowed: RangeInclusive<u64>) -> Bounded<T> {
    Bounded { allowed, is_size: false, value: PhantomData }
}

/// A size, which is a number of bytes or has a unit.
pub(super) const fn size<T>(allowed: RangeInclusive<u64>) -> Bounded<T> {
    Bounded { allowed, is_size: true, value: PhantomData }
}

impl<T: TryFrom<u64> + TryInto<u64> + Copy> Bounded<T> {
    fn parse(&self, node: &Node<'_>) -> Result<T, Wrong> {
        let number = if self.is_size { node.size()? } else { node.number()? };
        let (least, most) = (*self.allowed.start(), *self.allowed.end());
        let within = Some(number).filter(|number| self.allowed.contains(number));
        within.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
            let nearest = number.clamp(least, most);
            let (show, hint) = match self.is_size {
                true => (show_size as fn(u64) -> String, format!("write \"{}\"", show_size(nearest))),
                false => ((|number| number.to_string()) as fn(u64) -> String, format!("write {nearest}")),
            };
            Wrong::new(format!("must be from {} to {}", show(least), show(most))).hint(hint)
        })
    }
}

impl<T: TryFrom<u64> + TryInto<u64> + Copy> Kind for Bounded<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        let mut shape = json!({ "type": "integer", "minimum": self.allowed.start(), "maximum": self.allowed.end() });
        if self.is_size {
            // A size with a unit is not compared with the bounds.
            shape["type"] = json!(["string", "integer"]);
            shape["pattern"] = format!(r"^\s*[0-9]+\s*({})\s*$", SIZES.map(|(unit, _)| unit).join("|")).into();
        }
        shape
    }

    fn take(&self, node: &Node<'_>) -> Option<T> {
        node.accept(self.parse(node))
    }

    fn print(&self, value: &T) -> Option<Toml> {
        let number: u64 = (*value).try_into().unwrap_or(u64::MAX);
        Some(if self.is_size { show_size(number).into() } else { i64::try_from(number).unwrap_or(i64::MAX).into() })
    }
}

/// A duration within bounds.
pub(super) struct Time {
    least: Duration,
    most: Duration,
}

/// Any duration.
pub(super) const TIME: Time = Time { least: Duration::ZERO, most: Duration::MAX };

/// Any duration but zero.
pub(super) const NONZERO_TIME: Time = Time { least: Duration::from_millis(1), most: Duration::MAX };

/// A duration from `least` to `most`.
pub(super) const fn time(least: Duration, most: Duration) -> Time {
    Time { least, most }
}

impl Kind for Time {
    type Value = Duration;

    fn shape(&self) -> Shape {
        let part = |number: &str| format!("{number}({})", DURATIONS.map(|(unit, _)| unit).join("|"));
        let any = part("[0-9]+");
        let pattern = if self.least.is_zero() {
            format!(r"({any})+")
        } else if self.least < Duration::from_secs(1) {
            format!(r"({})*{}({any})*", part("0+"), part("0*[1-9][0-9]*"))
        } else {
            // Several parts may come to less.
            format!(r"(0*[1-9][0-9]{{3,}}ms|0*[1-9][0-9]*[smhd]|{any}({any})+)")
        };
        json!({ "type": "string", "pattern": format!(r"^\s*{pattern}\s*$") })
    }

    fn take(&self, node: &Node<'_>) -> Option<Duration> {
        let duration = node.accept(node.duration())?;
        let wrong = if duration.is_zero() && !self.least.is_zero() {
            Wrong::new("must be longer than zero").hint(DURATION_HINT)
        } else if duration < self.least {
            let least = show_duration(self.least);
            Wrong::new(format!("must be at least {least}")).hint(format!("write \"{least}\" or more"))
        } else if duration > self.most {
            let most = show_duration(self.most);
            Wrong::new(format!("must be at most {most}")).hint(format!("write \"{most}\" or less"))
        } else {
            return Some(duration);
        };
        node.accept(Err(wrong))
    }

    fn print(&self, value: &Duration) -> Option<Toml> {
        Some(show_duration(*value).into())
    }
}

/// One of a few words.
pub(super) struct Words<T: 'static> {
    words: &'static [(&'static str, T)],
    later: &'static [&'static str],
}

/// One of these words.
pub(super) const fn words<T>(words: &'static [(&'static str, T)]) -> Words<T> {
    Words { words, later: &[] }
}

impl<T> Words<T> {
    /// Words of the contract that this version does not support.
    pub(super) const fn later(self, later: &'static [&'static str]) -> Self {
        Self { later, ..self }
    }
}

impl<T: Copy + PartialEq> Kind for Words<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        json!({ "type": "string", "enum": self.words.iter().map(|(word, _)| *word).collect::<Vec<_>>() })
    }

    fn take(&self, node: &Node<'_>) -> Option<T> {
        node.accept(node.word(self.words, self.later))
    }

    fn print(&self, value: &T) -> Option<Toml> {
        self.words.iter().find(|(_, meant)| meant == value).map(|(word, _)| (*word).into())
    }
}

/// Text that stands for something.
pub(super) struct Text<T> {
    /// The pattern of it.
    pub pattern: fn() -> String,
    /// Reads it.
    pub parse: fn(&Node<'_>) -> Result<T, Wrong>,
    /// Writes it.
    pub print: fn(&T) -> String,
}

/// Text of this pattern, printed as it is displayed.
pub(super) const fn text<T: ToString>(pattern: fn() -> String, parse: fn(&Node<'_>) -> Result<T, Wrong>) -> Text<T> {
    Text { pattern, parse, print: T::to_string }
}

/// The path of a file.
pub(super) const FILE: Text<PathBuf> = Text {
    pattern: || r"\S".into(),
    parse: |node| node.filled().map(PathBuf::from),
    print: |path| path.display().to_string(),
};

impl<T> Kind for Text<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        json!({ "type": "string", "pattern": (self.pattern)() })
    }

    fn take(&self, node: &Node<'_>) -> Option<T> {
        node.accept((self.parse)(node))
    }

    fn print(&self, value: &T) -> Option<Toml> {
        Some((self.print)(value).into())
    }
}

/// A value that may be absent.
pub(super) struct Optional<K>(pub K);

impl<K: Kind> Kind for Optional<K> {
    type Value = Option<K::Value>;

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn take(&self, node: &Node<'_>) -> Option<Self::Value> {
        self.0.take(node).map(Some)
    }

    fn print(&self, value: &Self::Value) -> Option<Toml> {
        value.as_ref().and_then(|value| self.0.print(value))
    }
}

/// A list.
pub(super) struct List<K> {
    item: K,
    is_set: bool,
    filled: Option<&'static str>,
}

/// A list of these, which may be empty.
pub(super) const fn list<K>(item: K) -> List<K> {
    List { item, is_set: false, filled: None }
}

impl<K> List<K> {
    /// No item may stand twice.
    pub(super) fn unique(self) -> Self {
        Self { is_set: true, ..self }
    }

    /// It must not be empty; the hint says what to write.
    pub(super) fn filled(self, hint: &'static str) -> Self {
        Self { filled: Some(hint), ..self }
    }
}

impl<K: Kind> List<K> {
    fn check(&self, values: Vec<K::Value>) -> Result<Vec<K::Value>, Wrong> {
        if let (true, Some(hint)) = (values.is_empty(), self.filled) {
            return Err(Wrong::new("must not be empty").hint(hint));
        }
        let printed: Vec<Option<Toml>> = values.iter().map(|value| self.item.print(value)).collect();
        let texts: Vec<&str> = printed.iter().flatten().filter_map(Toml::as_str).collect();
        match texts.iter().enumerate().find(|(place, text)| texts[..*place].contains(text)) {
            Some((_, twice)) if self.is_set => {
                Err(Wrong::new(format!("`{twice}` stands twice")).hint("remove one of them"))
            }
            _ => Ok(values),
        }
    }
}

impl<K: Kind> Kind for List<K> {
    type Value = Vec<K::Value>;

    fn shape(&self) -> Shape {
        let mut shape = json!({ "type": "array", "items": self.item.shape() });
        if self.filled.is_some() {
            shape["minItems"] = 1.into();
        }
        if self.is_set {
            shape["uniqueItems"] = true.into();
        }
        shape
    }

    fn take(&self, node: &Node<'_>) -> Option<Self::Value> {
        let Some(items) = node.items() else {
            let example = node.text().map_or_else(|_| "...".to_owned(), |text| format!("\"{text}\""));
            return node.accept(Err(node.expected("a list").hint(format!("write [{example}]"))));
        };
        let count = items.len();
        let values: Vec<K::Value> = items.iter().filter_map(|item| self.item.take(item)).collect();
        if values.len() < count { None } else { node.accept(self.check(values)) }
    }

    fn print(&self, value: &Self::Value) -> Option<Toml> {
        Some(Toml::Array(value.iter().filter_map(|item| self.item.print(item)).collect::<Array>()))
    }
}

/// One of these, or a list of them that is not empty.
pub(super) struct OneOrSeveral<K>(pub List<K>);

impl<K: Kind> Kind for OneOrSeveral<K> {
    type Value = Vec<K::Value>;

    fn shape(&self) -> Shape {
        let (mut shape, several) = (self.0.item.shape(), self.0.shape());
        shape["type"] = json!([shape["type"], several["type"]]);
        for key in ["items", "minItems"] {
            shape[key] = several[key].clone();
        }
        shape
    }

    fn take(&self, node: &Node<'_>) -> Option<Self::Value> {
        match node.items() {
            Some(_) => self.0.take(node),
            None => self.0.item.take(node).map(|one| vec![one]),
        }
    }

    fn print(&self, value: &Self::Value) -> Option<Toml> {
        match &value[..] {
            [one] => self.0.item.print(one),
            several => (!several.is_empty()).then(|| self.0.print(value)).flatten(),
        }
    }
}

/// A table with keys of its own, which count one by one.
pub(super) struct Nested<T>(PhantomData<T>);

/// The table of these keys.
pub(super) const fn nested<T>() -> Nested<T> {
    Nested(PhantomData)
}

impl<T: Keys> Kind for Nested<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        T::SECTION.shape()
    }

    fn inner(&self) -> Inner {
        Inner::Table(T::SECTION)
    }

    fn take(&self, node: &Node<'_>) -> Option<T> {
        Some(T::read(&Table::open(node.clone(), T::SECTION), T::default()))
    }

    fn print(&self, value: &T) -> Option<Toml> {
        Some(value.print_inline()).filter(|table| !table.is_empty()).map(Toml::InlineTable)
    }

    fn read(&self, table: &Table<'_>, key: &str, base: T) -> T {
        T::read(&table.table(key, T::SECTION), base)
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
