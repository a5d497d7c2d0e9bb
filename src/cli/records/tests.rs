use clap::Parser;

use super::*;
use crate::admin::testing::{Admin, start};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    records: RecordsArgs,
}

const ID: &str = "00000000000000000000000000000000000000000000000000000000000000ff";

async fn run(admin: &Admin, args: &[&str]) -> Result<String, String> {
    let address = admin.address.to_string();
    let args = ["records"].iter().chain(args).copied().chain(["--admin", &address]);
    let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    match execute(cli.records, &mut out).await {
        Ok(()) => Ok(String::from_utf8(out).unwrap()),
        Err(error) => Err(format!("{error:#}")),
    }
}

#[tokio::test]
async fn records_are_listed_as_a_table_and_as_json() {
    let admin = start(None).await;
    assert_eq!(run(&admin, &["list"]).await.unwrap(), "no records\n");
    for n in 0..5 {
        admin.unknown("charge", &format!("some-longer-key-{n}")).await;
    }
    let (id, _) = admin.claim("refund", "a+b/c=d&e").await;
    let table = run(&admin, &["list"]).await.unwrap();
    assert_eq!(table.lines().count(), 7);
    assert!(table.contains(&format!("{id}  in-flight  refund")), "{table}");
    let table = run(&admin, &["list", "--state", "unknown", "--limit", "2"]).await.unwrap();
    assert_eq!((table.lines().count(), table.lines().last()), (4, Some("and more: raise --limit")));
    let json = run(&admin, &["list", "--key", "a+b/c=d&e", "--json"]).await.unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["records"][0]["id"], &json["next"]), (&json!(id.to_string()), &Value::Null));
    let error = run(&admin, &["list", "--older-than", "soon"]).await.unwrap_err();
    assert_eq!(error, "bad-request: query parameter `older_than` must be a duration such as 90s, 1h or 7d");
}

#[tokio::test]
async fn a_list_follows_the_pages() {
    let admin = start(None).await;
    for n in 0..1100 {
        admin.claim("charge", &format!("key-{n}")).await;
    }
    let table = run(&admin, &["list", "--limit", "5000"]).await.unwrap();
    assert_eq!(table.lines().count(), 1101);
    let table = run(&admin, &["list", "--limit", "1050"]).await.unwrap();
    assert_eq!(table.lines().count(), 1052);
}

#[tokio::test]
async fn a_record_is_shown_resolved_and_purged() {
    let admin = start(None).await;
    let (id, _) = admin.unknown("charge", "one").await;
    let id = id.to_string();
    let shown = run(&admin, &["show", &id]).await.unwrap();
    for line in ["state            unknown", "unknown_because  shutdown: the gate shut down", "upstream         app"] {
        assert!(shown.contains(line), "{shown}");
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"\x00paid").unwrap();
    let body = format!("@{}", file.path().display());
    let complete =
        ["resolve", &id, "--complete", "--status", "201", "--header", "X-Id: 7", "--body", &body, "--reason", "ledger"];
    assert_eq!(run(&admin, &complete).await.unwrap(), format!("{id} completed: retries get this answer\n"));
    let shown: Value = serde_json::from_str(&run(&admin, &["show", &id, "--json"]).await.unwrap()).unwrap();
    assert_eq!((&shown["status"], &shown["body_bytes"], shown.get("answer")), (&json!(201), &json!(5), None));
    let whole: Value = serde_json::from_str(&run(&admin, &["show", &id, "--answer", "--json"]).await.unwrap()).unwrap();
    let answer = json!({"headers": [["x-id", "7"]], "body_base64": STANDARD.encode(b"\x00paid"), "trailers": []});
    assert_eq!(whole["answer"], answer);
    assert!(run(&admin, &["show", &id, "--answer"]).await.unwrap().ends_with("\nx-id: 7\n\n\\u{0}paid\n"));
    let release = ["resolve", &id, "--release", "--reason", "again"];
    assert!(run(&admin, &release).await.unwrap_err().starts_with("not-unknown: "));
    assert_eq!(
        run(&admin, &["purge", &id]).await.unwrap(),
        format!("{id} removed: its key is free, once no attempt of it runs any more\n")
    );
    assert!(run(&admin, &["show", &id]).await.unwrap_err().starts_with("not-found: "));
    let (id, _) = admin.unknown("charge", "two").await;
    let id = id.to_string();
    let release = ["resolve", &id, "--release", "--reason", "no charge"];
    assert_eq!(run(&admin, &release).await.unwrap(), format!("{id} released: its key is free\n"));
}

#[tokio::test]
async fn a_token_comes_from_a_file() {
    let admin = start(Some("s3cret")).await;
    let error = run(&admin, &["list"]).await.unwrap_err();
    assert!(error.starts_with("unauthorized: ") && error.ends_with("--token-file"), "{error}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    assert!(run(&admin, &["list", "--token-file", path]).await.unwrap_err().contains("holds no token"));
    std::fs::write(path, "s3cret\n").unwrap();
    assert_eq!(run(&admin, &["list", "--token-file", path]).await.unwrap(), "no records\n");
}

#[tokio::test]
async fn nobody_listening_is_said_with_the_address() {
    let mut out = Vec::new();
    // Port 1 is not one that anything is given by the system.
    let cli = Cli::try_parse_from(["records", "list", "--admin", "127.0.0.1:1"]).ok().unwrap();
    let error = format!("{:#}", execute(cli.records, &mut out).await.unwrap_err());
    assert!(error.contains("nothing listens at 127.0.0.1:1") && error.contains("`oncegate serve`"), "{error}");
}

#[test]
fn wrong_usage_is_refused() {
    for args in [
        &["resolve", ID, "--reason", "x"][..],
        &["resolve", ID, "--release"],
        &["resolve", ID, "--release", "--reason", " "],
        &["resolve", ID, "--release", "--complete", "--status", "200", "--reason", "x"],
        &["resolve", ID, "--release", "--status", "200", "--reason", "x"],
        &["resolve", ID, "--complete", "--reason", "x"],
        &["resolve", ID, "--complete", "--status", "200", "--header", "nothing", "--reason", "x"],
        &["list", "--state", "lost"],
        &["list", "--limit", "0"],
        &["show", "ff"],
    ] {
        assert!(Cli::try_parse_from(["records"].iter().chain(args)).is_err(), "{args:?}");
    }
}

#[test]
fn json_gets_its_type() {
    let json = ("Content-Type".to_owned(), "application/json".to_owned());
    assert_eq!(with_content_type(Vec::new(), br#"{"id":"ch_7"}"#), [json]);
    let other = vec![("content-type".to_owned(), "application/vnd.api+json".to_owned())];
    assert_eq!(with_content_type(other.clone(), b"{}"), other);
    for body in [&b""[..], b"paid", b"{\"id\":", b"\x00"] {
        assert_eq!(with_content_type(Vec::new(), body), []);
    }
}
