//! Holds the lists that the docs write by hand to the code: metrics, problems, outcomes, exit statuses, limits, headers and the
//! paths of the admin listener. A name that the code gains has to get its entry. Of metrics, problems, exit statuses and paths, an
//! entry that the code loses has to go, too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::runtime::Builder;
use tokio::time::Instant;

use super::man::{Facts, whole, with_subcommands};
use crate::config;
use crate::idempotency::recovery::Finding;
use crate::store::ErrorKind;
use crate::store::cached::CacheResult;
use crate::store::metered::{OperationsInFlight, StoreOp};
use crate::store::sealed::CountByKey;
use crate::telemetry::limits::Limit;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::observed::Dropped;
use crate::telemetry::outcome::{Code, Outcome};

fn page(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The first cells of a page's tables, where they are one name in backticks.
fn terms(page: &str) -> BTreeSet<String> {
    let cell = |line: &str| Some(line.strip_prefix("| `")?.split_once("` |")?.0.to_owned());
    page.lines().filter_map(cell).collect()
}

/// The other cells of the row that begins with `term`.
fn row<'a>(page: &'a str, term: &str) -> Option<Vec<&'a str>> {
    let row = page.lines().find_map(|line| line.strip_prefix(&format!("| `{term}` | ")))?;
    Some(row.trim_end_matches(['|', ' ']).split(" | ").collect())
}

fn codes() -> impl Iterator<Item = Code> {
    Outcome::ALL.into_iter().filter_map(|outcome| match outcome {
        Outcome::Problem(code) => Some(code),
        _ => None,
    })
}

/// Metrics in which every family has a series.
fn all_metrics() -> String {
    let metrics = Metrics::new();
    let route = metrics.route("a");
    for outcome in Outcome::ALL {
        drop(route.answered(outcome, StatusCode::OK, Instant::now()));
    }
    route.upstream_took(Duration::ZERO);
    route.client_gone();
    route.probe_checks(Finding::Done).inc();
    route.probe_contradicted(true);
    route.observed().would(Outcome::Executed, false);
    route.observed().dropped(Dropped::Store);
    metrics.store("memory")(StoreOp::Claim, Duration::ZERO, Some(ErrorKind::Full));
    metrics.watch_store("memory", Arc::default());
    let runtime = Builder::new_current_thread().build().unwrap();
    metrics.watch_runtime("main", runtime.handle());
    metrics.cache()(CacheResult::Memory);
    metrics.database_up("db", true);
    metrics.consumer("orders").in_hand(0);
    metrics.records_by_key().show(&CountByKey::default());
    metrics.limits().exceeded(Limit::MaxHeaders);
    metrics.encode()
}

/// Each family's type and labels, as the text format has them.
fn families(text: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let mut families = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            families.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
        } else if let Some((name, labels)) = line.split_once('{').filter(|_| !line.starts_with('#')) {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            let labels = labels.split(',').filter_map(|label| Some(label.split_once("=\"")?.0.to_owned()));
            families.get_mut(base).unwrap().1.extend(labels.filter(|label| label != "le"));
        }
    }
    families
}

/// `docs/observe/metrics.md` has a heading for each metric and, below it, a line with its type and its labels.
#[test]
fn every_metric_has_its_type_and_labels_in_the_docs() {
    let page = page("docs/observe/metrics.md");
    let families = families(&all_metrics());
    let declared = [
        include_str!("../telemetry/metrics/families.rs"),
        include_str!("../telemetry/records_by_key.rs"),
        include_str!("../telemetry/deliveries.rs"),
        include_str!("../telemetry/consumers.rs"),
        include_str!("../telemetry/losses.rs"),
        include_str!("../telemetry/process.rs"),
        include_str!("../telemetry/runtimes.rs"),
    ];
    let declared = declared.map(|file| file.split("#[cfg(test)]").next().unwrap()).concat();
    let is_name = |literal: &&str| ["oncegate_", "process_", "tokio_"].iter().any(|start| literal.starts_with(start));
    for name in declared.split('"').filter(is_name) {
        assert!(families.contains_key(name), "{name} has no series: give it one in all_metrics");
    }
    let mut documented = BTreeSet::new();
    for chapter in page.split("\n### `").skip(1) {
        let (name, rest) = chapter.split_once("`\n\n").expect("a heading that is a name in backticks");
        documented.insert(name.to_owned());
        let (kind, labels) = families.get(name).unwrap_or_else(|| panic!("there is no metric {name}"));
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let facts = match labels.len() {
            0 => format!("*{kind}*"),
            _ => format!("*{kind}; by {}*", labels.join(", ")),
        };
        assert!(rest.starts_with(&facts), "{name} should begin with {facts}");
        assert!(rest.contains("```promql\n"), "{name} has no query");
    }
    assert_eq!(documented, families.into_keys().collect());
}

/// A query for a metric that does not exist is silent: an alert never fires, and a panel stays empty.
#[test]
fn alerts_and_dashboard_ask_for_metrics_that_exist() {
    let families = families(&all_metrics());
    for path in ["deploy/prometheus/oncegate.rules.yaml", "deploy/grafana/oncegate.json"] {
        let text = page(path);
        let words = text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        let names: BTreeSet<&str> = words.filter(|word| word.starts_with("oncegate_")).collect();
        assert!(names.len() > 5, "{path} names its metrics otherwise");
        for name in names {
            let base = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(families.contains_key(base), "{path}: there is no metric {name}");
        }
    }
    let alerts = page("docs/observe/alerts.md");
    for name in
        page("deploy/prometheus/oncegate.rules.yaml").lines().filter_map(|line| line.trim().strip_prefix("- alert: "))
    {
        assert!(alerts.contains(&format!("`{name}`")), "docs/observe/alerts.md does not name {name}");
    }
}

#[test]
fn every_word_of_a_label_is_in_the_docs() {
    let page = page("docs/observe/metrics.md");
    let terms = terms(&page);
    let outcomes = Outcome::ALL.map(Outcome::as_str);
    let kinds = ErrorKind::ALL.map(ErrorKind::as_str);
    let words = Limit::ALL.map(Limit::as_str).into_iter().chain(CacheResult::ALL.map(CacheResult::as_str));
    let operations: Vec<&str> = OperationsInFlight::default().iter().map(|(operation, _)| operation.as_str()).collect();
    assert_eq!(operations.len(), StoreOp::COUNT, "{operations:?}");
    for operation in operations {
        assert!(
            page.contains(&format!("`{operation}`")),
            "docs/observe/metrics.md does not name the operation {operation}"
        );
    }
    for word in words.chain(kinds).chain(outcomes.into_iter().filter(|word| codes().all(|code| code.as_str() != *word)))
    {
        assert!(terms.contains(word), "no table of docs/observe/metrics.md has `{word}`");
    }
}

#[test]
fn every_problem_has_its_status_in_the_docs() {
    let page = page("docs/reference/problems.md");
    for code in codes() {
        let found = row(&page, code.as_str()).unwrap_or_else(|| panic!("{} is missing", code.as_str()));
        let retryable = if code.retryable() { "yes" } else { "no" };
        assert_eq!(found[..2], [code.status().as_str(), retryable], "{}", code.as_str());
    }
    let is_problem = |term: &String| row(&page, term).is_some_and(|cells| cells[0].parse::<u16>().is_ok());
    let documented: BTreeSet<String> = terms(&page).into_iter().filter(is_problem).collect();
    assert_eq!(documented, codes().map(|code| code.as_str().to_owned()).collect());
}

/// The `type` of a problem leads to its heading, so the anchor is the code and nothing else.
#[test]
fn every_problem_has_a_heading_in_the_error_catalogue() {
    let page = page("docs/clients/errors.md");
    let headings: BTreeSet<&str> = page
        .lines()
        .filter(|line| line.starts_with("##"))
        .map(|line| line.trim_start_matches('#').trim().trim_matches('`'))
        .collect();
    let missing: Vec<&str> = codes().map(Code::as_str).filter(|code| !headings.contains(code)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_outcome_that_a_client_sees_is_in_the_docs() {
    let page = page("docs/reference/headers.md");
    let terms = terms(&page);
    for outcome in Outcome::ALL {
        let is_shown = !matches!(outcome, Outcome::Passed | Outcome::Observed | Outcome::Problem(_));
        assert!(!is_shown || terms.contains(outcome.as_str()), "{} is missing", outcome.as_str());
    }
    for key in keys_of("headers") {
        assert!(page.contains(&format!("`headers.{key}`")), "headers.{key} is missing");
    }
}

#[test]
fn every_limit_is_in_the_docs() {
    let page = page("docs/reference/limits.md");
    for key in keys_of("limits") {
        assert!(page.contains(&format!("`limits.{key}`")), "limits.{key} is missing");
    }
    for limit in Limit::ALL {
        assert!(page.contains(limit.as_str()), "{} is missing", limit.as_str());
    }
}

#[test]
fn every_exit_status_is_in_the_docs() {
    let whole = whole();
    let facts = with_subcommands(&whole).into_iter().filter_map(Facts::of);
    let statuses: BTreeSet<String> = facts.flat_map(Facts::statuses).map(|(status, _)| status.to_string()).collect();
    assert_eq!(terms(&page("docs/reference/exit-codes.md")), statuses);
}

#[test]
fn every_path_of_the_admin_listener_is_in_the_docs() {
    let page = page("docs/reference/admin-api.md");
    let source = include_str!("../admin/endpoints.rs").split("#[cfg(test)]").next().unwrap();
    let paths = source.split('"').filter(|literal| literal.starts_with('/') && !literal.contains(' '));
    let paths: BTreeSet<String> = paths.map(str::to_owned).collect();
    assert!(paths.contains("/readyz"), "{paths:?}");
    let documented: BTreeSet<String> = terms(&page).into_iter().filter(|term| term.starts_with('/')).collect();
    assert_eq!(documented, paths);
}

/// The keys of a table of the configuration.
fn keys_of(table: &str) -> Vec<String> {
    let keys = config::schema()["properties"][table]["properties"].clone();
    keys.as_object().unwrap_or_else(|| panic!("[{table}] has no keys")).keys().cloned().collect()
}
