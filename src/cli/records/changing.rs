//! `oncegate records resolve` and `purge`: one record, or all that a filter finds.

use std::fs::File;
use std::future::pending;
use std::io::{Read, Write};
use std::pin::pin;

use anyhow::{Context, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::Method;
use serde_json::{Map, Value, json};
use tokio::signal::ctrl_c;

use super::counts::{
    ACCEPTED, Counts, RECORDS, counted, say_accepted, say_in_flight, say_of_unknown_outcome, say_of_unknown_scope,
    say_to_retry, say_unreadable,
};
use super::table;
use super::{
    Ask, ChangeArgs, FilterArgs, ResolveArgs, SHOWN, WHOLE, ids_of, members_of, one_of, percent_encode, record_path,
    records_of, whole_id,
};
use crate::admin::MAX_BODY;
use crate::cli::complain;
use crate::cli::http_client::AdminClient;
use crate::cli::paging::{note_unknown_route, say_done};
use crate::cli::table::text;

pub(super) const PURGE_USAGE: &str = "oncegate records purge [--reason <TEXT>] <ID>
       oncegate records purge --reason <TEXT> <FILTER>... [--yes]
       oncegate records purge --dry-run <ID or FILTER...>";

pub(super) const RESOLVE_USAGE: &str =
    "oncegate records resolve <--release | --complete --status <N>> [--reason <TEXT>] <ID>
       oncegate records resolve <--release | --complete --status <N>> --reason <TEXT> <FILTER>... [--yes]
       oncegate records resolve <--release | --complete --status <N>> --dry-run <ID or FILTER...>";

pub(super) const RETRY_USAGE: &str = "oncegate records retry [--reason <TEXT>] <ID>
       oncegate records retry --reason <TEXT> <FILTER>... [--yes]
       oncegate records retry --dry-run <ID or FILTER...>";

/// What is done to records.
struct RecordOperation {
    /// The last part of the path of the request for many.
    path: &'static str,
    /// One of what it is done to, and many.
    nouns: [&'static str; 2],
    /// The members of its request that say what is done.
    members: Map<String, Value>,
    /// What a question asks for: "purge 3 records?"
    verb: &'static str,
    /// What was done to records, as the end of a sentence.
    done: &'static str,
}

pub(super) async fn purge(
    client: &AdminClient,
    args: ChangeArgs,
    out: &mut dyn Write,
    ask: &Ask,
) -> anyhow::Result<()> {
    let change = RecordOperation { path: "purge", nouns: RECORDS, members: Map::new(), verb: "purge", done: "removed" };
    let Some(id) = change.one_record(client, &args, out).await? else {
        return change.many(client, &args, out, ask).await;
    };
    if !args.dry_run {
        // Asked before: nothing is left of it afterwards. It is done, whether or not the gate says so.
        let is_delivery = is_without_record(client, &id).await.unwrap_or(false);
        let reason = args.reason.map(|reason| format!("?reason={}", percent_encode(&reason))).unwrap_or_default();
        client.send(Method::DELETE, &format!("{}{reason}", record_path(&id)), None).await?;
        let done = match is_delivery {
            true => "discarded: this accepted request is not delivered; its key is free",
            false => "removed: its key is free; an attempt that still runs is not stopped",
        };
        say_done(|| Ok(writeln!(out, "{id} {done}")?))?;
    }
    Ok(())
}

pub(super) async fn resolve(
    client: &AdminClient,
    args: ResolveArgs,
    out: &mut dyn Write,
    ask: &Ask,
) -> anyhow::Result<()> {
    let ResolveArgs { change: mut selected, release, status, header, body, .. } = args;
    let members = if release {
        json!({ "action": "release" })
    } else {
        let body = read_body(body)?;
        json!({
            "action": "complete",
            "status": status,
            "headers": with_content_type(header, &body),
            "body_base64": STANDARD.encode(body),
        })
    };
    let Value::Object(members) = members else { bail!("the request is not an object") };
    let (verb, done) = if release { ("release", "released") } else { ("complete", "completed") };
    let change = RecordOperation { path: "resolve", nouns: RECORDS, members, verb, done };
    let Some(id) = change.one_record(client, &selected, out).await? else {
        // Other records have nothing to resolve, and a dry run shows what would be touched.
        selected.filter.state.get_or_insert_with(|| "unknown".to_owned());
        selected.all = false;
        return change.many(client, &selected, out, ask).await;
    };
    if !selected.dry_run {
        let mut body = change.members;
        body.extend(selected.reason.map(|reason| ("reason".to_owned(), reason.into())));
        client.send(Method::POST, &format!("{}/resolve", record_path(&id)), Some(&Value::Object(body))).await?;
        // It is done, whether or not the gate says how an accepted request goes on.
        let accepted = if release { accepted_state(client, &id).await } else { Ok(None) };
        let done = match accepted.as_ref().map(Option::as_deref) {
            _ if !release => "completed: retries get this answer".to_owned(),
            Err(_) => "released".to_owned(),
            Ok(None) => "released: its key is free".to_owned(),
            Ok(Some("dead")) => {
                format!("released: `oncegate records retry {id}` delivers its request again; until then it is dead")
            }
            Ok(Some(_)) => "released: its request is queued, and a gate delivers it".to_owned(),
        };
        say_done(|| Ok(writeln!(out, "{id} {done}")?))?;
    }
    Ok(())
}

pub(super) async fn retry(
    client: &AdminClient,
    args: ChangeArgs,
    out: &mut dyn Write,
    ask: &Ask,
) -> anyhow::Result<()> {
    let Some(start) = &args.record else {
        let change = RecordOperation {
            path: "retry",
            nouns: ACCEPTED,
            members: Map::new(),
            verb: "retry",
            done: "queued again",
        };
        return change.many(client, &args, out, ask).await;
    };
    let id = whole_id_of_dead(client, start).await?;
    if args.dry_run {
        let Some(state) = accepted_state(client, &id).await? else {
            let record = client.send(Method::GET, &record_path(&id), None).await?;
            bail!("nothing is left to deliver: the record is {}", text(&record["state"]));
        };
        if state != "dead" {
            bail!("the request is {state}: it is delivered by itself");
        }
        let trial = json!({ "filter": { "id": id }, "dry_run": true });
        let found = client.send(Method::POST, "/api/v1/records/retry", Some(&trial)).await?;
        if found["matched"] != 1 {
            say_of_unknown_outcome(1, out)?;
            bail!("it would not be queued again");
        }
        writeln!(out, "1 accepted request would be queued again; nothing was changed")?;
        return Ok(());
    }
    let reason = json!({ "reason": args.reason.unwrap_or_default() });
    client.send(Method::POST, &format!("{}/retry", record_path(&id)), Some(&reason)).await?;
    // It is done, whether or not the gate says that its route is paused.
    let when = match paused_route(client, &id).await {
        Ok(Some(route)) => format!(" once the route {route} is resumed"),
        _ => String::new(),
    };
    say_done(|| Ok(writeln!(out, "{id} queued: it is delivered again{when}, with as many attempts as a new one")?))
}

/// The route of the accepted request with this id, where its deliveries are paused.
async fn paused_route(client: &AdminClient, id: &str) -> anyhow::Result<Option<String>> {
    let page = client.send(Method::GET, &format!("/api/v1/deliveries?id={id}"), None).await?;
    let route = members_of(&page, "deliveries")?.first().map(|listed| &listed["route"]);
    let is_paused = |route: &&Value| members_of(&page, "paused").is_ok_and(|paused| paused.contains(route));
    Ok(route.filter(is_paused).and_then(Value::as_str).map(str::to_owned))
}

/// The whole id of the one dead delivery whose id starts so.
async fn whole_id_of_dead(client: &AdminClient, start: &str) -> anyhow::Result<String> {
    if start.len() == WHOLE {
        return Ok(start.to_owned());
    }
    let target = format!("/api/v1/deliveries?state=dead&id={start}&limit={}", SHOWN + 1);
    one_of(ids_of(client, &target, "deliveries").await?, start, "dead delivery")
}

/// The state of the accepted request with this id, if there is one.
async fn accepted_state(client: &AdminClient, id: &str) -> anyhow::Result<Option<String>> {
    let page = client.send(Method::GET, &format!("/api/v1/deliveries?id={id}"), None).await?;
    let first = members_of(&page, "deliveries")?.first();
    Ok(first.and_then(|listed| listed["state"].as_str()).map(str::to_owned))
}

/// Whether this is the id of an accepted request of which no attempt has made a record.
async fn is_without_record(client: &AdminClient, id: &str) -> anyhow::Result<bool> {
    let recorded = ids_of(client, &format!("/api/v1/records?id={id}"), "records").await?;
    Ok(recorded.is_empty() && accepted_state(client, id).await?.is_some())
}

impl RecordOperation {
    /// The id of the record, where one is named. A dry run shows it.
    async fn one_record(
        &self,
        client: &AdminClient,
        args: &ChangeArgs,
        out: &mut dyn Write,
    ) -> anyhow::Result<Option<String>> {
        let Some(start) = &args.record else { return Ok(None) };
        let id = whole_id(client, start).await?;
        if args.dry_run {
            if self.path == "purge" && is_without_record(client, &id).await? {
                writeln!(out, "1 accepted request would be discarded, and not delivered; nothing was changed")?;
                return Ok(Some(id));
            }
            let record = client.send(Method::GET, &record_path(&id), None).await?;
            if self.path == "resolve" {
                if record["state"] != "unknown" {
                    bail!("the record is {}: only an unknown one can be resolved", text(&record["state"]));
                }
                // The gate looks at the answer, too.
                let mut trial = self.members.clone();
                trial.extend([("filter".to_owned(), json!({ "id": id })), ("dry_run".to_owned(), true.into())]);
                let tried = client.send(Method::POST, "/api/v1/records/resolve", Some(&Value::Object(trial))).await?;
                if tried["unreadable"].as_u64().is_some_and(|count| count > 0) {
                    bail!("no client could read the answer: `oncegate records show` says `unreadable`, or `grpc`");
                }
            }
            writeln!(out, "1 record would be {}; nothing was changed:", self.done)?;
            table::table().write([table::row(&record)], out)?;
        }
        Ok(Some(id))
    }

    async fn many(
        &self,
        client: &AdminClient,
        args: &ChangeArgs,
        out: &mut dyn Write,
        ask: &Ask,
    ) -> anyhow::Result<()> {
        if args.dry_run {
            let counts = self.send(client, args, true, args.as_of.clone()).await?;
            let (matched, in_flight, accepted) = (counts.matched, counts.in_flight, counts.accepted);
            writeln!(out, "{} would be {}; nothing was changed", self.counted(matched), self.done)?;
            self.say_rest(&counts, "would not be delivered any more", out)?;
            // A list has no `as_of`: it would show records that came later.
            if self.path != "retry" && matched > 0 && args.as_of.is_none() {
                let target = format!("/api/v1/records?limit={SHOWN}{}", args.filter.query());
                let newest = client.send(Method::GET, &target, None).await?;
                let mut newest = records_of(&newest)?.to_vec();
                if in_flight > 0 {
                    newest.retain(|record| record["state"] != "in-flight");
                }
                if matched - accepted > newest.len() as u64 {
                    writeln!(out, "the newest {} of them:", newest.len())?;
                }
                if matched > accepted {
                    table::table().write(newest.iter().map(table::row), out)?;
                }
            }
            if let Some(as_of) = counts.as_of.filter(|_| matched > 0) {
                writeln!(out, "for these and none that come later: --as-of {as_of} --yes")?;
            }
            return Ok(());
        }
        let mut as_of = args.as_of.clone();
        if !args.yes {
            let found = self.send(client, args, true, as_of).await?;
            let matched = found.matched;
            if matched == 0 {
                writeln!(out, "no {}", self.nouns[1])?;
                return self.say_rest(&found, "", out);
            }
            as_of = found.as_of;
            match ask(&format!("{} {}?", self.verb, self.counted(matched))) {
                Some(true) => {}
                Some(false) => bail!("nothing was changed"),
                None => bail!(
                    "{} would be {}: give --yes to do it, or --dry-run to see what it would be",
                    self.counted(matched),
                    self.done
                ),
            }
        }
        let counts = self.send(client, args, false, as_of).await?;
        let Counts { matched, done, failed, .. } = counts;
        let mut say = || {
            writeln!(out, "{} {}", self.counted(done), self.done)?;
            self.say_rest(&counts, "will not be delivered any more", out)?;
            let others = matched.saturating_sub(done + failed);
            if others > 0 {
                writeln!(
                    out,
                    "{} left alone: changed by others meanwhile, or held by an open transaction",
                    self.counted(others)
                )?;
            }
            Ok(())
        };
        let said = if done > 0 { say_done(say) } else { say() };
        if failed > 0 {
            let failed = self.counted(failed);
            bail!("{failed} could not be {}: the store failed; see the log of `oncegate serve`", self.done);
        }
        said
    }

    /// Says what it does not do, and what else there is to it. `accepted` is what becomes of accepted requests without a record.
    fn say_rest(&self, counts: &Counts, accepted: &str, out: &mut dyn Write) -> anyhow::Result<()> {
        if self.path != "retry" {
            say_accepted(counts.accepted, accepted, out)?;
        }
        say_to_retry(counts.to_retry, out)?;
        say_in_flight(counts.in_flight, out)?;
        say_unreadable(counts.unreadable, out)?;
        say_of_unknown_outcome(counts.of_unknown_outcome, out)?;
        say_of_unknown_scope(counts.of_unknown_scope, out)
    }

    /// So many of what it is done to, in words.
    fn counted(&self, count: u64) -> String {
        counted(count, self.nouns)
    }

    /// Sends the request, and again where the gate came to its time limit.
    async fn send(
        &self,
        client: &AdminClient,
        args: &ChangeArgs,
        is_dry_run: bool,
        as_of: Option<String>,
    ) -> anyhow::Result<Counts> {
        let mut body = self.members.clone();
        body.insert("filter".to_owned(), args.filter.members().into());
        body.insert("all".to_owned(), args.all.into());
        body.insert("dry_run".to_owned(), is_dry_run.into());
        body.insert("reason".to_owned(), args.reason.clone().unwrap_or_default().into());
        if let Some(as_of) = as_of {
            body.insert("as_of".to_owned(), as_of.into());
        }
        let mut counts = Counts::default();
        let mut interrupted = pin!(async {
            if is_dry_run || ctrl_c().await.is_err() {
                pending::<()>().await;
            }
        });
        loop {
            let body_now = Value::Object(body.clone());
            let target = format!("/api/v1/records/{}", self.path);
            let sent = client.send(Method::POST, &target, Some(&body_now));
            let answer = tokio::select! {
                answer = sent => answer,
                () = &mut interrupted => Err(anyhow!(
                    "interrupted: the gate still finishes the last request, which takes up to some 15 s, and changes no more after that; \
                     `oncegate audit --action bulk-{}` then says what was done",
                    self.path
                )),
            };
            let answer = match answer {
                Err(error) if counts.done > 0 => {
                    return Err(error.context(format!("{} {} before", self.counted(counts.done), self.done)));
                }
                answer => answer?,
            };
            let count = |name: &str| answer[name].as_u64().with_context(|| format!("the answer has no count `{name}`"));
            counts.matched += count("matched")?;
            counts.done += count("done")?;
            counts.failed += count("failed")?;
            counts.in_flight += answer["in_flight"].as_u64().unwrap_or(0);
            counts.unreadable += answer["unreadable"].as_u64().unwrap_or(0);
            counts.accepted += answer["accepted"].as_u64().unwrap_or(0);
            counts.to_retry += answer["to_retry"].as_u64().unwrap_or(0);
            counts.of_unknown_scope += answer["of_unknown_scope"].as_u64().unwrap_or(0);
            counts.of_unknown_outcome += answer["of_unknown_outcome"].as_u64().unwrap_or(0);
            if let Some(as_of) = answer["as_of"].as_str() {
                // The requests that follow are about the same time.
                counts.as_of = Some(as_of.to_owned());
                body.insert("as_of".to_owned(), as_of.into());
            }
            match answer["next"].as_str() {
                Some(next) => body.insert("after".to_owned(), next.into()),
                None => break,
            };
            let (count, done) = if is_dry_run { (counts.matched, "found") } else { (counts.done, self.done) };
            complain(&format!("oncegate: {} {done} so far; going on", self.counted(count)));
        }
        if counts.matched == 0 {
            note_unknown_route(client, args.filter.route.as_deref()).await;
            if self.path == "resolve" {
                note_other_state(client, &args.filter).await;
            }
        }
        Ok(counts)
    }
}

/// Says in which state the record of a key or an id is, where it is not unknown. It is for information: where the gate does not say,
/// that stays unsaid.
async fn note_other_state(client: &AdminClient, filter: &FilterArgs) {
    if filter.key.is_none() && filter.id.is_none() {
        return;
    }
    let target = format!("/api/v1/records?limit=1{}", filter.query_of_any_state());
    let Ok(page) = client.send(Method::GET, &target, None).await else { return };
    if let Some(found) = records_of(&page).ok().and_then(|found| found.first()) {
        complain(&format!("oncegate: the record is {}: only an unknown one is resolved", text(&found["state"])));
    }
}

/// The headers of an answer. A body of JSON says so unless they do: clients read it by its type.
pub(super) fn with_content_type(mut headers: Vec<(String, String)>, body: &[u8]) -> Vec<(String, String)> {
    let has_type = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("Content-Type"));
    if !has_type && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok() {
        headers.push(("Content-Type".to_owned(), "application/json".to_owned()));
    }
    headers
}

fn read_body(body: Option<String>) -> anyhow::Result<Vec<u8>> {
    match body {
        None => Ok(Vec::new()),
        Some(text) => match text.strip_prefix('@') {
            Some(file) => {
                let mut body = Vec::new();
                File::open(file)
                    .and_then(|opened| opened.take(MAX_BODY as u64 + 1).read_to_end(&mut body))
                    .with_context(|| format!("cannot read the body of {file}"))?;
                if body.len() > MAX_BODY {
                    bail!("{file} has more than {} MiB, which no answer may have", MAX_BODY >> 20);
                }
                Ok(body)
            }
            None => Ok(text.into_bytes()),
        },
    }
}
