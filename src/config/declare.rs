//! The declaration of keys.
//!
//! [`keys!`] declares a table: each key once, with its documentation, its type, its default and its [`Kind`]. The loader,
//! `config print`, the JSON Schema, the annotated default file and the suggestions for misspelt keys all read it.

use serde_json::{Map, json};
use toml_edit::{InlineTable, Item};

use super::kinds::{Kind, Shape, Toml, nested, to_json};
use super::node::Table;

/// A table, as it was declared.
pub(super) struct Section {
    /// Its name in messages.
    pub name: &'static str,
    /// What it is for, line by line.
    pub about: &'static [&'static str],
    /// Its keys, in groups; none at all where the keys are the user's own.
    pub groups: &'static [&'static [Key]],
}

/// A table whose keys are declared with [`keys!`].
pub(super) trait Keys: Sized + Default {
    /// Its keys.
    const KEYS: &'static [Key];
    /// The table.
    const SECTION: &'static Section;

    /// Reads every key. Where a key is absent or wrong, `base` applies; what is wrong is reported.
    fn read(table: &Table<'_>, base: Self) -> Self;

    /// Every key that has a value, as TOML.
    fn print(&self) -> Vec<(&'static str, Toml)>;

    /// The same as a table of a file.
    fn print_table(&self) -> Item {
        Item::Table(self.print().into_iter().map(|(key, value)| (key, Item::Value(value))).collect())
    }

    /// The same as a table in one line.
    fn print_inline(&self) -> InlineTable {
        self.print().into_iter().collect()
    }
}

/// One declared key.
pub(super) struct Key {
    /// Its name.
    pub name: &'static str,
    /// Its documentation, line by line.
    pub doc: &'static [&'static str],
    /// How it is shown where its documentation is.
    pub shown: Shown,
    /// What its kind says about it.
    pub facts: fn() -> Facts,
}

/// How a key is shown in the annotated default file.
pub(super) enum Shown {
    /// With its default.
    Default,
    /// With its default in this spelling.
    DefaultAs(&'static str),
    /// With its default, commented out: the key means more when it is set than its value says.
    DefaultOff,
    /// Commented out, with this example: it has no fixed default.
    Example(&'static str),
    /// Commented out, with this example: it must be set.
    Required(&'static str),
}

/// What the kind of a key says about it.
pub(super) struct Facts {
    /// What its values look like, as JSON Schema.
    pub shape: Shape,
    /// Its default.
    pub default: Option<Toml>,
    /// The tables in it.
    pub inner: Inner,
}

/// The tables in a key.
pub(super) enum Inner {
    /// None.
    None,
    /// It may be this table.
    Table(&'static Section),
    /// Its keys are names, each of one such table.
    Named(&'static Section),
    /// It is a list of such tables.
    List(&'static Section),
    /// Its keys are entries; these are the defaults.
    Entries(Vec<(String, Toml)>),
}

impl Facts {
    /// Asks a kind.
    pub(super) fn of<T: 'static>(kind: &Kind<T>, default: &T) -> Self {
        Self { shape: kind.shape(), default: kind.print(default), inner: kind.inner() }
    }
}

impl Section {
    /// Its keys.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'static Key> {
        self.groups.iter().copied().flatten()
    }

    /// The names of its keys.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.keys().map(|key| key.name)
    }

    /// Whether its keys are the user's own.
    pub(super) fn is_open(&self) -> bool {
        self.groups.is_empty()
    }

    /// The table as JSON Schema.
    pub(super) fn shape(&self) -> Shape {
        let properties: Map<String, Shape> = self.keys().map(|key| (key.name.to_owned(), key.shape())).collect();
        let required: Vec<&str> =
            self.keys().filter(|key| matches!(key.shown, Shown::Required(_))).map(|key| key.name).collect();
        let mut shape = json!({
            "title": self.name,
            "type": "object",
            "properties": properties,
            "additionalProperties": false,
        });
        if !required.is_empty() {
            shape["required"] = required.into();
        }
        shape
    }
}

impl Key {
    /// A key that is a table of the top level.
    pub(super) const fn table<T: Keys + 'static>(name: &'static str) -> Self {
        let facts = || Facts::of(&nested::<T>(), &T::default());
        Self { name, doc: T::SECTION.about, shown: Shown::Default, facts }
    }

    /// Its part of the schema.
    fn shape(&self) -> Shape {
        let Facts { mut shape, default, .. } = (self.facts)();
        shape["description"] = self.description().into();
        // A table has its defaults key by key.
        let default = default.filter(|default| !default.is_inline_table());
        let spelled = |text: &str| text.parse::<Toml>().ok();
        let (word, value) = match self.shown {
            Shown::Default | Shown::DefaultOff => ("default", default.as_ref().map(to_json)),
            Shown::DefaultAs(text) => ("default", spelled(text).as_ref().map(to_json)),
            Shown::Example(text) | Shown::Required(text) => {
                ("examples", spelled(text).map(|value| json!([to_json(&value)])))
            }
        };
        if let Some(value) = value {
            shape[word] = value;
        }
        shape
    }

    /// Its documentation in one line.
    fn description(&self) -> String {
        self.doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    }
}

/// The name of a key, whose field has a prefix where the name is a word of the language.
pub(super) const fn key_name(field: &'static str) -> &'static str {
    match field.as_bytes() {
        [b'r', b'#', ..] => field.split_at(2).1,
        _ => field,
    }
}

/// Declares the keys of a table. `struct` declares the struct of their values too; `for` is for a struct that is there
/// already, whose fields are the keys and whose `Default` has the defaults.
///
/// ```text
/// keys! {
///     /// What the table is for.
///     pub(super) struct Log "[log]" {
///         /// "text" for people, "json" for machines.
///         format: Format = Format::Text => words(&[("text", Format::Text), ("json", Format::Json)]);
///     }
/// }
/// ```
macro_rules! keys {
    (@shown) => { $crate::config::declare::Shown::Default };
    (@shown $shown:expr) => { $shown };
    (
        $(#[doc = $about:literal])*
        for $Table:ident $name:literal {
            $( $(#[doc = $doc:literal])* $key:ident => $kind:expr $(, $shown:expr)?; )*
        }
    ) => {
        impl $crate::config::declare::Keys for $Table {
            const KEYS: &'static [$crate::config::declare::Key] = &[ $( $crate::config::declare::Key {
                name: $crate::config::declare::key_name(stringify!($key)),
                doc: &[$($doc),*],
                shown: keys!(@shown $($shown)?),
                facts: || $crate::config::declare::Facts::of(&$kind, &<$Table>::default().$key),
            } ),* ];
            const SECTION: &'static $crate::config::declare::Section =
                &$crate::config::declare::Section { name: $name, about: &[$($about),*], groups: &[Self::KEYS] };

            fn read(table: &$crate::config::node::Table<'_>, base: Self) -> Self {
                Self { $( $key: $kind.read(table, $crate::config::declare::key_name(stringify!($key)), base.$key), )* }
            }

            fn print(&self) -> Vec<(&'static str, $crate::config::kinds::Toml)> {
                let printed = [ $( ($crate::config::declare::key_name(stringify!($key)), $kind.print(&self.$key)) ),* ];
                printed.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
            }
        }
    };
    (
        $(#[doc = $about:literal])*
        $visibility:vis struct $Table:ident $name:literal {
            $( $(#[doc = $doc:literal])* $key:ident: $type:ty = $default:expr => $kind:expr $(, $shown:expr)?; )*
        }
    ) => {
        $(#[doc = $about])*
        $visibility struct $Table {
            $( $visibility $key: $type, )*
        }

        impl Default for $Table {
            fn default() -> Self {
                Self { $( $key: $default, )* }
            }
        }

        keys! {
            $(#[doc = $about])*
            for $Table $name {
                $( $(#[doc = $doc])* $key => $kind $(, $shown)?; )*
            }
        }
    };
}
pub(super) use keys;

#[cfg(test)]
mod tests;
