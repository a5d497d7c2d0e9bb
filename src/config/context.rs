//! The merged values, where each came from, and what was found wrong with them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use figment::Figment;
use figment::value::Value;
use toml_edit::Item;

use super::file::{self, Lines};
use super::node::{Node, Wrong};
use super::problem::{Advice, Place, Problem, Problems};

/// A dotted key, such as `routes[0].key.from`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Path(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Key(String),
    Index(usize),
}

/// One layer of a configuration. The name is its tag in [`Figment`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    File,
    Environment,
    Flags,
}

/// An environment variable that sets a key.
#[derive(Clone, Debug)]
pub(super) struct Variable {
    /// Its name.
    pub name: String,
    /// Its value as it stands.
    pub raw: String,
}

/// Everything that is known while a configuration is read.
// No `Debug`: it would show passwords.
pub(super) struct Context {
    /// All layers merged.
    pub values: Value,
    /// Knows the layer of each value.
    pub figment: Figment,
    /// The file and its lines.
    pub file: Option<(PathBuf, Lines)>,
    /// The environment variables, by the key that each sets.
    pub variables: BTreeMap<Path, Variable>,
    /// `PGPASSWORD` of the environment.
    pub password: Option<String>,
    /// What was found wrong.
    pub problems: RefCell<Vec<Problem>>,
    /// What is better known.
    pub advice: RefCell<Vec<Advice>>,
    /// What is in force, by keys of the top level.
    pub printed: RefCell<BTreeMap<&'static str, Item>>,
}

impl Context {
    /// Everything.
    pub(super) fn root(&self) -> Node<'_> {
        Node { context: self, value: &self.values, path: Path::default() }
    }

    /// Notes what is wrong with the value of a key. Something that is missing from a file altogether is reported where the
    /// file begins: each problem has a line.
    pub(super) fn report(&self, place: Place, path: &Path, wrong: Wrong) {
        let problem =
            Problem { place: self.with_line(place), key: path.to_string(), message: wrong.message, hint: wrong.hint };
        self.problems.borrow_mut().push(problem);
    }

    /// A place with a line, also where something is missing from the file altogether.
    pub(super) fn with_line(&self, place: Place) -> Place {
        match (place, &self.file) {
            (Place::File(file, None), Some((_, lines))) => Place::File(file, Some(file::first(lines))),
            (place, _) => place,
        }
    }

    /// Notes what is better known of a key.
    pub(super) fn advise(&self, place: Place, path: &Path, message: String) {
        self.advice.borrow_mut().push(Advice { place, key: path.to_string(), message });
    }

    /// Where a value came from.
    pub(super) fn place(&self, value: &Value, path: &Path) -> Place {
        let place = match self.layer(value) {
            Some(Layer::Flags) => path.flag().map(Place::Flag),
            Some(Layer::Environment) => self.variable_at_or_above(path).or_else(|| self.variable_below(path)),
            Some(Layer::File) | None => None,
        };
        let file = || Some(Place::File(self.file.as_ref()?.0.clone(), None));
        let place = place.or_else(|| self.line_of(path)).or_else(|| self.variable_below(path));
        place.or_else(file).unwrap_or(Place::Nowhere)
    }

    /// The layer that a value came from.
    pub(super) fn layer(&self, value: &Value) -> Option<Layer> {
        let name = &self.figment.get_metadata(value.tag())?.name;
        Layer::ALL.into_iter().find(|layer| layer.name() == name)
    }

    /// The advice, and what is in force, unless something is wrong.
    pub(super) fn finish(self) -> Result<(Vec<Advice>, BTreeMap<&'static str, Item>), Problems> {
        let problems = self.problems.into_inner();
        if !problems.is_empty() {
            return Err(Problems::new(problems));
        }
        let mut advice = self.advice.into_inner();
        advice.sort();
        Ok((advice, self.printed.into_inner()))
    }

    /// The same where one table alone was read: what is wrong elsewhere does not matter. Where it is not there, an unknown key of the
    /// top level may be meant for it.
    pub(super) fn finish_with(self, table: &str) -> Result<(), Problems> {
        let is_there = self.values.as_dict().is_some_and(|values| values.contains_key(table));
        let matters = |key: &str| key.split(['.', '[']).next() == Some(table) || !is_there && !key.contains(['.', '[']);
        self.problems.borrow_mut().retain(|problem| matters(&problem.key));
        self.finish().map(drop)
    }

    /// The line of a key, or of the nearest key that it stands in; nothing where the file has neither.
    fn line_of(&self, path: &Path) -> Option<Place> {
        let (file, lines) = self.file.as_ref()?;
        let line = path.and_above().find_map(|path| lines.get(&path).copied())?;
        Some(Place::File(file.clone(), Some(line)))
    }

    fn variable_at_or_above(&self, path: &Path) -> Option<Place> {
        let variable = path.and_above().find_map(|path| self.variables.get(&path))?;
        Some(Place::Environment(variable.name.clone()))
    }

    fn variable_below(&self, path: &Path) -> Option<Place> {
        let mut below = self.variables.iter().filter(|(other, _)| !path.0.is_empty() && other.0.starts_with(&path.0));
        below.next().map(|(_, variable)| Place::Environment(variable.name.clone()))
    }
}

impl Layer {
    const ALL: [Self; 3] = [Self::File, Self::Environment, Self::Flags];

    /// Its word.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Environment => "environment",
            Self::Flags => "flags",
        }
    }
}

impl Path {
    /// The path of these keys, from the top.
    pub(super) fn of<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        Self(keys.into_iter().map(|key| Step::Key(key.to_owned())).collect())
    }

    /// A key in it.
    pub(super) fn key(&self, key: &str) -> Self {
        self.with(Step::Key(key.to_owned()))
    }

    /// An item of it.
    pub(super) fn index(&self, index: usize) -> Self {
        self.with(Step::Index(index))
    }

    fn with(&self, step: Step) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }

    /// This path, then each that it stands in, the nearest first.
    fn and_above(&self) -> impl Iterator<Item = Self> {
        (1..=self.0.len()).rev().map(|length| Self(self.0[..length].to_vec()))
    }

    /// The flag that sets it.
    fn flag(&self) -> Option<&'static str> {
        let keys: Vec<&str> = self.0.iter().map(Step::word).collect();
        match *keys.as_slice() {
            ["upstreams", ..] => Some("--upstream"),
            ["server", "listen", ..] => Some("--listen"),
            ["admin", "listen", ..] => Some("--admin"),
            ["store", "url", ..] => Some("--store"),
            _ => None,
        }
    }
}

impl Step {
    fn word(&self) -> &str {
        match self {
            Self::Key(key) => key,
            Self::Index(_) => "[]",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, step) in self.0.iter().enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(key) => {
                    let dot = if place > 0 { "." } else { "" };
                    let bare = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
                    if !key.is_empty() && key.bytes().all(bare) {
                        write!(f, "{dot}{key}")?;
                    } else {
                        write!(f, "{dot}{key:?}")?;
                    }
                }
            }
        }
        Ok(())
    }
}
