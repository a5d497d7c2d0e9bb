//! Rules of the house that no compiler holds: who may import whom, what stays pure, how long a file
//! may be, and what `docs/architecture.md` says of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "tidy/cycles.rs"]
mod cycles;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What each room may import. Between rooms imports go one way: there is no cycle in here.
#[rustfmt::skip]
const EDGES: &[(&str, &[&str])] = &[
    ("idempotency", &[]),
    ("tls", &[]),
    ("net", &[]),
    ("route", &["idempotency"]),
    ("store", &["tls", "net", "idempotency"]),
    ("telemetry", &["store", "idempotency"]),
    ("http", &["tls", "net", "route", "store", "telemetry", "idempotency"]),
    ("gate", &["http", "route", "store", "telemetry", "idempotency"]),
    ("consumers", &["net", "gate", "telemetry", "idempotency"]),
    ("worker", &["store", "telemetry", "idempotency"]),
    ("admin", &["http", "route", "store", "telemetry", "idempotency"]),
    ("config", &["tls", "admin", "consumers", "gate", "http", "worker", "route", "store", "telemetry", "idempotency"]),
    ("cli", &["tls", "config", "admin", "consumers", "gate", "http", "worker", "route", "store", "telemetry", "idempotency"]),
    ("main", &["cli"]),
    ("lib", &[]),
];

/// Longest file, in lines, without its tests.
const LONGEST: usize = 500;

#[test]
fn imports_go_one_way() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let room = room_of(&path);
        let allowed = EDGES.iter().find(|(name, _)| *name == room).unwrap_or_else(|| panic!("{room} is no room")).1;
        for import in imports(&code(&text)) {
            if import != room && is_room(&import) && !allowed.contains(&import.as_str()) {
                wrong.push(format!("{} imports {import}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_edges_have_no_cycle() {
    let mut placed: BTreeSet<&str> = BTreeSet::new();
    while placed.len() < EDGES.len() {
        let ready =
            EDGES.iter().find(|(room, to)| !placed.contains(room) && to.iter().all(|room| placed.contains(room)));
        let (room, _) = ready.unwrap_or_else(|| panic!("a cycle among those that are not in {placed:?}"));
        placed.insert(room);
    }
}

#[test]
fn the_rules_are_pure() {
    const BANNED: [&str; 9] = [
        "tokio",
        "SystemTime",
        "Instant",
        "std::fs",
        "std::net::Tcp",
        "std::thread",
        "std::env",
        "async fn",
        "getrandom",
    ];
    let mut wrong = Vec::new();
    let sources = sources();
    for (path, text) in sources.iter().filter(|(path, _)| room_of(path) == "idempotency") {
        if is_test(path, &sources) {
            continue;
        }
        let code = code_before_tests(text);
        wrong.extend(
            BANNED.iter().filter(|word| code.contains(*word)).map(|word| format!("{}: {word}", path.display())),
        );
    }
    assert!(wrong.is_empty(), "what decides has no clock and does nothing:\n{}", wrong.join("\n"));
}

#[test]
fn files_are_short() {
    let mut files = sources();
    files.extend(files_under("tests").into_iter().filter(|(path, _)| path.extension().is_some_and(|end| end == "rs")));
    let long: Vec<String> = files
        .iter()
        .map(|(path, text)| (path, lines_before_tests(text)))
        .filter(|(_, lines)| *lines > LONGEST)
        .map(|(path, lines)| format!("{}: {lines} lines", path.display()))
        .collect();
    assert!(long.is_empty(), "over {LONGEST} lines, split by a seam:\n{}", long.join("\n"));
}

#[test]
fn nothing_is_left_to_do_and_nothing_names_one_machine() {
    // Written in two parts, so as not to find this file.
    let banned = [
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("/wo", "rk/"),
        concat!("/tmp/", "wt"),
        concat!("/ro", "ot/"),
    ];
    let mut wrong = Vec::new();
    for (path, text) in files_under(".") {
        wrong.extend(
            banned.iter().filter(|word| text.contains(*word)).map(|word| format!("{}: {word}", path.display())),
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The fuzz targets are a workspace of their own: a dependency that oncegate gains has to enter their lock file too, but for
/// those of features, which they are built without.
#[test]
fn the_lock_of_the_fuzz_targets_knows_every_dependency() {
    let table = |path: &str| {
        let text = std::fs::read_to_string(root().join(path)).unwrap();
        text.parse::<toml_edit::DocumentMut>().unwrap()
    };
    let lock = table("tests/fuzz/Cargo.lock");
    let packages = lock["package"].as_array_of_tables().unwrap();
    let ours = packages.iter().find(|package| package["name"].as_str() == Some("oncegate")).unwrap();
    // A name that several versions share has its version behind it.
    let locked: BTreeSet<&str> =
        ours["dependencies"].as_array().unwrap().iter().filter_map(|name| name.as_str()?.split(' ').next()).collect();
    let manifest = table("Cargo.toml");
    let dependencies = manifest["dependencies"].as_table().unwrap().iter();
    let is_optional = |item: &toml_edit::Item| item.get("optional").and_then(toml_edit::Item::as_bool) == Some(true);
    let named: BTreeSet<&str> = dependencies.filter(|(_, item)| !is_optional(item)).map(|(name, _)| name).collect();
    assert_eq!(named, locked, "take them up by: cargo metadata --manifest-path tests/fuzz/Cargo.toml");
}

/// A line break in a literal, without the backslash that joins its lines, leaves a run of spaces in a message.
#[test]
fn no_text_has_a_run_of_spaces() {
    // Tables and pictures.
    const ALIGNED: [&str; 3] = ["cli/demo", "cli/explain", "cli/records"];
    let sources = sources();
    let mut wrong = Vec::new();
    for (path, text) in &sources {
        if is_test(path, &sources) || ALIGNED.iter().any(|aligned| path.starts_with(aligned)) {
            continue;
        }
        let code = text.lines().take(lines_before_tests(text)).collect::<Vec<_>>().join("\n");
        let runs = literals(&code).into_iter().filter(|literal| has_run_of_spaces(literal));
        wrong.extend(runs.map(|literal| format!("{}: {literal:?}", path.display())));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The page that says where things are. Names in backticks that end like a file or a folder are paths; the names behind a path
/// and a colon stand in that file, and not in its comments alone.
#[test]
fn the_architecture_page_names_what_exists() {
    let page = architecture();
    let mut wrong = Vec::new();
    let mut spans = backticked(&page);
    while let Some((span, rest)) = spans {
        spans = backticked(rest);
        if !is_path(span) {
            continue;
        }
        let Some(found) = resolve(span) else {
            wrong.push(format!("{span} does not exist"));
            continue;
        };
        let missing = names_behind(rest).filter(|name| !has_word(&code_of(&found), name));
        wrong.extend(missing.map(|name| format!("{span} has no {name}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(page.lines().count() <= 400, "a page that is too long is not read");
}

/// The most that a change may leave: lower them as the walk gets shorter. The targets are 45 files, 20 crossings and 12 file
/// changes.
const MOST_FILES: usize = 57;
const MOST_CROSSINGS: usize = 44;
const MOST_FILE_CHANGES: usize = 12;

#[test]
fn the_walk_of_a_request_is_as_long_as_the_page_says() {
    let page = architecture();
    let walk = section(&page, "## The walk");
    let mut lines = Vec::new();
    for line in walk.lines().filter(|line| line.starts_with(|char: char| char.is_ascii_digit())) {
        let (number, text) = line.split_once(". ").unwrap_or_else(|| panic!("{line}"));
        assert_eq!(number, (lines.len() + 1).to_string(), "{line}");
        let path = backticked(text).filter(|_| text.starts_with('`')).map(|(path, _)| path);
        let path = path.filter(|path| is_path(path)).unwrap_or_else(|| panic!("{line} names no file"));
        assert!(root().join("src").join(path).is_file(), "{path} is no file of src");
        lines.push(Path::new(path));
    }
    let files = lines.iter().collect::<BTreeSet<_>>().len();
    let steps = || lines.windows(2).map(|pair| (pair[0], pair[1]));
    let crossings = steps().filter(|(from, to)| room_of(from) != room_of(to)).count();
    let is_inside = |path: &Path| room_of(path) == "gate";
    let changes = steps().filter(|(from, to)| from != to && is_inside(from) && is_inside(to)).count();
    let said = format!("**{files} files, {crossings} crossings of rooms, {changes} file changes inside `gate/`.**");
    assert!(walk.contains(&said), "the list comes to: {said}");
    assert!(files <= MOST_FILES && crossings <= MOST_CROSSINGS && changes <= MOST_FILE_CHANGES, "{said}");
}

#[test]
fn the_architecture_page_has_the_rooms_and_their_imports() {
    let page = architecture();
    let rooms: Vec<(String, BTreeSet<String>)> = rows(section(&page, "## The map"))
        .map(|row| {
            let imports = row[2].split(", ").filter(|import| *import != "-").map(str::to_owned);
            (row[0].trim_matches('`').to_owned(), imports.collect())
        })
        .collect();
    let edges: BTreeSet<_> =
        EDGES.iter().filter(|(room, _)| *room != "lib").map(|(room, _)| (*room).to_owned()).collect();
    assert_eq!(rooms.iter().map(|(room, _)| room.clone()).collect::<BTreeSet<_>>(), edges);
    for (room, imports) in rooms {
        let allowed = EDGES.iter().find(|(name, _)| *name == room).unwrap().1;
        assert_eq!(imports, allowed.iter().map(|name| (*name).to_owned()).collect(), "{room}");
    }
}

#[test]
fn the_glossary_is_short_and_its_words_are_used() {
    let page = architecture();
    let words: Vec<String> = rows(section(&page, "## Glossary")).map(|row| row[0].to_lowercase()).collect();
    assert!((1..=30).contains(&words.len()), "{} words", words.len());
    let sources: Vec<String> = sources().into_iter().map(|(_, text)| text.to_lowercase()).collect();
    let unused: Vec<_> = words.iter().filter(|word| !sources.iter().any(|text| text.contains(*word))).collect();
    assert!(unused.is_empty(), "not in the code: {unused:?}");
}

fn architecture() -> String {
    std::fs::read_to_string(root().join("docs/architecture.md")).unwrap()
}

/// The text from a heading to the next of its kind.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let begin = page.find(&format!("\n{heading}")).unwrap_or_else(|| panic!("{heading} is gone")) + 1;
    let length = page[begin..].find("\n## ").unwrap_or(page.len() - begin);
    &page[begin..begin + length]
}

/// The rows of a table, without its head.
fn rows(section: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    lines.map(|line| line.trim_matches(['|', ' ']).split(" | ").collect())
}

/// The next text in backticks, and what follows it.
fn backticked(text: &str) -> Option<(&str, &str)> {
    text.split_once('`')?.1.split_once('`')
}

/// The names that follow a path and a colon: `a`, `b` and `c`.
fn names_behind(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text.strip_prefix(": ").unwrap_or_default();
    std::iter::from_fn(move || {
        let (name, after) = rest.strip_prefix('`')?.split_once('`')?;
        rest = [", and ", ", ", " and "].iter().find_map(|join| after.strip_prefix(join)).unwrap_or_default();
        Some(name).filter(|name| !is_path(name))
    })
}

/// A file without its comments.
fn code_of(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let comment = match path.extension().and_then(|end| end.to_str()) {
        Some("rs" | "js") => "//",
        Some("sql" | "lua") => "--",
        Some("toml") => "#",
        _ => return text,
    };
    text.lines().map(|line| line.split(comment).next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn is_path(text: &str) -> bool {
    let ends = [".rs", ".md", ".sql", ".toml", ".lua", ".js", ".json", "/"];
    ends.iter().any(|end| text.ends_with(end)) && !text.contains(' ')
}

/// A path of the repository, or of its `src`.
fn resolve(path: &str) -> Option<PathBuf> {
    [root().join(path), root().join("src").join(path)].into_iter().find(|path| path.exists())
}

fn has_word(text: &str, word: &str) -> bool {
    text.split(|char: char| !char.is_alphanumeric() && char != '_').any(|found| found == word)
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library's files, their paths under `src`.
fn sources() -> Vec<(PathBuf, String)> {
    let files = files_under("src");
    assert!(files.len() > 10, "where is the source?");
    files.into_iter().map(|(path, text)| (path.strip_prefix("src").unwrap().to_owned(), text)).collect()
}

/// Every text file under a directory of the repository that is not made by a build.
fn files_under(directory: &str) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut directories = vec![root().join(directory)];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !["target", ".git"].contains(&name.as_str()) {
                    directories.push(path);
                }
            } else if let Ok(text) = std::fs::read_to_string(&path)
                // In a worktree this file says where the repository is.
                && name != ".git"
            {
                let relative = path.strip_prefix(root()).unwrap();
                files.push((relative.strip_prefix(".").unwrap_or(relative).to_owned(), text));
            }
        }
    }
    files
}

/// Whether a file is a module that is only there for tests.
fn is_test(path: &Path, sources: &[(PathBuf, String)]) -> bool {
    let name = path.file_stem().unwrap().to_string_lossy();
    let declared = format!("#[cfg(test)]\nmod {name};");
    // By a file beside it, or by the one that its directory is named after.
    let is_above =
        |other: &Path| other.parent() == path.parent() || Some(other.with_extension("").as_path()) == path.parent();
    sources.iter().any(|(other, text)| is_above(other) && text.contains(&declared))
}

/// `gate` of `gate/mod.rs` and of `gate.rs`.
fn room_of(path: &Path) -> String {
    let first = path.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
    first.strip_suffix(".rs").unwrap_or(&first).to_owned()
}

fn is_room(name: &str) -> bool {
    EDGES.iter().any(|(room, _)| *room == name)
}

/// The text without its comments; strings that hold `//` lose their rest, which is nothing that these rules look for.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn code_before_tests(text: &str) -> String {
    code(&text.lines().take(lines_before_tests(text)).collect::<Vec<_>>().join("\n"))
}

/// The rooms named after `crate::`, in groups too.
fn imports(code: &str) -> BTreeSet<String> {
    names_after(code, "crate::")
}

/// The names that paths go on with behind `prefix`, in groups too.
fn names_after(code: &str, prefix: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, prefix) in code.match_indices(prefix).filter(|(at, _)| !code[..*at].ends_with(':')) {
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            Some(group) => found.extend(first_words(group)),
            None => found.extend(first_word(rest)),
        }
    }
    found
}

/// The first word of each item of a group that was opened before `text`.
fn first_words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut depth, mut at_start) = (0, true);
    for (at, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => at_start = true,
            c if at_start && !c.is_whitespace() => {
                words.extend(first_word(&text[at..]));
                at_start = false;
            }
            _ => {}
        }
    }
    words
}

fn first_word(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    (end > 0).then(|| text[..end].to_owned())
}

/// Whether spaces follow each other within a line. Those at its beginning indent it.
fn has_run_of_spaces(literal: &str) -> bool {
    literal.lines().any(|line| line.trim().contains("  "))
}

/// The texts in double quotes: what they hold, with their lines joined where a backslash says so. Raw strings hold patterns
/// and SQL, and are left out.
fn literals(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find(['"', '/', '\'', 'r']) {
        let (before, from) = rest.split_at(at);
        let in_word = before.ends_with(|char: char| char.is_alphanumeric() || char == '_');
        let hashes = from[1..].bytes().take_while(|byte| *byte == b'#').count();
        rest = match from.as_bytes() {
            [b'/', b'/', ..] => from.split_once('\n').map_or("", |(_, after)| after),
            [b'/', b'*', ..] => from.split_once("*/").map_or("", |(_, after)| after),
            [b'\'', b'\\', ..] => from[3..].split_once('\'').map_or("", |(_, after)| after),
            [b'\'', b'"', b'\'', ..] => &from[3..],
            [b'r', ..] if !in_word && from[1 + hashes..].starts_with('"') => {
                let end = format!("\"{}", "#".repeat(hashes));
                from[2 + hashes..].split_once(&end).map_or("", |(_, after)| after)
            }
            [b'"', ..] => {
                let (literal, after) = literal(&from[1..]);
                found.push(literal);
                after
            }
            _ => &from[1..],
        };
    }
    found
}

/// The literal that begins behind a quote, and what follows it.
fn literal(text: &str) -> (String, &str) {
    let mut literal = String::new();
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        match char {
            '"' => break,
            '\\' => match chars.next() {
                Some('n') => literal.push('\n'),
                Some('\n') => chars = chars.as_str().trim_start().chars(),
                Some(escaped) => literal.push(escaped),
                None => {}
            },
            char => literal.push(char),
        }
    }
    (literal, chars.as_str())
}

fn lines_before_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.windows(2).position(|pair| pair[0] == "#[cfg(test)]" && pair[1] == "mod tests {");
    tests.unwrap_or(lines.len())
}

#[test]
fn every_name_behind_a_path_is_found() {
    let names = |text| names_behind(text).collect::<Vec<_>>();
    assert_eq!(names(": `a`, `b` and `c` do it; `d`"), ["a", "b", "c"]);
    assert_eq!(names(": `a`, and `src/b.rs`: `b`"), ["a"]);
    assert!(names(" has `a`").is_empty() && names("").is_empty());
}

#[test]
fn imports_are_found_in_every_form() {
    let found =
        imports("use crate::store::Store; fn f(x: crate::gate::X) {} use crate::{admin, http::{self, body},\n route};");
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["admin", "gate", "http", "route", "store"]);
    assert!(imports(&code("//! Only [`crate::cli`] imports it.")).is_empty());
}

#[test]
fn runs_of_spaces_are_found_where_a_line_breaks() {
    let code =
        "f(\"one \\\n    line\"); g('\"', r#\"a  \"b\"#, '\\'') // \"a  b\"\n h(\"a\\n  b\", b\"a \n  b\", \"a   b\")";
    assert_eq!(literals(code), ["one line", "a\n  b", "a \n  b", "a   b"]);
    let found: Vec<bool> = literals(code).iter().map(|literal| has_run_of_spaces(literal)).collect();
    assert_eq!(found, [false, false, false, true]);
}
