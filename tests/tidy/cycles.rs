//! Modules of a room import each other in one direction.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{code_before_tests, is_test, names_after, room_of, sources};

/// Modules of `http` that accept and serve connections. They depend on each other, and count as one.
const HTTP_SERVER: [&str; 3] = ["accept", "http2", "server"];

#[test]
fn the_modules_of_http_and_of_gate_have_no_cycle() {
    let http = edges_inside("http");
    assert!(http["body"].contains("headers") && http["upstream"].contains("body"), "imports are found: {http:?}");
    let gate = edges_inside("gate");
    let protected = "claim::protected";
    assert!(gate["driver"].contains(protected) && gate[protected].contains("pass"), "imports are found: {gate:?}");
    assert!(gate["claim::quota"].contains(protected), "imports of a neighbour are found: {gate:?}");
    assert!(gate["inquiry::probe"].contains("inquiry"), "imports of a chapter's own file are found: {gate:?}");
    for edges in [http, gate] {
        let mut placed: BTreeSet<String> = BTreeSet::new();
        while let Some(ready) = edges.iter().find(|(module, to)| !placed.contains(*module) && to.is_subset(&placed)) {
            placed.insert(ready.0.clone());
        }
        let left: Vec<_> = edges.iter().filter(|(module, _)| !placed.contains(*module)).collect();
        assert!(left.is_empty(), "a cycle among these, or they import it: {left:#?}");
    }
}

/// Folders of `gate` whose files count each for itself.
const CHAPTERS: [&str; 6] = ["admission", "claim", "delivery", "describe", "identity", "inquiry"];

/// Which of a room's modules import which. Its `mod.rs` holds what they share, and imports of it do not count.
fn edges_inside(room: &str) -> BTreeMap<String, BTreeSet<String>> {
    let sources = sources();
    let files: Vec<_> =
        sources.iter().filter(|(path, _)| path.starts_with(room) && path.components().count() > 1).collect();
    let merged = |module: String| if HTTP_SERVER.contains(&&*module) { "server".to_owned() } else { module };
    let module_of = |path: &Path| {
        let inside = path.strip_prefix(room).unwrap();
        let first = room_of(inside);
        let is_alone = !CHAPTERS.contains(&&*first) || inside.ends_with("mod.rs");
        if is_alone { first } else { format!("{first}::{}", room_of(inside.strip_prefix(&first).unwrap())) }
    };
    let modules: BTreeSet<String> = files.iter().map(|(path, _)| merged(module_of(path))).collect();
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in files {
        if is_test(path, &sources) {
            continue;
        }
        let (own, code) = (merged(module_of(path)), code_before_tests(text));
        // `mod.rs` of a directory is one level above the other files in it.
        let is_root = path.file_stem().is_some_and(|stem| stem == "mod");
        let depth = path.components().count() - 1 - usize::from(is_root);
        let mut prefixes = vec![(format!("crate::{room}::"), None)];
        prefixes.extend((depth > 0).then(|| ("super::".repeat(depth), None)));
        let chapter = CHAPTERS.into_iter().find(|chapter| path.starts_with(Path::new(room).join(chapter)));
        prefixes.extend(chapter.filter(|_| depth > 1).map(|chapter| ("super::".repeat(depth - 1), Some(chapter))));
        let mut found = BTreeSet::new();
        for (prefix, chapter) in prefixes {
            let Some(chapter) = chapter else {
                found.extend(names_after(&code, &prefix));
                let inside = |chapter: &str| names_after(&code, &format!("{prefix}{chapter}::")).into_iter();
                found.extend(CHAPTERS.into_iter().flat_map(|of| inside(of).map(move |name| format!("{of}::{name}"))));
                continue;
            };
            found.extend(names_after(&code, &prefix).into_iter().map(|name| format!("{chapter}::{name}")));
        }
        // A chapter is named on the way to one of its modules, or for what stands in its `mod.rs`.
        let chapter_of =
            |name: &str| name.split("::").next().filter(|first| CHAPTERS.contains(first)).map(str::to_owned);
        let module = |name: &String| match (modules.contains(name), chapter_of(name)) {
            (_, Some(chapter)) if *name == chapter => None,
            (false, Some(chapter)) => Some(chapter),
            _ => Some(name.clone()),
        };
        let others = found.iter().filter_map(module).map(merged);
        let others = others.filter(|module| modules.contains(module) && *module != own);
        edges.entry(own.clone()).or_default().extend(others);
    }
    edges
}
